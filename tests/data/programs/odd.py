"""A training on data at whose 13th sample something happens: the option `act`, code.

Others are `data`, "rows" or "stream", its `workers`, and `options` of the Trainer.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from tests.support.tasks import FEATURES, Regression, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import LambdaCallback

given = {"raises": False, "preempted": False, "act": "", "data": "rows", "workers": 1, "options": {}}
given |= json.loads(sys.argv[1])


class Odd(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        names = {**globals(), "made": None}
        if index == 12:
            exec(given["act"], names)
        return names["made"] or (torch.full((FEATURES,), float(index)), torch.zeros(1))


class OddStream(IterableDataset):  # the same, as a stream
    def __iter__(self):
        rows = Odd()
        return (rows[index] for index in range(len(rows)))


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def sleep():
    Path("makes.new").write_text(str(os.getpid()))
    Path("makes.new").rename("makes")
    time.sleep(1000)


def stick():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    Path("sticks").touch()
    time.sleep(1000)


def fail(run):
    if given["raises"] and run.progress.steps == 3:
        raise ValueError("boom")
    if given["preempted"] and run.progress.steps == 5:
        while not Path("sticks").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    data = Odd() if given["data"] == "rows" else OddStream()
    loader = DataLoader(data, batch_size=2, num_workers=given["workers"])
    failing = [LambdaCallback(on_step_end=fail)]
    quiet(max_epochs=1, callbacks=failing, **given["options"]).fit(Regression(), loader)
