"""A task's own callbacks, and values that it leaves out."""

from typing import Any

from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback


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
