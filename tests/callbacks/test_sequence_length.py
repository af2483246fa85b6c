"""The length of training sequences by schedule: what is cut, how it is counted, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import PADDING, VOCABULARY, NextToken, quiet, ragged
from torch import Tensor
from torch.nn import functional as F

from drivetrain import (
    CheckpointConfig,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
    SequenceLength,
    TaskModule,
    ramp,
)
from drivetrain.testing import run_distributed

LENGTHS = {0: 3, 2: 5, 4: 9}


class Sequences:
    """A dataset of the ragged sequences."""

    def __init__(self, length: int = 9) -> None:
        self.samples = ragged(22, length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


def fitted(*callbacks: Any, resume: str | None = None, **options: Any) -> tuple[NextToken, Any, list[Any]]:
    seen: list[Any] = []

    def see(run: Any) -> None:
        seen.append([tuple(each.batch["tokens"].shape) for each in run.window.micro_batches])

    task = NextToken(OptimizerConfig("sgd", lr=0.5))
    watch = LambdaCallback(on_step_start=see)
    options = {"max_epochs": 1, "batch_size": 4, **options}
    result = quiet(callbacks=[*callbacks, watch], **options).fit(task, Sequences(), resume=resume)
    return task, result, seen


def test_sequences_grow_with_the_updates_whatever_the_micro_batches() -> None:
    _, _, seen = fitted(SequenceLength(LENGTHS))
    assert seen == [[(4, 3)], [(4, 3)], [(4, 5)], [(4, 5)], [(4, 9)], [(2, 9)]]
    _, _, seen = fitted(SequenceLength(LENGTHS), batch_size=2, gradient_accumulation_steps=2)
    assert seen == [[(2, 3)] * 2, [(2, 3)] * 2, [(2, 5)] * 2, [(2, 5)] * 2, [(2, 9)] * 2, [(2, 9)]]
    _, _, seen = fitted(
        SequenceLength({0: 4, "1 epoch": 6}), max_epochs=2, gradient_accumulation_steps={0: 6, 1: 3}
    )
    assert seen == [[*[(4, 4)] * 5, (2, 4)], [(4, 6)] * 3, [(4, 6)] * 2 + [(2, 6)]]
    _, _, seen = fitted(SequenceLength(4))
    assert {shape[1] for window in seen for shape in window} == {4}


def test_tokens_and_the_weights_of_losses_count_what_is_left() -> None:
    whole = [*fitted(SequenceLength(LENGTHS))]
    parts = [*fitted(SequenceLength(LENGTHS), batch_size=1, gradient_accumulation_steps=4)]
    torch.testing.assert_close(whole[0].state_dict(), parts[0].state_dict(), rtol=1e-5, atol=1e-6)
    assert whole[1].progress.tokens == parts[1].progress.tokens

    by_hand, samples = NextToken(None), Sequences().samples
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    order: list[int] = []
    see = LambdaCallback(
        on_step_start=lambda run: order.extend(run.window.micro_batches[0].batch["number"].tolist())
    )

    class Numbered(Sequences):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**super().__getitem__(index), "number": torch.tensor(index)}

    task = NextToken(OptimizerConfig("sgd", lr=0.5))
    result = quiet(max_epochs=1, batch_size=4, callbacks=[SequenceLength(LENGTHS), see]).fit(task, Numbered())
    tokens = 0
    for update, length in enumerate((3, 3, 5, 5, 9, 9)):
        chosen = torch.stack([samples[number]["tokens"] for number in order[4 * update : 4 * update + 4]])[
            :, :length
        ]
        tokens += int((chosen[:, 1:] != PADDING).sum())
        optimizer.zero_grad()
        by_hand.loss(by_hand(chosen), {"tokens": chosen}).backward()
        optimizer.step()
    assert result.progress.tokens == tokens
    torch.testing.assert_close(task.state_dict(), by_hand.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_next_to_each_change_is_bitwise_the_uninterrupted_one(
    workers: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "num_workers": workers}
    policy = CheckpointConfig(every="1 step", keep_last=None, best=0, by=None)
    expected, _, whole = fitted(SequenceLength(LENGTHS), run_dir=tmp_path, checkpoint=policy, **options)
    for done in (1, 2, 3) if not workers else (2,):
        path = tmp_path / "checkpoints" / f"update-{done:08d}"
        task, _, seen = fitted(SequenceLength(LENGTHS), resume=str(path), **options)
        assert seen == whole[done:]
        assert weights(task) == weights(expected)


def test_evaluations_are_not_cut() -> None:
    shapes: set[int] = set()

    class Watched(NextToken):
        def validation_step(self, batch: Any) -> Any:
            shapes.add(batch["tokens"].shape[1])
            return self.loss(self(batch["tokens"]), batch)

    task = Watched(OptimizerConfig("sgd", lr=0.1))
    quiet(max_epochs=1, batch_size=4, callbacks=[SequenceLength(3)]).fit(task, Sequences(), Sequences())
    assert shapes == {9}


class Attention(TaskModule):
    """Takes all that a batch of a language model may have, and keeps the shapes."""

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
    return {
        "input_ids": torch.zeros(2, length, dtype=torch.long),
        "attention_mask": torch.ones(2, length, dtype=torch.long),
        "labels": torch.zeros(2, length, dtype=torch.long),
        "position_ids": torch.arange(length).unsqueeze(0),
        "mask": torch.ones(2, 1, length, length, dtype=torch.bool),
        "embeddings": torch.zeros(2, length, 3),
        "weight": torch.ones(2),
    }


def fit(data: Any, *callbacks: Any) -> dict[Any, tuple[int, ...]]:
    task = Attention()
    quiet(max_epochs=1, callbacks=callbacks).fit(task, [data])
    return task.shapes


def test_all_that_goes_with_the_tokens_is_found_and_cut() -> None:
    assert fit(batch(), SequenceLength(5)) == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
        "labels": (2, 5),
        "position_ids": (1, 5),
        "mask": (2, 1, 5, 5),
        "embeddings": (2, 5, 3),
        "weight": (2,),
    }


def test_named_fields_alone_are_cut() -> None:
    found = fit(batch(), SequenceLength(5, fields={"input_ids": 1, "mask": (2, 3)}))
    assert (found["input_ids"], found["mask"], found["labels"]) == ((2, 5), (2, 1, 5, 5), (2, 8))
    pair = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long))
    assert fit(pair, SequenceLength(5, fields=[0])) == {0: (2, 5), 1: (2, 6)}
    assert fit(pair, SequenceLength(5, fields=(0, 1))) == {0: (2, 5), 1: (2, 5)}


@pytest.mark.parametrize(
    ("data", "options", "told"),
    [
        (batch(5), {}, "nothing to cut in the first batch: its sequences have 5 tokens"),
        ({"image": torch.zeros(2, 3, 8, 8)}, {}, "found no tensor of tokens in the batch"),
        (
            {**batch(), "labels": torch.zeros(2, 6, dtype=torch.long)},
            {},
            "cannot tell whether to cut 'labels'",
        ),
        ({**batch(), "heads": torch.zeros(2, 3, 8)}, {}, "cannot tell whether to cut 'heads'"),
        ({**batch(), "cu_seqlens": torch.zeros(3)}, {}, "cannot tell whether to cut 'cu_seqlens'"),
        (batch(), {"fields": "label"}, "has 'label', which is no tensor .* Did you mean 'labels'"),
        (batch(), {"fields": {"labels": 2}}, "cuts dimension 2 of 'labels'"),
        (
            {**batch(), "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]] * 2)},
            {},
            "padding at their beginning",
        ),
    ],
)
def test_a_first_batch_that_cannot_be_cut_is_an_error(data: Any, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fit(data, SequenceLength(5, **options))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"lengths": 0}, "SequenceLength must be a whole number, at least 1"),
        ({"lengths": {0: 8, "1 hour": 16}}, "steps, whole epochs, or samples"),
        ({"lengths": 8, "fields": {"labels": 0}}, "Dimension 0 counts samples"),
        ({"lengths": 8, "fields": ()}, "is empty"),
        ({"lengths": 8, "fields": 3.5}, "takes names of the batch's tensors, .* not 3.5"),
        ({"lengths": 8, "fields": [["labels"]]}, r"not \[\['labels'\]\]"),
    ],
)
def test_arguments_that_are_not_allowed_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SequenceLength(**arguments)


def test_two_of_them_and_skipped_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="two SequenceLengths would cut the same batches"):
        fit(batch(), SequenceLength(5), SequenceLength(4))
    with pytest.raises(ConfigError, match="on_bad_batch='skip' leaves some out"):
        quiet(max_epochs=1, on_bad_batch="skip", callbacks=[SequenceLength({0: 4, "9 samples": 8})])


def _on_a_rank(strategy: str) -> Any:
    task, result, seen = fitted(SequenceLength(LENGTHS), batch_size=2, strategy=strategy, devices=2)
    return [each.detach().flatten().tolist() for each in task.parameters()], seen, result.progress.tokens


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_two_ranks_cut_as_one_process_does(strategy: str) -> None:
    first, second = run_distributed(_on_a_rank, strategy, timeout=180)
    assert first[0] == second[0]
    assert first[1][:5] == second[1][:5] == [[(2, 3)], [(2, 3)], [(2, 5)], [(2, 5)], [(2, 9)]]
    alone, result, _ = fitted(SequenceLength(LENGTHS))
    assert first[2] == result.progress.tokens
    for found, parameter in zip(first[0], alone.parameters(), strict=True):
        assert found == pytest.approx(parameter.detach().flatten().tolist(), abs=1e-6)


def test_a_ramp_of_lengths_by_samples_is_used_as_it_is() -> None:
    _, _, seen = fitted(SequenceLength(ramp(2, 8, over="18 samples", by=2)))
    assert [window[0][1] for window in seen] == [2, 2, 4, 6, 6, 8]
