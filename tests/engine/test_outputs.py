"""Outputs of any type come back as the type that a task gave: in predictions, files, metrics and parts."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.utils import _pytree

from drivetrain import CheckpointError, DataError, LambdaCallback, StepOutput
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.testing import run_distributed


class Pair(NamedTuple):
    value: Tensor
    note: str | None


@dataclass
class Plain:
    value: Tensor
    extra: Any = None


@dataclass
class Registered:
    value: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    inner: Pair


class Node:
    """No container but by torch's pytree."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


_pytree.register_dataclass(Registered)
_pytree.register_pytree_node(Node, lambda node: ([node.value], None), lambda entries, _: Node(*entries))

MAKERS = {
    "named tuple": lambda value: Pair(value, None),
    "named tuple with a text": lambda value: Pair(value, "text"),
    "dataclass": lambda value: Plain(value),
    "nested dataclass": lambda value: Frozen(value, Pair(value + 1, None)),
    "registered dataclass": lambda value: Registered(value, {"more": value, "none": None}),
    "registered type": Node,
    "ordered": lambda value: collections.OrderedDict(value=value, none=None),
    "with a default": lambda value: collections.defaultdict(list, value=value),
    "torch's": lambda value: torch.return_types.max((value, value.long())),
}
FILED = {
    "named tuple",
    "named tuple with a text",
    "dataclass",
    "nested dataclass",
    "registered dataclass",
    "ordered",
}


class Giving(Regression):
    """Predicts an object of a type.

    Args:
        kind: Its name in `MAKERS`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any) -> Any:
        return MAKERS[self.kind](self(batch[0]))


def same(left: Any, right: Any) -> bool:
    """Whether two outputs have the same types and values.

    Values are compared to float32's rounding: some processors add in another order for another size of batch.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.allclose(left, right, rtol=1e-6, atol=1e-6) and not left.requires_grad
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    if hasattr(left, "__dict__"):
        return same(vars(left), vars(right))
    return bool(left == right)


@pytest.mark.parametrize("kind", MAKERS)
def test_predictions_are_of_the_type_that_the_task_gave(kind: str) -> None:
    task = Giving(kind)
    with torch.no_grad():
        right = [MAKERS[kind](task(features)) for features, _ in pairs(5)]
    kept = quiet().predict(task, pairs(5))
    assert len(kept) == len(right)
    assert all(map(same, kept, right))


@pytest.mark.parametrize("kind", sorted(FILED))
def test_files_hold_the_types_of_outputs(kind: str, tmp_path: Path) -> None:
    task = Giving(kind)
    kept = quiet().predict(task, pairs(5))
    files = quiet().predict(task, pairs(5), save_to=tmp_path)
    read = [read_predictions(file, types=[Pair, Plain, Frozen, Registered]) for file in files]
    assert all(map(same, read, kept))


def test_a_type_that_is_not_known_where_a_file_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (file,) = quiet().predict(Giving("dataclass"), pairs(2), save_to=tmp_path)
    with pytest.raises(CheckpointError, match=r"test_outputs\.Plain.*types=\[Plain\]"):
        read_predictions(file)


def predicted(kind: str) -> bool:
    """Whether the predictions on one of two ranks are those of one process."""
    kept = quiet().predict(Giving(kind), pairs(6))
    both = quiet(strategy="ddp", devices=2).predict(Giving(kind), pairs(6))
    return len(both) == len(kept) and all(map(same, both, kept))


@pytest.mark.parametrize("kind", ["nested dataclass", "registered dataclass", "registered type"])
def test_all_ranks_get_outputs_of_the_type_that_the_task_gave(kind: str) -> None:
    assert run_distributed(predicted, kind) == [True, True]


@pytest.mark.parametrize("kind", sorted(FILED))
def test_outputs_of_parts_are_joined_as_their_type(kind: str) -> None:
    whole = quiet().predict(Giving(kind), pairs(10, batch_size=5))
    parts = quiet(micro_batch=2).predict(Giving(kind), pairs(10, batch_size=5))
    assert all(map(same, parts, whole))


def test_an_entry_that_cannot_be_joined_is_named() -> None:
    class Counting(Regression):
        def predict_step(self, batch: Any) -> Any:
            return Plain(self(batch[0]), len(batch[0]))

    with pytest.raises(DataError, match="'extra': a int does not have one entry for each sample"):
        quiet(micro_batch=2).predict(Counting(), pairs(10, batch_size=5))


class Mean:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Any, _: Tensor) -> None:
        self.seen.append(outputs)

    def compute(self) -> float:
        assert all(type(each) is Frozen and type(each.inner) is Pair for each in self.seen)
        return float(torch.stack([each.value.detach().mean() for each in self.seen]).mean())

    def reset(self) -> None:
        self.seen: list[Any] = []


class Measured(Regression):
    """Has outputs of a type of its own, and a metric of them."""

    def training_step(self, batch: Any) -> StepOutput:
        outputs = self(batch[0])
        return StepOutput(self.loss(outputs, batch), Frozen(outputs, Pair(outputs + 1, None)))

    def metrics(self) -> Any:
        return {"mean": Mean()}


def measured(strategy: str) -> float:
    """The metric of a training with a strategy."""
    values: dict[str, float] = {}
    trainer = quiet(
        strategy=strategy,
        max_steps=3,
        log_every=1,
        callbacks=[LambdaCallback(on_fit_end=lambda run: values.update(run.metrics))],
    )
    trainer.fit(Measured(), pairs(6))
    return values["train/mean"]


def test_metrics_are_given_outputs_of_the_type_that_the_task_gave() -> None:
    assert run_distributed(measured, "fsdp", world_size=1)[0] == pytest.approx(measured("cpu"))
