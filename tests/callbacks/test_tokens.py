"""Fits that are measured in tokens: killed, resumed, and on two ranks."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import PADDING, NextToken, quiet
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import LambdaCallback, OptimizerConfig, WeightAverage
from drivetrain.callbacks import SequenceLength
from drivetrain.data import by_tokens, mixture, packed
from drivetrain.errors import ConfigError
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
    """Train to 900 tokens; return weights, rates, and the tokens after each step and at each validation."""
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


class Stream(IterableDataset[Any]):
    def __init__(self, texts: list[Any]) -> None:
        self.texts, self.at = texts, 0

    def __iter__(self) -> Any:
        while self.at < len(self.texts):
            self.at += 1
            yield self.texts[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def padded(**options: Any) -> DataLoader[Any]:
    return DataLoader(TEXTS, collate_fn=pad, **options)  # type: ignore[arg-type]


def rows(texts: Any = TEXTS) -> Any:
    return packed(texts, 16, tokens="tokens")


def mixed(*texts: Any) -> Any:
    return mixture(dict(zip("ab", map(rows, texts), strict=True)), {"a": 0.6, "b": 0.4})


KINDS: dict[str, Any] = {
    "rows": rows,
    "varlen": lambda: packed(TEXTS, 16, tokens="tokens", boundary="varlen"),
    "a mixture": lambda: mixed(TEXTS, TEXTS[::2]),
    "streams": lambda: mixed(Stream(TEXTS), Stream(TEXTS[::2])),
    "by tokens": lambda: padded(batch_sampler=by_tokens(TEXTS, 32, lengths="tokens")),
    "padded": lambda: padded(batch_size=5, shuffle=True),
}
OWN_BATCHES = ("by tokens", "padded")


def packed_fit(
    folder: Path | None = None, kind: str = "rows", *, stop: int | None = None, **options: Any
) -> list[Any]:
    """Train on rows of 16 tokens, or other data; return the weights, and the samples and tokens of each."""
    shapes: list[Any] = []

    def note(run: Any) -> None:
        shapes.append([tuple(each.batch["tokens"].shape) for each in run.window.micro_batches])

    files: dict[str, Any] = {} if folder is None else {"run_dir": folder, "checkpoint": True}
    callbacks = [LambdaCallback(on_step_end=note), *options.pop("callbacks", ())]
    task, skip = NextToken(OptimizerConfig("sgd", lr=0.5)), options.pop("skip", None)
    size = {} if kind in OWN_BATCHES else {"batch_size": 2}
    trainer = quiet(**{**size, "max_epochs": 2, **files, **options}, callbacks=callbacks, max_steps=stop)
    trainer.fit(task, KINDS[kind](), resume="auto" if folder else None, skip=skip)
    return [task.head.weight.flatten().tolist(), shapes]


GLOBAL: dict[str, Any] = {"gradient_accumulation_steps": "96 tokens"}


def test_a_step_has_as_many_tokens_on_any_ranks_and_when_resumed_on_others(tmp_path: Path) -> None:
    weights, shapes = packed_fit(**GLOBAL)
    assert [weights, shapes] == packed_fit(gradient_accumulation_steps=3)
    assert shapes[0] == [(2, 16)] * 3
    packed_fit(tmp_path, stop=4, **GLOBAL)
    one, _ = on_two_ranks(lambda: packed_fit(tmp_path, batch_size=1, **GLOBAL, **TWO))
    assert one == [pytest.approx(weights, abs=1e-6), [[(1, 16)] * len(each) for each in shapes[4:]]]


def rest_on_two_ranks(folder: Path, batches: Any, given: Any) -> list[Any]:
    """Return the weights after the rest of each fit, by kind of data; batches of rows are half as large."""
    kinds = {each.name: {"gradient_accumulation_steps": given, "batch_size": 1} for each in folder.iterdir()}
    kinds |= {kind: {"gradient_accumulation_steps": batches} for kind in kinds if kind in OWN_BATCHES}
    one, other = on_two_ranks(
        lambda: {kind: packed_fit(folder / kind, kind, **each, **TWO)[0] for kind, each in kinds.items()}
    )
    assert one == other
    return one


def test_a_step_has_as_many_tokens_of_streams_mixtures_and_batches_by_tokens(tmp_path: Path) -> None:
    expected, given = {}, "128 tokens"
    for kind in ("a mixture", "streams", "by tokens"):
        weights, shapes = packed_fit(kind=kind, gradient_accumulation_steps=given)
        assert [len(each) for each in shapes[:3]] == [4] * 3, kind
        packed_fit(tmp_path / kind, kind, stop=2, gradient_accumulation_steps=given)
        expected[kind] = pytest.approx(weights, abs=1e-6)
    assert rest_on_two_ranks(tmp_path, given, given) == expected


def test_a_skip_of_tokens_is_that_of_its_steps_on_any_ranks(tmp_path: Path) -> None:
    kinds, skips = ("rows", "streams"), ("1 step", "96 tokens")
    for kind, skip in itertools.product(kinds, skips):
        packed_fit(tmp_path / kind / skip, kind, stop=2, **GLOBAL)

    def rest(kind: str, skip: str) -> Any:
        return packed_fit(tmp_path / kind / skip, kind, skip=skip, batch_size=1, **GLOBAL, **TWO)

    one, _ = on_two_ranks(lambda: [[rest(kind, skip) for skip in skips] for kind in kinds])
    for kind, (steps, tokens) in zip(kinds, one, strict=True):
        assert steps == tokens, kind
        assert len(tokens[1]) == len(packed_fit(kind=kind, **GLOBAL)[1]) - 3, kind


def test_points_in_tokens_of_other_data_follow_the_tokens_read(tmp_path: Path) -> None:
    expected, given = {}, {0: 2, "100 tokens": 4}
    for kind in ("streams", "by tokens", "padded"):
        before: list[tuple[int, int]] = []
        see = LambdaCallback(
            on_step_start=lambda run, before=before: before.append((run.progress.tokens, run.progress.epoch))
        )
        weights, shapes = packed_fit(kind=kind, gradient_accumulation_steps=given, callbacks=[see])
        for made, (tokens, epoch), following in zip(shapes, before, before[1:], strict=False):
            assert len(made) == (4 if tokens >= 100 else 2) or following[1] > epoch, kind
        packed_fit(tmp_path / kind, kind, stop=1, gradient_accumulation_steps=given)
        expected[kind] = pytest.approx(weights, abs=1e-6)
    assert rest_on_two_ranks(tmp_path, {0: 1, "100 tokens": 2}, given) == expected


def test_points_in_tokens_are_those_of_the_samples_before() -> None:
    numbers: dict[str, Any] = {"batch_size": {0: 1, "100 tokens": 3}}
    assert packed_fit(**numbers) == packed_fit(batch_size={0: 1, "7 samples": 3})
    _, shapes = packed_fit(gradient_accumulation_steps={0: 1, "0.1K tokens": 2})
    assert [len(each) for each in shapes[:6]] == [1] * 4 + [2] * 2
    _, shapes = packed_fit(
        callbacks=[SequenceLength({0: 4, "40 tokens": 8, "120 tokens": 16}, fields=FIELDS)]
    )
    assert [each for ((_, each),) in shapes[:12]] == [4] * 5 + [8] * 5 + [16] * 2


FIELDS = ("tokens", "labels", "position_ids")
REFUSED: dict[str, dict[str, Any]] = {
    r"one of each process is 32 tokens \(32 x 1\). Give '128 tokens'": {
        "gradient_accumulation_steps": "120 tokens"
    },
    "takes a number of tokens": {"gradient_accumulation_steps": "2 epochs"},
    r"batch_size=.* needs steps that are known beforehand": {
        "batch_size": {0: 1, 9: 2},
        "gradient_accumulation_steps": {0: 1, "9 tokens": 2},
        "kind": "varlen",
    },
    "batch_size=.* changes after tokens": {"batch_size": {0: 1, "9 tokens": 2}, "kind": "varlen"},
    "SequenceLength=.* changes after tokens": {
        "kind": "streams",
        "callbacks": [SequenceLength({0: 4, "9 tokens": 8}, fields=FIELDS)],
    },
    "changes the tokens of a sample": {**GLOBAL, "callbacks": [SequenceLength(8, fields=FIELDS)]},
}


def test_tokens_that_cannot_be_counted_beforehand_are_refused() -> None:
    for words, options in REFUSED.items():
        with pytest.raises(ConfigError, match=words):
            packed_fit(**options)
    with pytest.raises(ConfigError, match=r"rows of drivetrain\.data\.packed"):
        quiet(max_steps=1, **GLOBAL).fit(
            NextToken(OptimizerConfig("sgd")),
            DataLoader(TEXTS, batch_size=2, collate_fn=pad),  # type: ignore[arg-type]
        )
