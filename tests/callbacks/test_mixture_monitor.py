"""The loss, the epochs and the tokens of each source are those of its samples alone, on all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from drivetrain import LambdaCallback, StepOutput, TaskModule
from drivetrain.callbacks import MixtureMonitor
from drivetrain.core.errors import ConfigError
from drivetrain.data import mixture
from drivetrain.strategies.ddp import DDP


class Values(Dataset[Any]):
    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"value": torch.tensor(float(self.first + index)), "tokens": 1 + index % 3}


class Stream(IterableDataset[Any]):
    def __init__(self, *of: int) -> None:
        self.data = Values(*of)

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        outputs = batch["value"] * batch["tokens"] * (1 + 0 * self.weight)
        return StepOutput(outputs.sum() / batch["tokens"].sum(), outputs)

    def loss_weight(self, batch: Any) -> Any:
        return batch["tokens"].sum()


def by_token(outputs: Any, batch: Any) -> Any:
    return outputs, batch["tokens"]


def by_sample(outputs: Any, batch: Any) -> Any:
    return outputs


def fit(losses: Any = by_token, stop: int | None = None, kind: Any = Values, **options: Any) -> Any:
    """The values at each log point by step, and the samples (source, value, tokens) of each step."""
    rows: dict[int, Any] = {}
    steps: list[Any] = []
    sources = {"web": kind(0, 30), "code": kind(100, 9)}

    def note(run: Any) -> None:
        columns = [
            zip(*(each.batch[name].tolist() for name in ("source", "value", "tokens")), strict=True)
            for each in run.window.micro_batches
            if not each.is_placeholder
        ]
        steps.append([sample for each in columns for sample in each])
        if run.progress.steps == stop:
            run.stop("for the test")

    noting = LambdaCallback(
        on_step_end=note, on_log=lambda run: rows.update({run.progress.steps: run.logged})
    )
    quiet(
        callbacks=[MixtureMonitor(sources, losses), noting],
        **{"max_epochs": 2, "batch_size": 2, "gradient_accumulation_steps": 2, "log_every": "2 steps"}
        | options,
    ).fit(Task(), mixture(sources, {"web": 9, "code": 1}), resume="auto" if "run_dir" in options else None)
    return rows, steps


def expected(steps: list[Any], rows: Any, by_token: bool = True) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    last = 0
    for step in sorted(rows):
        values = found[step] = {}
        for source, (name, length) in enumerate((("web", 30), ("code", 9))):
            own, new = (
                [each for samples in part for each in samples if each[0] == source]
                for part in (steps[:step], steps[last:step])
            )
            values |= {f"samples/{name}": len(own), f"epoch/{name}": len(own) / length}
            if by_token:
                values[f"tokens/{name}"] = sum(tokens for *_, tokens in own)
            if new:
                weights = [each[2] if by_token else 1 for each in new]
                total = sum(value * tokens for _, value, tokens in new)
                values[f"loss/{name}"] = total / sum(weights)
        last = step
    return found


def of_sources(row: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("train/"): each for name, each in row.items() if name.endswith(("web", "code"))}


def check(rows: Any, steps: Any, **options: Any) -> None:
    assert len(rows) > 3
    for step, values in expected(steps, rows, **options).items():
        assert of_sources(rows[step]) == pytest.approx(values), step


def test_values_are_those_of_each_source_alone_and_add_up_to_the_whole() -> None:
    rows, steps = fit()
    check(rows, steps)
    check(*fit(by_sample), by_token=False)
    # a stream has no length here, and its rank numbers do not matter
    assert {name for row in fit(None, kind=Stream)[0].values() for name in of_sources(row)} == {
        "samples/web",
        "samples/code",
    }
    before = {"web": 0, "code": 0}
    for row in rows.values():
        tokens = {name: row[f"train/tokens/{name}"] - before[name] for name in before}
        parts = sum(row.get(f"train/loss/{name}", 0) * tokens[name] for name in tokens)
        assert parts / sum(tokens.values()) == pytest.approx(row["train/loss"])
        before = {name: row[f"train/tokens/{name}"] for name in before}


def test_ranks_and_a_resume_change_nothing(tmp_path: Path) -> None:
    ranks = {"strategy": DDP(world_size=2), "devices": 2}
    (rows, first), (others, second) = on_two_ranks(lambda: fit(**ranks))
    assert rows == others
    check(rows, [one + other for one, other in zip(first, second, strict=True)])
    whole = fit()[0]
    for stop in (1, 4):
        options = {"checkpoint": True, "run_dir": tmp_path / str(stop)}
        parts = fit(stop=stop, **options)[0] | fit(**options)[0]
        assert {step: of_sources(parts[step]) for step in whole} == {
            step: of_sources(row) for step, row in whole.items()
        }, stop


def test_what_cannot_be_attributed_is_refused() -> None:
    one, two = {"web": Values(0, 8)}, {"web": Values(0, 8), "code": Values(0, 8)}
    data = mixture(two, {"web": 1, "code": 1})

    class Bare(Task):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch).loss

    for task, sources, given, losses, words in (
        (Task, ["web"], data, None, "takes the sources by name"),
        (Task, two, one["web"], None, "with an entry 'source'"),
        (Task, one, data, None, r"has the sources \['web'\]"),
        (Task, dict(reversed(two.items())), data, None, r"mixture \['web', 'code'\], in this order"),
        (Task, two, data, "by_sample", r"takes a function \(outputs, batch\)"),
        (Task, two, data, lambda outputs, batch: None, r"returned a shape None, not \[4\]"),
        (Bare, two, data, by_sample, "StepOutput"),
        (Task, two, data, lambda outputs, batch: outputs.mean(), r"returned a shape \[\], not \[4\]"),
    ):

        def go(task: Any = task, sources: Any = sources, given: Any = given, losses: Any = losses) -> None:
            monitor = MixtureMonitor(sources, losses)
            quiet(max_steps=1, batch_size=4, callbacks=[monitor]).fit(task(), given)

        with pytest.raises(ConfigError, match=words):
            go()
