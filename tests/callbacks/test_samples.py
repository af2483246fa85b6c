"""Samples: what the model makes of prompts, under every strategy and without a trace in the training."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError, FSDPConfig
from drivetrain.callbacks import Samples
from drivetrain.distributed.processes import rank
from drivetrain.loggers import Image, Table

PROMPTS = [torch.ones(4), torch.zeros(4)]


class Kept:  # a logger that keeps what it gets
    takes = ("table", "image")

    def __init__(self) -> None:
        self.media: list[tuple[int, str, Any]] = []

    def log_metrics(self, metrics: Any, step: int) -> None: ...
    def log_config(self, config: Any) -> None: ...
    def close(self) -> None: ...

    def log_media(self, values: Any, step: int) -> None:
        rows = lambda each: each.rows if isinstance(each, Table) else None  # noqa: E731
        self.media += [(step, name, rows(each)) for name, each in values.items()]


def words(task: Any, prompts: Any, calls: list[Any]) -> list[str]:
    calls.append(task)
    assert not task.training
    assert rank() == 0
    noise = torch.rand(1) * 0  # drawn from the run's generator
    return [f"{float(task(each[None]) + noise):.3f}" for each in prompts]


def sampled(strategy: Any = "cpu", size: int = 1, **options: Any) -> tuple[Any, list[float], int]:
    task, kept, calls = Regression(dropout=0.2), Kept(), list[Any]()
    made = lambda it, _: words(it, PROMPTS, calls)  # noqa: E731
    callbacks = [Samples(["one", "zero"], generate=made, **options)] if options else []
    trainer = quiet(
        max_epochs=2,
        log_every=1,
        strategy=strategy,
        devices=size,
        callbacks=callbacks,
        loggers=kept,
        sanity_validation=1,
    )
    trainer.fit(task, pairs(8, 2 // size), pairs(4))
    return kept.media, task.line.weight.detach().flatten().tolist(), len(calls)


@pytest.mark.parametrize(
    ("every", "steps"),
    [("3 steps", [3, 6]), ([0, 2, 5], [0, 2, 5]), ("1 epoch", [4, 8]), (None, [4, 8])],
    ids=str,
)
def test_samples_are_logged_at_their_points_and_change_no_training(every: Any, steps: list[int]) -> None:
    media, weights, calls = sampled(every=every)
    assert calls == len(steps)
    assert [(step, name, [row[:2] for row in rows]) for step, name, rows in media] == [
        (max(step, 1), "samples", [[step, "one"], [step, "zero"]])
        for step in steps  # at a log point
    ]
    assert media[0][2] != media[1][2]
    assert sampled()[1] == weights


def test_samples_of_shards_are_those_of_one_process() -> None:
    expected = sampled(every="4 steps", name="of")
    (media, _, _), _ = on_two_ranks(lambda: sampled(FSDPConfig(), 2, every="4 steps", name="of"))
    assert [each[:2] for each in media] == [each[:2] for each in expected[0]] == [(4, "of"), (8, "of")]


def test_refusals_of_samples() -> None:
    image = lambda task, prompts: [Image(torch.zeros(1, 2, 2))] * len(prompts)  # noqa: E731
    fit = lambda *made: quiet(max_epochs=1, callbacks=list(made)).fit(Regression(), pairs(4))  # noqa: E731
    of = lambda generate: lambda: fit(Samples(["a", "b"], every=1, generate=generate))  # noqa: E731
    cases: dict[str, tuple[Any, ...]] = {
        "no prompts": (lambda: Samples([], generate=image), "takes a list"),
        "one text": (lambda: Samples("Once", generate=image), "takes a list"),
        "no function": (lambda: Samples(["a"], generate="text"), "a function of the task"),
        "a time": (lambda: Samples(["a"], every="1 minute", generate=image), "cannot be a time"),
        "one name": (lambda: fit(*(Samples(["a"], every=1, generate=image) for _ in range(2))), "'samples'"),
        "no validation": (lambda: fit(Samples(["a"], generate=image)), "no validation data"),
        "too few": (of(lambda task, prompts: ["a"]), "1 samples for 2 prompts"),
        "nothing": (of(lambda task, prompts: None), "0 samples for 2 prompts"),
        "another type": (of(lambda task, prompts: [1.0, "a"]), "'float'", "Image(pixels)"),
    }
    assert_refused(ConfigError, cases)
    kept = Kept()
    made = Samples(["a", "b"], every="2 steps", generate=image, name="of")
    quiet(max_steps=2, callbacks=[made], loggers=kept).fit(Regression(), pairs(4))
    assert [each[:2] for each in kept.media] == [(2, "of/0"), (2, "of/1")]
