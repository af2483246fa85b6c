"""How all ranks stop after the same update when one of them asks for it, without a collective."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import EXIT_REQUEUE, Preempted, RankFailure


class Stopping:
    """One rank's part: what its main thread has passed, and what it is to wait for.

    At the end of every update, before its savers and after them, the main thread passes a *boundary*: it
    counts `passed` up, and if it then finds itself `held`, it takes `answer`. A rank that asks to stop is
    held at once, the others when they hear of it. Whoever holds first sets `held` and then reads `passed`,
    the main thread does the reverse, so that the boundary after the one that was read is not passed without
    an answer. Rank 0 hears what all ranks have passed, and lets them stop at the first boundary that none
    has. It takes the channel's threads alone: no rank waits for another's main thread.

    Where all ranks ask at the same point of an update each is held from its own request on, so that they stop
    after this very update, as one process does. Neither side takes a lock: a signal's handler may ask, too.

    Attributes:
        passed: The last boundary that was passed, from 0, which stands before the first update.
        held: Whether the main thread is to take `answer` at the next boundary.
        shared: Whether there are other ranks to agree with, over an open channel.
        asked: Why this rank wants to stop, if it does.
        reason: Why this rank is to stop, as far as it knows.
        signals: Reasons that are a signal's, and the exit codes of the program after them.
        ending: What is raised at the end of a run that such a reason has ended, on all ranks alike.
        in_vain: Whether the program is not to be started again, whatever signal has come: it would meet what
            has spoiled the run once more. On all ranks alike.
    """

    def __init__(self) -> None:
        self.passed = -1
        self.held = False
        self.shared = False
        self.asked: str | None = None
        self.signals: Mapping[str, int] = {}
        self.reason: str | None = None
        self.ending: BaseException | None = None
        self.in_vain = False
        self._asked_after = -1
        self._at: int | None = None
        self._failure: RankFailure | None = None
        self._told = threading.Event()

    @property
    def exit_code(self) -> int | None:
        """What the program ends with if a signal has ended the run; None if none has."""
        return (
            None if self.reason is None or self.is_overruled(self.reason) else self.signals.get(self.reason)
        )

    def is_overruled(self, reason: str) -> bool:
        """Whether it is a signal's after which the program would be started again in vain."""
        return self.in_vain and self.signals.get(reason) == EXIT_REQUEUE

    def ask(self, reason: str) -> None:
        """Ask all ranks to stop; the channel's thread passes it on. Only the first reason counts."""
        if self.asked is None:
            self.held = True
            self._asked_after = self.passed
            self.asked = self.reason = reason

    def end_of(self, reason: str) -> BaseException:
        """What a run that such a signal has ended raises."""
        return Preempted(reason) if self.signals[reason] == EXIT_REQUEUE else KeyboardInterrupt(reason)

    def end(self, reason: str, spoiled: str | None) -> str | None:
        """End a run that such a signal has ended.

        Args:
            reason: The signal's.
            spoiled: What has spoiled the run meanwhile, if anything has.

        Returns:
            That, where it goes before the signal.

        Raises:
            Preempted: The program is to be started again.
            KeyboardInterrupt: It is to stop.
        """
        if self.is_overruled(reason):
            return spoiled
        self.ending = self.end_of(reason)
        if spoiled is not None:
            self.ending.add_note(f"drivetrain: {spoiled}")
        raise self.ending

    def hold(self) -> dict[str, Any]:
        """Hold the main thread at its next boundary, and say which it has passed without being held."""
        self.held = True
        passed = self.passed
        # One that was held by its own request may have come to its boundary: it waits there.
        return {
            "passed": passed if self.asked is None else min(passed, self._asked_after),
            "asked": self.asked,
        }

    def tell(self, at: int, reason: str) -> None:
        """Rank 0's answer: at which boundary to stop, and why."""
        self._at, self.reason = at, reason
        self._told.set()

    def abandon(self, failure: RankFailure) -> None:
        """There will be no answer."""
        self._failure = failure
        self._told.set()

    def answer(self) -> str | None:
        """Why to stop at the boundary that was just passed, once that is known; None to go on.

        Raises:
            RankFailure: Another rank has failed meanwhile.
        """
        while not self._told.wait(1.0):  # a wait without an end cannot be interrupted on every system
            pass
        if self._at is None and self._failure is not None:
            raise self._failure
        return self.reason if self.passed == self._at else None


class Poll:
    """Rank 0's part: where all ranks are, and the first boundary that none has passed.

    Args:
        world_size: How many ranks there are.

    Attributes:
        is_open: Whether a rank has asked.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._passed: dict[int, int] = {}
        self._asked: dict[int, str] = {}
        self._is_decided = False
        self.is_open = False

    def note(self, rank: int, passed: int, asked: str | None = None) -> None:
        """What a rank has passed: it is held there, or has left."""
        self._passed[rank] = passed
        if asked is not None:
            self._asked[rank] = asked

    def open(self, rank: int, asked: str) -> bool:
        """Take a rank's request; whether it is the first, so that all are to be held."""
        self._asked[rank] = asked
        is_first, self.is_open = not self.is_open, True
        return is_first

    def decision(self) -> dict[str, Any] | None:
        """Where to stop, and why, once: when all ranks have told."""
        if not self.is_open or self._is_decided or len(self._passed) < self._world_size:
            return None
        self._is_decided = True
        return {"at": max(self._passed.values()) + 1, "reason": self._asked[min(self._asked)]}
