"""The only function that catches everything: the frame around a run, however it ends."""

from __future__ import annotations

import atexit
import inspect
import threading
import traceback
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from drivetrain.checkpoint.storage.filesystem import StorageError
from drivetrain.core.errors import shown
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import is_out_of_memory
from drivetrain.core.random_streams import preserved
from drivetrain.core.types import Logger
from drivetrain.core.validation import duration
from drivetrain.data.batch import described
from drivetrain.data.workers.ends import note_on
from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.failure.last_words import record
from drivetrain.distributed.failure.location import Phase, error_location, hook_location, phase_of_thread
from drivetrain.distributed.failure.messages import Cause, summary
from drivetrain.distributed.failure.watchdog import Watchdog
from drivetrain.engine.memory import WHAT_HELPS
from drivetrain.engine.weighting import StepResult
from drivetrain.run.messages import as_given, what_goes_on
from drivetrain.run.out_of_memory import largest_blocks, write_snapshot
from drivetrain.run.preemption import print_end
from drivetrain.run.run import Run
from drivetrain.run.save_errors import is_gone
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

_loops: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def left_with_program(loop: Generator[StepResult, None, None]) -> Generator[StepResult, None, None]:
    """Return the loop, and close it before the program ends, if it is still suspended then.

    torch can still compute then and files can be written; the interpreter's shutdown does not wait for that.
    """
    _loops.add(loop)
    return loop


def _leave_loops() -> None:
    with ExitStack() as stack:
        for each in _loops:
            if inspect.getgeneratorstate(each) != inspect.GEN_RUNNING:  # in a thread that is not waited for
                stack.callback(each.close)


@contextmanager
def run_context(settings: RunSettings, run: Run) -> Iterator[None]:
    """Run the block under the Trainer's process-wide settings, and restore the process afterwards.

    On an exception, callbacks are called, loggers are closed, and it is raised again with a note of the run's
    progress.
    """
    # The last to be registered is the first to be called: before the process group is ended.
    atexit.unregister(_leave_loops)
    atexit.register(_leave_loops)
    with ExitStack() as stack:
        # Otherwise the memory of the last batches, and the files through which workers share it, would stay
        # until the next garbage collection.
        stack.callback(setattr, run, "window", None)
        stack.enter_context(run.ledger)
        stack.callback(run.engine.teardown)
        closing = stack.enter_context(ExitStack())
        for logger in run.loggers:  # separately: if one fails to close, the others are closed all the same
            closing.callback(_close, run, logger)
        stack.enter_context(preserved(run.engine.device))
        if settings.deterministic:
            stack.enter_context(_deterministic())
        _watched.append(run)
        stack.callback(_watched.remove, run)
        channel, limit = run.engine.channel, duration("hang_timeout", settings.hang_timeout)
        if channel is not None:
            stack.push(channel)
            channel.follow(_status(run), limit, run.run_dir)
            if run.stage == "train":
                run.stopping = channel.stopping
        elif limit is not None:
            stack.enter_context(_watchdog(limit, run))
        wrapped = stack.enter_context(ExitStack())
        try:
            for each in run.callbacks:
                wrapped.enter_context(each.wrap_run(run))
            yield
            _restore_task(run)
        except GeneratorExit:
            try:
                _restore_task(run)
            except BaseException as error:
                _report(settings, run, error)
                raise
            raise
        except BaseException as error:
            _tell(settings, run, error, channel, closing)
            raise


def _tell(
    settings: RunSettings, run: Run, error: BaseException, channel: FailureChannel | None, closing: ExitStack
) -> None:
    """Report an error that ends a run to the other ranks, to the reader, and to the callbacks."""
    if (note := note_on(error)) is not None:
        error.add_note(f"drivetrain: {note}")
    is_agreed = error is run.stopping.ending  # raised by all ranks
    if channel is not None and not is_agreed:  # before anything that waits for the others
        channel.report(error, _besides(settings, run, error))
        if isinstance(error, SystemExit) and not error.code:
            error.code = 1  # the others have failed for it
    elif not is_agreed and run.engine.ranks.size == 1:
        location, doing = _location(run), error_location(error)
        location = location if doing in location else f"{location}, {doing}"
        record(Cause.of_error(0, location, error, _besides(settings, run, error)).failure())
    _report(settings, run, error)
    _note_memory(run, error)
    if is_agreed:
        _end_together(settings, run, closing)


def _note_memory(run: Run, error: BaseException) -> None:
    """Say at the end what fills the memory, and write a snapshot if this rank or another one has run out."""
    is_here = is_out_of_memory(error)
    is_anywhere = is_here or torch.OutOfMemoryError.__name__ in str(error)
    if is_anywhere and (snapshot := write_snapshot(run)) is not None:
        error.add_note(f"drivetrain: torch's snapshot of this rank's memory is {snapshot}")
    if is_here:
        error.add_note(f"drivetrain: {_what_helps(run)}")


def _besides(settings: RunSettings, run: Run, error: BaseException) -> str:
    """Return where in the task an error was raised, what is left after a failed save, or what fills the
    memory, for the last line of the program.

    It does not check the storage: one that does not answer would keep the other ranks waiting.
    """
    if is_out_of_memory(error):
        found = f"{largest_blocks(run)}; {WHAT_HELPS}"
    elif isinstance(error, StorageError) and run.last_checkpoint is not None:
        found = f"the last checkpoint that is whole is {as_given(settings, run.last_checkpoint)}"
    else:
        found = _in_task(run.task, error)
    return found[:1].upper() + found[1:]


def _close(run: Run, logger: Logger) -> None:
    with run.logging_to(logger, f"what {type(logger).__name__} writes as it is closed, after step"):
        logger.close()


def _end_together(settings: RunSettings, run: Run, closing: ExitStack) -> None:
    """After a signal, wait until all ranks have written everything: a launcher may kill the rest at the first
    exit.
    """
    closing.close()
    run.engine.ranks.compare_calls()
    print_end(run, what_is_left(settings, run))


def what_is_left(settings: RunSettings, run: Run) -> str:
    """Return the newest checkpoint of a run that a signal has ended, and how to go on from it."""
    newest = as_given(settings, run.last_checkpoint)
    if settings.checkpoint is False:
        again = "anew" if newest is None else f"from {newest} again"
        return f"nothing is saved, by checkpoint=False, and a program that is started again begins {again}"
    if newest is None:
        return "nothing is saved"
    return f"the newest checkpoint is {newest}; {what_goes_on(settings, newest)}"


def _restore_task(run: Run) -> None:
    """Make the task an ordinary module again after a run that ended well, equal on all ranks."""
    run.ledger.end_training()
    run.engine.synchronize_buffers()
    run.engine.strategy.restore()


_OF_SHARDS = (
    "got mixed torch.Tensor and DTensor",
    "FSDP requires running forward through the root module first",
)
"""Words of torch's errors for a hook that takes a shard for a weight."""


def _report(settings: RunSettings, run: Run, error: BaseException) -> None:
    run.exception = error
    run.ledger.end_training()
    group = summary(error) if isinstance(error, BaseExceptionGroup) else ""
    locations = (group, _in_task(run.task, error), _where(run))
    error.add_note(shown(f"drivetrain: {', '.join(filter(None, locations))}"))
    if any(words in str(error) for words in _OF_SHARDS):
        error.add_note(
            "drivetrain: the model's weights are sharded: in a hook call the model inside `with"
            " run.gathered():`, and read a weight by run.full_tensor(weight)"
        )
    _call_on_exception(run)  # ends a save in the background
    if run.last_checkpoint is not None:
        newest = as_given(settings, run.last_checkpoint) or run.last_checkpoint
        there = f"drivetrain: the newest checkpoint is {newest}; {what_goes_on(settings, newest)}"
        gone = f"drivetrain: the newest checkpoint, {newest}, is not there any more"
        error.add_note(shown(gone if is_gone(run.last_checkpoint) else there))


_OF_BATCH = {"training_step", "validation_step", "test_step", "predict_step", "loss_weight", "tokens"}
"""The methods of a task that are given a batch first."""


def _in_task(task: TaskModule, error: BaseException) -> str:
    """Return the task's method that raised an error, with the batch of its step; empty for other errors."""
    calls = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_locals.get("self") is task and not frame.f_code.co_name.startswith("_")
    ]
    first = next((each for each in calls if each.f_code.co_name in _OF_BATCH), None)
    if first is None:
        return ""
    batch = first.f_locals.get(first.f_code.co_varnames[1])
    return f"in {type(task).__name__}.{calls[-1].f_code.co_name}, with the batch {described(batch)}"


def _where(run: Run) -> str:
    progress = run.progress
    more = f", epoch {progress.epoch}, position {progress.position}" if run.stage == "train" else ""
    return f"{_location(run)}{more}, rank {run.engine.strategy.rank}"


def _what_helps(run: Run) -> str:
    """Return a note for an out-of-memory error: the location, the sizes, and advice."""
    splitter = run.engine.splitter
    batches = run.window.micro_batches if run.stage == "train" and run.window is not None else ()
    sizes = f" with batches of {', '.join(str(each.samples) for each in batches)} samples" if batches else ""
    if sizes and splitter is not None and splitter.size is not None:
        sizes += f", {splitter.size} at once"
    what = f"rank {run.engine.strategy.rank} ran out of memory {_location(run)}{sizes}"
    return f"{what}; {largest_blocks(run)}; {WHAT_HELPS}"


def _location(run: Run) -> str:
    """Return where a run is: its progress, the batch it waits for, and the current hook."""
    feeds = [feed for _, feed in run.evaluation_feeds] + ([run.train_feed] if run.train_feed else [])
    waiting = next((text for each in feeds if (text := each.waiting()) is not None), None)
    hook = "" if run.hook is None else hook_location(run.hook)
    return ", ".join(filter(None, (_stage(run), waiting and f"waiting for {waiting}", hook)))


def _stage(run: Run) -> str:
    after = f"after step {run.progress.steps}"
    if run.stage == "train":
        return f"in training, {after}"
    evaluation = run.evaluation
    loader = f" of loader {evaluation.loader!r}" if evaluation.loader else ""
    return f"in {run.stage}, batch {evaluation.batch}{loader}, {after}"


def _call_on_exception(run: Run) -> None:
    for hook in run.hooks.on_exception:
        try:
            hook(run)
        except Exception:  # a callback's error must not hide the first cause
            _LOG.exception("a callback's on_exception failed")


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    benchmark, kernels = cudnn.benchmark, cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic = benchmark, kernels


_watched: list[Run] = []
"""The runs of this process that are in progress, such as a validation in a fit's callback."""


def _signs() -> list[int]:
    """Return counters that change with every step of any run here, or when a callback reports progress."""
    found = []
    for run in list(_watched):
        progress = run.progress
        found += [progress.micro_batches, progress.steps, run.milestones, run.reports]
        found += [run.evaluation.batch, run.engine.passes]
    return found


def _status(run: Run) -> Status:
    def progress() -> int | None:  # never falls, so that it shows who is behind
        made = run.progress.micro_batches + run.milestones
        return made * 1_000_000 + run.evaluation.batch if run.milestones else None

    return Status(lambda: _location(run), progress, _signs, lambda: run.is_suspended)


def _watchdog(timeout: float, run: Run) -> Watchdog:
    main = threading.get_ident()

    def progress() -> tuple[object, ...]:
        return (*_signs(), run.stage, run.evaluation.loader, run.last_checkpoint, _location(run))

    def phase() -> Phase:
        return Phase.OUTSIDE if run.is_suspended else phase_of_thread(main)[0]

    return Watchdog(timeout, progress, lambda: _where(run), run.run_dir, phase)
