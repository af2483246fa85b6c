"""What a signal does to a fit: `PreemptionConfig`, and how a run in progress hears of it."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from drivetrain.distributed.last_words import write_now
from drivetrain.distributed.launch import launched
from drivetrain.distributed.processes import rank
from drivetrain.distributed.signals import Signals
from drivetrain.errors import EXIT_REQUEUE, EXIT_STOPPED, ConfigError, Preempted, RankFailure
from drivetrain.options import by_name, check_names, duration, one_of

if TYPE_CHECKING:
    from drivetrain.run import Run

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGXCPU", "SIGBREAK")
"""Signals that somebody may want to end a run with. Others cannot be caught, or tell of an error."""

_TERMINATION = 25.0
"""Seconds from SIGTERM to the end: systems kill after 30 (SLURM's KillWait, Kubernetes' grace period)."""


@by_name
@dataclass(frozen=True, kw_only=True)
class PreemptionConfig:
    """Which signals end a fit in order, and how.

    At the first signal, which one process may get alone, all finish the update, save, and end. At a second
    one a process ends at once, which no checkpoint minds. On Windows there is only SIGINT.

    Attributes:
        requeue: Signals after which the program is to be started again: `fit` raises `Preempted`, so that it
            ends with exit code 75. SLURM gives a warning as `--signal=USR1@300`.
        stop: Signals after which it is not: `fit` raises `KeyboardInterrupt`, so that it ends with 130.
        deadline: Seconds, a timedelta, or a text such as "2 minutes", from a signal of `requeue` to the end
            of the process, saved or not; "auto" for 25 seconds after SIGTERM, after which systems kill, and
            no limit after another signal, which comes as early as you have told the system; None for no
            limit.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    requeue: str | int | Iterable[str | int] = ("SIGTERM", "SIGUSR1", "SIGUSR2")
    stop: str | int | Iterable[str | int] = ("SIGINT",)
    deadline: str | float | timedelta | None = "auto"

    def __post_init__(self) -> None:
        """Check each, and have the signals by their names."""
        for name in ("requeue", "stop"):
            object.__setattr__(self, name, _named(name, getattr(self, name)))
        both = [each for each in self.requeues if each in self.stops]
        if both:
            raise ConfigError(f"PreemptionConfig: {both[0]} stands in requeue and in stop; it can be one")
        if self.deadline is not None and self.deadline != "auto":
            object.__setattr__(self, "deadline", _deadline(self.deadline))

    @property
    def requeues(self) -> tuple[str, ...]:
        """`requeue`, read."""
        return _named("requeue", self.requeue)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop`, read."""
        return _named("stop", self.stop)

    def seconds(self, received: signal.Signals) -> float | None:
        """The seconds that a signal leaves; None for no limit."""
        if received.name in self.stops or self.deadline is None:
            return None
        if self.deadline == "auto":
            return _TERMINATION if received is signal.SIGTERM else None
        return _deadline(self.deadline)


def _deadline(given: str | float | timedelta | None) -> float | None:
    try:
        return duration("PreemptionConfig: deadline", given)
    except ConfigError as error:
        if not isinstance(given, str):
            raise
        raise ConfigError(
            f"PreemptionConfig: deadline is a time, such as 30 or '2 minutes', 'auto' or None, not {given!r}"
        ) from error


def _named(name: str, given: Any) -> tuple[str, ...]:
    single = isinstance(given, (str, int))
    if not single and not isinstance(given, Iterable):
        raise ConfigError(f"PreemptionConfig: {name} takes signals, such as 'SIGTERM', not {given!r}")
    found = []
    for each in _apart(given) if single else given:
        if isinstance(each, int) and not isinstance(each, bool) and each in signal.valid_signals():
            each = signal.Signals(each).name
        elif isinstance(each, str) and not each.startswith("SIG"):  # as `kill -l` and SLURM have it
            each = f"SIG{each}"
        found.append(one_of("signal in PreemptionConfig", each, _NAMES))
    return tuple(dict.fromkeys(found))


def _apart(given: str | int) -> list[str | int]:
    """One signal, or several in a text, as on the command line."""
    return [given] if isinstance(given, int) else [each.strip() for each in given.split(",") if each.strip()]


def as_preemption(spec: object) -> PreemptionConfig | None:
    """What a user wrote, as a configuration; None for none.

    Raises:
        ConfigError: It is no such thing; says what is.
    """
    if isinstance(spec, bool):
        return PreemptionConfig() if spec else None
    if isinstance(spec, PreemptionConfig):
        return spec
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"preemption is True, False, a PreemptionConfig or a mapping of its options, not {spec!r}"
        )
    check_names("preemption", spec, [each.name for each in fields(PreemptionConfig)])
    return PreemptionConfig(**spec)


class Preemption:
    """A context manager around all of a fit: signals end it in order, once it has something to finish.

    Args:
        spec: The Trainer's argument.

    Raises:
        Preempted: Signals have asked for an end, and the run has ended by itself, or failed, before it could.
        KeyboardInterrupt: Likewise.
    """

    def __init__(self, spec: object) -> None:
        self._config = as_preemption(spec)
        self._is_chosen = not isinstance(spec, bool)
        self._run: Run | None = None
        self._signals: Signals | None = None

    def __enter__(self) -> Preemption:
        config = self._config
        if config is None:
            return self
        if threading.current_thread() is not threading.main_thread():
            if self._is_chosen:
                warnings.warn(
                    "preemption: signals reach the main thread alone, and this fit runs in another; it is not"
                    " ended by them",
                    stacklevel=2,
                )
            return self
        here = signal.Signals.__members__  # a system may have fewer
        requeues = [here[each] for each in config.requeues if each in here]
        stops = [here[each] for each in config.stops if each in here]
        self._signals = Signals(requeues, stops, config.seconds, _say)
        self._signals.open()
        return self

    def attach(self, run: Run) -> None:
        """There is a run now, which signals end."""
        config, self._run = self._config, run
        if config is None:
            return
        stopping = run.stopping
        stopping.signals = {
            **{_reason(each): EXIT_REQUEUE for each in config.requeues},
            **{_reason(each): EXIT_STOPPED for each in config.stops},
        }
        if self._signals is not None:
            self._signals.attach(self._ask, self._where)

    def _ask(self, received: signal.Signals) -> None:
        assert self._run is not None
        self._run.stopping.ask(_reason(received.name))
        if self._run.is_main:
            _say(f"{received.name}: ends after this update, once it is saved; a second signal ends at once")

    def _where(self) -> str:
        assert self._run is not None
        newest = self._run.last_checkpoint
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
        return f"the fit was after update {self._run.progress.updates}, and {kept}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.close()
        run = self._run
        if run is None:
            return
        stopping, ranks = run.stopping, launched()
        if stopping.exit_code is not None and ranks is not None:
            ranks.agreed_code = stopping.exit_code
        if isinstance(error, RankFailure) and stopping.exit_code == EXIT_REQUEUE:
            _say(
                f"{stopping.reason}: a process failed before all was saved: {self._where()}; exit code"
                f" {EXIT_REQUEUE}"
            )
            raise Preempted(str(stopping.reason)) from error
        first = None if signals is None else signals.first
        reason = stopping.reason if first is None else _reason(first.name)
        if error is None and reason is not None and stopping.is_overruled(reason):
            _say(
                f"{reason}, but not with exit code {EXIT_REQUEUE}, as a program that is started again would"
                f" meet the same: {run.stop_reason}"
            )
        elif first is not None and error is None:  # it came when the run was over
            raise stopping.end_of(_reason(first.name))
        if first is not None and isinstance(error, GeneratorExit):
            signal.raise_signal(first)  # the loop was left by its caller: the signal does what it else does


def tell_end(run: Run, left: str) -> None:
    """Say that a signal has ended the run, and what is left of it; an interrupt has a traceback for that.

    Args:
        run: The run.
        left: That.
    """
    if run.is_main and isinstance(run.stopping.ending, Preempted):
        _say(
            f"{run.stopping.ending.reason} after update {run.progress.updates}: {left}; exit code"
            f" {EXIT_REQUEUE}"
        )


def _reason(name: str) -> str:
    return f"ended by {name}"


def _say(text: str) -> None:
    if rank() == 0 or text.endswith(str(EXIT_REQUEUE)):
        write_now(f"drivetrain: {text}\n")
