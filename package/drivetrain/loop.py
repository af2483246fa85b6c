"""The loops, as functions of a run.

Training is a generator: `fit` exhausts it, and whoever wants a loop of his own iterates over it, so both run
the same code. Evaluation and prediction are plain passes over their data.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from drivetrain.data import Feed, MicroBatch, to_host
from drivetrain.declared_metrics import joined
from drivetrain.distributed.last_words import tell_training
from drivetrain.errors import DataError
from drivetrain.metrics import MetricBuffer, is_loss
from drivetrain.progress import Progress
from drivetrain.run import Evaluation, Run, Totals
from drivetrain.step_output import StepValues
from drivetrain.streams import shielded
from drivetrain.token_weight import first_step
from drivetrain.window import StepResult

Feeds = Sequence[tuple[str | None, Feed]]

_LEFT = "the loop was left by its caller"


def train_steps(run: Run) -> Generator[StepResult, None, None]:
    """Train, yielding after every update; what the caller does in between is seen by validation and
    checkpoints.

    Raises:
        DataError: The data is empty or raised; names the batch.
        NonFiniteError: A loss was NaN or infinite.
        ConfigError: A metric that a callback decides by did not come.
    """
    progress, hooks, timing, splitter = run.progress, run.hooks, run.timing, run.engine.splitter
    train_step = run.engine.train_step if splitter is None else splitter.train_step
    feed = run.train_feed
    assert feed is not None
    leaves_out_bad = feed.leaves_out_bad
    left = False
    _begin(run)
    while not run.due_to_stop():
        with shielded():
            run.call(hooks.on_epoch_start)
        run.check_parameters()
        until = _epochs_until(run.totals, progress)
        windows = feed.windows(progress.epoch, progress.position, progress.epoch_batches, until)
        idle = progress.epoch_updates == 0
        while True:
            start = perf_counter()
            window = next(windows, None)
            fetched = perf_counter()
            timing["data"] += fetched - start
            if window is None:  # a resumed epoch of which nothing was left
                _end_update(run, epoch_ended=True)
                break
            run.window = window
            run.milestones += 1
            for hook in hooks.on_step_start:
                hook(run)
            if run.step is None:  # the first update of this program
                run.step = first_step(run.engine, train_step, window.micro_batches)
            else:
                run.step = train_step(window.micro_batches)
            timing["compute"] += perf_counter() - fetched
            if leaves_out_bad:
                progress.bad_batches += run.engine.bad_batches(window.micro_batches)
            for hook in hooks.on_step_end:
                hook(run)
            idle = idle and not run.step.rows
            if not left:
                try:
                    yield run.step
                except GeneratorExit:
                    # The loop was left here: what this update still owes, a log point, a validation, a save,
                    # is made up, so that a resumed run has all that the uninterrupted one has. Ranks whose
                    # loop goes on may be in the next update already, which they cannot make alone.
                    run.stop(_LEFT)
                    left = True
            if idle and window.last and not left:
                raise _nothing_learned(run)
            _end_update(run, window.last)
            if window.last or run.stop_reason is not None:
                break
        windows.close()
    if not left:
        run.end_if_asked()
    run.log_training()
    run.nonfinite.check_end()
    run.call(hooks.on_fit_end)
    if run.failure is not None:
        raise run.failure


def _begin(run: Run) -> None:
    run.call(run.hooks.on_fit_start)
    run.start()
    tell_training()
    run.ledger.train()
    if run.stopping.shared or run.stopping.held:
        _agree(run)


def begin_reading(feed: Feed, totals: Totals, progress: Progress) -> None:
    """Have workers make what `train_steps` reads first, while other things are set up.

    Raises:
        DataError: They cannot be started.
    """
    until = _epochs_until(totals, progress)
    feed.begin(progress.epoch, progress.position, progress.epoch_batches, until)


def _epochs_until(totals: Totals, progress: Progress) -> int | None:
    """The first epoch that is not begun, as far as that is planned."""
    per_epoch, until = totals.updates_per_epoch, totals.epochs
    if totals.max_updates is None or not per_epoch:
        return until
    left = totals.max_updates - progress.updates + progress.epoch_updates
    last = progress.epoch - (-left // per_epoch)
    return last if until is None else min(until, last)


def _nothing_learned(run: Run) -> DataError:
    return DataError(
        f"epoch {run.progress.epoch} made no update: none of its micro-batches had a loss to learn from."
        f" Either {type(run.task).__name__}.loss_weight gave 0 for all of them, or a generator training_step"
        " never yielded an optimizer's name and its loss, or none of them could be made (on_bad_batch='skip')"
    )


def _end_update(run: Run, epoch_ended: bool) -> None:
    """Everything that may be due once an update is made; savers last, so that they see what all others
    changed.
    """
    progress, triggers = run.progress, run.triggers
    progress.seconds = perf_counter() - run.origin
    if run.by_time:
        run.share_clock()
    if epoch_ended:
        progress.epoch += 1
    if epoch_ended or run.step is None or run.step.applied:
        if triggers.log.every is not None and triggers.log.due(progress, epoch_ended):
            run.log_training()
        due = triggers.validate.every is not None and triggers.validate.due(progress, epoch_ended)
        if due and run.nonfinite.spoiled is None:
            validate(run)
    if epoch_ended:
        with shielded():
            run.call(run.hooks.on_epoch_end)
        progress.position = progress.epoch_updates = progress.epoch_batches = 0
    if run.stopping.shared or run.stopping.held:
        _agree(run)
    stops = run.due_to_stop()  # after the answer: a reason of the program's own comes before a limit
    if run.stop_reason is not None:
        _validate_at_end(run)
    for hook in run.hooks.on_save:
        hook(run)
    if run.stopping.shared or run.stopping.held:
        _agree(run)
    if run.stop_reason is not None and not stops:  # asked for meanwhile: a run that stops is saved
        _validate_at_end(run)
        run.call(run.hooks.on_save)


def _validate_at_end(run: Run) -> None:
    """Validate a fit that ends without ever having validated; not one that a signal or its caller ends."""
    ends = run.stop_reason not in (None, _LEFT, *run.stopping.signals) and run.failure is None
    if ends and not run.validated and run.triggers.validate.every is not None and not run.nonfinite.spoiled:
        validate(run)


def _agree(run: Run) -> None:
    """Pass a boundary, at which all ranks may have agreed to stop; see `Stopping`."""
    stopping = run.stopping
    stopping.passed += 1
    if stopping.held and run.stop_reason is None:
        # Of one process, the thread that has heard a signal has asked.
        run.stop_reason = stopping.answer() if stopping.shared else stopping.asked


def validate(run: Run) -> None:
    """A validation in the middle of training: its values reach callbacks, loggers and metric-driven
    schedules.
    """
    with run.timed("evaluation"), shielded():
        values = evaluate(run, "validation", run.evaluation_feeds)
    run.validated = True
    for updater in run.engine.updaters.values():
        updater.observe(values, run.progress.updates)
    run.log_point(values)
    run.nonfinite.judge_values(
        {name: each for name, each in values.items() if is_loss(name.rpartition("/")[2])}
    )


def evaluate(run: Run, stage: str, feeds: Feeds) -> dict[str, float]:
    """One pass over evaluation data; every sample counts once, in no random stream of the training.

    Args:
        run: The run.
        stage: "validation" or "test".
        feeds: The data, by loader name; None for an only one.

    Returns:
        Weighted means of what the step returned and the declared metrics, as `stage/name` or
        `stage/loader/name`.
    """
    engine, hooks = run.engine, run.hooks
    values: dict[str, float] = {}
    before, run.stage = run.stage, stage
    with engine.evaluating(stage):
        run.evaluation = Evaluation()
        run.call(hooks.on_evaluation_start)
        for loader, feed in feeds:
            prefix = stage if loader is None else f"{stage}/{loader}"
            found = _evaluate_loader(run, loader, feed)
            values.update({f"{prefix}/{name}": value for name, value in found.items()})
        run.metrics.update(values)
        run.evaluation = replace(run.evaluation, values=values)
        run.call(hooks.on_evaluation_end)
    run.stage = before  # not after an error, which tells where the run was
    return values


def _evaluate_loader(run: Run, loader: str | None, feed: Feed) -> dict[str, float]:
    engine, task, declared, hooks = (
        run.engine,
        run.task,
        run.evaluation_metrics,
        run.hooks.on_evaluation_step_end,
    )
    step, metric_inputs, add, splitter = (
        engine.evaluation_step,
        task.metric_inputs,
        (buffer := MetricBuffer(engine.data_ranks)).add,
        engine.splitter,
    )
    if declared:
        declared.reset()
    run.evaluation = Evaluation(loader, 0, feed.batches_per_epoch)
    run.milestones += 1
    sharded = engine.strategy.sharded
    for number, micro_batch in enumerate(feed.micro_batches()):
        run.evaluation.batch = number
        if micro_batch.stand_in:  # this rank has no samples left; of a sharded model all run every forward
            if sharded:
                step(micro_batch, number)
            continue
        parts: Iterable[tuple[MicroBatch, StepValues]]
        if splitter is None:
            parts = ((micro_batch, step(micro_batch, number)),)
        else:
            parts = splitter.evaluation_steps(micro_batch, number)
        for part, (_, names, scalars, outputs) in parts:
            if scalars is not None:
                add([(names, scalars, part.weight)], number)
            if declared and outputs is not None:
                declared.update(metric_inputs(outputs, part.batch))
        if hooks:
            run.call(hooks)
    # A loss that is NaN here is reported as NaN; a fit then does what `on_nonfinite` says.
    values = buffer.means(refuse_nonfinite=False)
    if declared:
        values = joined(values, declared.compute())
        declared.reset()
    return values


def predict(run: Run, feed: Feed) -> Generator[Any, None, None]:
    """Yield the outputs of every batch, on the CPU, in the data's order, those of all ranks on every rank."""
    engine, splitter, after_step = run.engine, run.engine.splitter, run.hooks.on_evaluation_step_end
    ranks, sharded, alone = engine.data_ranks, engine.strategy.sharded, engine.data_ranks.alone
    run.stage = "predict"
    with engine.evaluating("predict"):
        seed, step = engine.streams.seed_evaluation, engine.evaluate_step
        run.evaluation = evaluation = Evaluation(None, 0, feed.batches_per_epoch)
        run.call(run.hooks.on_evaluation_start)
        for number, micro_batch in enumerate(feed.micro_batches()):
            mine, evaluation.batch = None, number
            if sharded or not micro_batch.stand_in:
                if splitter is None:
                    seed(number)
                    outputs = to_host(step(micro_batch.batch))
                else:
                    outputs = splitter.predict_step(micro_batch, number)
                mine = None if micro_batch.stand_in else (outputs,)
            if after_step:
                run.call(after_step)
            # In one round the ranks hold consecutive samples: their order is the data's.
            for each in (mine,) if alone else ranks.all_gather(mine):
                if each is not None:
                    yield each[0]
        run.call(run.hooks.on_evaluation_end)
