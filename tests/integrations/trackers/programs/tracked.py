"""A fit of ten steps with one tracker and a table, which kills itself if it is asked to.

Arguments: the logger's name, its options as JSON, and as JSON the step after which it is killed, or null; and
whether it first waits until the tracker has stored the step before, and MLflow measurements of the machine.
"""

import json
import os
import signal
import sys

from tests.support.tasks import Regression, pairs

from drivetrain import CheckpointConfig, LambdaCallback, Trainer
from drivetrain.loggers import LOGGERS

name, options, killed_after, waits = sys.argv[1], *map(json.loads, sys.argv[2:])


def is_stored(tracker):
    if tracker._stored_until() < killed_after - 2:
        return False
    measures = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING" in os.environ
    return not measures or "system/" in str(tracker.experiment.get_run(tracker.run_id).data.metrics)


def die(run):
    if run.progress.steps == killed_after:
        while waits and not is_stored(run.logger(name)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)


Trainer(
    max_epochs=2,
    log_every=1,
    checkpoint=CheckpointConfig(every="3 steps", best=0),
    callbacks=[LambdaCallback(on_step_end=die)],
    loggers=("csv", LOGGERS[name](**options)),
    run_dir="run",
    strategy="cpu",
    progress_bar=False,
).fit(Regression(), pairs(), pairs(4), resume="auto")
