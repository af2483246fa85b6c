"""Resumes that begin new data at its start, or leave out a part of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import CheckpointError, ConfigError, DataError, LambdaCallback
from drivetrain.strategies.ddp import DDP

BATCHES = list(pairs(24))


class Stream(IterableDataset[Any]):
    def __init__(self, batches: Any, has_state: bool = False) -> None:
        self.batches, self.at = batches, 0
        if has_state:
            self.state_dict, self.load_state_dict = lambda: {"at": self.at}, self.load

    def load(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Any:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0


def loader(batches: Any, **options: Any) -> DataLoader[Any]:
    dataset = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    dataset.tokens_per_sample = 4  # type: ignore[attr-defined]
    return DataLoader(dataset, batch_size=2, **options)


KINDS: dict[str, Any] = {
    "a list": list,
    "a dataset": loader,
    "workers": lambda batches: loader(batches, num_workers=1),
    "a sampler": lambda batches: loader(batches, sampler=range(2 * len(batches))),
    "a stream": Stream,
    "a state": lambda batches: Stream(batches, has_state=True),
}


def fit(data: Any, folder: Path, stop: int | None = None, resume: Any = "auto", **given: Any) -> Any:
    """Return the first features of each step, the weights and the progress."""
    seen: list[float] = []

    def note(run: Any) -> None:
        shown = [each for each in run.window.micro_batches if not each.is_placeholder]
        seen.extend(float(each.batch[0][0, 0]) for each in shown)
        if run.progress.steps == stop:
            run.stop("for the test")

    asked = {name: given.pop(name) for name in ("new_data", "skip") if name in given}
    options = {"max_epochs": 1, "checkpoint": True, "run_dir": folder, **given}
    task = Regression(dropout=0.5)
    with heard():
        trainer = quiet(callbacks=[LambdaCallback(on_step_end=note)], **options)
        result = trainer.fit(task, data, resume=resume, **asked)
    return seen, weights(task), result.progress


@pytest.mark.parametrize("kind", KINDS)
def test_a_skip_is_exactly_a_run_whose_data_lacks_it(kind: str, tmp_path: Path) -> None:
    make = KINDS[kind]
    expected = fit(make(BATCHES[:4] + BATCHES[8:]), tmp_path / "lacks", gradient_accumulation_steps=2)
    saved: Any = {"folder": tmp_path / "run", "gradient_accumulation_steps": 2}
    first = fit(make(BATCHES), stop=2, resume=None, **saved)
    rest = fit(make(BATCHES), skip="2 steps", stop=3, **saved)
    again = fit(make(BATCHES), skip="2 steps", **saved)  # the same command after a kill
    assert (first[0] + rest[0] + again[0], again[1]) == expected[:2]
    assert again[2].samples == 16


def test_a_skip_goes_on_in_the_next_epochs_and_counts_samples_and_epochs(tmp_path: Path) -> None:
    options: Any = {"max_epochs": 3}
    whole = fit(loader(BATCHES, shuffle=True), tmp_path / "whole", **options)[0]
    for skip, steps in {"14 steps": 14, "30 samples": 15, "119 tokens": 15, "1.5 epochs": 18}.items():
        saved: Any = {"folder": tmp_path / str(skip), **options}
        fit(loader(BATCHES, shuffle=True), stop=4, **saved)
        assert fit(loader(BATCHES, shuffle=True), skip=skip, **saved)[0] == whole[4 + steps :], skip


@pytest.mark.parametrize("kind", KINDS)
def test_new_data_begins_at_its_start_once_and_steps_go_on(kind: str, tmp_path: Path) -> None:
    make, new = KINDS[kind], BATCHES[::-2]
    fit(make(BATCHES), tmp_path, stop=5, resume=None)
    first, _, progress = fit(make(new), tmp_path, new_data=True, max_epochs=2, stop=7, loggers="csv")
    assert (len(first), progress.epoch, progress.epoch_steps) == (2, 0, 2)
    rest, _, progress = fit(make(new), tmp_path, new_data=True, max_epochs=2)
    assert first + rest == [float(each[0][0, 0]) for each in new] * 2
    assert (progress.steps, progress.epoch) == (17, 2)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["run"]["resumes"][-1]["data"] == "new_data=True"
    path = str(tmp_path / "checkpoints/step-00000017")  # a path begins anew each time
    assert len(fit(make(new), tmp_path, resume=path, new_data=True, max_epochs=3)[0]) == 6


def on_ranks(folder: Path, kind: str) -> Any:
    options: Any = {"strategy": DDP(world_size=2), "devices": 2, "folder": folder / kind, "max_epochs": 2}
    parts = [fit(KINDS[kind](BATCHES), stop=2, **options)[0]]
    parts += [fit(KINDS[kind](BATCHES), skip="2 steps", stop=3, **options)[0]]
    return [*parts, fit(KINDS[kind](BATCHES[:8]), new_data=True, **options)[0]]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_ranks_leave_out_the_same_and_begin_together(tmp_path: Path) -> None:
    firsts = [float(each[0][0, 0]) for each in BATCHES]
    for kind in ("a list", "a dataset", "a stream"):
        one, other = on_two_ranks(on_ranks, tmp_path, kind)
        wanted = [firsts[:4], firsts[8:10], firsts[:8] * 2]
        for ours, theirs, all_ in zip(one, other, wanted, strict=True):
            assert (ours, theirs) == (all_[::2], all_[1::2]), kind


def test_what_cannot_be_skipped_or_begun_is_refused(tmp_path: Path) -> None:
    for kind in ("a list", "a dataset", "a stream"):
        fit(KINDS[kind](BATCHES), tmp_path / kind, stop=2)
    sizes = {0: 1, 9: 2}

    def asked(kind: str = "a dataset", **options: Any) -> Any:
        return lambda: fit(KINDS[kind](BATCHES), tmp_path / kind, **options)

    assert_refused(
        (ConfigError, CheckpointError, DataError),
        {
            "no resume": (asked(resume=None, skip=2), "skip='2 steps' is for a resume", "give resume='auto'"),
            "no flag": (asked(new_data="yes"), "fit(new_data=)", "True or False"),
            "nothing there": (lambda: fit(BATCHES, tmp_path / "new", new_data=True), "found none in", "path"),
            "a time": (
                asked(skip="2 minutes"),
                "'2 minutes' cannot be counted",
                "steps or epochs or samples or tokens",
            ),
            "samples of a list": (asked("a list", skip="8 samples"), "'8 samples'", "Give steps or epochs"),
            "tokens of a stream": (asked("a stream", skip="9 tokens"), "'9 tokens'", "Give steps"),
            "epochs of a stream": (asked("a stream", skip="1 epoch"), "'1 epoch'", "Give steps"),
            "a stream's end": (asked("a stream", skip=30), "ended after 10 of the 30", "within an epoch"),
            "sizes": (asked(skip="3 steps", gradient_accumulation_steps=sizes), "'3 steps'", "Give samples"),
            "no step left": (asked(skip="30 steps"), "no step is left", "max_epochs=1", "a larger limit"),
        },
    )
