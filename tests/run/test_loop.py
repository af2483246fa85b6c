"""The loops: the order of the hooks, limits, stopping, and what evaluation leaves alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.drawing import Play, drawing, drawn_hooks
from tests.support.outcome import weights
from tests.support.tasks import FEATURES, Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DataError,
    LambdaCallback,
    OptimizerConfig,
)
from drivetrain.data.feed import Feed
from drivetrain.data.reading import as_source
from drivetrain.data.transfer import Transfer
from drivetrain.run.hooks import HOOKS
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed


class Recorder(Callback):
    """Notes every hook that is called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for hook in HOOKS:
            setattr(self, hook, self._note(hook))

    def _note(self, hook: str) -> Any:
        return lambda run: self.called.append(hook)


def recorded(tmp_path: Path, resume: str | None = None, **options: Any) -> list[str]:
    recorder = Recorder()
    trainer = quiet(
        callbacks=[recorder],
        run_dir=tmp_path,
        checkpoint=CheckpointConfig(every="2 steps", by=None),
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.fit(Regression(), pairs(10), pairs(5), resume=resume)
    return recorder.called


def test_every_hook_stands_in_the_drawing() -> None:
    assert drawn_hooks(drawing()) == set(HOOKS)
    assert set(HOOKS) == {name for name in vars(Callback) if name.startswith("on_")}


def test_the_hooks_are_called_as_the_drawing_says(tmp_path: Path) -> None:
    """Epochs of 3 updates (5 micro-batches, 2 an update); the third and sixth log, and so does the end."""
    play = Play([3, 3], validates={3, 6}, logs={3, 6}, saves={2, 4, 6}, batches=3)
    assert recorded(tmp_path, max_epochs=2, log_every=3) == play.hooks()


def test_the_hooks_of_a_resumed_run_are_called_as_the_drawing_says(tmp_path: Path) -> None:
    """Resumed in the middle of the second epoch: the epoch begins again for the callbacks."""
    recorded(tmp_path, max_steps=4, log_every=2)
    play = Play([3, 3], validates={6}, logs={6}, saves={6}, batches=3, resumed_after=4)
    assert recorded(tmp_path, "auto", max_epochs=2, log_every=2) == play.hooks()


def test_several_validations_in_an_epoch_are_called_as_the_drawing_says(tmp_path: Path) -> None:
    play = Play([3], validates={1, 2, 3}, logs={3}, saves={2, 3}, batches=3)
    assert recorded(tmp_path, max_epochs=1, log_every=3, validate_every="1 step") == play.hooks()


def test_a_placeholder_is_no_micro_batch_and_each_loss_of_a_generator_step_is_one() -> None:
    class Two(Regression):
        def configure_optimizers(self) -> Any:
            return {
                "first": OptimizerConfig("sgd", lr=0.1, parameters=["line.weight"]),
                "second": OptimizerConfig("sgd", lr=0.1, parameters=["line.bias"]),
            }

        def training_step(self, batch: Any) -> Any:
            yield "first", self.loss(self(batch[0]), batch)
            yield "second", self.loss(self(batch[0]), batch)

    data = list(pairs(8))

    class FirstWeighsNothing(Regression):
        def loss_weight(self, batch: Any) -> float:
            return 0.0 if torch.equal(batch[0], data[0][0]) else float(len(batch[0]))

    for task, expected in ((Two(), 4), (FirstWeighsNothing(), 1)):
        called: list[Any] = []
        trainer = quiet(
            max_epochs=1,
            gradient_accumulation_steps=2,
            limit_train_batches=2,
            callbacks=[LambdaCallback(on_micro_batch_end=called.append)],
        )
        trainer.fit(task, data)
        assert len(called) == expected


def test_what_is_not_logged_yet_has_a_last_log_point_before_the_end(tmp_path: Path) -> None:
    called = recorded(tmp_path, max_epochs=1, log_every="1000 steps", validate_every=None)
    assert called[-2:] == ["on_log", "on_fit_end"]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_verb_outside_a_fit_calls_the_hooks_of_evaluation_alone(verb: str) -> None:
    recorder = Recorder()
    getattr(quiet(callbacks=[recorder]), verb)(Regression(), pairs(5))
    steps = ["on_evaluation_step_end"] * 3
    assert recorder.called == ["on_evaluation_start", *steps, "on_evaluation_end"]


def test_a_hook_sees_what_the_hooks_before_it_did_and_savers_see_all(tmp_path: Path) -> None:
    def change(run: Any) -> None:
        with torch.no_grad():
            run.task.line.bias.fill_(42.0)

    trainer = quiet(
        max_steps=3,
        callbacks=[LambdaCallback(on_step_end=change)],
        checkpoint=CheckpointConfig(every="1 step", by=None),
        run_dir=tmp_path,
    )
    trainer.fit(Regression(), pairs())
    assert Regression.from_checkpoint(str(tmp_path)).line.bias.tolist() == [42.0]


def test_gradients_before_the_optimizer_step_are_averaged_unscaled_and_unclipped() -> None:
    seen: dict[str, Tensor] = {}

    def look(run: Any) -> None:
        seen.setdefault("weight", run.task.line.weight.grad.clone())

    task = Regression()
    batch = next(iter(pairs(8, 8)))
    task.loss(task(batch[0]), batch).backward()
    right = task.line.weight.grad
    assert right is not None
    trainer = quiet(
        max_steps=1,
        max_grad_norm=1e-3,
        gradient_accumulation_steps=4,
        callbacks=[LambdaCallback(on_before_optimizer_step=look)],
    )
    trainer.fit(Regression(), pairs(8))
    assert torch.allclose(seen["weight"], right, rtol=1e-5)


# Limits.


def test_max_steps_counts_updates() -> None:
    result = quiet(max_steps=7, gradient_accumulation_steps=2).fit(Regression(), pairs(10))
    assert (result.progress.updates, result.progress.epoch) == (7, 2)
    assert result.stop_reason == "max_steps=7 reached"


def test_max_epochs_counts_passes() -> None:
    result = quiet(max_epochs=3).fit(Regression(), pairs(10))
    assert (result.progress.updates, result.progress.epoch, result.progress.samples) == (15, 3, 30)
    assert result.stop_reason == "max_epochs=3 reached"


@pytest.mark.parametrize(("epochs", "updates"), [(0.5, 2), (2.5, 8), (1.9, 6), (2.0, 6)])
def test_max_epochs_may_be_a_fraction(epochs: float, updates: int) -> None:
    options: Any = {"max_epochs": epochs, "gradient_accumulation_steps": 2}
    result = quiet(**options).fit(Regression(), pairs(10))  # two full windows and a short one
    assert result.progress.updates == updates
    assert result.stop_reason == f"max_epochs={epochs:g} reached"
    assert quiet(**options).plan(Regression(), pairs(10)).updates == updates


def test_a_fraction_of_an_epoch_counts_skipped_updates_and_resumes(tmp_path: Path) -> None:
    batches = [(torch.full((2, 4), value), torch.zeros(2, 1)) for value in (1.0, float("nan"), 2.0, 1.0)]
    options: Any = {"on_nonfinite": "skip", "checkpoint": True, "run_dir": tmp_path}
    first = quiet(max_epochs=0.75, **options).fit(Regression(), batches)
    assert (first.progress.updates, first.progress.skipped, first.progress.epoch_batches) == (2, 1, 3)
    with pytest.raises(CheckpointError, match=r"past the end of this run.*max_epochs=0\.5"):
        quiet(max_epochs=0.5, **options).fit(Regression(), batches, resume="auto")
    second = quiet(max_epochs=1.25, **options).fit(Regression(), batches, resume="auto")
    assert (second.progress.updates, second.progress.epoch, second.progress.epoch_batches) == (4, 1, 1)


@pytest.mark.parametrize("skipped", [9, 10])
def test_the_last_validation_is_made_although_an_update_before_it_was_skipped(skipped: int) -> None:
    class Skipping(Regression):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            loss = self.loss(self(batch[0]), batch)
            return loss * float("nan") if self.steps == skipped else loss

    at: list[int] = []
    note = LambdaCallback(on_evaluation_end=lambda run: at.append(run.progress.updates))
    options: Any = {"max_epochs": 2.5, "validate_every": "0.5 epochs", "on_nonfinite": "skip"}
    result = quiet(**options, callbacks=[note]).fit(Skipping(), pairs(8), pairs(4))
    assert (result.progress.updates, result.progress.skipped) == (9, 1)
    assert at == [2, 4, 6, 8, 9]


def test_a_fraction_of_an_epoch_needs_data_of_known_length() -> None:
    with pytest.raises(ConfigError, match=r"max_epochs=1\.5 needs training data of known length"):
        quiet(max_epochs=1.5).fit(Regression(), (each for each in pairs(4)))


def test_the_first_limit_that_is_reached_counts() -> None:
    assert quiet(max_epochs=3, max_steps=4).fit(Regression(), pairs(10)).progress.updates == 4
    assert quiet(max_epochs=1, max_steps=400).fit(Regression(), pairs(10)).progress.updates == 5


@pytest.mark.parametrize("limit", [0.05, "0.05 seconds", timedelta(milliseconds=50)])
def test_max_time_ends_a_run(limit: Any) -> None:
    slow = LambdaCallback(on_step_end=lambda run: time.sleep(0.02))
    result = quiet(max_time=limit, callbacks=[slow]).fit(Regression(), pairs(10))
    assert 1 <= result.progress.updates <= 3
    assert result.stop_reason == "max_time=0.05 seconds reached"


def test_max_time_counts_over_restarts(tmp_path: Path) -> None:
    slow = LambdaCallback(on_step_end=lambda run: time.sleep(0.02))
    trainer = quiet(max_time=0.07, callbacks=[slow], checkpoint=True, run_dir=tmp_path)
    first = trainer.fit(Regression(), pairs(10))
    assert trainer.fit(Regression(), pairs(10), resume="auto").progress.updates == first.progress.updates


def test_the_stages_can_be_limited() -> None:
    counts = {"train": 0, "validation": 0, "test": 0, "predict": 0}

    def count(run: Any) -> None:
        counts[run.stage] += 1

    trainer = quiet(
        max_epochs=2,
        callbacks=[LambdaCallback(on_step_end=count, on_evaluation_step_end=count)],
        limit_train_batches=4,
        limit_validation_batches=1,
        limit_test_batches=2,
        limit_predict_batches=3,
    )
    result = trainer.fit(Regression(), pairs(12), pairs(12))
    assert (result.progress.epoch, result.progress.samples) == (2, 16)
    trainer.test(Regression(), pairs(12))
    assert len(trainer.predict(Regression(), pairs(12))) == 3
    assert counts == {"train": 8, "validation": 2, "test": 2, "predict": 3}


def test_a_limit_may_be_a_fraction_of_the_batches() -> None:
    counts = {"train": 0, "validation": 0, "predict": 0}

    def count(run: Any) -> None:
        counts[run.stage] += 1

    hooks = [LambdaCallback(on_step_end=count, on_evaluation_step_end=count)]
    limits: Any = {"limit_train_batches": 0.7, "limit_validation_batches": 0.1, "limit_predict_batches": 0.5}
    trainer = quiet(max_epochs=2, callbacks=hooks, **limits)
    assert trainer.fit(Regression(), pairs(20), {"a": pairs(8), "b": pairs(60)}).progress.epoch == 2
    assert trainer.plan(Regression(), pairs(20)).updates == 14
    trainer.predict(Regression(), pairs(10))
    assert counts == {"train": 14, "validation": 2 * (1 + 3), "predict": 2}
    with pytest.raises(
        ConfigError, match=r"a limit of 0\.7 of the training batches needs data of known length"
    ):
        trainer.fit(Regression(), (each for each in pairs()))


def test_anyone_may_stop_a_run_and_the_first_reason_counts() -> None:
    def stop(run: Any) -> None:
        if run.progress.updates == 3:
            run.stop("enough")
            run.stop("too late")

    result = quiet(max_epochs=9, callbacks=[LambdaCallback(on_step_end=stop)]).fit(Regression(), pairs(10))
    assert (result.stop_reason, result.progress.updates) == ("enough", 3)


def test_a_run_stopped_before_its_first_update_trains_nothing() -> None:
    stop = LambdaCallback(on_fit_start=lambda run: run.stop("no need"))
    task = Regression()
    before = weights(task)
    result = quiet(max_epochs=9, callbacks=[stop]).fit(task, pairs(10))
    assert (result.stop_reason, result.progress.updates) == ("no need", 0)
    assert weights(task) == before


# Evaluation.


class Frozen(Regression):
    """Batch statistics that are kept as they are, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.BatchNorm1d(4)
        self.free = nn.BatchNorm1d(4)
        self.fixed.eval()

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.free(self.fixed(features)))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_leaves_modes_gradients_and_statistics_as_they_were(verb: str) -> None:
    task = Frozen()
    task(torch.randn(3, 4)).sum().backward()
    gradients = {name: each.grad.clone() for name, each in task.named_parameters() if each.grad is not None}
    assert gradients
    before = weights(task)
    modes: list[bool] = []
    watch = LambdaCallback(on_evaluation_step_end=lambda run: modes.append(run.task.free.training))
    getattr(quiet(callbacks=[watch]), verb)(task, pairs(6))
    assert modes == [False] * 3
    assert (task.training, task.fixed.training, task.free.training) == (True, False, True)
    assert weights(task) == before
    for name, each in task.named_parameters():
        assert each.grad is not None
        assert torch.equal(each.grad, gradients[name])


def test_validation_within_a_fit_leaves_modes_as_they_were() -> None:
    task = Frozen()
    seen: list[tuple[bool, bool]] = []
    look = LambdaCallback(on_step_start=lambda run: seen.append((task.fixed.training, task.free.training)))
    quiet(max_epochs=2, validate_every="1 step", callbacks=[look]).fit(task, pairs(6), pairs(4))
    assert set(seen) == {(False, True)}
    assert torch.equal(task.fixed.running_mean, torch.zeros(4))  # type: ignore[arg-type]
    assert not torch.equal(task.free.running_mean, torch.zeros(4))  # type: ignore[arg-type]


def test_a_validation_that_fails_leaves_the_task_in_training_mode() -> None:
    class Failing(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            raise RuntimeError("planted")

    task = Failing()
    with pytest.raises(RuntimeError, match="planted"):
        quiet().validate(task, pairs(6))
    assert task.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_every_sample_counts_once_whatever_the_size_of_the_batches(count: int, batch_size: int) -> None:
    task = Regression()
    features, target = next(iter(pairs(count, count)))
    right = (task(features) - target).square().mean().item()
    assert quiet().validate(task, pairs(count, batch_size)) == {
        "validation/loss": pytest.approx(right, rel=1e-6)
    }


@pytest.mark.parametrize("every", ["1 epoch", "100 steps", "1 hour"])
def test_a_fit_that_is_given_validation_data_validates_at_least_once(every: str, tmp_path: Path) -> None:
    trainer = quiet(max_steps=3, validate_every=every, checkpoint=True, run_dir=tmp_path)
    result = trainer.fit(Regression(), pairs(10), pairs(4))
    assert "validation/loss" in result.metrics
    assert result.best_checkpoint == result.last_checkpoint  # saved after it


def test_no_validation_is_due_before_validate_from() -> None:
    validated: list[int] = []
    note = LambdaCallback(on_evaluation_end=lambda run: validated.append(run.progress.updates))
    options: Any = {"max_epochs": 3, "validate_every": "4 steps", "callbacks": [note]}
    trainer = quiet(validate_from="2 epochs", **options)
    trainer.fit(Regression(), pairs(10), pairs(4))
    assert validated == [12]
    plan = trainer.plan(Regression(), pairs(10), pairs(4)).validation
    assert (plan.times, plan.first, plan.last) == (1, 12, 12)


def test_the_first_update_is_logged_where_it_is_asked_for() -> None:
    logged: list[int] = []
    note = LambdaCallback(on_log=lambda run: logged.append(run.progress.updates))
    trainer = quiet(max_steps=5, log_every="4 steps", log_first_step=True, callbacks=[note])
    trainer.fit(Regression(), pairs(10))
    assert logged == [1, 4, 5]
    assert (trainer.plan(Regression(), pairs(10)).logging.times) == 2


def test_a_fit_that_never_validates_is_asked_for_by_none() -> None:
    result = quiet(max_steps=3, validate_every=None).fit(Regression(), pairs(10), pairs(4))
    assert "validation/loss" not in result.metrics


def test_a_fit_that_has_validated_does_not_do_so_again_at_its_end(tmp_path: Path) -> None:
    options: Any = {"validate_every": "4 steps"}
    assert recorded(tmp_path, max_steps=6, **options).count("on_evaluation_end") == 1
    assert recorded(tmp_path, "auto", max_steps=7, **options).count("on_evaluation_end") == 0


@pytest.mark.parametrize("hook", ["on_step_end", "on_save"])
def test_a_fit_that_somebody_stops_validates_too_but_not_a_loop_that_is_left(hook: str) -> None:
    stop = LambdaCallback(**{hook: lambda run: run.stop("enough")})
    options: Any = {"max_epochs": 1, "loggers": ()}
    assert "validation/loss" in quiet(callbacks=[stop], **options).fit(Regression(), pairs(), pairs()).metrics
    called: list[str] = []
    note = LambdaCallback(on_evaluation_start=lambda run: called.append(run.stage))
    for _ in quiet(callbacks=[note], **options).steps(Regression(), pairs(), pairs()):
        break
    assert called == []


def test_empty_validation_data_is_an_error() -> None:
    with pytest.raises(DataError, match="validation data is empty"):
        quiet().validate(Regression(), [])


def test_reduce_on_plateau_follows_validation() -> None:
    optimizer = OptimizerConfig(
        "sgd",
        lr=0.1,
        schedule="reduce_on_plateau",
        schedule_options={"metric": "validation/loss", "patience": 0, "factor": 0.5},
    )

    class Stuck(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(1.0)

    rates: list[float] = []
    note = LambdaCallback(on_epoch_start=lambda run: rates.append(run.learning_rates()["lr"]))
    quiet(max_epochs=4, callbacks=[note]).fit(Stuck(optimizer), pairs(4), pairs(2))
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.025])


# A loop over the steps, on several ranks.


class Ends(Callback):
    """Notes how the run ended."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def on_fit_end(self, run: Any) -> None:
        self.ends.append((run.progress.updates, run.stop_reason, run.last_checkpoint))


def looped(leave_at: dict[int, int], run_dir: Path, error: type[Exception] | None = None) -> Any:
    """A loop that ranks leave at an update, by `break` or by an error; what this one saw, and the end."""
    rank, ends, seen = torch.distributed.get_rank(), Ends(), []
    trainer = quiet(
        max_epochs=3,
        strategy=DDP(world_size=2),
        devices=2,
        callbacks=[ends],
        run_dir=run_dir,
        checkpoint=CheckpointConfig(every=None, by=None),
    )
    task = Regression()
    try:
        for step in trainer.steps(task, pairs(12)):
            seen.append(step.update)
            if step.update == leave_at.get(rank):
                if error is not None:
                    raise error("planted")
                break
    except ValueError as caught:
        seen.append(str(caught).splitlines()[0])
    return seen, ends.ends, weights(task)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "leave_at", [{0: 1}, {1: 1}, {1: 2}, {0: 3, 1: 4}, {0: 4, 1: 4}, {0: 2, 1: 2}], ids=str
)  # an epoch has three updates
def test_a_loop_that_a_rank_leaves_ends_on_all_after_the_same_update(
    leave_at: dict[int, int], tmp_path: Path
) -> None:
    found = run_distributed(looped, leave_at, tmp_path)
    (_, [(updates, reason, saved)], trained), (_, *other) = found
    assert other == [[(updates, reason, saved)], trained]
    assert reason == "the loop was left by its caller"
    assert saved.endswith(f"update-{updates:08d}")
    first = min(leave_at.values())
    assert updates == first + 1 if len(set(leave_at.values())) < len(leave_at) else updates - first in (1, 2)
    for rank, (seen, *_) in enumerate(found):
        assert seen == list(range(leave_at[rank] + 1 if rank in leave_at else updates))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_an_error_in_the_body_on_one_rank_is_that_ranks_and_the_run_ends_in_order(tmp_path: Path) -> None:
    (_, *ended), (seen, *other) = run_distributed(looped, {1: 2}, tmp_path, ValueError)
    assert seen == [0, 1, 2, "planted"]
    assert ended == other


# Parameters that come too late.


class Grows(Regression):
    """Gets a parameter, or has one replaced or unfrozen, in a step or by a callback's hand.

    Args:
        how: "added", "replaced", "unfrozen", or "frozen", which is no error.
        in_step: Whether in the second step.
    """

    def __init__(self, how: str, in_step: bool = False) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1).requires_grad_(False)
        self.how, self.in_step, self.steps = how, in_step, 0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self.in_step and self.steps == 2:
            self.grow()
        return super().training_step(batch)

    def grow(self) -> None:
        if self.how == "unfrozen":
            self.other.requires_grad_(True)
        else:
            late = nn.Linear(1, 1).requires_grad_(self.how != "frozen")
            setattr(self, "other" if self.how == "replaced" else "late", late)


def grown(kind: Any, how: str, hook: str | None, **options: Any) -> None:
    strategy = {} if kind is None else {"strategy": kind(world_size=2), "devices": 2}
    callbacks = [] if hook is None else [LambdaCallback(**{hook: lambda run: run.task.grow()})]
    trainer = quiet(**{"max_epochs": 2, "callbacks": callbacks, **strategy, **options})
    trainer.fit(Grows(how, in_step=hook is None), pairs(8), pairs(4))


def told(how: str) -> str:
    return (
        rf"'{'late' if how == 'added' else 'other'}\.weight' was added to Grows, replaced or unfrozen after"
    )


@pytest.mark.parametrize("how", ["added", "replaced", "unfrozen"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_epoch_start", "on_step_end", "on_epoch_end", None])
def test_a_parameter_that_comes_after_the_start_is_an_error_that_names_it(how: str, hook: str | None) -> None:
    with pytest.raises(ConfigError, match=told(how)):
        grown(None, how, hook, log_every=None)


def test_it_is_told_before_such_a_task_is_saved(tmp_path: Path) -> None:
    options = {"checkpoint": CheckpointConfig(every="3 steps", by=None), "run_dir": tmp_path, "max_steps": 4}
    with pytest.raises(ConfigError, match=told("added")):
        grown(None, "added", None, log_every=None, **options)
    assert not list((tmp_path / "checkpoints").glob("update-*"))


def test_it_is_told_at_the_next_log_point() -> None:
    updates: list[int] = []
    keep = LambdaCallback(on_step_end=lambda run: updates.append(run.progress.updates))
    with pytest.raises(ConfigError, match=told("unfrozen")):
        grown(None, "unfrozen", None, log_every="3 steps", callbacks=[keep])
    assert updates == [1, 2, 3]


def test_a_parameter_that_is_not_to_be_trained_may_come_at_any_time() -> None:
    grown(None, "frozen", "on_fit_start")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("kind", [DDP, FSDP])
@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_it_is_told_on_several_ranks_too(kind: Any, how: str) -> None:
    with pytest.raises(RuntimeError, match=told(how)):
        run_distributed(grown, kind, how, "on_epoch_end")


def gathers() -> int:
    gather = LambdaCallback(on_epoch_start=lambda run: run.engine.model.unshard())
    strategy = {"strategy": FSDP(world_size=2), "devices": 2, "log_every": "1 step"}
    trainer = quiet(max_epochs=2, validate_every="1 step", callbacks=[gather], **strategy)
    return trainer.fit(Regression(), pairs(8), pairs(4)).progress.updates


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_what_fsdp_puts_in_the_place_of_a_shard_for_a_while_does_not_count_as_new() -> None:
    assert run_distributed(gathers) == [4, 4]


# Prediction.


class Weighted(Regression):
    """Whose loss is a mean over something that only data with targets can tell."""

    def loss_weight(self, batch: Any) -> float:
        return float(batch[1].numel())


@pytest.mark.parametrize("hooks", [0, 1])
def test_a_prediction_does_not_count_and_takes_data_without_targets(hooks: int) -> None:
    task, data = Weighted(), [(torch.ones(3, FEATURES),), (torch.zeros(2, FEATURES),)]
    trainer = quiet(callbacks=[LambdaCallback(on_evaluation_step_end=lambda run: None)] * hooks)
    assert [len(each) for each in trainer.predict(task, data)] == [3, 2]


def test_a_prediction_ends_at_its_limit_and_says_what_is_wrong_with_its_data() -> None:
    assert len(quiet(limit_predict_batches=2).predict(Regression(), [torch.ones(1, FEATURES)] * 5)) == 2
    with pytest.raises(DataError, match="the predict data is empty"):
        quiet().predict(Regression(), [])
    with pytest.raises(DataError, match="batch 0 of epoch 0 of the predict data is a str"):
        quiet().predict(Regression(), ["text"])


class Made(list[Any]):
    """A list that makes its batches as they are asked for."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2, FEATURES), float(each)) for each in super().__iter__())


def test_a_prediction_reads_a_list_as_it_is_iterated_and_as_it_is_now() -> None:
    task = Regression()
    expected = [task(torch.full((2, FEATURES), float(each))).detach() for each in range(3)]
    torch.testing.assert_close(quiet().predict(task, Made(range(3))), expected)
    waits: list[str | None] = []

    class Slow(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                waits.append(feed.waiting())
                yield each

    feed = Feed(as_source(Slow([torch.ones(1, 1)] * 2), "predict", 0), Transfer(torch.device("cpu")))
    assert len(list(feed.micro_batches())) == 2
    assert waits == [f"batch {number} of epoch 0 of the predict data" for number in (0, 1)]
    ready = [torch.zeros(2, FEATURES)]
    source = as_source(ready, "predict", 0, in_order=True)
    ready.append(torch.ones(2, FEATURES))
    assert len(list(Feed(source, Transfer(torch.device("cpu"))).micro_batches())) == 2


class Drawing(Regression):
    """Predicts noise."""

    def predict_step(self, batch: Any) -> Any:
        return torch.rand(2)


def test_noise_of_a_prediction_follows_from_the_batchs_number_however_it_is_read() -> None:
    batches = [torch.zeros(2, FEATURES)] * 3
    plain = quiet().predict(Drawing(), batches)
    assert not torch.equal(plain[0], plain[1])
    for trainer, data in (
        (quiet(), Made(range(3))),
        (quiet(), iter(batches)),
        (quiet(callbacks=[LambdaCallback(on_evaluation_step_end=lambda run: torch.rand(1))]), batches),
    ):
        torch.testing.assert_close(trainer.predict(Drawing(), data), plain, rtol=0, atol=0)


def test_a_forward_that_a_callback_puts_in_its_place_predicts() -> None:
    def put(run: Any) -> None:
        run.task.forward = lambda features: features.sum()

    class Columns(Regression):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    data = [{"features": torch.full((1, FEATURES), float(each))} for each in range(3)]
    found = quiet(callbacks=[LambdaCallback(on_evaluation_start=put)]).predict(Columns(), data)
    assert [float(each) for each in found] == [0.0, FEATURES, 2.0 * FEATURES]
