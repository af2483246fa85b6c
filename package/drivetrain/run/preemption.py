"""The effect of signals on a fit: `PreemptionConfig`, and the handling in a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from drivetrain.core.errors import EXIT_REQUEUE, EXIT_STOPPED, ConfigError, Preempted, RankFailure
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, duration, one_of
from drivetrain.distributed.processes import rank

if TYPE_CHECKING:
    from drivetrain.distributed.signals import Signals
    from drivetrain.run.run import Run

_LOG = logger(__name__)

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGXCPU", "SIGBREAK")
"""Signals that may end a run. Others cannot be caught, or report an error."""

_TERMINATION = 25.0
"""Seconds from SIGTERM to the end: systems kill after 30 (SLURM's KillWait, Kubernetes' grace period)."""


@by_name
@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """The signals that end a fit in order, and the way it ends.

    At the first signal, which may reach one process only, all ranks finish the step, save, and end. A
    second signal ends a process at once; checkpoints stay intact. On Windows there is only SIGINT.

    Attributes:
        requeue: Signals after which the program should start again: `fit` raises `Preempted`, so that it ends
            with exit code 75. SLURM sends a warning as `--signal=USR1@300`. With
            `CheckpointConfig(resumable=False)` they count as those of `stop`.
        stop: Signals after which the program should not start again: `fit` raises `KeyboardInterrupt`, so
            that it ends with 130.
        deadline: The time from a signal of `requeue` to the end of the process, saved or not: seconds, a
            timedelta, or a text such as "2 minutes". "auto" is 25 seconds after SIGTERM, because systems then
            kill, and no limit after another signal, whose lead time you choose. None disables it.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    requeue: str | int | Iterable[str | int] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    stop: str | int | Iterable[str | int] = ("SIGINT",)
    deadline: str | float | timedelta | None = "auto"

    def __post_init__(self) -> None:
        for name in ("requeue", "stop"):
            object.__setattr__(self, name, _named(name, getattr(self, name)))
        both = [each for each in self.requeues if each in self.stops]
        if both:
            raise ConfigError(f"PreemptionConfig: {both[0]} is in requeue and stop; give it in one of them")
        if self.deadline is not None and self.deadline != "auto":
            name = "PreemptionConfig: deadline, if not 'auto',"
            object.__setattr__(self, "deadline", duration(name, self.deadline))

    @property
    def requeues(self) -> tuple[str, ...]:
        """The names of the signals in `requeue`."""
        return _named("requeue", self.requeue)

    @property
    def stops(self) -> tuple[str, ...]:
        """The names of the signals in `stop`."""
        return _named("stop", self.stop)

    def seconds(self, received: signal.Signals) -> float | None:
        """Return the seconds between a signal and the end of the process; None for no limit."""
        if received.name in self.stops or self.deadline is None:
            return None
        if self.deadline == "auto":
            return _TERMINATION if received is signal.SIGTERM else None
        return cast(float, self.deadline)


def _named(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):  # several too, as on the command line
        given = [each.strip() for each in given.split(",") if each.strip()]
    listed = [given] if isinstance(given, int) else given
    if not isinstance(listed, Iterable):
        raise ConfigError(f"PreemptionConfig: {name} takes signals, such as 'SIGTERM', not {given!r}")
    found = []
    for each in listed:
        if isinstance(each, int) and not isinstance(each, bool) and each in signal.valid_signals():
            each = signal.Signals(each).name
        elif isinstance(each, str) and not each.startswith("SIG"):  # as `kill -l` and SLURM have it
            each = f"SIG{each}"
        found.append(one_of("signal in PreemptionConfig", each, _NAMES))
    return tuple(dict.fromkeys(found))


def as_preemption(spec: object) -> PreemptionConfig | None:
    """Return the user's argument as a configuration; None if it disables preemption."""
    if isinstance(spec, bool):
        return PreemptionConfig() if spec else None
    if isinstance(spec, PreemptionConfig):
        return spec
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"preemption takes a bool, a PreemptionConfig or a mapping of its options, not {spec!r}"
        )
    return PreemptionConfig(**spec)


class Preemption:
    """A context manager around a fit: signals end it in order, as soon as a run exists.

    Raises:
        Preempted: A signal has asked for an end, and the run has ended or failed before it could stop in
            order.
        KeyboardInterrupt: The same after a signal of `stop`.
    """

    def __init__(self, spec: object) -> None:
        self._config = as_preemption(spec)
        self._is_chosen = not isinstance(spec, bool)
        self._run: Run | None = None
        self._left: Callable[[], str] = str
        self._signals: Signals | None = None

    def __enter__(self) -> Preemption:
        config = self._config
        if config is None:
            return self
        if threading.current_thread() is not threading.main_thread():
            if self._is_chosen:
                _LOG.warning(
                    "preemption: signals reach the main thread alone, and this fit runs in another thread, so"
                    " they do not end it"
                )
            return self
        from drivetrain.distributed.signals import Signals

        here = signal.Signals.__members__  # a system may have fewer
        requeues = [here[each] for each in config.requeues if each in here]
        stops = [here[each] for each in config.stops if each in here]
        self._signals = Signals(requeues, stops, config.seconds, _say)
        self._signals.open()
        return self

    def attach(self, run: Run, left: Callable[[], str], resumable: bool = True) -> None:
        """Let signals end this run.

        Args:
            left: Says what is left of the run.
            resumable: Whether a run can go on from its checkpoints. Otherwise each signal is one of `stop`: a
                program that is started again would fail at its start.
        """
        config, self._run, self._left = self._config, run, left
        if config is None:
            return
        stopping = run.stopping
        again = EXIT_REQUEUE if resumable else EXIT_STOPPED
        stopping.signals = {
            **{_reason(each): again for each in config.requeues},
            **{_reason(each): EXIT_STOPPED for each in config.stops},
        }
        if self._signals is not None:
            self._signals.attach(self._ask, self._where, again)

    def _ask(self, received: signal.Signals) -> None:
        assert self._run is not None
        stopping = self._run.stopping
        if self._run.is_main and stopping.takes_requests:  # first: the run's end prints the last line
            _say(f"{received.name}: ends after this step, once it is saved; a second signal ends at once")
        stopping.ask(_reason(received.name))

    def _where(self) -> str:
        assert self._run is not None
        newest = self._run.last_checkpoint
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
        return f"the fit was after step {self._run.progress.steps}, and {kept}"

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        signals, self._signals, first = self._signals, None, None
        if signals is not None:
            signals.close()
            first = signals.first
        run = self._run
        if run is None:
            return
        from drivetrain.distributed.launch.programs import launched

        stopping, ranks = run.stopping, launched()
        if stopping.exit_code is not None and ranks is not None:
            ranks.agreed_code = stopping.exit_code
        if isinstance(error, RankFailure) and stopping.exit_code == EXIT_REQUEUE:
            _say(
                f"{stopping.reason}: a process failed before all was saved: {self._where()}; exit code"
                f" {EXIT_REQUEUE}"
            )
            raise Preempted(str(stopping.reason)) from error
        reason = stopping.reason if first is None else _reason(first.name)
        if error is None and reason is not None and stopping.is_overruled(reason):
            _say(
                f"{reason}, but not with exit code {EXIT_REQUEUE}, because a restarted program would end the"
                f" same way: {run.stop_reason}"
            )
        elif first is not None and error is None:  # it came after the run
            try:
                stopping.end(_reason(first.name), run.nonfinite.reason)
            finally:
                print_end(run, self._left())
        if first is not None and isinstance(error, GeneratorExit):
            signal.raise_signal(first)  # the caller has left the loop: the signal has its usual effect


def print_end(run: Run, left: str) -> None:
    """Print that a signal has ended the run and what is left of it; an interrupt has a traceback for that."""
    if run.is_main and isinstance(run.stopping.ending, Preempted):
        _say(
            f"{run.stopping.ending.reason} after step {run.progress.steps}: {left}; exit code {EXIT_REQUEUE}"
        )


def _reason(name: str) -> str:
    return f"ended by {name}"


def _say(text: str) -> None:
    from drivetrain.distributed.failure.last_words import write_now

    if rank() == 0 or text.endswith((str(EXIT_REQUEUE), str(EXIT_STOPPED))):
        write_now(f"drivetrain: {text}\n")
