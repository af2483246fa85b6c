"""Batches in parts that fit into memory (`micro_batch`): the same steps, in training and in evaluation."""

import gc
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import NextToken, Regression, pairs, quiet, ragged
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from drivetrain import LambdaCallback, OptimizerConfig, StepOutput

ADAMW, SGD = OptimizerConfig("adamw", lr=0.05), OptimizerConfig("sgd", lr=0.5, momentum=0.9)


@pytest.fixture(autouse=True, scope="module")
def cheap_collections() -> None:
    """Each lack of memory collects garbage; leave out what earlier tests have imported."""
    gc.collect()
    gc.freeze()


def lacks_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Small(Regression):  # lacks memory for more than `fits` samples at once
    def __init__(self, fits: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.fits = fits
        self.tried: list[int] = []

    def forward(self, features: Tensor) -> Tensor:
        self.tried.append(len(features))
        if len(features) > self.fits:
            lacks_memory()
        return super().forward(features)


class FailsInBackward(Regression):  # as `Small`, when gradients have been added already
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        if len(outputs) > 3:
            loss.register_hook(lacks_memory)
        return loss


class SmallNextToken(NextToken):
    def forward(self, tokens: Tensor) -> Tensor:
        if len(tokens) > 3:
            lacks_memory()
        return super().forward(tokens)


class Counted(Small):
    def metrics(self) -> Mapping[str, Any]:
        return {"count": SumMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> Any:
        return (torch.tensor(float(len(outputs))),)


class Weighed(Counted):
    """A loss that is a mean over samples with weights of their own, the batch's last column."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        weight = batch[2].float()
        return ((outputs - batch[1]).square().mean(1).float() * weight).sum() / weight.sum()

    def loss_weight(self, batch: Any) -> Any:
        return batch[2].sum()


def weighed(weight: list[float]) -> list[Any]:
    features = torch.randn(len(weight), 4, generator=torch.Generator().manual_seed(0))
    return [(features, features.sum(1, keepdim=True), torch.tensor(weight))]


def same(first: nn.Module, second: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, one), two in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", [Small, FailsInBackward])
def test_micro_batch_auto_makes_the_steps_of_whole_batches(kind: type[Regression]) -> None:
    for options in ({}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}):
        whole, parts = Regression(), kind()
        losses = [
            [step.loss for step in quiet(max_epochs=2, micro_batch=size, **options).steps(task, pairs(22, 8))]
            for task, size in ((whole, None), (parts, "auto"))
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        same(whole, parts)


def test_micro_batch_keeps_the_weights_of_ragged_token_losses() -> None:
    # The fourth sequence is padding alone: with 1 a part has nothing to learn from, and a loss of 0 / 0.
    whole = NextToken(ADAMW)
    expected = quiet(max_epochs=2).fit(whole, DataLoader(ragged(), batch_size=8))
    for micro_batch in (1, "auto"):
        task = SmallNextToken(ADAMW)
        found = quiet(max_epochs=2, micro_batch=micro_batch).fit(task, DataLoader(ragged(), batch_size=8))
        same(task, whole)
        assert found.metrics["train/loss"] == pytest.approx(expected.metrics["train/loss"], rel=1e-6)
        found.progress.seconds = expected.progress.seconds
        assert found.progress == expected.progress  # micro-batches, samples and tokens are those of the data


def test_micro_batch_weighs_parts_as_the_data_gave_them() -> None:
    # In half precision the sum is infinite; with the 8 bits of bfloat16 it is 1004.
    data = weighed([20000.0] * 4 + [1005.0, 0, 0, 0] + [4.0, 0, 0, 0])
    for precision in ("16-true", "bf16-true"):
        options = {"max_epochs": 1, "precision": precision, "train_metrics": False}
        (step,) = quiet(micro_batch=4, **options).steps(Weighed(99), data)
        assert [weight for _, _, weight in step.step_values] == [80000.0, 1005.0, 4.0]


class Drawing(Small):
    """Draws from all generators and counts in two buffers; the weights show what an attempt did."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.4, **options)
        self.own = random.Random(0)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.other = self.other + 1  # another tensor in its place
        noise = random.random() + self.own.random()
        return super().forward(features) * (1 + 0.1 * noise) + 0.01 * self.calls


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_an_attempt_that_ran_out_of_memory_leaves_no_trace(precision: str) -> None:
    fixed, found = Drawing(fits=2), Drawing(fits=2)
    for task, micro_batch in ((fixed, 2), (found, "auto")):
        quiet(max_epochs=3, micro_batch=micro_batch, precision=precision).fit(task, pairs(20, 8))
    assert max(found.tried) == 8
    assert weights(found) == weights(fixed)


class FailsLate(Counted):  # fails late in a batch, after metrics of its first parts were there
    def training_step(self, batch: Any) -> StepOutput:
        outputs = super(Small, self).forward(batch[0])
        self.tried.append(len(outputs))
        if len(outputs) > 2 and len(self.tried) > 1:
            lacks_memory()
        return StepOutput(self.loss(outputs, batch), outputs)


def test_declared_metrics_count_each_sample_once_in_parts() -> None:
    options = {"max_epochs": 1, "gradient_accumulation_steps": 3, "log_every": None}
    found = quiet(micro_batch="auto", **options).fit(FailsLate(), pairs(24, 8), pairs(11, 2)).metrics
    assert (found["train/count"], found["validation/count"]) == (24, 11)
    for micro_batch, fits in ((None, 99), ("auto", 2)):  # samples without weight count too
        trainer = quiet(max_epochs=1, micro_batch=micro_batch)
        assert trainer.fit(Weighed(fits), weighed([1, 1, 0, 0, 1, 0, 0, 0])).metrics["train/count"] == 8


def test_micro_batch_auto_finds_the_size_once_keeps_and_logs_it() -> None:
    task = Small(fits=3)
    with heard("micro-batch", logging.INFO) as texts:
        quiet(max_epochs=3, micro_batch="auto", progress_bar=True).fit(task, pairs(16, 8))
    assert [each for each in task.tried if each > 3] == [8, 4]
    assert any("micro-batch 2: batches of 8 run in parts" in each for each in texts)


def test_micro_batch_auto_is_taken_over_on_resume(tmp_path: Path) -> None:
    options = {"micro_batch": "auto", "checkpoint": True, "run_dir": tmp_path}
    quiet(max_epochs=1, **options).fit(Drawing(), pairs(16, 8))
    resumed, straight, tried = Drawing(), Drawing(), []
    resumed.register_forward_pre_hook(lambda _, inputs: tried.append(len(inputs[0])))
    quiet(max_epochs=2, **options).fit(resumed, pairs(16, 8), resume="auto")
    quiet(max_epochs=2, micro_batch="auto").fit(straight, pairs(16, 8))
    assert max(tried) == 2
    assert weights(resumed) == weights(straight)


def test_micro_batch_of_a_number_splits_without_searching() -> None:
    task = Small(fits=3)
    quiet(max_epochs=1, micro_batch=3).fit(task, pairs(16, 8))
    assert task.tried == [3, 3, 2, 3, 3, 2]


def test_evaluations_run_whole_batches_and_say_what_makes_them_smaller() -> None:
    task = Small(fits=8)
    trainer = quiet(max_epochs=1, micro_batch=3)
    trainer.fit(task, pairs(6, 6), pairs(13, 8))
    trainer.predict(task, pairs(13, 8))
    assert task.tried == [3, 3, 8, 5, 8, 5]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet(micro_batch="auto").validate(Small(fits=3), pairs(13, 8))
    assert "In an evaluation give Trainer(evaluation_batch_size=...)" in caught.value.__notes__[-1]


def notes_of(task: Any, data: Any, **options: Any) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet(max_epochs=1, **options).fit(task, data)
    return "\n".join(caught.value.__notes__)


def test_out_of_memory_errors_have_advice() -> None:
    assert "not even a micro-batch of one" in notes_of(Small(fits=0), pairs(8, 4), micro_batch="auto")
    notes = notes_of(Small(), pairs(10, 5), gradient_accumulation_steps=2)
    assert "rank 0 ran out of memory in training, after step 0 with batches of 5, 5 samples" in notes
    assert "Trainer(micro_batch='auto')" in notes
    assert "the largest blocks are the weight 'line.weight' (16 bytes)" in notes


def test_a_step_that_has_begun_to_change_weights_is_not_repeated() -> None:
    seen: list[int] = []

    def fail(run: Any) -> None:
        seen.append(run.progress.steps)
        lacks_memory()

    callbacks = [LambdaCallback(on_before_optimizer_step=fail)]
    trainer = quiet(max_epochs=1, micro_batch="auto", callbacks=callbacks)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Small(), pairs(8, 8))
    assert seen == [0]


def on_ranks(micro_batch: int | str | None, fits: tuple[int, int], tokens: bool) -> Any:
    rank = torch.distributed.get_rank()
    options = {"strategy": "ddp", "devices": 2, "micro_batch": micro_batch, "max_epochs": 1}
    if tokens:
        task: Any = (NextToken if rank else SmallNextToken)(SGD)
        result = quiet(**options).fit(task, DataLoader(ragged(), batch_size=6))
    else:
        task = Small(fits=fits[rank], optimizer=ADAMW)  # the last round: 3 and 2 samples
        result = quiet(max_grad_norm=0.5, **options).fit(task, pairs(17, 6), pairs(7, 1))
    result.progress.seconds = 0.0
    return task, result.metrics, result.progress


def in_the_pool(function: Any, *arguments: Any) -> list[Any]:
    """As `on_two_ranks`; what ranks have imported is left out of the collections."""
    return on_two_ranks(lambda: (gc.freeze(), function(*arguments))[1])


def test_all_ranks_repeat_the_step_of_one_that_ran_out_of_memory() -> None:
    whole = in_the_pool(on_ranks, None, (99, 99), False)
    parts = in_the_pool(on_ranks, "auto", (99, 2), False)
    for (task, metrics, progress), (right, right_metrics, right_progress) in zip(parts, whole, strict=True):
        same(task, right)
        assert metrics == pytest.approx(right_metrics, rel=1e-5)
        assert progress == right_progress
        assert {6, 3, 1} <= set(task.tried)  # both, though the memory of one was enough
    whole = NextToken(SGD)  # and with weights that differ, on the other rank
    quiet(max_epochs=1).fit(whole, DataLoader(ragged(), batch_size=12))
    for task, _, _ in in_the_pool(on_ranks, "auto", (3, 99), True):
        same(task, whole, 1e-5)
