"""A fit that logs a picture, and what else a tracker takes, after each of its two log points."""

import json
import sys

import torch
from plotly.graph_objects import Figure as PlotlyFigure
from tests.support.tasks import Regression, pairs

from drivetrain import LambdaCallback, Trainer
from drivetrain.loggers import LOGGERS, Audio, Figure, File, Histogram, Image, Table, Text, Video

name, options = sys.argv[1], json.loads(sys.argv[2])
tracker = LOGGERS[name](**options)
picture = Image(torch.arange(24).reshape(2, 3, 4).repeat_interleave(2, 0)[:3])
film = Video(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
values = [picture, film, Audio(torch.zeros(80), 8000), Histogram([1, 2]), Text("**x**"), Table(["a"], [[1]])]
values += [Figure(PlotlyFigure()), File(__file__)]


def log(run):
    for value in values:
        if value.kind in tracker.takes:
            run.log(f"media/{value.kind}", value)


Trainer(
    max_steps=4,
    log_every=2,
    callbacks=[LambdaCallback(on_log=log)],
    loggers=tracker,
    checkpoint=False,
    run_dir="run",
    strategy="cpu",
    progress_bar=False,
).fit(Regression(), pairs())
