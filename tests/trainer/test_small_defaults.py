"""Small defaults: the mode of a loaded task, metrics in a collection, a rate of 0 or of the optimizer."""

from pathlib import Path
from typing import Any

import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from drivetrain import ConfigError, Engine, LambdaCallback, LearningRateMonitor, OptimizerConfig


def test_a_loaded_task_evaluates_and_a_fit_trains_it(tmp_path: Path) -> None:
    quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path).fit(Regression(dropout=0.5), pairs(4))
    task, modes = Regression.from_checkpoint(tmp_path), list[bool]()
    assert not task.training
    assert not task.dropout.training
    watch = LambdaCallback(on_step_start=lambda run: modes.append(run.task.dropout.training))
    quiet(max_epochs=1, callbacks=[watch]).fit(task, pairs(4))
    assert modes == [True, True]


def test_metrics_may_be_a_collection() -> None:
    def metrics(_: Any) -> MetricCollection:
        return MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}, prefix="my_")

    task = variant(metrics=metrics)()
    result = quiet(max_epochs=1).fit(task, pairs(4), pairs(2))
    assert {"train/my_mae", "validation/my_mae", "validation/my_mse"} <= result.metrics.keys()
    assert quiet().validate(task, pairs(2))["validation/my_mse"] == result.metrics["validation/my_mse"]


class OwnRate(torch.optim.SGD):  # as the Adafactor of transformers, which finds its rate
    def __init__(self, parameters: Any, lr: float | None = None) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = lr

    def step(self, closure: Any = None) -> None: ...


def test_a_rate_of_zero_and_one_of_the_optimizer() -> None:
    task = Regression(OptimizerConfig("sgd", lr=0.0))
    before = task.line.weight.clone()
    quiet(max_epochs=1).fit(task, pairs(4))
    assert torch.equal(task.line.weight, before)
    options = {"max_epochs": 1, "callbacks": [LearningRateMonitor()]}
    result = quiet(**options).fit(Regression(OptimizerConfig(OwnRate, lr=None)), pairs(4))
    assert "lr" not in result.metrics


def test_refusals_of_small_mistakes() -> None:
    def factory(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    adam = OptimizerConfig("adam", lr=None)
    own = variant(backward=lambda self, loss: loss.backward())
    table: dict[str, tuple[Any, ...]] = {
        "backward": (lambda: quiet(max_epochs=1).fit(own(), pairs(4)), "backward is never called"),
        "schedule": (lambda: Engine().prepare(nn.Linear(1, 1), factory), "schedule.step()"),
        "no rate": (lambda: OptimizerConfig(OwnRate, lr=None, schedule="linear"), "lr=None"),
        "no own rate": (lambda: quiet(max_epochs=1).fit(Regression(adam), pairs(4)), "finds its own rate"),
    }
    assert_refused(ConfigError, table)
