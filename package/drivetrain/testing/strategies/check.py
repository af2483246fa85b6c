"""The conformance suite of strategies.

Every check trains small tasks under a strategy, in each process of a job, and compares the results with those
of one process on the whole batch. Run it on your own strategy with

    check_strategy(lambda world_size: MyStrategy(world_size=world_size), world_size=2)

docs/how-to/write-a-strategy.md shows an example.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.callbacks import Freeze, LambdaCallback
from drivetrain.checkpoint import load_weights
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.run.loop import predict
from drivetrain.run.session import run_context
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.job import (
    Job,
    MakeStrategy,
    Outcome,
    assert_same_on_all_ranks,
    whole_state,
)
from drivetrain.testing.strategies.resume import resume_is_bitwise, resume_on_another_number_of_processes
from drivetrain.testing.strategies.streams import each_rank_draws_for_itself
from drivetrain.testing.strategies.tasks import (
    OPTIMIZERS,
    GeneratorAndDiscriminator,
    SampleNumbers,
    Sequences,
    Tokens,
)
from drivetrain.trainer.assembly import build_evaluation
from drivetrain.trainer.feeds import evaluation_feeds


def same_as_the_big_batch(job: Job) -> None:
    """A run equals one process on the whole batch.

    Covered are three optimizers, clipping, accumulation, unequal loss weights, a sample of padding and a last
    window that is short.
    """
    for name in OPTIMIZERS:
        options: dict[str, Any] = {"max_grad_norm": 0.3}
        alone = job.fit(True, Tokens(name, schedule="cosine"), job.sequences(True), **options)
        for accumulation in (1, 2):
            task = Tokens(name, schedule="cosine")
            data = job.sequences(False, accumulation)
            found = job.fit(False, task, data, gradient_accumulation_steps=accumulation, **options)
            what = f"{name}, {accumulation} micro-batches"
            assert len(found.record.norms) == len(alone.record.norms), (
                f"clip_grad_norm gave None for the gradient's norm ({what}) on rank {job.rank}; it returns"
                " the norm before clipping, a tensor without dimensions"
            )
            job.assert_equals_one_process(found.weights, alone.weights, f"the weights ({what})")
            job.assert_equals_one_process(
                found.record.norms, alone.record.norms, f"the gradient's norm ({what})"
            )
            job.assert_equals_one_process(found.result.metrics, alone.result.metrics, f"the metrics ({what})")
            assert found.record.rates == alone.record.rates, f"the rates ({what}) on rank {job.rank}"
            for each in ("steps", "samples", "tokens", "epoch"):
                mine, theirs = getattr(found.result.progress, each), getattr(alone.result.progress, each)
                assert mine == theirs, f"{each} ({what}) on rank {job.rank}: {mine}, alone {theirs}"


def all_begin_with_the_weights_of_rank_0(job: Job) -> None:
    """Training starts from rank 0's weights on all ranks, and the weights stay equal."""
    task = Tokens()
    with torch.no_grad():
        for each in task.parameters():
            each.add_(job.rank)
    alone = job.fit(True, Tokens(), job.sequences(True))
    found = job.fit(False, task, job.sequences(False))
    job.assert_equals_one_process(found.weights, alone.weights, "the weights")
    assert_same_on_all_ranks(
        [float(each.sum()) for each in found.weights.values()], "the sums of the weights"
    )


def a_process_may_begin_with_padding(job: Job) -> None:
    """A first micro-batch of weight 0, whose mean loss is NaN, adds nothing to the gradient."""
    samples = Sequences(empty=0)
    alone = job.fit(True, Tokens(), DataLoader(samples, batch_size=job.step))
    loader = DataLoader(samples, batch_size=1)
    accumulation = job.step // job.shards
    found = job.fit(False, Tokens(), loader, gradient_accumulation_steps=accumulation)
    job.assert_equals_one_process(found.weights, alone.weights, "the weights")
    job.assert_equals_one_process(found.result.metrics, alone.result.metrics, "the metrics")


def frozen_and_tied(job: Job) -> None:
    """Frozen parameters do not change, and tied ones stay tied."""
    variants: tuple[dict[str, Any], ...] = ({"frozen": True}, {"tied": True})
    for options in variants:
        start = whole_state(Tokens(**options))
        alone = job.fit(True, Tokens(**options), job.sequences(True))
        found = job.fit(False, Tokens(**options), job.sequences(False))
        job.assert_equals_one_process(found.weights, alone.weights, f"the weights ({options})")
        if "frozen" in options:
            name = "blocks.0.0.weight"
            job.assert_close(found.weights[name], start[name], f"{name}, which is frozen,")
            assert torch.equal(found.weights[name], alone.weights[name]), f"{name} moved on rank {job.rank}"
        else:
            tied = torch.equal(found.weights["head.weight"], found.weights["embedding.weight"])
            assert tied, f"tied weights differ on rank {job.rank}"


def parameters_may_be_unfrozen(job: Job) -> None:
    """Parameters that are frozen until a point of the fit do not change before it, and train afterwards.

    A strategy that refuses this is not checked.
    """
    if job.make(job.world_size).refuses("unfreezing"):
        return
    names = ("blocks.0.0.weight", "embedding.weight")
    start = whole_state(Tokens())

    def frozen(run: Any) -> None:
        if run.progress.steps == 2:  # the first epoch has at least three
            for name in names:
                now = run.full_tensor(run.task.get_parameter(name)).detach().double().cpu()
                job.assert_close(now, start[name], f"{name}, which is frozen,")

    def fit(alone: bool) -> Outcome:
        freeze = Freeze({"blocks.0": "4 steps", "embedding": "1 epoch"})
        callbacks = [freeze, LambdaCallback(on_step_end=frozen)]
        return job.fit(alone, Tokens(), job.sequences(alone), max_grad_norm=0.3, callbacks=callbacks)

    alone, found = fit(True), fit(False)
    job.assert_equals_one_process(found.weights, alone.weights, "the weights")
    job.assert_equals_one_process(found.record.norms, alone.record.norms, "the gradient's norm")
    for name in names:
        assert not torch.equal(found.weights[name], start[name]), f"{name} did not train on rank {job.rank}"


def generator_steps(job: Job) -> None:
    """A generator step with several optimizers works, with and without accumulation."""
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(13, 4, generator=generator), torch.randn(13, 2, generator=generator))
    alone = job.fit(True, GeneratorAndDiscriminator(), DataLoader(data, batch_size=job.step))
    for accumulation in (1, 2):
        loader = DataLoader(data, batch_size=job.step // (job.shards * accumulation))
        found = job.fit(False, GeneratorAndDiscriminator(), loader, gradient_accumulation_steps=accumulation)
        what = f"{accumulation} micro-batches"
        job.assert_equals_one_process(found.weights, alone.weights, f"the weights ({what})")
        job.assert_equals_one_process(found.result.metrics, alone.result.metrics, f"the metrics ({what})")


def evaluation_counts_each_sample_once(job: Job) -> None:
    """An evaluation counts each of 1 to 17 samples once, in batches of 1 to 5, from loaders and from lists.

    Some ranks have no samples. Values that steps return are averaged, declared metrics see each sample once,
    and predictions are in order.
    """
    loaders: dict[str, Any] = {}
    for count in range(1, 18):
        numbers = torch.arange(1.0, count + 1)[:, None]
        for size in range(1, 6):
            loader = DataLoader(TensorDataset(numbers), batch_size=size)
            listed = (count + size) % 2 == 1
            loaders[f"{count}-by-{size}"] = list(loader) if listed else loader
    found = job.trainer(False).validate(SampleNumbers(), loaders)
    predicted = _predictions(job, loaders)
    for name in loaders:
        numbers = torch.arange(1.0, int(name.split("-")[0]) + 1)
        expected = {"loss": numbers.mean(), "square": numbers.square().mean(), "sum": numbers.sum()}
        for metric, value in expected.items():
            job.assert_close(found[f"validation/{name}/{metric}"], float(value), f"{metric} of {name}")
        job.assert_close(predicted[name], numbers, f"predictions of {name}")


def _predictions(job: Job, loaders: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the predictions of each loader. One run makes them all, since starting a run takes longest."""
    trainer, task = job.trainer(False), SampleNumbers()
    run = build_evaluation(trainer, task, next(iter(loaders.values())), "predict", None)
    found: dict[str, Tensor] = {}
    with run_context(trainer, run):
        for name, loader in loaders.items():
            ((_, feed),) = evaluation_feeds(trainer, run.engine, task, loader, "predict")
            found[name] = torch.cat([each.float() for each in predict(run, feed)])
    return found


def all_ranks_see_the_same(job: Job) -> None:
    """All ranks log the same values at the same steps, to the last bit."""
    # A value that a callback adds to a log point is exchanged after all callbacks have seen the point.
    adds = LambdaCallback(on_log=lambda run: run.log("added", run.engine.strategy.rank))
    options: dict[str, Any] = {"max_grad_norm": 1.0, "log_every": "3 steps", "callbacks": [adds]}
    found = job.fit(False, Tokens(with_metric=True), job.sequences(False), **options)
    assert found.record.logged, "nothing was logged"
    assert_same_on_all_ranks(found.record.logged, "the logged values")
    assert_same_on_all_ranks(sorted(found.result.metrics.items()), "the metrics")
    assert_same_on_all_ranks(found.record.norms, "the gradient's norms")


def checkpoints_have_plain_names(job: Job) -> None:
    """The weights of a finished run load into a plain module, and equal what was trained."""
    directory = job.scratch / "plain"
    found = job.fit(False, Tokens(), job.sequences(False), run_dir=directory, checkpoint=True)
    assert found.result.model_path is not None
    stored = load_weights(found.result.model_path)
    names = sorted(Tokens().state_dict())
    assert sorted(stored) == names, f"the weights are stored as {sorted(stored)}, not as {names}"
    task = Tokens()
    task.load_state_dict(stored, strict=True)
    job.assert_close(whole_state(task), found.weights, "the exported weights")


CHECKS: dict[str, Callable[[Job], None]] = {
    check.__name__: check
    for check in (
        same_as_the_big_batch,
        all_begin_with_the_weights_of_rank_0,
        a_process_may_begin_with_padding,
        frozen_and_tied,
        parameters_may_be_unfrozen,
        generator_steps,
        each_rank_draws_for_itself,
        evaluation_counts_each_sample_once,
        all_ranks_see_the_same,
        checkpoints_have_plain_names,
        resume_is_bitwise,
        resume_on_another_number_of_processes,
    )
}
"""The checks by name. Each is called in every process."""


def check_strategy(
    make: MakeStrategy,
    world_size: int = 2,
    *,
    checks: Sequence[str] | None = None,
    precision: str = "32",
    tolerance: float = 1e-6,
    timeout: float = 300.0,
) -> None:
    """Run the suite on a strategy, in real processes.

    Args:
        make: Makes the strategy for a given number of processes.
        world_size: The number of processes.
        checks: Names of the `CHECKS` to run. By default all run.
        precision: The precision of all runs.
        tolerance: The largest difference from one process; 1e-6 is for float32.
        timeout: Time limit in seconds for all checks together.

    Raises:
        ConfigError: An unknown name in `checks`; the message names the nearest.
        RuntimeError: A check failed; the message names the check, the rank and the values that differ.
    """
    chosen = tuple(CHECKS) if checks is None else tuple(checks)
    for name in chosen:
        if name not in CHECKS:
            raise ConfigError(f"no check {name!r}. {nearest(name, CHECKS)}")
    with tempfile.TemporaryDirectory() as scratch:
        declared = run_distributed(
            _run_checks, make, scratch, chosen, precision, tolerance,
            world_size=world_size, timeout=timeout,
        )  # fmt: skip
    if declared[0]:
        print(declared[0])


def _run_checks(
    make: MakeStrategy, scratch: str, checks: Sequence[str], precision: str, tolerance: float
) -> str:
    """Run checks in one process. Return a note if the strategy declares itself inexact, else ""."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in checks:
        try:
            CHECKS[name](Job(make, rank, world_size, Path(scratch), precision, tolerance))
        except Exception as error:
            error.add_note(f"drivetrain: in the check {name!r}")
            raise
    strategy = make(world_size)
    reason = strategy.refuses("exactness")
    return f"strategy {strategy.name!r} is not compared with one process: {reason}" if reason else ""
