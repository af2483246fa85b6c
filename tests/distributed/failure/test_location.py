"""A run's location is read from its stack frames: the hook, or the part of the step."""

import gc
import linecache
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import nn

from drivetrain import Callback
from drivetrain.distributed.failure.location import error_location, thread_location


def fail(*_: Any, **options: Any) -> Any:
    raise ArithmeticError


class BrokenBackward(torch.autograd.Function):
    forward = staticmethod(lambda context, x: x.clone())
    backward = staticmethod(fail)


class Fails(Regression):  # in its loss, in a validation, in the backward or in the step
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def loss(self, outputs: Any, batch: Any) -> Any:
        if self.part == ("loss" if self.training else "validation"):
            fail()
        found = super().loss(outputs, batch)
        return BrokenBackward.apply(found) if self.part == "backward" else found

    def configure_optimizers(self) -> Any:
        stubborn = type("Stubborn", (torch.optim.SGD,), {"step": fail} if self.part == "optimizer" else {})
        return lambda parameters: stubborn(parameters, lr=0.1)


class Hooked(Callback):
    def __init__(self, hook: str) -> None:
        self._hook = hook

    def on_evaluation_end(self, run: Any) -> Any:
        return self._hook == "evaluation end" and fail()

    def on_checkpoint_saved(self, run: Any) -> Any:
        return self._hook == "saved" and fail()


def test_an_error_is_placed(tmp_path: Path) -> None:
    parts = {
        "loss": "in the forward",
        "validation": "in the forward",
        "backward": "in the backward",
        "optimizer": "in the optimizer's step",
        "evaluation end": "in on_evaluation_end of Hooked",
        "saved": "in on_checkpoint_saved of Hooked",
    }
    found = {}
    for part in parts:
        trainer = quiet(max_epochs=1, callbacks=[Hooked(part)], run_dir=tmp_path / part, checkpoint=True)
        with pytest.raises(ArithmeticError) as caught:
            trainer.fit(Fails(part), pairs(8), pairs(8))
        found[part] = error_location(caught.value)
    assert found == parts
    with pytest.raises(TypeError) as other:
        nn.Linear(1, 1)(None)
    assert error_location(other.value) == ""


def test_no_garbage_is_collected_while_frames_are_read() -> None:  # CPython 3.11 could crash
    lines: list[str] = []

    def note(*_: Any) -> None:
        frame = sys._getframe(1)
        lines.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 10**6)
    thread_location(threading.get_ident())
    gc.set_threshold(*before)
    gc.callbacks.remove(note)
    assert lines
    assert not [each for each in lines if "f_back" in each]
