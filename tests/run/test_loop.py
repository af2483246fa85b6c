"""The loops: the order of the hooks, limits, stopping, and what evaluation leaves alone."""

import copy
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.drawing import Play, drawing, drawn_hooks
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import FEATURES, Regression, pairs, quiet, variant
from torch import Tensor, nn

import drivetrain
from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
)
from drivetrain.run.hooks import HOOKS
from drivetrain.testing import run_distributed

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
SAVES = CheckpointConfig(every="1 step", by=None)


class Recorder(Callback):  # notes every hook that is called
    def __init__(self) -> None:
        self.called: list[str] = []
        for hook in HOOKS:
            setattr(self, hook, lambda run, hook=hook: self.called.append(hook))


def recorded(tmp_path: Path, resume: str | None = None, **options: Any) -> list[str]:
    recorder = Recorder()
    checkpoint = CheckpointConfig(every="2 steps", by=None)
    options = {"gradient_accumulation_steps": 2, "checkpoint": checkpoint, "run_dir": tmp_path, **options}
    quiet(callbacks=[recorder], **options).fit(Regression(), pairs(10), pairs(5), resume=resume)
    return recorder.called


def steps_at(hook: str, **options: Any) -> list[int]:
    seen: list[int] = []
    note = LambdaCallback(**{hook: lambda run: seen.append(run.progress.steps)})
    quiet(callbacks=[note], **options).fit(Regression(), pairs(10), pairs(4))
    return seen


def test_every_hook_stands_in_the_drawing() -> None:
    assert drawn_hooks(drawing()) == set(HOOKS)
    assert set(HOOKS) == {name for name in vars(Callback) if name.startswith("on_")}


def test_hooks_are_called_as_the_drawing_says(tmp_path: Path) -> None:
    """Epochs of 3 steps (5 micro-batches, 2 a step); the third and sixth log, and so does the end."""
    play = Play([3, 3], validates={3, 6}, logs={3, 6}, saves={2, 4, 6}, batches=3)
    assert recorded(tmp_path / "whole", max_epochs=2, log_every=3) == play.hooks()
    # Resumed in the middle of the second epoch: the epoch begins again for the callbacks.
    recorded(tmp_path / "parts", max_steps=4, log_every=2)
    play = Play([3, 3], validates={6}, logs={6}, saves={6}, batches=3, resumed_after=4)
    assert recorded(tmp_path / "parts", "auto", max_epochs=2, log_every=2) == play.hooks()
    # Several validations in an epoch.
    play = Play([3], validates={1, 2, 3}, logs={3}, saves={2, 3}, batches=3)
    assert recorded(tmp_path / "often", max_epochs=1, log_every=3, validate_every="1 step") == play.hooks()


def seen_by_hooks(strategy: str) -> None:
    seen: list[tuple[str, Any, Any]] = []

    def note(run: Any) -> None:
        assert not run.outputs.requires_grad
        seen.append((run.stage, run.batch[0], run.outputs))

    def left(run: Any) -> None:
        assert run.batch is run.outputs is None

    hooks = {"on_micro_batch_end": note, "on_evaluation_step_end": note, "on_step_end": left, "on_log": left}
    task = Regression(optimizer=OptimizerConfig("sgd", lr=0.0))
    both = {"gradient_accumulation_steps": 2, "callbacks": [LambdaCallback(**hooks)], "strategy": strategy}
    trainer = quiet(max_epochs=1, **both)
    trainer.fit(task, pairs(8, 2), pairs(4, 2))
    trainer.predict(task, pairs(4, 2))
    per_rank = 2 // drivetrain.world_size()
    stages = ["train"] * 2 * per_rank + ["validation"] * per_rank + ["predict"] * per_rank
    assert [stage for stage, *_ in seen] == stages
    for _, features, outputs in seen:
        torch.testing.assert_close(outputs, task(features).detach())


def test_hooks_see_the_batch_and_the_outputs_that_they_are_about() -> None:
    seen_by_hooks("single")
    on_two_ranks(seen_by_hooks, "fsdp")


def test_on_micro_batch_end_skips_placeholders_and_counts_each_loss_of_a_generator_step() -> None:
    def step(self: Any, batch: Any) -> Any:
        yield "first", self.loss(self(batch[0]), batch)
        yield "second", self.loss(self(batch[0]), batch)

    data = list(pairs(8))
    optimizers = {
        name: OptimizerConfig("sgd", lr=0.1, parameters=[f"line.{each}"])
        for name, each in (("first", "weight"), ("second", "bias"))
    }
    two = variant(training_step=step)(optimizers)
    weightless = variant(loss_weight=lambda self, batch: 0.0 if batch[0] is data[0][0] else 2.0)()
    for task, expected in ((two, 4), (weightless, 1)):
        called: list[Any] = []
        hooks = [LambdaCallback(on_micro_batch_end=called.append)]
        options: dict[str, Any] = {"gradient_accumulation_steps": 2, "limit_train_batches": 2}
        quiet(max_epochs=1, callbacks=hooks, **options).fit(task, data)
        assert len(called) == expected


def test_validate_test_and_predict_call_the_hooks_of_evaluation_alone() -> None:
    for verb in ("validate", "test", "predict"):
        recorder = Recorder()
        getattr(quiet(callbacks=[recorder]), verb)(Regression(), pairs(5))
        steps = ["on_evaluation_step_end"] * 3
        assert recorder.called == ["on_evaluation_start", *steps, "on_evaluation_end"]


def test_what_nests_ends_in_the_reverse_order_and_savers_last() -> None:
    called: list[tuple[str, str]] = []
    hooks = [name for name in HOOKS if name.endswith(("_start", "_end")) and "evaluation_step" not in name]

    def noting(name: str, *more: str) -> Callback:
        return LambdaCallback(
            **{hook: lambda run, hook=hook: called.append((hook, name)) for hook in (*hooks, *more)}
        )

    callbacks = [noting("outer"), noting("inner"), noting("saver", "on_save")]
    quiet(max_steps=1, callbacks=callbacks).fit(Regression(), pairs(2), pairs(2))
    for hook in hooks:
        expected = ["outer", "inner", "saver"]
        if hook in ("on_step_end", "on_epoch_end", "on_evaluation_end"):
            expected = expected[::-1]
        elif hook == "on_fit_end":
            expected = ["inner", "outer", "saver"]
        assert [name for each, name in called if each == hook] == expected, hook


def test_a_checkpoint_has_what_callbacks_changed_in_on_step_end(tmp_path: Path) -> None:
    change = LambdaCallback(on_step_end=lambda run: nn.init.constant_(run.task.line.bias, 42.0))
    quiet(max_steps=3, callbacks=[change], checkpoint=SAVES, run_dir=tmp_path).fit(Regression(), pairs())
    assert Regression.from_checkpoint(str(tmp_path)).line.bias.tolist() == [42.0]


def test_gradients_in_on_before_optimizer_step_are_averaged_unscaled_and_unclipped() -> None:
    seen: dict[str, Tensor] = {}
    look = LambdaCallback(
        on_before_optimizer_step=lambda run: seen.setdefault("weight", run.task.line.weight.grad.clone())
    )
    task = Regression()
    batch = next(iter(pairs(8, 8)))
    task.loss(task(batch[0]), batch).backward()
    options: dict[str, Any] = {"max_grad_norm": 1e-3, "gradient_accumulation_steps": 4}
    quiet(max_steps=1, callbacks=[look], **options).fit(Regression(), pairs(8))
    torch.testing.assert_close(seen["weight"], task.line.weight.grad, rtol=1e-5, atol=0)


def test_three_steps_equal_three_by_hand_with_momentum_accumulation_and_clipping() -> None:
    """Windows of four samples in two micro-batches, and a short one of a single sample."""

    def sgd(parameters: Any) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    task, plain = Regression(sgd), Regression()
    result = quiet(max_steps=3, gradient_accumulation_steps=2, max_grad_norm=0.1).fit(task, pairs(9))
    features, target = pairs(9).dataset.tensors  # type: ignore[attr-defined]
    optimizer = sgd(plain.parameters())
    for window in (slice(0, 4), slice(4, 8), slice(8, 9)):
        optimizer.zero_grad()
        plain.loss(plain(features[window]), (None, target[window])).backward()
        assert nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        optimizer.step()
    torch.testing.assert_close(task.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert (result.progress.steps, result.progress.epoch, result.progress.samples) == (3, 1, 9)


def test_max_steps_counts_steps_and_max_epochs_counts_passes() -> None:
    result = quiet(max_steps=7, gradient_accumulation_steps=2).fit(Regression(), pairs(10))
    assert (result.progress.steps, result.progress.epoch) == (7, 2)
    assert result.stop_reason == "max_steps=7 reached"
    result = quiet(max_epochs=3).fit(Regression(), pairs(10))
    assert (result.progress.steps, result.progress.epoch, result.progress.samples) == (15, 3, 30)
    assert result.stop_reason == "max_epochs=3 reached"
    # The first limit that is reached counts.
    assert quiet(max_epochs=3, max_steps=4).fit(Regression(), pairs(10)).progress.steps == 4
    assert quiet(max_epochs=1, max_steps=400).fit(Regression(), pairs(10)).progress.steps == 5


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (2.5, 8), (1.9, 6), (2.0, 6)])
def test_max_epochs_may_be_a_fraction(epochs: float, steps: int) -> None:
    options: Any = {"max_epochs": epochs, "gradient_accumulation_steps": 2}
    result = quiet(**options).fit(Regression(), pairs(10))  # two full windows and a short one
    assert result.progress.steps == steps
    assert result.stop_reason == f"max_epochs={epochs:g} reached"
    assert quiet(**options).plan(Regression(), pairs(10)).steps == steps


def test_a_fraction_of_an_epoch_counts_skipped_steps_and_resumes(tmp_path: Path) -> None:
    batches = [(torch.full((2, 4), value), torch.zeros(2, 1)) for value in (1.0, float("nan"), 2.0, 1.0)]
    options: Any = {"on_nonfinite": "skip", "checkpoint": True, "run_dir": tmp_path}
    first = quiet(max_epochs=0.75, **options).fit(Regression(), batches)
    assert (first.progress.steps, first.progress.skipped, first.progress.epoch_batches) == (2, 1, 3)
    with pytest.raises(CheckpointError, match=r"past the end of this run.*max_epochs=0\.5"):
        quiet(max_epochs=0.5, **options).fit(Regression(), batches, resume="auto")
    second = quiet(max_epochs=1.25, **options).fit(Regression(), batches, resume="auto")
    assert (second.progress.steps, second.progress.epoch, second.progress.epoch_batches) == (4, 1, 1)


def test_max_time_ends_a_fit_and_counts_over_resumes(tmp_path: Path) -> None:
    def pass_20_hours(run: Any) -> None:
        run.origin -= 20 * 3600.0

    options: Any = {"callbacks": [LambdaCallback(on_step_start=pass_20_hours)]}
    for limit in (180_000, "50 hours", timedelta(hours=50)):
        result = quiet(max_time=limit, **options).fit(Regression(), pairs(10))
        assert result.progress.steps == 3
        assert result.stop_reason in ("max_time=50 hours reached", "max_time=180000 seconds reached")
    options |= {"max_time": "50 hours", "checkpoint": True, "run_dir": tmp_path}
    for limit, steps in ((1, 1), (9, 3)):
        trainer = quiet(max_steps=limit, **options)
        assert trainer.fit(Regression(), pairs(10), resume="auto").progress.steps == steps


def test_limits_of_batches_are_numbers_or_fractions_by_stage() -> None:
    counts = dict.fromkeys(("train", "validation", "test", "predict"), 0)

    def count(run: Any) -> None:
        counts[run.stage] += 1

    hooks = [LambdaCallback(on_step_end=count, on_evaluation_step_end=count)]
    limits: Any = {"train": 4, "validation": 1, "test": 2, "predict": 3}
    limits = {f"limit_{stage}_batches": limit for stage, limit in limits.items()}
    trainer = quiet(max_epochs=2, callbacks=hooks, **limits)
    result = trainer.fit(Regression(), pairs(12), pairs(12))
    assert (result.progress.epoch, result.progress.samples) == (2, 16)
    trainer.test(Regression(), pairs(12))
    assert len(trainer.predict(Regression(), pairs(12))) == 3
    assert counts == {"train": 8, "validation": 2, "test": 2, "predict": 3}

    counts.update(dict.fromkeys(counts, 0))
    limits = {"limit_train_batches": 0.7, "limit_validation_batches": 0.1, "limit_predict_batches": 0.5}
    trainer = quiet(max_epochs=2, callbacks=hooks, **limits)
    assert trainer.fit(Regression(), pairs(20), {"a": pairs(8), "b": pairs(60)}).progress.epoch == 2
    assert trainer.plan(Regression(), pairs(20)).steps == 14
    trainer.predict(Regression(), pairs(10))
    assert counts == {"train": 14, "validation": 2 * (1 + 3), "test": 0, "predict": 2}


def test_run_stop_ends_a_fit_and_the_first_reason_counts() -> None:
    def stop(run: Any) -> None:
        if run.progress.steps == 3:
            run.stop("enough")
            run.stop("too late")

    result = quiet(max_epochs=9, callbacks=[LambdaCallback(on_step_end=stop)]).fit(Regression(), pairs(10))
    assert (result.stop_reason, result.progress.steps) == ("enough", 3)
    # Before the first step nothing is trained.
    task = Regression()
    before = weights(task)
    first = LambdaCallback(on_fit_start=lambda run: run.stop("no need"))
    result = quiet(max_epochs=9, callbacks=[first]).fit(task, pairs(10))
    assert (result.stop_reason, result.progress.steps) == ("no need", 0)
    assert weights(task) == before


class Frozen(Regression):  # batch statistics that are kept as they are, and others that are not
    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.free = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.fixed.eval()

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.free(self.fixed(features)))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_is_in_evaluation_mode_and_leaves_modes_gradients_and_statistics(verb: str) -> None:
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
    def fail(self: Any, batch: Any) -> Tensor:
        raise RuntimeError("planted")

    task = variant(validation_step=fail)()
    with pytest.raises(RuntimeError, match="planted"):
        quiet().validate(task, pairs(6))
    assert task.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_validate_weighs_every_sample_alike_whatever_the_size_of_the_batches(batch_size: int) -> None:
    """Without dropout, and not as a mean of the batches, whose last one is shorter."""
    task = Regression(dropout=0.5)
    for count in (1, 3, 7, 9):
        features, target = pairs(count).dataset.tensors  # type: ignore[attr-defined]
        right = (task.line(features) - target).square().mean().item()
        for drop_last in (False, True):  # which holds for training alone
            found = quiet().validate(task, pairs(count, batch_size, drop_last=drop_last))
            assert found == {"validation/loss": pytest.approx(right, rel=1e-6)}, count


@pytest.mark.parametrize("every", ["1 epoch", "100 steps", "1 hour"])
def test_a_fit_with_validation_data_validates_at_least_once(every: str, tmp_path: Path) -> None:
    trainer = quiet(max_steps=3, validate_every=every, checkpoint=True, run_dir=tmp_path)
    result = trainer.fit(Regression(), pairs(10), pairs(4))
    assert "validation/loss" in result.metrics
    assert result.best_checkpoint == result.last_checkpoint  # saved after it
    result = quiet(max_steps=3, validate_every=None).fit(Regression(), pairs(10), pairs(4))
    assert "validation/loss" not in result.metrics


def test_validate_from_and_log_first_step_decide_when_as_the_plan_says() -> None:
    options: Any = {"max_epochs": 3, "validate_every": "4 steps", "validate_from": "2 epochs"}
    assert steps_at("on_evaluation_end", **options) == [12]
    plan = quiet(**options).plan(Regression(), pairs(10), pairs(4)).validation
    assert (plan.times, plan.first, plan.last) == (1, 12, 12)
    options = {"max_steps": 5, "log_every": "4 steps", "log_first_step": True, "validate_every": None}
    assert steps_at("on_log", **options) == [1, 4, 5]
    assert quiet(**options).plan(Regression(), pairs(10)).logging.times == 2


def test_listed_steps_validate_and_save_also_before_the_first_step_and_once(tmp_path: Path) -> None:
    validated: list[int] = []
    note = LambdaCallback(on_evaluation_end=lambda run: validated.append(run.progress.steps))
    for steps, resume, found in ((3, None, [0, 1, 3]), (6, "auto", [0, 1, 3, 5])):
        saves = CheckpointConfig(every=[0, 1, 3, 5], keep_last=None)
        options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": saves, "validate_every": [0, 1, 3, 5]}
        trainer = quiet(max_steps=steps, callbacks=[note], sanity_validation=None, **options)
        plan = trainer.plan(Regression(), pairs(), pairs(4))
        assert (plan.validation.first, plan.validation.times, plan.saving.first) == (0, len(found), 0)
        trainer.fit(Regression(), pairs(), pairs(4), resume=resume)
        assert validated == found
        saved = sorted(int(each.name[5:]) for each in (tmp_path / "checkpoints").glob("step-*"))
        assert saved == sorted({*found, steps} | ({3} if resume else set()))


def test_training_is_logged_at_the_end_of_epochs_and_as_an_interval_that_is_given_says() -> None:
    class Stream:  # of no known length
        def __iter__(self) -> Iterator[Any]:
            return iter(pairs(12))

    for data, options, points, planned in (
        (pairs(12), {}, [6, 6, 12, 12], 2),
        (Stream(), {}, [6, 6, 12, 12], None),
        (pairs(12), {"log_every": "50 steps"}, [6, 12, 12], 0),
        (pairs(120), {}, [50, 60, 60, 100, 120, 120], 4),
        (
            pairs(120),
            {"max_epochs": 5, "validate_every": None},
            [50, 60, 100, 120, 150, 180, 200, 240, 250, 300],
            10,
        ),
    ):
        seen: list[int] = []
        note = LambdaCallback(on_log=lambda run, seen=seen: seen.append(run.progress.steps))
        trainer = quiet(callbacks=[note], **{"max_epochs": 2, **options})
        trainer.fit(Regression(), data, pairs(2))
        assert seen == points, options
        assert trainer.plan(Regression(), data, pairs(2)).logging.times == planned


def test_a_fit_that_has_validated_does_not_do_so_again_at_its_end(tmp_path: Path) -> None:
    options: Any = {"validate_every": "4 steps"}
    assert recorded(tmp_path, max_steps=6, **options).count("on_evaluation_end") == 1
    assert recorded(tmp_path, "auto", max_steps=7, **options).count("on_evaluation_end") == 0


def test_a_fit_that_run_stop_ends_validates_but_not_a_loop_that_is_left() -> None:
    for hook in ("on_step_end", "on_save"):
        stop = LambdaCallback(**{hook: lambda run: run.stop("enough")})
        result = quiet(callbacks=[stop], max_epochs=1).fit(Regression(), pairs(), pairs())
        assert "validation/loss" in result.metrics
    called: list[str] = []
    note = LambdaCallback(on_evaluation_start=lambda run: called.append(run.stage))
    for _ in quiet(callbacks=[note], max_epochs=1).steps(Regression(), pairs(), pairs()):
        break
    assert called == []


def looped(leave_at: dict[int, int], run_dir: Path, error: type[Exception] | None = None) -> Any:
    """A loop that ranks leave at a step, by `break` or by an error; what this one saw, and the end."""
    rank, seen, ends = torch.distributed.get_rank(), list[Any](), list[Any]()
    note = LambdaCallback(
        on_fit_end=lambda run: ends.append((run.progress.steps, run.stop_reason, run.last_checkpoint))
    )
    checkpoint = CheckpointConfig(every=None, by=None)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "checkpoint": checkpoint, "run_dir": run_dir}
    task = Regression()
    try:
        for result in quiet(max_epochs=3, callbacks=[note], **options).steps(task, pairs(12)):
            seen.append(result.step)
            if result.step == leave_at.get(rank):
                if error is not None:
                    raise error("planted")
                break
    except ValueError as caught:
        seen.append(str(caught).splitlines()[0])
    return seen, ends, weights(task)


@needs_gloo
def test_a_steps_loop_that_a_rank_leaves_ends_on_all_after_the_same_step(tmp_path: Path) -> None:
    cases = [{0: 1}, {1: 1}, {1: 2}, {0: 3, 1: 4}, {0: 4, 1: 4}, {0: 2, 1: 2}]  # an epoch has three steps
    every = on_two_ranks(lambda: [looped(each, tmp_path / str(at)) for at, each in enumerate(cases)])
    for leave_at, *found in zip(cases, *every, strict=True):
        (_, [(steps, reason, saved)], trained), (_, *other) = found
        assert other == [[(steps, reason, saved)], trained]
        assert reason == "the loop was left by its caller"
        assert saved.endswith(f"step-{steps:08d}")
        first = min(leave_at.values())
        together = len(set(leave_at.values())) < len(leave_at)
        assert steps == first + 1 if together else steps - first in (1, 2)
        for rank, (seen, *_) in enumerate(found):
            assert seen == list(range(min(leave_at.get(rank, steps) + 1, steps)))


@needs_gloo
def test_an_error_in_the_body_of_a_steps_loop_on_one_rank_ends_the_run_in_order(tmp_path: Path) -> None:
    (_, *ended), (seen, *other) = on_two_ranks(looped, {1: 2}, tmp_path, ValueError)
    assert seen == [0, 1, 2, "planted"]
    assert ended == other


# Gets a parameter, or has one replaced or unfrozen, in its second step or by a callback's hand.
class Grows(Regression):
    def __init__(self, how: str, in_step: bool = False) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1).requires_grad_(False)
        self.how, self.in_step, self.steps = how, in_step, 0

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self.in_step and self.steps == 2:
            self.grow()
        return super().training_step(batch)

    def forward(self, features: Any) -> Any:
        used = [each.weight.sum() for each in (self.other, getattr(self, "late", None)) if each is not None]
        return super().forward(features) + (0.0 if self.how == "copied" else 0.0 * sum(used))

    def grow(self) -> None:
        if hasattr(self, "late") or self.other.weight.requires_grad:
            return
        if self.how == "unfrozen":
            self.other.requires_grad_(True)
        elif self.how == "copied":
            self.late = copy.deepcopy(self.line)
        else:
            late = nn.Linear(1, 1).requires_grad_(self.how != "frozen")
            setattr(self, "other" if self.how == "replaced" else "late", late)


def grown(how: str, hook: str | None, **options: Any) -> None:
    callbacks = [] if hook is None else [LambdaCallback(**{hook: lambda run: run.task.grow()})]
    trainer = quiet(**{"max_epochs": 2, "callbacks": callbacks, **options})
    trainer.fit(Grows(how, in_step=hook is None), pairs(8), pairs(4))


def told(how: str) -> str:
    name = "late" if how == "added" else "other"
    return f"'{name}.weight' was added to Grows, replaced or unfrozen after"


def test_a_parameter_that_comes_after_the_start_is_refused_by_name(tmp_path: Path) -> None:
    hooks = ("on_fit_start", "on_epoch_start", "on_step_end", "on_epoch_end", None)
    cases = [(how, hook) for how in ("added", "replaced", "unfrozen") for hook in hooks]
    table: dict[str, tuple[Any, ...]] = {
        f"{how} in {hook}": (lambda c=(how, hook): grown(*c, log_every=None), told(how))
        for how, hook in cases
    }
    assert_refused(ConfigError, table)
    # Before such a task is saved, and at the next log point.
    saves = {"checkpoint": CheckpointConfig(every="3 steps", by=None), "run_dir": tmp_path, "max_steps": 4}
    steps: list[int] = []
    keep = LambdaCallback(on_step_end=lambda run: steps.append(run.progress.steps))
    wrong: dict[str, tuple[Any, ...]] = {
        "saved": (lambda: grown("added", None, log_every=None, **saves), told("added")),
        "logged": (lambda: grown("unfrozen", None, log_every=3, callbacks=[keep]), told("unfrozen")),
    }
    assert_refused(ConfigError, wrong)
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert steps == [1, 2, 3]
    for how in ("frozen", "copied"):  # what is not trained by any optimizer may come at any time
        grown(how, "on_epoch_start")


def gathers() -> int:
    gather = LambdaCallback(on_epoch_start=lambda run: run.engine.model.unshard())
    strategy = {"strategy": "fsdp", "devices": 2, "log_every": "1 step"}
    trainer = quiet(max_epochs=2, validate_every="1 step", callbacks=[gather], **strategy)
    return trainer.fit(Regression(), pairs(8), pairs(4)).progress.steps


@needs_gloo
def test_a_parameter_that_comes_after_the_start_is_refused_on_several_ranks() -> None:
    options = {"strategy": "fsdp", "devices": 2}
    with pytest.raises(RuntimeError, match=told("unfrozen")):
        run_distributed(lambda: grown("unfrozen", "on_epoch_end", **options))
    # What FSDP puts in the place of a shard for a while does not count as new.
    assert on_two_ranks(gathers) == [4, 4]


@pytest.mark.parametrize("hooks", [0, 1])
def test_predict_takes_data_without_targets_and_asks_for_no_loss_weight(hooks: int) -> None:
    task = variant(loss_weight=lambda self, batch: float(batch[1].numel()))()
    data = [(torch.ones(3, FEATURES),), (torch.zeros(2, FEATURES),)]
    trainer = quiet(callbacks=[LambdaCallback(on_evaluation_step_end=lambda run: None)] * hooks)
    assert [len(each) for each in trainer.predict(task, data)] == [3, 2]
    assert len(quiet(limit_predict_batches=2).predict(Regression(), [torch.ones(1, FEATURES)] * 5)) == 2


class Made(list[Any]):  # a list that makes its batches as they are asked for
    def __iter__(self) -> Iterator[Any]:
        return (torch.full((2, FEATURES), float(each)) for each in super().__iter__())


def test_predict_reads_a_list_as_it_is_iterated() -> None:
    task = Regression()
    expected = [task(torch.full((2, FEATURES), float(each))).detach() for each in range(3)]
    torch.testing.assert_close(quiet().predict(task, Made(range(3))), expected)


def test_noise_of_predict_follows_from_the_number_of_the_batch_however_it_is_read() -> None:
    task = variant(predict_step=lambda self, batch: torch.rand(2))()
    batches = [torch.zeros(2, FEATURES)] * 3
    plain = quiet().predict(task, batches)
    assert not torch.equal(plain[0], plain[1])
    draws = LambdaCallback(on_evaluation_step_end=lambda run: torch.rand(1))
    for trainer, data in (
        (quiet(), Made(range(3))),
        (quiet(), iter(batches)),
        (quiet(callbacks=[draws]), batches),
    ):
        torch.testing.assert_close(trainer.predict(task, data), plain, rtol=0, atol=0)


def test_predict_takes_a_forward_that_a_callback_has_replaced() -> None:
    def put(run: Any) -> None:
        run.task.forward = lambda features: features.sum()

    data = [{"features": torch.full((1, FEATURES), float(each))} for each in range(3)]
    found = quiet(callbacks=[LambdaCallback(on_evaluation_start=put)]).predict(Regression(), data)
    assert [float(each) for each in found] == [0.0, FEATURES, 2.0 * FEATURES]


def test_a_step_is_5_frames_below_fit_and_a_write_of_a_checkpoint_12(tmp_path: Path) -> None:
    package, depths = str(Path(drivetrain.__file__).parent), dict[str, int]()

    def note(frame: FrameType | None, event: str, _: object) -> None:
        assert frame is not None
        name = frame.f_code.co_name
        if event == "call" and name in ("training_step", "write_chunks"):
            found: list[str] = []
            while frame is not None:
                found += [frame.f_code.co_name] * frame.f_code.co_filename.startswith(package)
                frame = frame.f_back
            if "train_steps" in found:
                depth = found.index("fit") + 1  # the first step is one deeper, for its checks
                depths[name] = min(depth, depths.get(name, depth))

    before = sys.getprofile()
    try:
        sys.setprofile(note)
        quiet(max_steps=2, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    finally:
        sys.setprofile(before)
    # The step's own frame, which is the user's where a task overrides it, is the fifth.
    assert depths["training_step"] <= 5
    assert depths["write_chunks"] <= 12
