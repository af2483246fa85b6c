"""Stop all ranks after the same update when one of them asks for it, without a collective."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from drivetrain.core.errors import EXIT_REQUEUE, Preempted, RankFailure

_LAUNCHERS = 2.0
"""Seconds by which a launcher's signal, which follows the death of a rank, may come before the news of it."""


class Stopping:
    """One rank's part of the agreement: how far its main thread is, and where it must wait.

    Each update ends in two *boundaries*, one before its savers and one after them. At a boundary the main
    thread increments `passed` and then calls `answer` if it is `held`. A rank that asks to stop is held at
    once, the others when its request arrives. The thread that holds sets `held` and then reads `passed`; the
    main thread does the reverse. So it cannot pass the boundary after the one that was read without an
    answer. Rank 0 collects `passed` of all ranks and stops them at the first boundary that none has passed.
    Only the channel's threads take part: no rank waits for another's main thread.

    If all ranks ask at the same point of an update, each is held from its own request on, so they stop after
    this very update, as one process does. Neither side takes a lock, so a signal handler may ask too.

    Attributes:
        passed: The last boundary that was passed, from 0, which is before the first update.
        held: Whether the main thread must call `answer` at the next boundary.
        shared: Whether there are other ranks to agree with, over an open channel.
        asked: Why this rank wants to stop; None if it does not.
        reason: Why this rank must stop, as far as it knows.
        signals: The reasons that come from signals, each with the program's exit code.
        ending: The exception that ends a run stopped by a signal; all ranks raise the same.
        restart_is_pointless: Whether the error that spoiled the run would recur after a restart, whatever
            signal has arrived. The same on all ranks.
    """

    def __init__(self) -> None:
        self.passed = -1
        self.held = False
        self.shared = False
        self.asked: str | None = None
        self.signals: Mapping[str, int] = {}
        self.reason: str | None = None
        self.ending: BaseException | None = None
        self.restart_is_pointless = False
        self._asked_after = -1
        self._asked_at = -math.inf
        self._at: int | None = None
        self._failure: RankFailure | None = None
        self._answered = threading.Event()

    @property
    def exit_code(self) -> int | None:
        """The program's exit code after a signal has ended the run; None if none has."""
        return (
            None if self.reason is None or self.is_overruled(self.reason) else self.signals.get(self.reason)
        )

    def is_overruled(self, reason: str) -> bool:
        """Return whether a signal asks for a restart that would be pointless."""
        return self.restart_is_pointless and self.signals.get(reason) == EXIT_REQUEUE

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; the channel's thread passes it on. Only the first reason counts.

        After a failure nothing is asked: a launcher then signals the ranks that are left.
        """
        if self.asked is None and self._failure is None:
            self.held = True
            self._asked_at = time.monotonic()
            self._asked_after = self.passed
            self.asked = self.reason = reason

    def end_of(self, reason: str) -> BaseException:
        """Return the exception that ends a run after a signal's `reason`."""
        return Preempted(reason) if self.signals[reason] == EXIT_REQUEUE else KeyboardInterrupt(reason)

    def end(self, reason: str, spoiled: str | None) -> str | None:
        """End a run that a signal has stopped.

        Args:
            reason: The signal's reason.
            spoiled: What else has spoiled the run meanwhile; None if nothing has.

        Returns:
            `spoiled`, if it overrules the signal.

        Raises:
            Preempted: The program will be started again.
            KeyboardInterrupt: The program stops.
        """
        if self.is_overruled(reason):
            return spoiled
        self.ending = self.end_of(reason)
        if spoiled is not None:
            self.ending.add_note(f"drivetrain: {spoiled}")
        raise self.ending

    def hold(self) -> dict[str, Any]:
        """Hold the main thread at its next boundary, and return the last one that it passed before."""
        self.held = True
        passed = self.passed
        # A rank held by its own request may already wait at its boundary.
        return {
            "passed": passed if self.asked is None else min(passed, self._asked_after),
            "asked": self.asked,
        }

    def set_answer(self, at: int, reason: str) -> None:
        """Set rank 0's answer: the boundary to stop at, and the reason."""
        self._at, self.reason = at, reason
        self._answered.set()

    def abandon(self, failure: RankFailure, is_death: bool = False) -> None:
        """Give up waiting for an answer: a rank has failed.

        Args:
            failure: How.
            is_death: Whether the rank was killed or stopped. A launcher that sees it first signals the ranks
                that are left, and that signal asks for no restart.
        """
        self._failure = failure
        if is_death and self._at is None and time.monotonic() - self._asked_at < _LAUNCHERS:
            self.signals = {}
        self._answered.set()

    def answer(self) -> str | None:
        """Wait for rank 0's answer and return the reason to stop at this boundary; None to go on.

        Raises:
            RankFailure: Another rank has failed meanwhile.
        """
        while not self._answered.wait(1.0):  # a wait without a timeout cannot be interrupted on every system
            pass
        if self._at is None and self._failure is not None:
            raise self._failure
        return self.reason if self.passed == self._at else None


class Poll:
    """Rank 0's part of the agreement: where all ranks are, and the first boundary that none has passed.

    Args:
        world_size: The number of ranks.

    Attributes:
        is_open: Whether a rank has asked to stop.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passed: dict[int, int] = {}
        self._asked: dict[int, str] = {}
        self._is_decided = False
        self.is_open = False

    def note(self, rank: int, passed: int, asked: str | None = None) -> None:
        """Note the last boundary that a rank has passed; the rank is held there or has left."""
        self._passed[rank] = passed
        if asked is not None:
            self._asked[rank] = asked

    def open(self, rank: int, asked: str) -> bool:
        """Take a rank's request; returns whether it is the first, so that all ranks must be held."""
        self._asked[rank] = asked
        is_first, self.is_open = not self.is_open, True
        return is_first

    def decision(self) -> dict[str, Any] | None:
        """Return where to stop and why, once, when all ranks have reported; otherwise None."""
        if not self.is_open or self._is_decided or len(self._passed) < self._world_size:
            return None
        self._is_decided = True
        return {"at": max(self._passed.values()) + 1, "reason": self._asked[min(self._asked)]}
