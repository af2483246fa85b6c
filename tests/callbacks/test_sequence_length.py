"""The length of training sequences by schedule: what is cut, how it is counted, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import PADDING, VOCABULARY, NextToken, quiet, ragged
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.callbacks import SequenceLength
from drivetrain.core.errors import ConfigError
from drivetrain.core.int_schedule import ramp

LENGTHS = {0: 3, 2: 5, 4: 9}


def sequences(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(ragged(22), batch_size=batch_size, **options)  # type: ignore[arg-type]


def fitted(*callbacks: Any, resume: str | None = None, data: Any = None, **options: Any) -> Any:
    seen: list[Any] = []

    def see(run: Any) -> None:
        seen.append([tuple(each.batch["tokens"].shape) for each in run.window.micro_batches])

    task = NextToken(OptimizerConfig("sgd", lr=0.5))
    trainer = quiet(**{"max_epochs": 1, **options}, callbacks=[*callbacks, LambdaCallback(on_step_start=see)])
    return task, trainer.fit(task, sequences() if data is None else data, resume=resume), seen


def test_sequences_grow_with_the_steps_whatever_the_micro_batches() -> None:
    _, _, seen = fitted(SequenceLength(LENGTHS, "tokens"))
    assert seen == [[(4, 3)], [(4, 3)], [(4, 5)], [(4, 5)], [(4, 9)], [(2, 9)]]
    _, _, seen = fitted(SequenceLength(LENGTHS, "tokens"), data=sequences(2), gradient_accumulation_steps=2)
    assert seen == [[(2, 3)] * 2, [(2, 3)] * 2, [(2, 5)] * 2, [(2, 5)] * 2, [(2, 9)] * 2, [(2, 9)]]
    accumulate: Any = {"max_epochs": 2, "gradient_accumulation_steps": {0: 6, 1: 3}}
    _, _, seen = fitted(SequenceLength({0: 4, "1 epoch": 6}, "tokens"), **accumulate)
    assert seen == [[*[(4, 4)] * 5, (2, 4)], [(4, 6)] * 3, [(4, 6)] * 2 + [(2, 6)]]
    _, _, seen = fitted(SequenceLength(4, "tokens"))
    assert {shape[1] for window in seen for shape in window} == {4}
    _, _, seen = fitted(SequenceLength(ramp(2, 8, over="18 samples", by=2), "tokens"))
    assert [window[0][1] for window in seen] == [2, 2, 4, 6, 6, 8]


def test_tokens_and_the_weights_of_losses_count_what_is_left() -> None:
    task, result, _ = fitted(SequenceLength(LENGTHS, "tokens"))
    parts, others, _ = fitted(
        SequenceLength(LENGTHS, "tokens"), data=sequences(1), gradient_accumulation_steps=4
    )
    torch.testing.assert_close(task.state_dict(), parts.state_dict(), rtol=1e-5, atol=1e-6)
    by_hand, tokens = NextToken(None), 0
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for length, batch in zip((3, 3, 5, 5, 9, 9), sequences(), strict=True):
        chosen = batch["tokens"][:, :length]
        tokens += int((chosen[:, 1:] != PADDING).sum())
        optimizer.zero_grad()
        by_hand.loss(by_hand(chosen), {"tokens": chosen}).backward()
        optimizer.step()
    assert result.progress.tokens == others.progress.tokens == tokens
    torch.testing.assert_close(task.state_dict(), by_hand.state_dict(), rtol=1e-5, atol=1e-6)


def test_resume_next_to_each_change_is_bitwise(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "data": sequences(shuffle=True)}
    policy = CheckpointConfig(every="1 step", keep_last=None, best=0, by=None)
    expected, _, whole = fitted(
        SequenceLength(LENGTHS, "tokens"), run_dir=tmp_path, checkpoint=policy, **options
    )
    for done in (1, 2, 3):
        path = tmp_path / "checkpoints" / f"step-{done:08d}"
        task, _, seen = fitted(SequenceLength(LENGTHS, "tokens"), resume=str(path), **options)
        assert seen == whole[done:]
        assert weights(task) == weights(expected)


def test_evaluations_are_not_cut() -> None:
    losses = []
    for callbacks in ([SequenceLength(3, "tokens")], []):
        task = NextToken(OptimizerConfig("sgd", lr=1e-9))
        metrics = quiet(max_epochs=1, callbacks=callbacks).fit(task, sequences(), sequences()).metrics
        losses.append(metrics["validation/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Attention(TaskModule):  # keeps the shapes of a batch of a language model
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.shapes: dict[Any, tuple[int, ...]] = {}

    def training_step(self, batch: Any) -> Tensor:
        named = batch.items() if isinstance(batch, dict) else enumerate(batch)
        self.shapes = {name: tuple(each.shape) for name, each in named}
        tokens = batch["input_ids"] if isinstance(batch, dict) else batch[0]
        # As many losses do, `view` insists on contiguous tensors.
        return F.cross_entropy(self.embedding(tokens).view(-1, VOCABULARY), tokens.view(-1))


def batch(length: int = 8) -> dict[str, Tensor]:
    zeros, ones = torch.zeros(2, length, dtype=torch.long), torch.ones(2, length, dtype=torch.long)
    return {
        **dict.fromkeys(("input_ids", "labels"), zeros),
        "attention_mask": ones,
        "position_ids": torch.arange(length).unsqueeze(0),
        "mask": torch.ones(2, 1, length, length, dtype=torch.bool),
        "embeddings": torch.zeros(2, length, 3),
        "weight": torch.ones(2),
    }


def fit(data: Any, *callbacks: Any) -> dict[Any, tuple[int, ...]]:
    task = Attention()
    quiet(max_epochs=1, callbacks=callbacks).fit(task, [data])
    return task.shapes


FIELDS = {**dict.fromkeys(("input_ids", "labels", "attention_mask", "position_ids"), 1), "mask": (2, 3)}


def test_sequence_length_cuts_the_fields_that_are_named() -> None:
    shapes = {"position_ids": (1, 5), "mask": (2, 1, 5, 5), "embeddings": (2, 5, 3), "weight": (2,)}
    expected = {**dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, 5)), **shapes}
    assert fit(batch(), SequenceLength(5, {**FIELDS, "embeddings": 1})) == expected


def test_a_first_batch_that_cannot_be_cut_is_refused() -> None:
    def cut(data: Any, fields: Any = "input_ids") -> Any:
        return lambda: fit(data, SequenceLength(5, fields))

    left = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]] * 2)
    table: dict[str, tuple[Any, ...]] = {
        "short": (cut(batch(5)), "nothing to cut", "5 tokens"),
        "misspelt": (cut(batch(), "label"), "did you mean 'labels'"),
        "a dimension": (cut(batch(), {"labels": 2}), "cuts dimension 2 of 'labels'", "(2, 8)"),
        "padded left": (cut({**batch(), "attention_mask": left}), "padding at their beginning"),
        "two": (
            lambda: fit(batch(), *(SequenceLength(each, "labels") for each in (5, 4))),
            "two SequenceLengths",
        ),
    }
    assert_refused(ConfigError, table)


def on_ranks() -> Any:
    task, result, seen = fitted(
        SequenceLength(LENGTHS, "tokens"), data=sequences(2), strategy="ddp", devices=2
    )
    return [each.detach().flatten().tolist() for each in task.parameters()], seen, result.progress.tokens


def test_two_ranks_cut_as_one_process_does() -> None:
    first, second = on_two_ranks(on_ranks)
    assert first[0] == second[0]
    assert first[1][:5] == second[1][:5] == [[(2, 3)], [(2, 3)], [(2, 5)], [(2, 5)], [(2, 9)]]
    alone, result, _ = fitted(SequenceLength(LENGTHS, "tokens"))
    assert first[2] == result.progress.tokens
    for found, parameter in zip(first[0], alone.parameters(), strict=True):
        assert found == pytest.approx(parameter.detach().flatten().tolist(), abs=1e-6)
