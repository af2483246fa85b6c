"""The loops, as functions of a run.

Training is a generator: `fit` exhausts it, and whoever wants a loop of his own iterates over it, so both run
the same code. Evaluation and prediction are plain passes over their data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import shielded
from drivetrain.data import Feed, MicroBatch, to_host
from drivetrain.engine.first_step import checking_first_step
from drivetrain.engine.updater import Updater
from drivetrain.engine.weighting import StepResult
from drivetrain.run.evaluation_pass import EvaluationPass
from drivetrain.run.run import Run
from drivetrain.run.state import Evaluation
from drivetrain.task.attributes import generators_kept
from drivetrain.task.output import read_output
from drivetrain.task.task import modules_in_evaluation, overrides
from drivetrain.task.without_trace import without_trace

T = TypeVar("T")

Feeds = Sequence[tuple[str | None, Feed]]

_LEFT = "the loop was left by its caller"

_LOG = logger(__name__)

_NAMED = 8
"""The most modules that a message names."""


def train_steps(run: Run) -> Generator[StepResult, None, None]:
    """Train, yielding after every step; what the caller does in between is seen by validation and
    checkpoints.

    Raises:
        DataError: The data is empty or raised; names the batch.
        NonFiniteError: A loss was NaN or infinite.
        ConfigError: A metric that a callback decides by did not come.
    """
    progress, hooks, timing, train_step = run.progress, run.hooks, run.timing, _train_step(run)
    feed: Any = run.train_feed
    skips_bad_batches = feed.skips_bad_batches
    left = False
    _begin(run)
    while run.stop_reason is None:
        run.epoch_begun = progress.epoch
        with shielded():
            run.call(hooks.on_epoch_start)
        run.check_parameters()
        until = run.length.epochs_until(progress)
        windows = feed.windows(progress.epoch, progress.position, progress.epoch_batches, until)
        idle = progress.epoch_steps == 0
        while True:
            start = perf_counter()
            window = next(windows, None)
            fetched = perf_counter()
            timing["data"] += fetched - start
            if window is None:  # a resumed epoch that was over already
                _end_step(run, epoch_ended=True)
                break
            run.window = window
            run.milestones += 1
            for hook in hooks.on_step_start:
                hook(run)
            if run.result is None:  # the first step of this program
                with checking_first_step(run.engine):
                    run.result = train_step(window.micro_batches)
                _check_first_step(run, run.result)
            else:
                run.result = train_step(window.micro_batches)
            timing["compute"] += perf_counter() - fetched
            if skips_bad_batches:
                progress.bad_batches += run.engine.bad_batches(window.micro_batches)
            for hook in hooks.on_step_end:
                hook(run)
            idle = idle and not run.result.step_values
            if not left:
                try:
                    yield run.result
                except GeneratorExit:
                    # The loop was left here: what this step still owes, a log point, a validation, a save,
                    # is made up, so that a resumed run has all that the uninterrupted one has. Ranks whose
                    # loop goes on may be in the next step already, which they cannot make alone.
                    run.stop_now(_LEFT)
                    left, idle = True, False
            last = window.last  # of data without a length, this reads the next batch
            timing["data"] += window.waited
            if idle and last:
                raise _nothing_learned(run)
            if _end_step(run, last) or run.stop_reason is not None:
                break
        windows.close()
        run.agreed -= {"end_epoch"}  # of an epoch that has ended
    _end(run, left)


def _check_first_step(run: Run, result: StepResult) -> None:
    run.engine.ranks.compare_calls()  # compares the calls of all ranks
    if run.length.calendar.needs_tokens and result.applied and not run.progress.tokens:
        raise ConfigError(
            f"{type(run.task).__name__}.tokens counted none in the first step, and an interval or the length"
            " of the fit is in tokens"
        )


def _train_step(run: Run) -> Callable[[Sequence[MicroBatch]], StepResult]:
    return (run.engine.splitter or run.engine).train_step


def _end(run: Run, left: bool) -> None:
    """Log what is left, and call the hooks of the fit's end."""
    if not left:
        run.end_if_asked()
    run.engine.ranks.compare_calls()  # compares the calls of the last steps
    if run.evaluation_feeds and run.engine.ranks.size > 1 and _ends_itself(run):
        _agree_at_end(run)
    run.is_over = True
    run.log_training()
    run.nonfinite.check_end()
    run.engine.modes.evaluate()
    run.call(run.hooks.on_fit_end)
    if run.failure is not None:
        raise run.failure


def _begin(run: Run) -> None:
    _report_modes(run.task)
    run.call(run.hooks.on_fit_start)
    run.start()
    run.ledger.train()
    if run.sanity_batches is not None:
        check_validation(run, run.sanity_batches)
    if run.agreed and not run.progress.steps:
        _end_step(run, False)
    _pass_boundary(run)
    if run.stop_reason is None:
        run.stop_reason = run.length.limit_reached(run.progress)


def _report_modes(task: nn.Module) -> None:
    """Log which modules the program has put in evaluation mode; a warning, if parts of the model train so."""
    if not (found := modules_in_evaluation(task)):
        return
    parts = [each for each in found.values() if next(each.children(), None) is not None]
    trains = any(each.requires_grad for part in parts for each in part.parameters())
    names = ["the whole task" if not name else repr(name) for name in [*found][:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    _LOG.log(
        logging.WARNING if trains else logging.INFO,
        f"training starts with {', '.join(names)}{more} in evaluation mode, as eval() sets it: dropout is off"
        " there, and batch norms keep their statistics. Call train() before the fit to change it",
    )


def _nothing_learned(run: Run) -> DataError:
    return DataError(
        f"epoch {run.progress.epoch} made no step: none of its micro-batches had a loss to learn from."
        f" Either {type(run.task).__name__}.loss_weight gave 0 for all of them, or a generator training_step"
        " never yielded an optimizer's name and its loss, or none of them could be made (on_bad_batch='skip')"
    )


def _end_step(run: Run, epoch_ended: bool) -> bool:
    """Log, validate, end the epoch and save, in this order: each if it is due or a hook has asked for it.

    Each is done once. A request whose turn has passed counts for the next step, and in the last step for this
    one. Savers come last, so that they see what all others changed.

    Returns:
        Whether the epoch has ended: with its data, or because a hook asked for it.
    """
    epoch_ended, done = _note_due(run, epoch_ended), set[str]()
    if "log" in run.agreed:
        _log(run, done)
    if "validate" in run.agreed:
        _validate(run, done)
    if epoch_ended:
        _end_epoch(run)
    if done:
        run.agreed -= done
    _save(run)
    return epoch_ended


def _note_due(run: Run, epoch_ended: bool) -> bool:
    """Add to what the ranks have agreed on what is due after this step; return whether the epoch has ended.

    An end of the epoch is asked for before all else, which is due by epochs too.
    """
    progress, triggers, stopping = run.progress, run.triggers, run.stopping
    progress.seconds = perf_counter() - run.origin
    if run.by_time:
        run.sync_clock()
    if run.requests or stopping.shared or stopping.asked is not None:
        _agree(run)
    epoch_ended = epoch_ended or "end_epoch" in run.agreed
    progress.epoch += epoch_ended
    if run.postponed is not None:
        run.stop_if_postponed()
    if epoch_ended or run.result is None or run.result.applied:
        if triggers.log.every is not None and triggers.log.due(progress, epoch_ended):
            run.agreed |= {"log"}
        if triggers.validate.every is not None and triggers.validate.due(progress, epoch_ended):
            run.agreed |= {"validate"}
    return epoch_ended


def _log(run: Run, done: set[str]) -> None:
    run.log_training()
    done.add("log")
    _pass_boundary(run)


def _validate(run: Run, done: set[str]) -> None:
    if run.nonfinite.diverged is None:
        validate(run)
    done.add("validate")
    _pass_boundary(run)


def _end_epoch(run: Run) -> None:
    progress = run.progress
    with shielded():
        run.call(run.hooks.on_epoch_end)
    _pass_boundary(run)
    _pass_to_schedules(run, lambda updater: updater.end_epoch(progress.epoch, run.metrics))
    progress.position = progress.epoch_steps = progress.epoch_batches = 0


def _save(run: Run) -> None:
    """Call the savers; a fit that stops first logs and validates what is left."""
    limit = run.length.limit_reached(run.progress)
    if run.stop_reason is None:  # after the answer: a reason of the program's own comes before a limit
        run.stop_reason = limit
    stops = run.stop_reason is not None
    if stops:
        _meet_last_requests(run)
    if limit is not None:
        _log_at_limit(run)
    if stops:
        _validate_at_end(run)
    if run.hooks.on_save:
        run.saves_now = "save" in run.agreed
        run.agreed -= {"save"}
        for hook in run.hooks.on_save:
            hook(run)
    if run.requests or run.stopping.shared or run.stopping.asked is not None:
        _agree(run)
    if run.stop_reason is not None and not stops:  # asked for meanwhile: a run that stops is saved
        _validate_at_end(run)
        run.call(run.hooks.on_save)


def _meet_last_requests(run: Run) -> None:
    """Log and validate in the last step what hooks have asked for when its turn had passed."""
    done = set[str]()
    if "log" in run.agreed:
        _log(run, done)
    if "validate" in run.agreed:
        _validate(run, done)
    run.agreed -= done


def _log_at_limit(run: Run) -> None:
    """Log before the last save: a resume finds nothing to train, and logs nothing again."""
    if run.hooks.on_save:
        from drivetrain.run.checkpoint import unlogged_state

        run.unlogged = unlogged_state(run)
    run.is_over = True
    run.log_training()
    run.is_over = False  # the hooks of a validation and of savers may ask for more


def _validate_at_end(run: Run) -> None:
    """Validate a fit that ends without ever having validated; not one that a signal or its caller ends.

    Neither schedules nor early stopping count a validation that was not due: an uninterrupted fit that is
    longer never makes it.
    """
    never = run.triggers.validate.every is not None and not run.validated
    if run.stop_reason is not None and never and _ends_itself(run):
        validate(run, counts=False)


def _ends_itself(run: Run) -> bool:
    """Return whether a fit that has stopped was ended neither by a signal, its caller nor an error."""
    failed = run.failure is not None or run.nonfinite.diverged
    return not failed and run.stop_reason not in (_LEFT, *run.stopping.signals)


def _pass_boundary(run: Run) -> None:
    """Take what hooks have asked for on any rank, once all ranks have agreed on it."""
    if run.requests or run.stopping.shared or run.stopping.asked is not None:
        _agree(run)


def _agree(run: Run) -> None:
    """Pass a boundary; if all ranks meet there, gather their requests. See `Stopping`."""
    stopping = run.stopping
    stopping.passed += 1
    if stopping.shared and not stopping.meets():
        return
    mine, run.requests = run.requests, {}
    of_all = run.engine.ranks.all_gather((stopping.asked, mine))
    reason = stopping.agree(each for each, _ in of_all)
    run.stop_reason = run.stop_reason or reason
    run.agreed |= {
        name
        for _, asked in of_all
        for name, epoch in asked.items()
        if name != "end_epoch" or epoch == run.epoch_begun
    }


def _agree_at_end(run: Run) -> None:
    """Validate if a rank has asked for it when another had passed the last boundary already."""
    of_all = run.engine.ranks.all_gather("validate" in run.requests or "validate" in run.agreed)
    latest = run.latest if run.latest_at == run.progress.steps else {}
    if any(of_all) and not any(run.names.stage_of(name) == "validation" for name in latest):
        validate(run)


def validate(run: Run, counts: bool = True) -> None:
    """Validate in the middle of training, for callbacks and loggers, and for schedules if it `counts`."""
    with run.timed("evaluation"), shielded(), generators_kept(run.task):
        evaluator = run.evaluator
        values = evaluate(run, "validation", run.evaluation_feeds) if evaluator is None else evaluator()
    run.in_turn = counts
    run.validated = run.validated or counts
    if counts:
        _pass_to_schedules(run, lambda updater: updater.observe(values, run.progress))
    run.log_point(values)
    run.nonfinite.judge_values({name: each for name, each in values.items() if run.names.is_loss(name)})


def _pass_to_schedules(run: Run, act: Callable[[Updater], None]) -> None:
    """Step the schedules that are due; a value that was not logged ends the run once it is saved."""
    try:
        for updater in run.engine.updaters.values():
            act(updater)
    except ConfigError as error:
        run.fail(error)


def check_validation(run: Run, batches: int) -> None:
    """Validate on the first batches of each loader before training, so that a fault in validation shows now.

    Its values are dropped. Metrics, random streams, and the stages that have given values are as before, so
    that a callback that needs a validation's value waits for the first whole one.
    """
    before, stages = dict(run.metrics), set(run.names.stages)
    read = [feed.source.dataset for _, feed in run.evaluation_feeds]
    try:
        without = without_trace(run.task, *read, device=run.engine.device)
        with run.timed("evaluation"), without, run.discarding_media():
            evaluate(run, "validation", run.evaluation_feeds, sanity_batches=batches)
    except Exception as error:
        error.add_note(
            f"drivetrain: this was the short validation before training, on {batches} batches of each loader;"
            " Trainer(sanity_validation=None) leaves it out"
        )
        raise
    run.evaluation = Evaluation()
    run.metrics.clear()
    run.metrics.update(before)
    run.names.stages = stages


def evaluate(run: Run, stage: str, feeds: Feeds, sanity_batches: int | None = None) -> dict[str, float]:
    """Make one pass over evaluation data. Every sample counts once; training's random streams do not move.

    Args:
        feeds: The data by loader name, which is None if there is only one loader.
        sanity_batches: The number of batches of each loader, for the short validation before training. A
            reader of whole evaluations is left out.

    Returns:
        Weighted means of the step's values, and the declared metrics, by the names of the task's
        `metric_name`; then rank 0's values of what hooks logged during the evaluation.
    """
    engine, hooks = run.engine, run.hooks
    values: dict[str, float] = {}
    before, run.stage = run.stage, stage
    with engine.evaluating(getattr(run.task, f"{stage}_step")), run.collecting() as logged:
        run.evaluation = Evaluation(is_sanity_check=sanity_batches is not None)
        run.call(hooks.on_evaluation_start)
        passes: list[Evaluation] = []
        for loader, feed in feeds:
            start = perf_counter()
            named = run.names.named(_evaluate_loader(run, loader, feed, sanity_batches), stage, loader)
            run.evaluation.seconds = perf_counter() - start
            passes.append(replace(run.evaluation, values=named))
            values.update(named)
        _end_evaluation(run, values, passes, logged)
    run.stage = before  # not after an error, whose report names the stage
    return values


def _end_evaluation(
    run: Run, values: dict[str, float], passes: Sequence[Evaluation], logged: Mapping[str, float]
) -> None:
    """Give the hooks an evaluation's values, and add what they log to them."""
    run.metrics.update(values)
    run.evaluation = replace(run.evaluation, values=values, passes=passes)
    run.call(run.hooks.on_evaluation_end)
    values.update(run.engine.ranks.first(lambda: dict(logged)))
    run.metrics.update(values)


def _evaluate_loader(run: Run, loader: str | None, feed: Feed, limit: int | None) -> dict[str, float]:
    after_step, batches = run.hooks.on_evaluation_step_end, feed.batches_per_epoch
    if limit is not None:
        batches = limit = min(limit, batches or limit)
    run.evaluation = Evaluation(loader, 0, batches, is_sanity_check=limit is not None)
    run.milestones += 1
    with ExitStack() as stack:
        made = EvaluationPass(run, limit is None, stack)
        outputs = _outputs(run, feed.micro_batches(limit=limit), run.engine.evaluation_step)
        for number, (micro_batch, returned) in enumerate(outputs):
            if returned is not None:
                made.take(micro_batch, number, returned)
            if made.needs_all:
                made.end_round()
            if after_step and returned is not None:
                run.call_about(micro_batch.batch, returned[3], after_step)
        return made.values()


def _outputs(
    run: Run, micro_batches: Iterable[MicroBatch], step: Callable[[MicroBatch, int], T]
) -> Iterator[tuple[MicroBatch, T | None]]:
    """Yield the micro-batches of an evaluation or a prediction, with what the step returns for each.

    None comes with a placeholder, of a rank that has no samples left. If the model is sharded, its step runs
    too, because all ranks run every forward.
    """
    evaluation, sharded = run.evaluation, run.engine.strategy.sharded
    for number, micro_batch in enumerate(micro_batches):
        evaluation.batch, evaluation.is_placeholder = number, micro_batch.is_placeholder
        if not micro_batch.is_placeholder:  # this rank has samples left
            evaluation.samples += micro_batch.samples
            yield micro_batch, step(micro_batch, number)
        else:
            if sharded:
                step(micro_batch, number)
            yield micro_batch, None
    evaluation.is_placeholder = False


def predict(
    run: Run, feed: Feed, values: dict[str, float] | None = None, sizes: list[int] | None = None
) -> Generator[Any, None, None]:
    """Yield the outputs of every batch, on the CPU, in the data's order, those of all ranks on every rank.

    Args:
        values: Gets the values of a validation on the same data, by name, at the end; None makes none.
        sizes: Gets the number of samples of each batch before its outputs are yielded.
    """
    engine, after_step, ranks = run.engine, run.hooks.on_evaluation_step_end, run.engine.data_ranks
    run.stage = "predict"
    step = run.task.predict_step if values is None else _validating(run)
    with engine.evaluating(step), run.collecting() as logged, ExitStack() as stack:
        run.evaluation = Evaluation(None, 0, feed.batches_per_epoch)
        run.call(run.hooks.on_evaluation_start)
        made = None if values is None else EvaluationPass(run, True, stack)
        for micro_batch, mine in _outputs(run, feed.micro_batches(), _predicting(run, made)):
            if made is not None and made.needs_all:
                made.end_round()
            if after_step:
                run.call_about(micro_batch.batch, None if mine is None else mine[0], after_step)
            # In one global micro-batch the ranks hold consecutive samples: their order is the data's.
            for each in (mine,) if ranks.alone else ranks.all_gather(mine):
                if each is not None:
                    if sizes is not None:
                        sizes.append(each[1])
                    yield each[0]
        if made is None or values is None:
            run.call(run.hooks.on_evaluation_end)
        else:
            values.update(run.names.named(made.values(), "validation", None))
            _end_evaluation(run, values, (), logged)


def _validating(run: Run) -> Callable[[Any], tuple[Any, Any]]:
    """Return a step that returns what `validation_step` and `predict_step` return; a task with neither of its
    own runs its forward once.
    """
    task, engine = run.task, run.engine

    def once(batch: Any) -> tuple[Any, Any]:
        evaluated = task.validation_step(batch)
        return evaluated, evaluated.outputs

    def both(batch: Any) -> tuple[Any, Any]:
        evaluated = task.validation_step(batch)
        engine.streams.seed_evaluation(run.evaluation.batch)  # each draws as it does alone
        return evaluated, task.predict_step(batch)

    return both if overrides(task, "validation_step") or overrides(task, "predict_step") else once


def _predicting(run: Run, made: EvaluationPass | None) -> Callable[[MicroBatch, int], tuple[Any, int]]:
    """Return a step that returns the outputs for a batch on the host, and its number of samples.

    Args:
        made: The pass that takes what the batch's validation step returns, if it is evaluated too.
    """
    engine = run.engine

    def predicted(micro_batch: MicroBatch, number: int) -> tuple[Any, int]:
        engine.streams.seed_evaluation(number)
        return to_host(engine.evaluate_step(micro_batch.batch)), micro_batch.samples

    def predicted_and_evaluated(micro_batch: MicroBatch, number: int) -> tuple[Any, int]:
        assert made is not None
        engine.streams.seed_evaluation(number)
        evaluated, outputs = engine.evaluate_step(micro_batch.batch)
        if not micro_batch.is_placeholder:
            made.take(micro_batch, number, read_output(evaluated))
        return to_host(outputs), micro_batch.samples

    return predicted if made is None else predicted_and_evaluated
