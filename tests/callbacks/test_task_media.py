"""Media that a task returns, from `StepOutput` to the files of loggers, and callbacks that a task gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import ConfigError, LambdaCallback, StepOutput, StrategyError, WeightAverage
from drivetrain.loggers import Histogram, Text


def numbered(first: int) -> list[Any]:
    return [(torch.full((2, 4), n / 1000), torch.zeros(2, 1)) for n in range(first, first + 16)]


class Showing(Regression):  # shows the number of a batch
    drawn: list[str] = []  # noqa: RUF012

    def shown(self, batch: Any) -> StepOutput:
        def draw() -> Text:
            self.drawn.append(f"{1000 * float(batch[0][0, 0]):.0f}")
            return Text(self.drawn[-1])

        loss = self.loss(self(batch[0]), batch)
        return StepOutput(loss, media={"number": draw, "counts": Histogram(batch[0])})

    training_step = validation_step = shown


def fit_showing(directory: Path, loggers: Any, **options: Any) -> tuple[list[str], dict[str, list[Any]]]:
    Showing.drawn.clear()
    options |= {"log_every": 2, "max_steps": 4, "validate_every": 4, "sanity_validation": None}
    data = numbered(0), {"a": numbered(100), "b": numbered(200)}
    quiet(**options, loggers=loggers, run_dir=directory).fit(Showing(), *data)
    reader = EventAccumulator(str(directory))
    reader.Reload()
    names = [each.replace("counts", "number") for each in reader.Tags()["histograms"]]
    found = {name: reader.Tensors(name) for name in names}
    return Showing.drawn, {
        n: [(each.step, each.tensor_proto.string_val[0]) for each in found[n]] for n in found
    }


VALIDATED = {"validation/a/number": [(4, b"100")], "validation/b/number": [(4, b"200")]}


def test_log_points_show_the_last_micro_batch_and_validations_the_first_batch(tmp_path: Path) -> None:
    with warned("takes no values of the kind") as said:
        made, found = fit_showing(tmp_path, ("tensorboard", "csv", "jsonl"), gradient_accumulation_steps=2)
    assert found == {"train/number": [(2, b"3"), (4, b"7")], **VALIDATED}
    assert made == ["3", "7", "100", "200"], "nothing is drawn that is not logged"
    assert len(said) == 3, "CSV's logger takes neither kind, and that of JSON lines no texts"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_of_two_ranks_that_shard_a_task_the_first_shows_its_values(tmp_path: Path) -> None:
    options = {"strategy": "fsdp", "devices": 2}
    (made, found), (other, _) = on_two_ranks(lambda: fit_showing(tmp_path, "tensorboard", **options))
    assert found == {"train/number": [(2, b"2"), (4, b"6")], **VALIDATED}
    assert (len(made), other) == (4, [])


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
        "one, no list": (fit(average[0]), "configure_callbacks('train') is a sequence"),
        "none": (fit(None, "validate"), "configure_callbacks('validation') is a sequence"),
        "a class": (fit([WeightAverage]), "configure_callbacks('train') has the class", "WeightAverage(...)"),
        "another object": (fit([SimpleNamespace()]), "must have the base drivetrain.Callback"),
    }
    assert_refused((ConfigError, StrategyError), table)
