"""A task's own callbacks, and values that it leaves out."""

from types import SimpleNamespace
from typing import Any

from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import ConfigError, LambdaCallback, StrategyError, WeightAverage


class Own(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def metric_name(self, stage: str, loader: str | None, name: str) -> str | None:
        return None

    def configure_callbacks(self, stage: str) -> list[Any]:
        self.stages.append(stage)
        return [LambdaCallback(on_log=lambda run: run.log("own", 1.0))]


def test_a_task_configures_callbacks_of_its_own_and_leaves_values_out() -> None:
    points: list[float] = []
    note = LambdaCallback(on_log=lambda run: points.append(run.progress.steps))
    options = {"max_epochs": 1, "log_every": 2, "callbacks": [note]}
    result = quiet(**options).fit(task := Own(), pairs(12, 2))
    assert (task.stages, points, result.metrics) == (["train"], [2, 4, 6], {"own": 1.0})


def test_callbacks_of_a_task_are_refused_as_those_of_the_trainer_are() -> None:
    def fit(own: Any, verb: str = "fit", **options: Any) -> Any:
        task = variant(configure_callbacks=lambda self, stage: own)()
        return lambda: getattr(quiet(max_steps=1, **options), verb)(task, pairs())

    average = (WeightAverage(), "2 WeightAverage", "Give one")
    table: dict[str, tuple[Any, ...]] = {
        "two": (fit([average[0], WeightAverage()]), *average[1:]),
        "two in a plan": (fit([average[0]], "plan", callbacks=[WeightAverage()]), *average[1:]),
        "one, no list": (fit(average[0]), "configure_callbacks('train') must be a sequence"),
        "none": (fit(None, "validate"), "configure_callbacks('validation') must be a sequence"),
        "a class": (fit([WeightAverage]), "configure_callbacks('train') has the class", "WeightAverage(...)"),
        "another object": (fit([SimpleNamespace()]), "must have the base drivetrain.Callback"),
    }
    assert_refused((ConfigError, StrategyError), table)
