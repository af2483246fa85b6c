"""A run's place is read from its stack frames: the hook, or the part of the step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import Callback, OptimizerConfig
from drivetrain.distributed.failure.place import place_of_error, place_of_thread


class Broken(torch.autograd.Function):
    """A backward that raises."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        """Raise."""
        raise ArithmeticError


class Fails(Regression):
    """A task that raises at a place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def loss(self, outputs: Any, batch: Any) -> Any:
        """The loss, perhaps."""
        if self.place == "loss" or (self.place == "validation" and not self.training):
            raise ArithmeticError
        found = super().loss(outputs, batch)
        return Broken.apply(found) if self.place == "backward" else found

    def configure_optimizers(self) -> Any:
        """One whose step raises, perhaps."""
        if self.place != "optimizer":
            return OptimizerConfig("sgd", lr=0.1)

        class Stubborn(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                raise ArithmeticError

        return lambda parameters: Stubborn(parameters, lr=0.1)


class Hooked(Callback):
    """A callback that raises, in a function that it calls."""

    def __init__(self, place: str) -> None:
        self.place = place

    def on_evaluation_end(self, run: Any) -> None:
        """Raise, perhaps."""
        self._act("evaluation end")

    def on_checkpoint_saved(self, run: Any) -> None:
        """Raise, perhaps."""
        self._act("saved")

    def _act(self, place: str) -> None:
        if self.place == place:
            raise ArithmeticError

    def state_dict(self) -> dict[str, Any]:
        """Raise, perhaps."""
        self._act("state")
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("place", "doing"),
    [
        ("loss", "in the forward"),
        ("validation", "in the forward"),
        ("backward", "in the backward"),
        ("optimizer", "in the optimizer's step"),
        ("evaluation end", "in on_evaluation_end of Hooked"),
        ("saved", "in on_checkpoint_saved of Hooked"),
    ],
)
def test_an_error_is_placed(place: str, doing: str, tmp_path: Any) -> None:
    trainer = quiet(max_epochs=1, callbacks=[Hooked(place)], run_dir=tmp_path, checkpoint=True)
    with pytest.raises(ArithmeticError) as caught:
        trainer.fit(Fails(place), pairs(8), pairs(8))
    assert place_of_error(caught.value) == doing


def test_what_a_thread_does_now_is_seen_from_another() -> None:
    found: list[str] = []

    class Looks(Callback):
        def on_step_end(self, run: Any) -> None:
            main = threading.get_ident()
            looking = threading.Thread(target=lambda: found.append(place_of_thread(main)))
            looking.start()
            looking.join()

    quiet(max_steps=1, callbacks=[Looks()], checkpoint=False).fit(Regression(), pairs(8))
    assert found == ["in on_step_end of Looks"]


def test_other_code_is_not_placed() -> None:
    with pytest.raises(TypeError) as caught:
        nn.Linear(1, 1)(None)
    assert place_of_error(caught.value) == ""
    assert place_of_thread(threading.get_ident()) == ""
    assert place_of_thread(-1) == ""
