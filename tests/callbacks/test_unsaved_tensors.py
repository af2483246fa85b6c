"""Tensors that training changes and no checkpoint holds are named by a warning; no others are."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.tasks import FEATURES, Regression, pairs, quiet
from torch import Tensor, nn
from torchmetrics import MeanMetric

from drivetrain import Callback, CheckpointConfig, LambdaCallback
from drivetrain.callbacks import unsaved_tensors
from drivetrain.testing.distributed import run_distributed


def told(task: Regression, run_dir: Path, every: str = "1 epoch", **options: Any) -> list[str]:
    """The warnings of a fit of two epochs, of five updates each."""
    policy = CheckpointConfig(every=every, by=None)
    with heard() as caught:
        quiet(**{"max_epochs": 2, "checkpoint": policy, "run_dir": run_dir, **options}).fit(
            task, pairs(10), pairs(4)
        )
    return [each for each in caught if "that no checkpoint holds" in each]


class Encoder(nn.Module):
    """An LSTM whose state goes on from batch to batch."""

    hidden: tuple[Tensor, Tensor] | None

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, FEATURES)
        self.hidden = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor
        out, (h, c) = self.lstm(x, self.hidden)
        self.hidden = h.detach(), c.detach()
        return out


class Recurrent(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.encoder(features))


class Touched(Regression):
    """Does something with itself, or with its layer, in each forward."""

    def __init__(self, touch: Any) -> None:
        super().__init__()
        self.touch = touch
        self.calls = 0

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.touch(self)
        return super().forward(features)


def test_the_hidden_state_of_an_lstm_is_named_once_with_what_to_do(tmp_path: Path) -> None:
    (text,) = told(Recurrent(), tmp_path)
    assert "'encoder.hidden' of Recurrent" in text
    assert re.search("register_buffer.*get_extra_state.*state_dict", text)


def replace(task: Touched) -> None:
    task.kept = torch.zeros(2) + task.calls


def add(task: Touched) -> None:
    if task.calls == 1:
        task.kept = torch.zeros(2)
    task.kept += 1


def grow(task: Touched) -> None:
    if task.calls == 1:
        task.kept = torch.zeros(0)
    task.kept.resize_(task.calls)


def extend(task: Touched) -> None:
    if task.calls == 1:
        task.kept = []
    task.kept.append(torch.zeros(1))


def recall(task: Touched) -> None:
    if task.calls == 1:
        task.kept = deque(maxlen=1)
    task.kept.append(torch.zeros(1))


def average(task: Touched) -> None:
    if task.calls == 1:
        task.kept = {"mean": torch.zeros(1)}
    task.kept["mean"].lerp_(torch.ones(1), 0.1)


@pytest.mark.parametrize("change", [replace, add, grow, extend, recall, average])
def test_a_tensor_that_changes_is_named_however_it_is_kept(change: Any, tmp_path: Path) -> None:
    (text,) = told(Touched(change), tmp_path, max_epochs=1)
    assert text.startswith("training changes tensors that no checkpoint holds: 'kept' of Touched,")


def test_what_changes_only_where_an_epoch_ends_is_named(tmp_path: Path) -> None:
    def change(run: Any) -> None:
        run.task.kept += 1

    task = Touched(lambda task: None)
    task.kept = torch.zeros(1)
    assert len(told(task, tmp_path, every="2 steps", callbacks=[LambdaCallback(on_epoch_end=change)])) == 1


def mask(task: Touched) -> None:
    if not hasattr(task, "mask"):
        task.mask = torch.ones(3, 3).triu()
        task.by_length = {}
    task.by_length.setdefault(task.calls, torch.zeros(task.calls))


def move(task: Touched) -> None:
    if task.calls == 1:
        task.scale = task.scale.clone()  # as to another device


def buffer(task: Touched) -> None:
    task.kept += 1
    task.unsaved = torch.zeros(2) + task.calls


def look(task: Touched) -> None:
    task.view, task.detached = task.line.weight[:, :2], [task.line.weight.detach()]
    task.weights = [task.line.weight]


def count(task: Touched) -> None:
    task.seen, task.words = task.calls, [str(task.calls)]


@pytest.mark.parametrize("change", [mask, move, buffer, look, count])
def test_caches_buffers_views_of_weights_and_numbers_are_not_named(change: Any, tmp_path: Path) -> None:
    task = Touched(change)
    task.scale = torch.ones(1)
    if change is buffer:
        task.register_buffer("kept", torch.zeros(2))
        task.register_buffer("unsaved", torch.zeros(2), persistent=False)
    assert told(task, tmp_path, every="2 steps") == []


class Measured(Regression):
    """Has its declared metric, and another one, as modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.other = MeanMetric(), MeanMetric()

    def metrics(self) -> Mapping[str, Any]:
        return {"mean": self.mean}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> tuple[Any, ...]:
        self.other.update(outputs.detach())
        return (outputs,)


class WithExtra(Recurrent):
    """Saves what is in it by itself."""

    def get_extra_state(self) -> Any:
        return {"hidden": self.encoder.hidden}

    def set_extra_state(self, state: Any) -> None:
        self.encoder.hidden = state["hidden"]


class OwnLinear(nn.Linear):
    """A layer of the user's class."""


class Normed(Regression):
    """Its weight is a plain attribute, which torch computes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.line)
        self.second = nn.utils.spectral_norm(OwnLinear(FEATURES, FEATURES))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.second(features))


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize("make", [Regression, Measured, WithExtra, Normed])
def test_metrics_extra_states_and_what_torch_computes_are_not_named(make: Any, tmp_path: Path) -> None:
    assert told(make(), tmp_path) == []


def test_without_checkpoints_there_is_nothing_to_warn_of(tmp_path: Path) -> None:
    assert told(Recurrent(), tmp_path, checkpoint=False) == []


def test_a_second_fit_warns_again_and_a_resumed_one_does(tmp_path: Path) -> None:
    for epochs in (1, 2):
        policy = CheckpointConfig(by=None)
        with warned(r"encoder\.hidden"):
            quiet(max_epochs=epochs, checkpoint=policy, run_dir=tmp_path).fit(
                Recurrent(), pairs(10), resume="auto"
            )


def test_nothing_runs_in_a_step_between_the_first_update_and_the_save(tmp_path: Path) -> None:
    at: set[int] = set()

    class Profiled(Callback):
        updates = 0

        def on_fit_start(self, run: Any) -> None:
            def note(frame: FrameType, event: str, argument: Any) -> None:
                if event == "call" and frame.f_code.co_filename == unsaved_tensors.__file__:
                    at.add(run.progress.updates)

            sys.setprofile(note)

        def on_fit_end(self, run: Any) -> None:
            sys.setprofile(None)

    try:
        told(Recurrent(), tmp_path, callbacks=[Profiled()])
    finally:
        sys.setprofile(None)
    assert at == {1, 5, 10}


def test_no_tensor_is_kept_alive(tmp_path: Path) -> None:
    dead: list[bool] = []
    first: list[weakref.ref[Tensor]] = []

    def note(run: Any) -> None:
        if run.progress.updates == 1:
            first.append(weakref.ref(run.task.kept))
        elif run.progress.updates == 3:
            gc.collect()
            dead.append(first[0]() is None)

    told(Touched(replace), tmp_path, callbacks=[LambdaCallback(on_step_end=note)])
    assert dead == [True]


def _on_a_rank(run_dir: Path, strategy: str) -> tuple[int, int]:
    chosen: dict[str, Any] = {"strategy": strategy, "devices": 2}
    return len(told(Regression(), run_dir / "sound", **chosen)), len(told(Recurrent(), run_dir, **chosen))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_of_several_processes_the_first_one_warns(strategy: str, tmp_path: Path) -> None:
    assert run_distributed(_on_a_rank, tmp_path, strategy, world_size=2) == [(0, 1), (0, 0)]
