"""Declared metrics: any object with update, compute and reset, and a state that survives the middle of a log
interval.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import CheckpointError, ConfigError, LambdaCallback, OverAll
from drivetrain.checkpoint import pack, unpack
from drivetrain.engine.metrics.declared import DeclaredMetrics
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed

CPU = torch.device("cpu")
CLASSES = 4
REPLACED = "a collection with shared states that each update replaces"


class Largest:
    """A metric of nobody's library, with a state."""

    def __init__(self) -> None:
        self.reset()

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.value = max(self.value, float(outputs.max()))

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.value = -1.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Forgetful:
    """A metric without a state to store."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, *_: Any) -> None:
        self.count += 1

    def compute(self) -> Any:
        return self.count

    def reset(self) -> None:
        self.count = 0


class Share(nn.Module):
    """A metric that is a module of torch's, with a buffer, a plain number and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros(()))
        self.reset()

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.right += (outputs.argmax(-1) == target).sum()
        self.seen += len(target)
        self.last = target[-1:].clone()

    def compute(self) -> dict[str, Any]:
        return {"share": self.right / self.seen, "last": self.last}

    def reset(self) -> None:
        self.right = torch.zeros(())
        self.seen = 0
        self.last = torch.zeros(1, dtype=torch.int64)


def of_torchmetrics() -> dict[str, Callable[[], Any]]:
    """One of each kind of state that torchmetrics has."""
    import torchmetrics
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
    )
    from torchmetrics.regression import ConcordanceCorrCoef, PearsonCorrCoef
    from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

    def group() -> Any:
        members = [MulticlassAccuracy(CLASSES), MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)]
        return torchmetrics.MetricCollection([*members, MulticlassConfusionMatrix(CLASSES)])

    return {
        "sums": lambda: MulticlassAccuracy(CLASSES),
        "lists": lambda: MulticlassAUROC(CLASSES),
        "a matrix": lambda: MulticlassConfusionMatrix(CLASSES),
        "a collection with shared states": group,
        REPLACED: lambda: torchmetrics.MetricCollection([PearsonCorrCoef(), ConcordanceCorrCoef()]),
        "a wrapper": lambda: ClasswiseWrapper(MulticlassF1Score(CLASSES, average=None)),
        "a wrapper with tensors of its own": lambda: MinMaxMetric(MulticlassAccuracy(CLASSES)),
        "a wrapper with a counter": lambda: Running(MulticlassAccuracy(CLASSES), window=3),
        "a wrapper in a collection": lambda: torchmetrics.MetricCollection(
            {"range": MinMaxMetric(MulticlassAccuracy(CLASSES)), "plain": MulticlassAccuracy(CLASSES)}
        ),
    }


KINDS = [
    "sums",
    "lists",
    "a matrix",
    "a collection with shared states",
    REPLACED,
    "a wrapper",
    "a wrapper with tensors of its own",
    "a wrapper with a counter",
    "a wrapper in a collection",
    "no library's",
    "a module of torch's",
    "of all samples at once",
]


def make(kind: str) -> DeclaredMetrics:
    makers = {
        **of_torchmetrics(),
        "no library's": Largest,
        "a module of torch's": Share,
        "of all samples at once": lambda: OverAll(
            lambda outputs, target: float(outputs[target % 2 == 0, 0].sum())
        ),
    }
    assert sorted(makers) == sorted(KINDS)
    return DeclaredMetrics({"it": makers[kind]()}, CPU)


def inputs(number: int, kind: str = "") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    scores = torch.randn(6, CLASSES, generator=generator).softmax(-1)
    if kind == REPLACED:
        return scores[:, 0], scores[:, 1]
    return scores, (torch.arange(6) + number) % CLASSES  # every class is there: AUROC warns where one is not


@pytest.mark.parametrize("computes", [False, True], ids=["", "computed in between"])
@pytest.mark.parametrize("stop", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_stored_in_the_middle_goes_on_to_the_same_values(
    kind: str, stop: int, computes: bool
) -> None:
    """Also without a warning, as warnings are errors here: torchmetrics warns of values before any update."""
    whole, first, second = make(kind), make(kind), make(kind)
    for number in range(5):
        if number == stop:
            packed, tensors = pack(first.state_dict())
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            first.update(inputs(77, kind))  # what happens afterwards is not in it
            second.load_state_dict(unpack(packed, tensors))
        for metrics in (whole, first if number < stop else second):
            metrics.update(inputs(number, kind))
            if computes:
                metrics.compute()
    assert second.compute() == whole.compute()
    assert whole.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_is_no_longer_touched(kind: str) -> None:
    first, second = make(kind), make(kind)
    first.update(inputs(0, kind))
    right, stored = first.compute(), first.state_dict()
    first.update(inputs(1, kind))
    second.update(inputs(3, kind))
    assert second.compute() != right
    second.load_state_dict(stored)
    assert second.compute() == right
    second.update(inputs(2, kind))
    third = make(kind)
    third.load_state_dict(stored)
    assert third.compute() == right


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_metric_begins_anew(kind: str) -> None:
    metrics, fresh = make(kind), make(kind)
    metrics.update(inputs(0, kind))
    metrics.reset()
    assert metrics.compute() == {}
    metrics.update(inputs(1, kind))
    fresh.update(inputs(1, kind))
    assert metrics.compute() == fresh.compute()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_shares_nothing(kind: str) -> None:
    metrics = make(kind)
    metrics.update(inputs(0, kind))
    right = metrics.compute()
    copied = metrics.copies()
    assert copied.compute() == {}
    copied.update(inputs(1, kind))
    assert metrics.compute() == right


def test_a_number_that_a_user_configured_anew_is_not_overwritten_by_a_checkpoint() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    first = DeclaredMetrics({"it": MulticlassAccuracy(CLASSES, top_k=1)}, CPU)
    first.update(inputs(0))
    metric = MulticlassAccuracy(CLASSES, top_k=2)
    DeclaredMetrics({"it": metric}, CPU).load_state_dict(first.state_dict())
    assert metric.top_k == 2


# Values.


class Computes(Forgetful):
    """Computes what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "floats"),
    [
        (3, {"it": 3.0}),
        (torch.tensor(0.5), {"it": 0.5}),
        (torch.tensor(0.5, requires_grad=True), {"it": 0.5}),
        (torch.tensor([0.5, 2.0]), {"it/0": 0.5, "it/1": 2.0}),
        (torch.tensor([[1, 2], [3, 4]]), {"it/0/0": 1.0, "it/0/1": 2.0, "it/1/0": 3.0, "it/1/1": 4.0}),
        ({"low": torch.tensor(1.0), "high": [2.0, 3.0]}, {"it/low": 1.0, "it/high/0": 2.0, "it/high/1": 3.0}),
        ((1.0, torch.tensor(2.0)), {"it/0": 1.0, "it/1": 2.0}),
        (np.float32(0.5), {"it": 0.5}),
        (np.array([1.0, 2.0]), {"it/0": 1.0, "it/1": 2.0}),
        (True, {"it": 1.0}),
    ],
)
def test_whatever_a_metric_computes_becomes_floats_by_name(value: Any, floats: dict[str, float]) -> None:
    metrics = DeclaredMetrics({"it": Computes(value)}, CPU)
    metrics.update(())
    assert metrics.compute() == floats
    assert all(type(each) is float for each in metrics.compute().values())


@pytest.mark.parametrize("value", [None, "good", object()])
def test_a_value_that_is_no_number_is_named(value: Any) -> None:
    metrics = DeclaredMetrics({"it": Computes(value)}, CPU)
    metrics.update(())
    with pytest.raises(ConfigError, match=f"metric 'it' computed a {type(value).__name__}"):
        metrics.compute()


def test_a_metric_that_was_never_updated_has_no_value() -> None:
    """torchmetrics would warn, and give a zero that nothing stands behind."""
    assert make("sums").compute() == {}
    assert not DeclaredMetrics({}, CPU)
    assert make("sums")


def test_updating_needs_no_gradients() -> None:
    seen: list[bool] = []

    class Looks(Forgetful):
        def update(self, *_: Any) -> None:
            seen.append(torch.is_grad_enabled())

    DeclaredMetrics({"it": Looks()}, CPU).update(())
    assert seen == [False]


class Moves(Forgetful):
    """Moves itself in place, and says nothing."""

    device = "nowhere"

    def to(self, device: torch.device) -> None:
        self.device = str(device)


def test_a_metric_is_moved_to_the_device_where_it_is_updated() -> None:
    metric = Moves()
    metrics = DeclaredMetrics({"it": metric}, CPU)
    metrics.update(())
    assert metric.device == "cpu"
    assert metrics.compute() == {"it": 1.0}


# What is refused.


@pytest.mark.parametrize("wrong", [torch.ones(2, 3), {"outputs": 1}, None])
def test_what_metrics_are_updated_with_is_a_tuple(wrong: Any) -> None:
    """The rows of a tensor would be given as separate arguments."""
    with pytest.raises(ConfigError, match=f"metric_inputs returned a {type(wrong).__name__}; it returns the"):
        make("no library's").update(wrong)


@pytest.mark.parametrize("wrong", [[Forgetful()], Forgetful(), None])
def test_metrics_have_names(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="must return a mapping of names to metrics, not a"):
        DeclaredMetrics(wrong, CPU)


@pytest.mark.parametrize("wrong", [nn.Linear(1, 1), lambda outputs, target: 0.0, 0.5])
def test_what_is_no_metric_is_named_with_what_it_lacks(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"metrics\(\)\['accuracy'\] is a .* without update, compute, reset"
    ):
        DeclaredMetrics({"accuracy": wrong}, CPU)


def test_a_metric_has_one_name() -> None:
    one = Forgetful()
    with pytest.raises(
        ConfigError, match="the same Forgetful as 'a' and as 'b': it would be given each batch"
    ):
        DeclaredMetrics({"a": one, "b": one}, CPU)


def test_a_metric_whose_state_cannot_be_stored_is_named_with_the_way_out() -> None:
    with pytest.raises(
        CheckpointError, match=r"'count' \(Forgetful\) has no state_dict.*train_metrics=False"
    ):
        DeclaredMetrics({"count": Forgetful()}, CPU).state_dict()


def test_a_checkpoint_with_other_metrics_is_refused() -> None:
    stored = make("sums").state_dict()
    with pytest.raises(
        CheckpointError, match=r"has training metrics \['it'\], the task declares \['other'\]"
    ):
        DeclaredMetrics({"other": Largest()}, CPU).load_state_dict(stored)
    with pytest.raises(CheckpointError, match="'it' has 0 parts, the checkpoint 1"):
        make("no library's").load_state_dict(stored)
    with pytest.raises(CheckpointError, match=r"state of the metric 'it' .* could not be loaded"):
        make("no library's").load_state_dict({**stored, "metrics": {"it": {"own": {}, "members": []}}})


# In a run.


class Measured(Regression):
    """Declares two metrics of torchmetrics'."""

    def metrics(self) -> dict[str, Any]:
        from torchmetrics import MeanSquaredError, PearsonCorrCoef

        return {"error": MeanSquaredError(), "rank": PearsonCorrCoef()}


def squared_error(task: Regression, data: Any) -> float:
    with torch.no_grad():
        residuals = torch.cat([(task(features) - target).squeeze(1) for features, target in data])
    return float(residuals.square().mean())


def test_declared_metrics_are_logged_in_training_and_in_evaluation() -> None:
    logged: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: logged.append(dict(run.logged)))
    task = Measured()
    before = squared_error(task, pairs(12))
    quiet(max_epochs=1, log_every="1 epoch", callbacks=[note]).fit(task, pairs(12, 12), pairs(12, seed=4))
    names = {name for each in logged for name in each}
    assert {"train/error", "train/rank", "validation/error", "validation/rank"} <= names
    values = {name: value for each in logged for name, value in each.items()}
    assert values["train/error"] == pytest.approx(before, rel=1e-5)
    assert values["validation/error"] == pytest.approx(squared_error(task, pairs(12, seed=4)), rel=1e-5)


def test_named_loaders_do_not_share_a_metric() -> None:
    task = Measured()
    data = {"here": pairs(8, seed=1), "there": pairs(8, seed=2)}
    values = quiet().test(task, data)
    for name, each in data.items():
        assert values[f"test/{name}/error"] == pytest.approx(squared_error(task, each), rel=1e-5)


def test_training_metrics_can_be_left_alone() -> None:
    logged: dict[str, float] = {}
    note = LambdaCallback(on_log=lambda run: logged.update(run.logged))
    quiet(max_epochs=1, train_metrics=False, callbacks=[note]).fit(Measured(), pairs(), pairs())
    assert "validation/error" in logged
    assert "train/error" not in logged


class Peaks(Regression):
    """Declares a metric that is no module."""

    def metrics(self) -> dict[str, Any]:
        return {"peak": Largest()}


def test_a_run_with_a_metric_of_a_plain_class_is_resumed_as_if_it_had_not_ended(tmp_path: Path) -> None:
    def run(steps: int, resume: str | None, run_dir: Path) -> float:
        trainer = quiet(max_steps=steps, log_every="4 steps", checkpoint=True, run_dir=run_dir)
        return trainer.fit(Peaks(), pairs(12), resume=resume).metrics["train/peak"]

    run(2, None, tmp_path / "parts")  # the largest output is of the first update
    assert run(4, "auto", tmp_path / "parts") == run(4, None, tmp_path / "whole")


def test_what_goes_wrong_in_a_metrics_own_code_is_told_of_the_metric(tmp_path: Path) -> None:
    class Wrong(Largest):
        def load_state_dict(self, state: dict[str, float]) -> None:
            self.value = self.valeu  # type: ignore[attr-defined]

    class Task(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"peak": Wrong()}

    trainer = quiet(max_steps=4, checkpoint=True, run_dir=tmp_path)
    trainer.fit(Task(), pairs(12))
    with pytest.raises(CheckpointError, match=r"state of the metric 'peak' \(Wrong\).* no attribute 'valeu'"):
        trainer.fit(Task(), pairs(12), resume="auto")


class Weighed(Regression):
    """Counts the samples that its metric has seen; the last column of a batch is its weight."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (super().loss(outputs, batch) * batch[2]).sum() / batch[2].sum()  # 0 / 0 where all are padding

    def loss_weight(self, batch: Any) -> float:
        return float(batch[2].sum())

    def metrics(self) -> dict[str, Any]:
        from torchmetrics import SumMetric

        return {"seen": SumMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> tuple[Tensor]:
        return (torch.tensor(float(len(batch[0]))),)


class Yielding(Weighed):
    """The same in a step that is a generator."""

    def training_step(self, batch: Any) -> Any:
        yield "default", super().training_step(batch)


def seen(kind: Any, task: type[Weighed], world_size: int, accumulation: int) -> list[float]:
    """How many samples the metrics have seen in training and in validation, of 21 in six batches."""
    weights = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    batches = [
        (torch.ones(count, 4), torch.ones(count, 1), torch.full((count, 1), weight))
        for count, weight in enumerate(weights, 1)
    ]
    strategy = {} if kind is None else {"strategy": kind(world_size=world_size), "devices": world_size}
    options = {"max_epochs": 1, "log_every": "1 epoch", "gradient_accumulation_steps": accumulation}
    found = quiet(**options, **strategy).fit(task(), batches, batches).metrics
    return [found["train/seen"], found["validation/seen"]]


WEIGHED = 2.0 + 3.0 + 5.0


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("task", [Weighed, Yielding])
def test_what_weighs_nothing_is_counted_in_no_metric_of_training(
    task: type[Weighed], accumulation: int
) -> None:
    assert seen(None, task, 1, accumulation) == [WEIGHED, 21.0]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("kind", [DDP, FSDP])
@pytest.mark.parametrize("task", [Weighed, Yielding])
def test_on_several_ranks_it_is_not_counted_either(kind: Any, task: type[Weighed]) -> None:
    def both() -> Any:
        return [seen(kind, task, 2, accumulation) for accumulation in (1, 2)]

    assert run_distributed(both) == [[[WEIGHED, 21.0]] * 2] * 2
