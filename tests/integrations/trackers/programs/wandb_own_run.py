"""A fit in a run of W&B that the program has opened, with histograms and artifacts."""

import wandb
from tests.support.tasks import Regression, pairs

from drivetrain import LambdaCallback, Trainer
from drivetrain.integrations.trackers import WandbLogger
from drivetrain.loggers import Histogram

own = wandb.init(mode="offline", id="own")
seen = []
Trainer(
    max_steps=4,
    log_every=2,
    callbacks=[
        LambdaCallback(
            on_fit_start=lambda run: seen.append(run.logger("wandb")),
            on_log=lambda run: run.log("weights/line.weight", Histogram(run.task.line.weight)),
        )
    ],
    loggers=WandbLogger(artifacts="all"),
    run_dir="run",
    strategy="cpu",
    progress_bar=False,
).fit(Regression(), pairs(), pairs(4))
assert seen[0].experiment is own is wandb.run
own.log({"afterwards": 1})
own.finish()
