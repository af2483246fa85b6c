"""Let all ranks act after the same step when one of them asks, without a collective in the others."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drivetrain.core.errors import EXIT_REQUEUE, Preempted, RankFailure

_LAUNCHERS = 2.0
"""Seconds by which a launcher's signal, which follows the death of a rank, may come before the news of it."""


class Stopping:
    """One rank's part of the agreement: how far its main thread is, and where all ranks meet.

    Each step ends in *boundaries*, as many on all ranks: one before all that is due after it, one after its
    savers, and one wherever hooks may have asked in between. At a boundary the main thread increments
    `passed` and then calls `meets`. A rank that asks is held at once, the others when its request arrives.
    The thread that holds sets `held` and then reads `passed`; the main thread does the reverse. So it cannot
    pass the boundary after the one that was read without an answer. Rank 0 collects `passed` of all ranks,
    and they meet at the first boundary that none has passed. Only the channel's threads take part until then:
    no rank waits for another's main thread. At the meeting the ranks gather all that they have asked for, and
    the next `round` begins.

    If all ranks ask at the same point of a step, each is held from its own request on, so they meet after
    this very step, as one process does. Neither side takes a lock, so a signal handler may ask too.

    Attributes:
        passed: The last boundary that was passed, from 0, which is before the first step.
        round: The number of meetings so far. Held and wanted are meant for one round, so that a new round
            resets both in one assignment.
        held: The round of the answer that the main thread must wait for at the next boundary.
        wanted: The round of this rank's last request.
        wake: Lets the channel's thread see at once what this rank has asked.
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
        self.round = 0
        self.held = self.wanted = -1
        self.wake: Callable[[], object] = bool
        self.shared = False
        self.asked: str | None = None
        self.signals: Mapping[str, int] = {}
        self.reason: str | None = None
        self.ending: BaseException | None = None
        self.restart_is_pointless = False
        self._asked_after = -1
        self._asked_at = -math.inf
        self._at: int | None = None
        self._has_agreed = False
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

    @property
    def takes_requests(self) -> bool:
        """Whether `ask` would have an effect."""
        return self.asked is None and self._failure is None

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop. Only the first reason counts.

        After a failure nothing is asked: a launcher then signals the ranks that are left.
        """
        if self.takes_requests:
            self._asked_at = time.monotonic()
            self.asked = self.reason = reason  # before the round, so that a meeting of that round has it
            self.want_meeting()

    def want_meeting(self) -> None:
        """Ask all ranks to meet; the channel's thread passes it on."""
        current = self.round
        if self.wanted != current:
            self.held = current
            self._asked_after = self.passed
            self.wanted = current
            self.wake()

    def end_of(self, reason: str) -> BaseException:
        """Return the exception that ends a run after a signal's `reason`."""
        return Preempted(reason) if self.signals[reason] == EXIT_REQUEUE else KeyboardInterrupt(reason)

    def end(self, reason: str, spoiled: str | None) -> str | None:
        """End a run that a signal has stopped.

        Args:
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

    def hold(self, number: int) -> dict[str, Any]:
        """Hold the main thread at its next boundary in a round, and return the last one that it passed."""
        self.held = number
        passed = self.passed
        # A rank held by its own request may already wait at its boundary.
        return {
            "passed": passed if self.wanted != number else min(passed, self._asked_after),
            "asked": self.asked,
        }

    def set_answer(self, at: int, reason: str | None) -> None:
        """Set rank 0's answer: the boundary to meet at, and the reason to stop there."""
        if reason is not None:
            self.reason, self._has_agreed = reason, True
        self._at = at
        self._answered.set()

    def abandon(self, failure: RankFailure, is_death: bool = False) -> None:
        """Give up waiting for an answer: a rank has failed.

        Args:
            is_death: Whether the rank was killed or stopped. A launcher that sees it first signals the ranks
                that are left, and that signal asks for no restart.
        """
        self._failure = failure
        if is_death and not self._has_agreed and time.monotonic() - self._asked_at < _LAUNCHERS:
            self.signals = {}
        self._answered.set()

    def meets(self) -> bool:
        """Return whether all ranks meet at this boundary; waits for rank 0's answer if this rank is held.

        Raises:
            RankFailure: Another rank has failed meanwhile.
        """
        if self.held != self.round:
            return False
        # A wait without a timeout cannot be interrupted on every system.
        while self._failure is None and not self._answered.wait(1.0):
            pass
        if self._at is None and self._failure is not None:
            raise self._failure
        if self.passed != self._at:
            return False
        # No rank asks in the next round before all have come to this meeting's collective, so nothing of the
        # next round is lost here.
        self._answered.clear()
        self._at = None
        self.round += 1
        return True

    def agree(self, reasons: Iterable[str | None]) -> str | None:
        """Return the first of the ranks' reasons to stop, and note it; None if no rank has one."""
        reason = next((each for each in reasons if each is not None), None)
        if reason is not None:
            self.reason, self._has_agreed = reason, True
        return reason


class Poll:
    """Rank 0's part of the agreement: where all ranks are, and the first boundary that none has passed.

    Attributes:
        round: The number of decisions so far.
        is_open: Whether a rank has asked in this round.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passed: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._asked: dict[int, str] = {}
        self.round = 0
        self.is_open = False

    def note(self, rank: int, passed: int, asked: str | None = None) -> None:
        """Note the last boundary that a rank has passed, where it is held, and why it wants to stop."""
        self._passed[rank] = passed
        if asked is not None:
            self._asked[rank] = asked

    def leave(self, rank: int, passed: int) -> None:
        """Note the last boundary that a rank has passed, which has left."""
        self._left[rank] = passed

    def open(self, rank: int, number: int, asked: str | None) -> bool:
        """Take a rank's request; returns whether it is the first, so that all ranks must be held.

        One of an earlier round is met by that round's meeting, which the rank has not come to yet.
        """
        if number != self.round:
            return False
        if asked is not None:
            self._asked[rank] = asked
        is_first, self.is_open = not self.is_open, True
        return is_first

    def decision(self) -> dict[str, Any] | None:
        """Return where to meet, and why to stop there, once all ranks have reported; otherwise None."""
        passed = {**self._passed, **self._left}
        if not self.is_open or len(passed) < self._world_size:
            return None
        reason = self._asked[min(self._asked)] if self._asked else None
        self._passed, self._asked, self.is_open = {}, {}, False
        self.round += 1
        return {"at": max(passed.values()) + 1, "reason": reason}
