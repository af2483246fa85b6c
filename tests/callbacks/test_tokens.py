"""Fits that are measured in tokens: killed, resumed, and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import PADDING, NextToken, quiet
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from drivetrain import LambdaCallback, OptimizerConfig, WeightAverage
from drivetrain.data import by_tokens
from drivetrain.task.optim.schedules import warmup_stable_decay

LENGTHS = torch.randint(2, 20, (61,), generator=torch.Generator().manual_seed(4)).tolist()
TEXTS = [{"tokens": torch.arange(number, number + each) % 11} for number, each in enumerate(LENGTHS)]


def pad(rows: list[Any]) -> dict[str, Any]:
    return {"tokens": pad_sequence([each["tokens"] for each in rows], True, PADDING)}


def trained(folder: Path, optimizer: Any = None, **options: Any) -> tuple[list[float], list[Any]]:
    """Return the weights, and the texts of each step on this rank."""
    steps: list[Any] = []

    def note(run: Any) -> None:
        parts = [each.batch["tokens"] for each in run.window.micro_batches if not each.is_placeholder]
        steps.append([row.tolist() for part in parts for row in part])

    task = NextToken(optimizer or OptimizerConfig("sgd", lr=0.5))
    loader: Any = DataLoader(
        TEXTS,  # type: ignore[arg-type]
        batch_sampler=by_tokens(TEXTS, 40, lengths="tokens"),
        collate_fn=pad,
    )
    trainer = {"max_epochs": 2, "checkpoint": True, "run_dir": folder, **options}
    quiet(callbacks=[LambdaCallback(on_step_end=note)], **trainer).fit(task, loader, resume="auto")
    return task.head.weight.flatten().tolist(), steps


TWO: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def test_batches_by_tokens_are_the_same_when_resumed_and_on_two_ranks(tmp_path: Path) -> None:
    weights, steps = trained(tmp_path / "whole", gradient_accumulation_steps=2)
    for name in ("one", "two"):
        trained(tmp_path / name, gradient_accumulation_steps=2, max_steps=3)
    assert trained(tmp_path / "one", gradient_accumulation_steps=2) == (weights, steps[3:])
    (found, first), (_, second) = on_two_ranks(lambda: trained(tmp_path / "two", **TWO))
    assert [a + b for a, b in zip(first, second, strict=True)] == steps[3:]
    assert found == pytest.approx(weights, abs=1e-6)


def counted(folder: Path, *, stop: int | None = None, batch_size: int = 4, **options: Any) -> list[Any]:
    """Train to 900 tokens; return the weights, the rate of each step, and the tokens after each step and at
    each validation.
    """
    rates, after, validated = [], [], []

    def end_step(run: Any) -> None:
        after.append(run.progress.tokens)
        if run.progress.steps == stop:
            run.stop("enough")

    seen = LambdaCallback(
        on_step_start=lambda run: rates.append(run.learning_rates()["lr"]),
        on_step_end=end_step,
        on_evaluation_end=lambda run: validated.append(run.progress.tokens),
    )
    config = {"schedule": "warmup_stable_decay", **options.pop("config", {})}
    task = NextToken(OptimizerConfig("sgd", lr=0.5, **config))
    loader: Any = DataLoader(TEXTS, batch_size=batch_size, collate_fn=pad, shuffle=True)  # type: ignore[arg-type]
    average = WeightAverage("swa", every="200 tokens", start="0.4")
    trainer = quiet(
        max_tokens="0.9K tokens",
        checkpoint=True,
        run_dir=folder,
        callbacks=[seen, average],
        **{**VALIDATE, **options},
    )
    result = trainer.fit(task, loader, loader, resume="auto")
    assert result.stop_reason == ("enough" if stop else "max_tokens=900 reached")
    assert average.averaged == (1 if stop else 3), "after 400, 600 and 800 tokens"
    return [task.head.weight.flatten().tolist(), rates, after, validated]


VALIDATE: dict[str, Any] = {"validate_every": "100 tokens", "validate_from": "0.25"}
PARTS: dict[str, Any] = {"warmup_ratio": 0.2, "schedule_options": {"decay": "0.3"}}
TOKENS: dict[str, Any] = {"warmup_steps": "0.18K tokens", "schedule_options": {"decay": "270 tokens"}}


@pytest.mark.parametrize("config", [PARTS, TOKENS])
def test_a_fit_follows_its_tokens_also_resumed_and_on_two_ranks(config: Any, tmp_path: Path) -> None:
    whole = weights, rates, after, validated = counted(tmp_path / "whole", config=config)
    assert after[-2] < 900 <= after[-1]
    before = [0, *after[:-1]]
    assert validated == [b for a, b in zip(before, after, strict=True) if a // 100 < b // 100 and b >= 225]
    factor = warmup_stable_decay(180, 900, decay_ratio=0.3)
    assert rates == [0.5 * factor(each) for each in before]
    first, rest = (
        counted(tmp_path / "parts", stop=15, config=config),
        counted(tmp_path / "parts", config=config),
    )
    assert [rest[0], *(a + b for a, b in zip(first[1:], rest[1:], strict=True))] == whole
    one, other = on_two_ranks(lambda: counted(tmp_path / "two", batch_size=2, config=config, **TWO))
    assert one == other == [pytest.approx(weights, abs=1e-6), *whole[1:]]
