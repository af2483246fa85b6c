"""Batches in parts that fit into memory: the same updates, whatever fails, in training and in evaluation."""

from __future__ import annotations

import logging
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.tasks import Duel, NextToken, Regression, duels, pairs, quiet, ragged
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from drivetrain import (
    Callback,
    ConfigError,
    DataError,
    DDPConfig,
    LambdaCallback,
    OptimizerConfig,
    StepOutput,
    StrategyError,
    Trainer,
)
from drivetrain.testing import run_distributed

ADAMW = OptimizerConfig("adamw", lr=0.05)


class Small(Regression):
    """Lacks memory for more than some samples at once.

    Args:
        fits: How many do.
        options: The task's.
    """

    def __init__(self, fits: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.fits = fits
        self.tried: list[int] = []

    def forward(self, features: Tensor) -> Tensor:
        self.tried.append(len(features))
        if len(features) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(features)


class FailsInBackward(Regression):
    """As `Small`, when the gradients of a part have been added already."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if len(outputs) > 3:
            loss.register_hook(_no_memory)
        return loss


def _no_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


class SmallNextToken(NextToken):
    """As `Small`, on sequences of any length."""

    def forward(self, tokens: Tensor) -> Tensor:
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(tokens)


def rows_of(trainer: Trainer, task: Any, data: Any) -> list[float]:
    return [step.loss for step in trainer.steps(task, data)]


def same(first: nn.Module, second: nn.Module) -> None:
    for (name, one), two in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6, msg=name)


# The same updates.


@pytest.mark.parametrize("kind", [Small, FailsInBackward])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}])
def test_an_update_that_ran_out_of_memory_is_made_in_parts_with_the_same_gradient(
    kind: type[Regression], options: dict[str, Any]
) -> None:
    whole, parts = Regression(), kind()
    losses = rows_of(quiet(max_epochs=2, **options), whole, pairs(22, 8))
    assert rows_of(quiet(max_epochs=2, micro_batch="auto", **options), parts, pairs(22, 8)) == pytest.approx(
        losses, rel=1e-6
    )
    same(whole, parts)


@pytest.mark.parametrize("micro_batch", [1, 3, "auto"])
def test_ragged_token_losses_keep_their_weights(micro_batch: int | str) -> None:
    # The fourth sequence is padding alone: with 1 a part has nothing to learn from, and a loss of 0 / 0.
    results = []
    for task, options in ((NextToken(ADAMW), {}), (SmallNextToken(ADAMW), {"micro_batch": micro_batch})):
        result = quiet(max_epochs=2, **options).fit(task, DataLoader(ragged(), batch_size=8))
        results.append((result.metrics["train/loss"], result.progress))
        results[-1][1].seconds = 0.0
    same(task, _trained(NextToken(ADAMW)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert results[1][1] == results[0][1]  # micro-batches, samples and tokens are those of the data


def _trained(task: NextToken) -> NextToken:
    quiet(max_epochs=2).fit(task, DataLoader(ragged(), batch_size=8))
    return task


class Weighed(Regression):
    """A loss that is a mean over samples with weights of their own, the batch's last column."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        each = (outputs - batch[1]).square().mean(1).float()
        weight = batch[2].float()
        return (each * weight).sum() / weight.sum()

    def loss_weight(self, batch: Any) -> Any:
        return batch[2].sum()


def _weighed(weight: list[float]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(len(weight), 4, generator=generator)
    return [(features, features.sum(1, keepdim=True), torch.tensor(weight))]


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_parts_are_weighed_as_the_data_gave_them(precision: str) -> None:
    # In half precision the sum is infinite; with the 8 bits of bfloat16 it is 1004.
    data = _weighed([20000.0] * 4 + [1005.0, 0, 0, 0] + [4.0, 0, 0, 0])
    seen = []
    for micro_batch in (None, 4):
        task = Weighed()
        trainer = quiet(max_epochs=1, precision=precision, micro_batch=micro_batch)
        for step in trainer.steps(task, data):
            seen.append([weight for _, _, weight in step.rows])
        assert all(bool(each.isfinite().all()) for each in task.parameters())
    assert seen == [[81009.0], [80000.0, 1005.0, 4.0]]


@pytest.mark.parametrize("wrong", [-1.0, float("inf"), float("nan")])
def test_a_part_with_an_impossible_weight_is_refused(wrong: float) -> None:
    class Wrong(Regression):
        def loss_weight(self, batch: Any) -> float:
            return len(batch[0]) if len(batch[0]) == 8 else wrong

    with pytest.raises(DataError, match="for a part of 4 of a batch's 8 samples; a weight is"):
        quiet(max_epochs=1, micro_batch=4).fit(Wrong(), pairs(8, 8))


def test_a_weight_that_is_no_sum_over_samples_is_refused() -> None:
    class Mean(Regression):
        def loss_weight(self, batch: Any) -> float:
            return 1.0

    with pytest.raises(DataError, match="gave 1 for a batch of 8 samples and 2 for its 2 parts together"):
        quiet(max_epochs=1, micro_batch=4).fit(Mean(), pairs(8, 8))


class Drawing(Small):
    """Draws from all generators and counts in a buffer; what an attempt did is seen in the weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.4, **options)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.other = self.other + 1  # another tensor in its place
        noise = random.random()
        return super().forward(features) * (1 + 0.1 * noise) + 0.01 * self.calls


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_a_failed_attempt_leaves_no_trace(precision: str) -> None:
    fixed, found = Drawing(fits=2), Drawing(fits=2)
    for task, micro_batch in ((fixed, 2), (found, "auto")):
        quiet(max_epochs=3, micro_batch=micro_batch, precision=precision).fit(task, pairs(20, 8))
    assert max(found.tried) == 8
    assert weights(found) == weights(fixed)


class Counting:
    """A metric: how many samples it was shown."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, outputs: Tensor, _: Tensor) -> None:
        self.count += len(outputs)

    def compute(self) -> float:
        return self.count

    def reset(self) -> None:
        self.count = 0


class Measured(Small):
    """Fails late in a batch, after metrics of its first parts were there."""

    def training_step(self, batch: Any) -> StepOutput:
        outputs = super(Small, self).forward(batch[0])
        self.tried.append(len(outputs))
        if len(outputs) > 2 and len(self.tried) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return StepOutput(self.loss(outputs, batch), outputs)

    def metrics(self) -> Mapping[str, Any]:
        return {"count": Counting()}


def test_metrics_count_each_sample_once() -> None:
    task = Measured(fits=3)
    result = quiet(max_epochs=1, micro_batch="auto", gradient_accumulation_steps=3, log_every=None).fit(
        task, pairs(24, 8), pairs(11, 8)
    )
    assert result.metrics["train/count"] == 24
    assert result.metrics["validation/count"] == 11


class MeasuredWeights(Weighed):
    """Counts its samples, whatever they weigh, and learns with dropout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.4, **options)

    def metrics(self) -> Mapping[str, Any]:
        return {"count": Counting()}


@pytest.mark.parametrize("micro_batch", [None, 2, "auto"])
def test_samples_without_weight_reach_declared_metrics(micro_batch: int | str | None) -> None:
    class Fits(MeasuredWeights):
        def forward(self, features: Tensor) -> Tensor:
            if micro_batch == "auto" and len(features) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(features)

    result = quiet(max_epochs=1, micro_batch=micro_batch).fit(Fits(), _weighed([1, 1, 0, 0, 1, 0, 0, 0]))
    assert result.metrics["train/count"] == 8


def test_labels_that_are_ignored_need_a_weight() -> None:
    class Tagger(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return nn.functional.mse_loss(
                outputs[batch[1] != -100], batch[0].sum(1)[batch[1] != -100][:, None]
            )

    class WeighedTagger(Tagger):
        def loss_weight(self, batch: Any) -> Tensor:
            return (batch[1] != -100).sum()

    data = [(torch.randn(8, 4), torch.tensor([1, 2, -100, -100, 3, -100, 1, 1]))] * 2
    whole, parts = WeighedTagger(), WeighedTagger()
    quiet(max_epochs=1).fit(whole, data)
    quiet(max_epochs=1, micro_batch=3).fit(parts, data)
    same(whole, parts)
    with warned(r"batch\[-1\] has labels of -100.*Tagger has no loss_weight") as caught:
        quiet(max_epochs=1, micro_batch=3).fit(Tagger(), data)
    assert len(caught) == 1


def test_what_is_learned_does_not_depend_on_whether_metrics_are_declared() -> None:
    tasks = []
    for metrics in (True, False):
        tasks.append(MeasuredWeights())
        quiet(max_epochs=3, micro_batch=2, train_metrics=metrics).fit(
            tasks[-1], _weighed([1, 0, 0, 0, 1, 0, 2, 1])
        )
    assert weights(tasks[0]) == weights(tasks[1])


def test_a_task_whose_modules_are_lazy_can_begin() -> None:
    class Lazy(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LazyBatchNorm1d()

        def forward(self, features: Tensor) -> Tensor:
            outputs = super().forward(self.norm(features))
            if len(features) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return outputs

    task = Lazy()
    quiet(max_epochs=1, micro_batch="auto").fit(task, pairs(8, 8))
    assert int(task.norm.num_batches_tracked) >= 4


# What was found.


def test_the_size_is_found_once_kept_and_told() -> None:
    task = Small(fits=3)
    run = quiet(max_epochs=3, micro_batch="auto", progress_bar=True)
    with heard("micro-batch 2 of 8 samples", logging.INFO) as texts:
        run.fit(task, pairs(16, 8))
    assert [each for each in task.tried if each > 3] == [8, 4]
    assert len(texts) == 1


def test_a_resumed_run_takes_the_size_over(tmp_path: Path) -> None:
    options = {"micro_batch": "auto", "checkpoint": True, "run_dir": tmp_path}
    quiet(max_epochs=1, **options).fit(Drawing(), pairs(16, 8))
    resumed, straight = Drawing(), Drawing()
    quiet(max_epochs=2, **options).fit(resumed, pairs(16, 8), resume="auto")
    quiet(max_epochs=2, micro_batch="auto").fit(straight, pairs(16, 8))
    assert max(resumed.tried) == 2
    assert weights(resumed) == weights(straight)


def test_a_number_splits_without_searching() -> None:
    task = Small(fits=3)
    quiet(max_epochs=1, micro_batch=3).fit(task, pairs(16, 8))
    assert task.tried == [3, 3, 2, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        quiet(max_epochs=1, micro_batch=4).fit(Small(fits=3), pairs(16, 8))


def test_no_part_is_left_with_one_sample_for_batch_norm() -> None:
    class Normed(Small):
        def __init__(self) -> None:
            super().__init__(fits=4)
            self.norm = nn.BatchNorm1d(1)

        def forward(self, features: Tensor) -> Tensor:
            return self.norm(super().forward(features))

    task = Normed()
    quiet(max_epochs=1, micro_batch=4).fit(task, pairs(21, 21))
    assert task.tried == [4, 4, 4, 3, 3, 3]


def test_the_summary_shows_it() -> None:
    with heard("micro-batch auto", logging.INFO) as texts:
        quiet(max_epochs=1, micro_batch="auto", progress_bar=True).fit(Regression(), pairs())
    assert len(texts) == 1


# What cannot be helped.


def test_one_sample_that_does_not_fit_ends_the_run_with_advice() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet(max_epochs=1, micro_batch="auto").fit(Small(fits=0), pairs(8, 4))
    notes = "\n".join(caught.value.__notes__)
    assert "not even a micro-batch of one sample" in notes
    assert "activation checkpointing" in notes
    assert "micro_batch='auto'" not in notes


def test_without_it_the_error_says_what_helps() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet(max_epochs=1, gradient_accumulation_steps=2).fit(Small(), pairs(10, 5))
    assert (
        "rank 0 ran out of memory in training, after update 0 with batches of 5, 5 samples; what helps: "
        in (notes := "\n".join(caught.value.__notes__))
    )
    assert "Trainer(micro_batch='auto')" in notes


class Packed(Regression):
    """A step on sequences that torch has packed."""

    def training_step(self, batch: PackedSequence) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (pack_sequence([torch.randn(3), torch.randn(2)]), "a PackedSequence cannot be split"),
        ((torch.randn(4, 4), torch.randn(2, 1)), r"a batch of 4 samples has a tensor of shape \(2, 1\)"),
        ((torch.randn(2, 4), [torch.randn(2), torch.randn(2)]), "a list inside of a batch"),
    ],
)
def test_what_cannot_be_split_is_named_with_the_reason(batch: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"out of memory, and {reason}.*activation checkpointing"):
        quiet(max_epochs=1, micro_batch="auto").fit(Packed(), [batch])


def test_an_update_that_has_begun_to_change_weights_is_not_repeated() -> None:
    seen = []

    def fail(run: Any) -> None:
        seen.append(run.progress.updates)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        quiet(
            max_epochs=1, micro_batch="auto", callbacks=[LambdaCallback(on_before_optimizer_step=fail)]
        ).fit(Small(), pairs(8, 8))
    assert seen == [0]


def test_other_errors_are_not_taken_for_it() -> None:
    class Wrong(Regression):
        def training_step(self, batch: Any) -> Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        quiet(max_epochs=1, micro_batch="auto").fit(Wrong(), pairs())


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(
        StrategyError,
        match=r"micro_batch='auto' with strategy 'fsdp'.*all processes gather parameters during a forward",
    ):
        Trainer(max_epochs=1, micro_batch="auto", strategy="fsdp", devices=2)
    with pytest.raises(StrategyError, match="communication='fp16'"):
        Trainer(max_epochs=1, micro_batch=2, strategy=DDPConfig(communication="fp16"), devices=2)
    with pytest.raises(ConfigError, match="training_step is a generator"):
        quiet(max_epochs=1, micro_batch="auto").fit(Duel(), DataLoader(duels(), batch_size=4))
    for wrong in ("automatic", 0, 2.5, True):
        with pytest.raises(ConfigError, match="micro_batch must be"):
            Trainer(micro_batch=wrong)  # type: ignore[arg-type]


def test_running_out_in_an_evaluation_has_advice_of_its_own() -> None:
    class SmallInside(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet(max_epochs=1, micro_batch=8).fit(SmallInside(), pairs(8, 8), pairs(8, 8))
    notes = "\n".join(caught.value.__notes__)
    assert "a micro_batch smaller than 8, or 'auto'" in notes
    assert "gradient_accumulation_steps" not in notes


def test_a_mask_that_is_split_with_the_samples_is_hinted_at() -> None:
    class Masked(Regression):
        def forward(self, features: Tensor, mask: Tensor) -> Tensor:
            return super().forward(features @ mask)

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return outputs.square().mean()

    features = torch.randn(4, 4)
    with pytest.raises(RuntimeError) as caught:
        quiet(max_epochs=1, micro_batch=2).fit(Masked(), [(features, torch.eye(4))])
    assert "by a part of 2 of a batch's 4 samples" in "\n".join(caught.value.__notes__)
    with pytest.raises(DataError, match=r"of shape \(4, 4\).*in the task's forward.*a first dimension"):
        quiet(max_epochs=1, micro_batch=2).fit(Masked(), [(torch.randn(3, 4), torch.eye(4))])
    quiet(max_epochs=1, micro_batch=2).fit(Masked(), [(features, torch.eye(4)[None])])


# Evaluation and prediction.


class Seen(Callback):
    """How many batches an evaluation had."""

    def __init__(self) -> None:
        self.batches = 0

    def on_evaluation_step_end(self, run: Any) -> None:
        self.batches += 1


def test_evaluation_counts_every_sample_once() -> None:
    seen = Seen()
    expected = quiet().validate(Regression(), pairs(13, 8))
    found = quiet(micro_batch="auto", callbacks=[seen]).validate(Small(), pairs(13, 8))
    assert found == pytest.approx(expected, rel=1e-6)
    assert seen.batches == 2


def test_a_number_splits_evaluations_and_predictions_too() -> None:
    task = Small(fits=3)
    quiet(micro_batch=3).validate(task, pairs(13, 8))
    quiet(micro_batch=3).predict(task, pairs(13, 8))
    assert task.tried == [3, 3, 2, 3, 2] * 2


def test_an_evaluation_runs_out_of_memory_as_often_as_it_halves() -> None:
    task = Small(fits=2)
    quiet(micro_batch="auto").validate(task, pairs(128, 64))
    assert [each for each in task.tried if each > 2] == [64, 32, 16, 8, 4]
    assert sum(each for each in task.tried if each <= 2) == 128


class Noise(Small):
    """Predicts what it draws, from all generators."""

    def predict_step(self, batch: Any) -> Tensor:
        self(batch[0])
        return torch.stack([torch.rand(()) + random.random() for _ in batch[0]])


@pytest.mark.parametrize("micro_batch", [2, "auto"])
def test_the_parts_of_a_batch_draw_one_after_the_other(micro_batch: int | str) -> None:
    random.seed(0)
    (expected,) = quiet().predict(Noise(fits=99), pairs(8, 8))
    random.seed(0)
    (found,) = quiet(micro_batch=micro_batch).predict(Noise(fits=2), pairs(8, 8))
    assert found.tolist() == expected.tolist()


class Predicting(Small):
    """Predictions of several kinds."""

    def predict_step(self, batch: Any) -> dict[str, Any]:
        outputs = self(batch[0])
        return {"value": outputs, "text": [f"{each:.3f}" for each in outputs[:, 0].tolist()]}


def test_predictions_of_parts_are_one_batchs_in_order() -> None:
    expected = quiet().predict(Predicting(fits=99), pairs(13, 8))
    found = quiet(micro_batch="auto").predict(Predicting(), pairs(13, 8))
    assert [len(each["value"]) for each in found] == [8, 5]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one["value"], two["value"])
        assert one["text"] == two["text"]


def test_predictions_that_cannot_be_put_together_are_refused() -> None:
    class Mean(Small):
        def predict_step(self, batch: Any) -> Tensor:
            return self(batch[0]).mean()

    with pytest.raises(DataError, match="it does not have one entry for each sample"):
        quiet(micro_batch="auto").predict(Mean(), pairs(8, 8))


# Several processes.


def _on_ranks(micro_batch: int | str | None, fits: tuple[int, int], ragged_tokens: bool) -> Any:
    rank = torch.distributed.get_rank()
    trainer = quiet(max_epochs=2, strategy="ddp", devices=2, micro_batch=micro_batch, max_grad_norm=0.5)
    if ragged_tokens:
        task: Any = NextToken(ADAMW) if rank else SmallNextToken(ADAMW)
        result = trainer.fit(task, DataLoader(ragged(), batch_size=6))
        tried = []
    else:
        task = Small(fits=fits[rank], optimizer=ADAMW)
        result = trainer.fit(task, pairs(17, 6), pairs(7, 6))  # the last round: 3 and 2 samples
        tried = task.tried
    progress = result.progress
    progress.seconds = 0.0
    state = {name: each.tolist() for name, each in task.state_dict().items()}
    return state, result.metrics, progress, tried


@pytest.mark.parametrize("fits", [(99, 2), (2, 99)])
def test_all_ranks_repeat_the_update_of_one_that_failed(fits: tuple[int, int]) -> None:
    whole = run_distributed(_on_ranks, None, (99, 99), False)
    parts = run_distributed(_on_ranks, "auto", fits, False)
    for rank in range(2):
        for name, value in whole[0][0].items():
            torch.testing.assert_close(
                torch.tensor(parts[rank][0][name]), torch.tensor(value), rtol=1e-6, atol=1e-6
            )
        assert parts[rank][1] == pytest.approx(whole[rank][1], rel=1e-5)
        assert parts[rank][2] == whole[rank][2]
        assert {6, 3, 1} <= set(parts[rank][3])  # both, though the memory of one was enough


def test_ranks_with_ragged_weights_have_the_gradient_of_the_whole() -> None:
    whole = NextToken(ADAMW)
    quiet(max_epochs=2, max_grad_norm=0.5).fit(whole, DataLoader(ragged(), batch_size=12))
    for micro_batch in ("auto", 1):
        for state, _, _, _ in run_distributed(_on_ranks, micro_batch, (3, 99), True):
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-5, atol=1e-5)


def _without_weight(micro_batch: int | str) -> Any:
    rank = torch.distributed.get_rank()

    class Sized(Weighed):
        def __init__(self) -> None:
            super().__init__()
            self.tried: list[int] = []

        def forward(self, features: Tensor) -> Tensor:
            self.tried.append(len(features))
            if len(features) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(features)

    # Of 16 samples for each rank and update only rank 0's weigh something, and of these only the last.
    features, targets, _ = _weighed([0.0] * 64)[0]
    weight = torch.tensor([0.0] * 12 + [1.0] * 4 + [0.0] * 16).repeat(2)
    task = Sized()
    data = DataLoader(torch.utils.data.TensorDataset(features, targets, weight), batch_size=16)
    quiet(max_epochs=1, strategy="ddp", devices=2, micro_batch=micro_batch).fit(task, data)
    assert all(bool(each.isfinite().all()) for each in task.parameters())
    return rank, task.tried


@pytest.mark.parametrize("micro_batch", [4, "auto"])
def test_what_a_rank_without_weight_runs_is_split_too(micro_batch: int | str) -> None:
    results = run_distributed(_without_weight, micro_batch)
    tried = dict(results)
    assert tried[1][-2:] == [4, 4]
    if micro_batch == 4:
        assert tried == {0: [4, 4], 1: [4, 4]}


def _ending(micro_batch: str | None) -> None:
    fits = 0 if torch.distributed.get_rank() else 99
    quiet(max_epochs=1, strategy="ddp", devices=2, micro_batch=micro_batch).fit(Small(fits), pairs(12, 3))


@pytest.mark.parametrize("micro_batch", [None, "auto"])
def test_one_rank_without_memory_ends_all_with_its_advice(micro_batch: str | None) -> None:
    with pytest.raises(RuntimeError) as caught:  # has what the first to end has raised, with its notes
        run_distributed(_ending, micro_batch)
    text = str(caught.value)
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert "rank 1 ran out of memory in training, after update 0 with batches of 3 samples" in text
    assert "activation checkpointing" in text


# Real failures.

_LIMITED = """
import resource, torch
from torch import nn
from drivetrain import OptimizerConfig, TaskModule, Trainer

class Wide(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 1)
    def forward(self, features):
        hidden = self.first(features).tanh()
        for _ in range(4):  # 64 kB for a sample, twice
            hidden = hidden.repeat(1, 256).sin().reshape(len(features), -1, 64).mean(1)
        return self.last(hidden)
    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()
    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=0.1)

torch.set_num_threads(1)
features = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
data = [(each, each.sum(1, keepdim=True)) for each in features.split(512)]
options = dict(max_epochs=1, strategy="cpu", checkpoint=False, loggers=(), progress_bar=False)
whole, task = Wide(), Wide()
Trainer(micro_batch=16, **options).fit(Wide(), data)  # everything is imported and started
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, hard))
Trainer(micro_batch="auto", **{**options, "progress_bar": True}).fit(task, data)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
Trainer(**options).fit(whole, data)
for one, two in zip(whole.parameters(), task.parameters()):
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
print("equal")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set by the size in /proc")
def test_a_real_lack_of_the_hosts_memory_is_found_and_survived() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout
    assert re.search(r"micro-batch \d+ of 512 samples", done.stderr)


_ON_RANKS = (
    _LIMITED.partition("options = dict")[0]
    + """
import sys
from drivetrain.distributed.launch.programs import ensure_ranks

micro_batch = sys.argv[1] if sys.argv[1:] else None
rank = ensure_ranks(2).rank
options = dict(max_epochs=1, strategy="ddp", devices=2, checkpoint=False, loggers=(), progress_bar=False)
task = Wide()
Trainer(micro_batch=16, **options).fit(Wide(), data)  # everything is imported and started
if rank == 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, hard))
Trainer(micro_batch=micro_batch, **options).fit(task, data)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
whole = Wide()
Trainer(**options).fit(whole, data)
for one, two in zip(whole.parameters(), task.parameters()):
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
sys.stdout.write(f"equal on rank {rank}\\n")
"""
)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set by the size in /proc")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("micro_batch", [None, "auto"])
def test_a_real_lack_of_memory_on_one_rank(micro_batch: str | None, tmp_path: Path) -> None:
    """It ends all ranks with what helps as the first cause; where that is done, all go on."""
    (tmp_path / "program.py").write_text(_ON_RANKS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py", *([micro_batch] if micro_batch else [])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if micro_batch:
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["equal on rank 0", "equal on rank 1"]
        return
    assert done.returncode == 1
    *_, cause, advice = done.stderr.splitlines()
    assert "rank 1 failed first, in training, after update 0, in the forward: RuntimeError: " in cause
    assert "can't allocate memory" in cause
    assert "rank 1 ran out of memory in training, after update 0 with batches of 512 samples; what" in advice
    assert "Trainer(micro_batch='auto'), which splits each batch until it fits" in advice
