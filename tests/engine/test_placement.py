"""The meta device in place of a GPU: it has no values to read, and shows what is copied to it and stays."""

import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from tests.support.waits import (
    TWO_RANKS,
    Language,
    Tokens,
    WithLoss,
    batches,
    markdown,
    waits,
    waits_of_own_loop,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from drivetrain import Engine, TaskModule, callbacks
from drivetrain.engine.weighting import OpenWindow
from drivetrain.strategies import SingleDevice

PACKAGE = Path(drivetrain.__file__).parent
META = torch.device("meta")
EACH, PARAMETERS = 4, 5
"""The tensors of a batch and of the task: all that is ever copied."""


def on_the_host(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return any(map(on_the_host, given))
    return isinstance(given, Tensor) and not given.is_meta


class Crossings(TorchDispatchMode):
    """Counts copies to the meta device by our file, and the tensors that our data code has put there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.most = 0
        self._moved: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        if isinstance(made, Tensor) and made.is_meta and any(map(on_the_host, arguments)):
            frame: Any = sys._getframe(1)
            while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
                frame = frame.f_back
            place = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            self.found[place] += 1
            if place.startswith("data/"):
                self._moved = [each for each in self._moved if each() is not None]
                self._moved.append(weakref.ref(made))
                self.most = max(self.most, len(self._moved))
        return made


def on_meta() -> SingleDevice:
    strategy = SingleDevice("cpu")
    strategy.device = META
    return strategy


def crossings(
    steps: int, task: TaskModule, data: Any = None, accumulation: int = 1, **options: Any
) -> Crossings:
    """Return those of a fit, which ends at its only log point: there is nothing to read."""
    data = batches(steps * accumulation) if data is None else data
    options = {"strategy": on_meta(), "max_steps": steps, "log_every": f"{steps} steps", **options}
    trainer = quiet(**options, gradient_accumulation_steps=accumulation)
    with pytest.raises((NotImplementedError, RuntimeError)) as error, Crossings() as mode:
        trainer.fit(task, data)
    assert f"after step {steps}," in str(error.value.__notes__), error.value
    return mode


@pytest.fixture(autouse=True)
def starts_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a fit begin without its check of weights, which reads them."""
    monkeypatch.setattr("drivetrain.run.nonfinite.names_of_nonfinite", lambda tensors: [])


def test_a_fit_of_200_steps_copies_its_task_and_its_batches_and_nothing_else() -> None:
    mode = crossings(200, Regression(), list(pairs(200, batch_size=1)))
    assert mode.found == {"strategies/single.py": 2, "data/batch.py": 2 * 200}


def test_at_most_two_batches_of_a_window_of_eight_are_on_the_device() -> None:
    mode = crossings(4, Tokens(), accumulation=8, max_grad_value=0.1)
    assert mode.found == {"strategies/single.py": PARAMETERS, "data/batch.py": EACH * 32}
    assert EACH <= mode.most <= 2 * EACH


def test_averages_and_statistics_are_kept_on_the_device() -> None:
    given = [callbacks.WeightAverage(), callbacks.GradientNorms(), callbacks.Freeze({"norm": "3 steps"})]
    mode = crossings(8, Language(), callbacks=given)
    assert mode.found == {"strategies/single.py": PARAMETERS, "data/batch.py": EACH * 8}


def test_weights_that_are_on_the_device_stay_there() -> None:
    on_device = batches(16, "meta")
    assert crossings(4, Tokens(), on_device, accumulation=4).found == {"strategies/single.py": PARAMETERS}


class TwoRanks:  # as a window knows them: it asks for their number, and for sums on the device
    size = 2

    def add(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("ranks", [1, 2])
def test_your_own_loop_does_not_read_weights_on_the_device(ranks: int) -> None:
    engine = Engine(on_meta())
    model, optimizer = engine.prepare(WithLoss(), lambda params: torch.optim.SGD(params, lr=0.1))
    if ranks == 2:
        engine._window = OpenWindow(TwoRanks())  # type: ignore[arg-type]
    with Crossings() as mode:
        for number, batch in enumerate(engine.prepare_data(batches(8)), 1):
            engine.backward(model(batch), 2.0 if number % 4 else (batch["labels"] > 2).sum())
            if number % 4 == 0:
                engine.step(optimizer, max_grad_norm=1.0)
    assert mode.found == {"data/batch.py": EACH * 8}


def waits_of_rank(strategy: str, directory: Path) -> tuple[float, float]:
    own_loop = waits_of_own_loop(strategy, ranks=2)
    return waits(TWO_RANKS[strategy], strategy, directory, devices=2), own_loop


@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_steps_on_two_ranks_wait_as_often_as_the_table_says(strategy: str, tmp_path: Path) -> None:
    assert on_two_ranks(waits_of_rank, strategy, tmp_path) == 2 * [(TWO_RANKS[strategy].waits, 0)]


def test_page_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs/explanation/the-step.md"
    assert markdown() in page.read_text(encoding="utf-8")
