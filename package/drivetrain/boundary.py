"""The one place that catches everything: what surrounds a run, however it ends."""

from __future__ import annotations

import atexit
import inspect
import sys
import threading
import traceback
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.checkpoint.filesystem import StorageError
from drivetrain.data.worker_ends import note_on
from drivetrain.distributed.doing import Phase, doing_when, hook_name, phase_now
from drivetrain.distributed.failure import FailureChannel
from drivetrain.distributed.failure_wire import Cause
from drivetrain.distributed.last_words import record
from drivetrain.distributed.watchdog import Watchdog
from drivetrain.options import duration
from drivetrain.out_of_memory import advice, is_out_of_memory
from drivetrain.paths import as_given, what_goes_on
from drivetrain.preemption import tell_end
from drivetrain.run import Run
from drivetrain.save_errors import is_gone
from drivetrain.streams import preserved
from drivetrain.types import Logger
from drivetrain.window import StepResult

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


_loops: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def left_with_program(loop: Generator[StepResult, None, None]) -> Generator[StepResult, None, None]:
    """The loop, which is left in order if it is still suspended when the program ends: while torch can still
    compute and files can be written, which the interpreter's own end does not wait for.
    """
    _loops.add(loop)
    return loop


def _leave_loops() -> None:
    with ExitStack() as stack:
        for each in _loops:
            if inspect.getgeneratorstate(each) != inspect.GEN_RUNNING:  # in a thread that is not waited for
                stack.callback(each.close)


@contextmanager
def boundary(trainer: Trainer, run: Run) -> Iterator[None]:
    """Run something under the Trainer's process-wide settings, and leave the process as it was found.

    Callbacks hear of an exception, loggers are closed, and it is raised again with a note of where the run
    stood.
    """
    # The last to be registered is the first to be called: before the process group is ended.
    atexit.unregister(_leave_loops)
    atexit.register(_leave_loops)
    with ExitStack() as stack:
        stack.callback(_let_go, run)
        stack.enter_context(run.ledger)
        stack.callback(run.engine.teardown)
        closing = stack.enter_context(ExitStack())
        for logger in run.loggers:  # each by itself: one that fails to close leaves none of the others open
            closing.callback(_close, run, logger)
        stack.enter_context(preserved(run.engine.device))
        if trainer.deterministic:
            stack.enter_context(_deterministic())
        stack.enter_context(_in_progress(run))
        channel = None
        if run.engine.ranks.size > 1:
            channel = stack.enter_context(_failing_together(trainer, run))
        elif (limit := duration("hang_timeout", trainer.hang_timeout)) is not None:
            stack.enter_context(_watchdog(limit, run))
        try:
            yield
            _hand_back(run)
        except GeneratorExit:
            try:
                _hand_back(run)
            except BaseException as error:
                _report(trainer, run, error)
                raise
            raise
        except BaseException as error:
            _tell(trainer, run, error, channel, closing)
            raise


def _tell(
    trainer: Trainer, run: Run, error: BaseException, channel: FailureChannel | None, closing: ExitStack
) -> None:
    """An error that ends a run: to the other ranks, to who reads it, and to the callbacks."""
    if is_out_of_memory(error):
        error.add_note(f"drivetrain: {_what_helps(run)}")
    if (note := note_on(error)) is not None:
        error.add_note(f"drivetrain: {note}")
    is_agreed = error is run.stopping.ending  # raised by all ranks
    if channel is not None and not is_agreed:  # before anything that waits for the others
        channel.report(error, _kept(trainer, run, error))
        if isinstance(error, SystemExit) and not error.code:
            error.code = 1  # the others have failed for it
    elif not is_agreed and run.engine.ranks.size == 1:
        place, doing = _place(run), doing_when(error)
        place = place if doing in place else f"{place}, {doing}"
        record(Cause.of_error(0, place, error, _kept(trainer, run, error)).failure())
    _report(trainer, run, error)
    if is_agreed:
        _end_together(trainer, run, closing)


def _kept(trainer: Trainer, run: Run, error: BaseException) -> str:
    """What is left when a save has failed, for the last line of the program.

    Nobody looks whether it still is there: a storage that does not answer would keep the other ranks waiting.
    """
    if not isinstance(error, StorageError) or run.last_checkpoint is None:
        return ""
    return f"The last checkpoint that is whole is {as_given(trainer, run.last_checkpoint)}"


def _let_go(run: Run) -> None:
    """Keep no batch: its memory, and the open files in which workers hand theirs over, would stay until the
    interpreter's next search for garbage.
    """
    run.window = None


def _close(run: Run, logger: Logger) -> None:
    with run.logging_to(logger, f"what {type(logger).__name__} writes as it is closed, after update"):
        logger.close()


def _end_together(trainer: Trainer, run: Run, closing: ExitStack) -> None:
    """After a signal: all is written on all ranks before one is gone, whose launcher may end the others."""
    closing.close()
    run.engine.ranks.all_gather(None)
    tell_end(run, _left(trainer, run))


def _left(trainer: Trainer, run: Run) -> str:
    newest = as_given(trainer, run.last_checkpoint)
    if trainer.checkpoint is False:
        again = "anew" if newest is None else f"from {newest} again"
        return f"nothing is saved, by checkpoint=False, and a program that is started again begins {again}"
    if newest is None:
        return "nothing is saved"
    return f"the newest checkpoint is {newest}; {what_goes_on(trainer, newest)}"


def _hand_back(run: Run) -> None:
    """After a run that ended well: the task as an ordinary module, the same in all processes."""
    run.ledger.end_training()
    run.engine.synchronize_buffers()
    run.engine.strategy.restore()


def _report(trainer: Trainer, run: Run, error: BaseException) -> None:
    run.exception = error
    run.ledger.end_training()
    error.add_note(f"drivetrain: {_where(run)}")
    if "Expected more than 1 value per channel" in str(error):  # torch.nn.functional.batch_norm
        error.add_note(
            "drivetrain: batch norm cannot train on one sample; the last batch of an epoch may have no more."
            " Use DataLoader(..., drop_last=True), other batch sizes, or group norm"
        )
    _tell_callbacks(run)  # a save in the background ends here
    if run.last_checkpoint is not None:
        newest = as_given(trainer, run.last_checkpoint) or run.last_checkpoint
        there = f"drivetrain: the newest checkpoint is {newest}; {what_goes_on(trainer, newest)}"
        gone = f"drivetrain: the newest checkpoint, {newest}, is not there any more"
        error.add_note(gone if is_gone(run.last_checkpoint) else there)


def _where(run: Run) -> str:
    progress = run.progress
    more = f", epoch {progress.epoch}, position {progress.position}" if run.stage == "train" else ""
    return f"{_place(run)}{more}, rank {run.engine.strategy.rank}"


def _what_helps(run: Run) -> str:
    """After running out of memory: on what, and what to do about it."""
    splitter = run.engine.splitter
    batches = run.window.micro_batches if run.stage == "train" and run.window is not None else ()
    sizes = f" with batches of {', '.join(str(each.samples) for each in batches)} samples" if batches else ""
    if sizes and splitter is not None and splitter.size is not None:
        sizes += f", {splitter.size} at once"
    place = f"rank {run.engine.strategy.rank} ran out of memory {_place(run)}{sizes}"
    spec = None if splitter is None else splitter.spec
    return f"{place}; {advice(spec, training=run.stage == 'train')}"


def _place(run: Run) -> str:
    """Return how far a run is, in a few words, with the batch it waits for and the hook that it is in."""
    feeds = [feed for _, feed in run.evaluation_feeds] + ([run.train_feed] if run.train_feed else [])
    waiting = next((text for each in feeds if (text := each.waiting()) is not None), None)
    hook = "" if run.hook is None else hook_name(run.hook)
    return ", ".join(filter(None, (_stage(run), waiting and f"waiting for {waiting}", hook)))


def _stage(run: Run) -> str:
    after = f"after update {run.progress.updates}"
    if run.stage == "train":
        return f"in training, {after}"
    place = run.evaluation
    loader = f" of loader {place.loader!r}" if place.loader else ""
    return f"in {run.stage}, batch {place.batch}{loader}, {after}"


def _tell_callbacks(run: Run) -> None:
    for hook in run.hooks.on_exception:
        try:
            hook(run)
        except Exception:  # the first cause must not be hidden by what a callback makes of it
            traceback.print_exc(file=sys.stderr)


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


@contextmanager
def _in_progress(run: Run) -> Iterator[None]:
    _watched.append(run)
    try:
        yield
    finally:
        _watched.remove(run)


def _signs() -> list[int]:
    """What changes with every step of any run of this process, or when a callback reports progress."""
    found = []
    for run in list(_watched):
        progress = run.progress
        found += [progress.micro_batches, progress.updates, run.milestones, run.reports]
        found += [run.evaluation.batch, run.engine.passes]
    return found


def _failing_together(trainer: Trainer, run: Run) -> FailureChannel:
    def progress() -> int:  # which never falls, so that it tells who is behind
        return (run.progress.micro_batches + run.milestones) * 1_000_000 + run.evaluation.batch

    ranks = run.engine.ranks
    return FailureChannel(
        ranks.rank,
        ranks.size,
        describe=lambda: _place(run),
        progress=progress,
        signs=_signs,
        is_outside=lambda: run.is_suspended,
        hang_timeout=duration("hang_timeout", trainer.hang_timeout),
        directory=run.run_dir,
        stopping=run.stopping if run.stage == "train" else None,
    )


def _watchdog(timeout: float, run: Run) -> Watchdog:
    main = threading.get_ident()

    def heartbeat() -> tuple[object, ...]:
        return (
            *_signs(),
            run.stage,
            run.evaluation.loader,
            run.last_checkpoint,
            _place(run),
        )

    def phase() -> Phase:
        return Phase.OUTSIDE if run.is_suspended else phase_now(main)[0]

    return Watchdog(timeout, heartbeat, lambda: _where(run), run.run_dir, phase)
