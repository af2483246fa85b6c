"""Train until a signal comes; a rank that trains makes a file. Given: size, strategy, deadline, workers."""

import os
import sys
import time
from typing import Any

from tests.support.tasks import Regression, pairs

from drivetrain import CheckpointConfig, LambdaCallback, Trainer

size = int(sys.argv[1])

if "FILES" in os.environ:  # more open files than select takes
    import resource

    most = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]


def act(run: Any) -> None:  # say that training has begun
    if run.progress.steps >= 3:
        with open(f"pid-{run.engine.strategy.rank}", "w") as file:
            file.write(str(os.getpid()))
        os.replace(file.name, f"training-{run.engine.strategy.rank}")
        if "WRITES" in os.environ:
            print("x" * (1 << 20), file=sys.stderr)
    time.sleep(0.03)


def slow(run: Any) -> None:  # take long to save, on the last rank
    if run.stop_reason and os.environ.get("SLOW") and run.engine.strategy.rank == size - 1:
        time.sleep(float(os.environ["SLOW"]))


options: Any = {"checkpoint": CheckpointConfig(every="2 steps", by=None), "run_dir": "run", "loggers": ()}
options["callbacks"] = [LambdaCallback(on_step_end=act, on_save=slow)]
options["preemption"] = {"deadline": float(sys.argv[3])}
trainer = Trainer(max_epochs=1000, strategy=sys.argv[2], devices=size, progress_bar=False, **options)
trainer.fit(Regression(), pairs(24, num_workers=int(sys.argv[4])), resume="auto")
