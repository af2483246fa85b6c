"""Declared metrics: any object with update, compute and reset; their state, their values, and ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor, nn

from drivetrain import CheckpointError, ConfigError, EpochMetric, LambdaCallback
from drivetrain.checkpoint import pack, unpack
from drivetrain.engine.metrics.declared import DeclaredMetrics, declared_by
from drivetrain.task.attribute_state import AttributeState

CPU = torch.device("cpu")
CLASSES = 4
REPLACED = "a collection with shared states that each step replaces"


class Largest:  # a metric of nobody's library, with a state
    def __init__(self) -> None:
        self.value = -1.0

    reset = __init__

    def update(self, outputs: Tensor, target: Tensor) -> None:
        self.value = max(self.value, float(outputs.max()))

    def compute(self) -> float:
        return self.value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Forgetful:  # a metric without a state to store; it computes its count, or what it was made with
    def __init__(self, value: Any = None) -> None:
        self.count, self.value = 0, value

    def update(self, *_: Any) -> None:
        self.count += 1
        assert not torch.is_grad_enabled()

    def compute(self) -> Any:
        return self.count if self.value is None else self.value

    def reset(self) -> None:
        self.count = 0


def makers() -> dict[str, Callable[[], Any]]:
    """One of each kind of state that torchmetrics has, and of others."""
    import torchmetrics
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
    from torchmetrics.regression import ConcordanceCorrCoef, PearsonCorrCoef
    from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

    accuracy = lambda: MulticlassAccuracy(CLASSES)  # noqa: E731
    collection = torchmetrics.MetricCollection
    return {
        "sums": accuracy,
        "lists": lambda: MulticlassAUROC(CLASSES),
        REPLACED: lambda: collection([PearsonCorrCoef(), ConcordanceCorrCoef()]),
        "a wrapper": lambda: ClasswiseWrapper(MulticlassF1Score(CLASSES, average=None)),
        "a wrapper with a counter": lambda: Running(accuracy(), window=3),
        "a wrapper in a collection": lambda: collection({"a": MinMaxMetric(accuracy()), "b": accuracy()}),
        "no library's": Largest,
        "of all samples at once": lambda: EpochMetric(
            lambda out, target: float(out[target % 2 == 0, 0].sum())
        ),
    }


def make(kind: str) -> DeclaredMetrics:
    return DeclaredMetrics({"it": makers()[kind]()}, CPU)


def inputs(number: int, kind: str = "") -> tuple[Tensor, Tensor]:
    scores = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(number)).softmax(-1)
    if kind == REPLACED:
        return scores[:, 0], scores[:, 1]
    return scores, (torch.arange(6) + number) % CLASSES  # every class is there: AUROC warns where one is not


@pytest.mark.parametrize("kind", makers())
def test_state_of_a_metric_stored_in_the_middle_goes_on_to_the_same_values(kind: str) -> None:
    """Also without a warning, as warnings are errors here: torchmetrics warns of values before any step."""
    for stop, computes in ((0, False), (1, True), (2, False), (4, True)):
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
        assert whole.compute()
        assert second.compute() == whole.compute()


@pytest.mark.parametrize("kind", makers())
def test_state_copies_and_resets_of_a_metric_share_nothing(kind: str) -> None:
    first, second, fresh = make(kind), make(kind), make(kind)
    first.update(inputs(0, kind))
    right, stored, copied = first.compute(), first.state_dict(), first.copies()
    assert copied.compute() == {}
    copied.update(inputs(1, kind))
    assert first.compute() == right
    first.update(inputs(1, kind))  # what was stored is no longer touched, by the one that gave it
    for _ in range(2):
        second.load_state_dict(stored)
        assert second.compute() == right
        second.update(inputs(2, kind))  # nor by the one that took it
    first.reset()
    assert first.compute() == {}
    for each in (first, fresh):
        each.update(inputs(1, kind))
    assert first.compute() == fresh.compute()


def test_whatever_a_metric_computes_becomes_floats_by_name() -> None:
    for value, floats in (
        (3, {"it": 3.0}),
        (torch.tensor(0.5, requires_grad=True), {"it": 0.5}),
        (torch.tensor([[1, 2], [3, 4]]), {"it/0/0": 1.0, "it/0/1": 2.0, "it/1/0": 3.0, "it/1/1": 4.0}),
        ({"low": torch.tensor(1.0), "high": [2.0, 3.0]}, {"it/low": 1.0, "it/high/0": 2.0, "it/high/1": 3.0}),
        (np.float32(0.5), {"it": 0.5}),
        (np.array([1.0, 2.0]), {"it/0": 1.0, "it/1": 2.0}),
    ):
        metrics = DeclaredMetrics({"it": Forgetful(value)}, CPU)
        metrics.update(())
        assert metrics.compute() == floats
        assert all(type(each) is float for each in metrics.compute().values())


def test_entries_are_named_by_labels_where_a_dimension_has_as_many() -> None:
    class Matrix(Largest):
        labels = ("cat", "dog")

        def compute(self) -> Any:
            return {"of": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}

    metrics = DeclaredMetrics({"m": Matrix()}, CPU)
    metrics.update((torch.zeros(1), torch.zeros(1)))
    assert list(metrics.compute()) == [
        f"m/of/{row}/{column}" for row in ("cat", "dog") for column in range(3)
    ]


def test_refusals_of_metrics() -> None:
    one, stored = Forgetful(), make("sums").state_dict()

    def declare(metrics: Any) -> Any:
        return lambda: DeclaredMetrics(metrics, CPU)

    def computed(metrics: Any) -> Any:
        declared = DeclaredMetrics(metrics, CPU)
        declared.update(())
        return declared.compute()

    broken = {**stored, "metrics": {"it": {"own": {}, "members": []}}}
    cases: dict[str, tuple[Any, ...]] = {
        "a tensor of inputs": (lambda: make("no library's").update(torch.ones(2, 3)), "metric_inputs"),
        "a list": (lambda: declared_by(variant(metrics=lambda _: [one])()), "such as {'accuracy'"),
        "the loss": (lambda: declared_by(variant(metrics=lambda _: {"loss": one})()), "'mean_loss'"),
        "no metric": (declare({"accuracy": nn.Linear(1, 1)}), "['accuracy']", "update, compute, reset"),
        "two names": (declare({"a": one, "b": one}), "'a'", "'b'"),
        "no state": (DeclaredMetrics({"count": one}, CPU).state_dict, "'count'", "train_metrics=False"),
        "values of one name": (
            lambda: computed({"a": Forgetful([1.0, 2.0]), "a/1": Forgetful(3.0)}),
            "two values called 'a/1'",
        ),
        "a state": (lambda: make("no library's").load_state_dict(broken), "'it'", "could not be loaded"),
    }
    assert_refused((ConfigError, CheckpointError), cases)


class Measured(Regression):
    def metrics(self) -> dict[str, Any]:
        from torchmetrics import MeanSquaredError, PearsonCorrCoef

        return {"error": MeanSquaredError(), "rank": PearsonCorrCoef()}


def squared_error(task: Regression, data: Any) -> float:
    with torch.no_grad():
        residuals = torch.cat([(task(features) - target).squeeze(1) for features, target in data])
    return pytest.approx(float(residuals.square().mean()), rel=1e-5)


def test_declared_metrics_are_logged_in_training_and_in_evaluation() -> None:
    values: dict[str, float] = {}
    note = LambdaCallback(on_log=lambda run: values.update(run.logged))
    task = Measured()
    before = squared_error(task, pairs(12))
    quiet(max_epochs=1, log_every="1 epoch", callbacks=[note]).fit(task, pairs(12, 12), pairs(12, seed=4))
    assert {"train/error", "train/rank", "validation/error", "validation/rank"} <= {*values}
    assert values["train/error"] == before
    assert values["validation/error"] == squared_error(task, pairs(12, seed=4))
    data = {"here": pairs(8, seed=1), "there": pairs(8, seed=2)}  # named loaders do not share a metric
    tested = quiet().test(task, data)
    for name, each in data.items():
        assert tested[f"test/{name}/error"] == squared_error(task, each)
    values.clear()
    quiet(max_epochs=1, train_metrics=False, callbacks=[note]).fit(Measured(), pairs(), pairs())
    assert "validation/error" in values
    assert "train/error" not in values


def test_resume_restores_a_metric_of_a_plain_class_and_names_its_own_errors(tmp_path: Path) -> None:
    class Wrong(Largest):
        def load_state_dict(self, state: dict[str, float]) -> None:
            self.value = self.valeu  # type: ignore[attr-defined]

    def run(steps: int, run_dir: Path, resume: str | None = None, metric: Any = Largest) -> float:
        task = variant(metrics=lambda self: {"peak": metric()})()
        trainer = quiet(max_steps=steps, log_every="4 steps", checkpoint=True, run_dir=run_dir)
        return trainer.fit(task, pairs(12), resume=resume).metrics["train/peak"]

    run(2, tmp_path / "parts")  # the largest output is of the first step
    with pytest.raises(CheckpointError, match=r"state of the metric 'peak' \(Wrong\).* no attribute 'valeu'"):
        run(4, tmp_path / "parts", "auto", Wrong)
    assert run(4, tmp_path / "parts", "auto") == run(4, tmp_path / "whole")


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


def seen(**options: Any) -> list[list[float]]:
    """How many samples the metrics have seen in training and in validation, of 21 in six batches."""
    made = lambda n, weight: (torch.ones(n, 4), torch.ones(n, 1), torch.full((n, 1), weight))  # noqa: E731
    batches = [made(count, float(count in (2, 3, 5))) for count in range(1, 7)]
    found, options = [], {"max_epochs": 1, "log_every": "1 epoch", **options}
    for accumulation in (1, 2):
        trainer = quiet(gradient_accumulation_steps=accumulation, **options)
        metrics = trainer.fit(Weighed(), batches, batches).metrics
        found.append([metrics["train/seen"], metrics["validation/seen"]])
    return found


def test_batches_without_weight_are_in_no_metric_of_training() -> None:
    expected = [[2.0 + 3.0 + 5.0, 21.0]] * 2
    assert seen() == expected
    assert on_two_ranks(lambda: seen(strategy="ddp", devices=2)) == [expected] * 2


def _of_each_set(strategy: str = "cpu", size: int = 1) -> list[float]:
    from torchmetrics import MeanSquaredError

    def metrics(self: Any, loader: str | None = None) -> dict[str, Any] | None:
        if loader is None:  # none in training
            return None
        last = EpochMetric(lambda outputs, targets: float(targets[-1].item()))
        return {"last": last} if loader == "b" else {"error": MeanSquaredError()}

    task, loaders = variant(metrics=metrics)(), {"a": pairs(8, seed=1), "b": pairs(8, seed=2)}
    trainer = quiet(max_epochs=1, strategy=strategy, devices=size)
    values = {**trainer.validate(task, loaders), **trainer.fit(task, pairs(8), loaders).metrics}
    names = ["validation/a/error", "validation/b/last"]
    assert [each for each in values if not each.endswith("loss")] == names
    assert values["validation/a/error"] == pytest.approx(values["validation/a/loss"], rel=1e-5)
    return [values["validation/b/last"]]


def test_each_evaluation_set_has_its_own_metrics() -> None:
    found = _of_each_set()
    assert found == [float(pairs(8, seed=2).dataset.tensors[1][-1])]  # type: ignore[attr-defined]
    assert on_two_ranks(_of_each_set, "ddp", 2) == [found] * 2


class Plain(nn.Module):  # as torchmetrics' metrics are: their state is in attributes, and in no state dict
    total = torch.zeros(())

    def update(self, value: float) -> None:
        self.total = self.total + value

    compute = reset = update


def test_metrics_in_attributes_are_saved_with_the_task_unless_it_declares_them() -> None:
    first, second = (nn.ModuleDict({"mean": Plain(), "line": nn.Linear(1, 1)}) for _ in range(2))
    state, without = AttributeState(first), AttributeState(first, [[first["mean"]], None])
    first["mean"].update(3.0)
    assert AttributeState(second).load(state.gather()[0], torch.device("cpu")) == []
    assert (second["mean"].total, without.gather()) == (3, [{}])
