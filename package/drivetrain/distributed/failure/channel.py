"""The failure channel: when one rank fails, all end within seconds, and the last lines say why."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from drivetrain.core.errors import RankFailure
from drivetrain.distributed.call_order import CallOrder
from drivetrain.distributed.failure import messages as failure_wire
from drivetrain.distributed.failure.last_words import end_now, record, write_now
from drivetrain.distributed.failure.messages import (
    TOKEN_BYTES,
    Cause,
    Line,
    Timing,
    at,
    connect,
    is_voluntary,
    own_hosts,
)
from drivetrain.distributed.failure.place import Phase, phase_of_thread, place_of_error, place_of_thread
from drivetrain.distributed.failure.silence import DIED, Silence, machine
from drivetrain.distributed.failure.stack_files import StackFiles, now
from drivetrain.distributed.failure.watchdog import EXIT_HANG
from drivetrain.distributed.interfaces import network, own_address
from drivetrain.distributed.interrupts import Interrupts
from drivetrain.distributed.launch.children import outlive_parent, started, wait_for
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.programs import launched
from drivetrain.distributed.launch.rendezvous import default_store
from drivetrain.distributed.secret import derived, signed, verified
from drivetrain.distributed.signals import AGENT, current
from drivetrain.distributed.sockets import Bell
from drivetrain.distributed.stopping import Stopping

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from drivetrain.distributed.failure.hub import Hub


class FailureChannel:
    """A context manager around the ranks' common work, entered by all of them.

    Every rank has a connection to rank 0, outside the training and without collectives. A rank that raises
    reports its error, one that dies breaks its connection, and one that is stopped falls silent. Rank 0
    decides which failure was the first: an error that only reports a lost connection or a timeout waits two
    seconds for a better one. The rank that failed first ends with its own error, and rank 0 with a
    `RankFailure` that names it in the last lines of the program. The other ranks end silently with exit code
    1. A rank whose main thread hangs in a collective is killed from another thread after a second.

    When all ranks leave the context without an error nothing happens, even if they leave at different
    moments. Rank 0 then waits up to a minute for the others.

    Args:
        store: A torch store that all ranks share, for the first contact; None uses that of the default
            process group.
        describe: Says how far this rank is, such as "step 17" or "in training, after step 17". Called in
            a thread.
        progress: Returns a number that grows with every step and is the same on all ranks at the same place.
            Called in a thread.
        signs: Other signs of progress: returns any JSON value that changes with it. Called in a thread.
        is_outside: Returns whether this rank is in the body of the program's own loop. Called in a thread.
        hang_timeout: Seconds without progress on any rank after which the run exits with code 75 and names
            the ranks that are behind; needs `progress`. Progress is a change of `progress`, `describe`,
            `signs`, the hook or the part of the step. Compilations, saves and loads, which show none, have an
            hour more. None disables it.
        directory: Where the stacks of all ranks go after a failure, into "failures"; None writes none.
        stopping: Agrees with the other ranks on when to stop or to act together, over these connections.
        order: The calls that the ranks make in one order. The last one is part of every message that says
            where a rank is.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None = None,
        *,
        timing: Timing | None = None,
        describe: Callable[[], str] = str,
        progress: Callable[[], int] | None = None,
        signs: Callable[[], Any] = int,
        is_outside: Callable[[], bool] = bool,
        hang_timeout: float | None = None,
        directory: Path | None = None,
        stopping: Stopping | None = None,
        order: CallOrder | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timing = failure_wire.TIMING if timing is None else timing
        self._describe = describe
        self._progress = progress
        self._hang_timeout = hang_timeout if progress is not None else None
        self._signs = signs
        self._seen: Any = None
        self._still_since = time.monotonic()
        self._is_outside = is_outside
        self._stopping = stopping if stopping is not None else Stopping()
        self._order = order if order is not None else CallOrder()
        self._stacks = StackFiles(rank, world_size, directory)
        self._main = threading.get_ident()
        self._interrupts = Interrupts()
        self._interrupted = False
        self._asked_in = -1
        self._cause: Cause | None = None
        self._decided = threading.Event()
        self._out = threading.Event()
        self._closed = threading.Event()
        self._reported: BaseException | None = None
        self._hub: Hub | None = None
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._bell: Bell
        self._rank_0: Silence
        self._rank_0_where = ""

    def __enter__(self) -> FailureChannel:
        if self.world_size == 1:
            return self
        self._main = threading.get_ident()
        store = self._store if self._store is not None else default_store()
        environment = detect(os.environ)
        # How many channels this rank has opened on this store: the same number on every rank.
        opened = store.add(f"drivetrain/failure/opened/{self.rank}", 1)
        key = f"drivetrain/failure/at/{opened}"
        secret = derived(key)  # which is not in the store, where others may read it
        if self.rank == 0:
            local = environment is not None and environment.one_machine
            address = environment.address if environment is not None else None
            host = "127.0.0.1" if local else own_address(address or "") or ""
            from drivetrain.distributed.failure.hub import Hub

            self._hub = Hub(
                self.world_size, host, self._timing, self._hang_timeout, token=secret and secret[:TOKEN_BYTES]
            ).start()
            found = {"port": self._hub.port, "hosts": [] if local else [host] if host else own_hosts()}
            found["bound"] = bool(host)
            if secret is None:  # a store of a test's, or of a program's own group
                found["token"] = self._hub.token
            found |= {"machine": machine(), "network": network(), "pid": os.getpid(), "began": now()}
            store.set(key, signed(key, json.dumps(found)))
        try:
            offer = json.loads(verified(key, store.get(key).decode()))
            offer = offer if secret is None else {**offer, "token": secret[:TOKEN_BYTES]}
            address = environment.address if environment is not None else None
            self._line = connect(self.rank, offer, address, self._timing.silence)
        except BaseException:
            if self._hub is not None:
                self._hub.leave()
            raise
        self._rank_0 = Silence(offer["machine"], offer["pid"], self._timing.silence)
        me = {"rank": self.rank, "machine": machine(), "pid": os.getpid()}
        stacks = self._stacks.open(offer["began"])
        self._line.send(kind="hello", stacks=stacks, **me, **self._state())
        ranks = launched()
        if ranks is not None:
            ranks.is_guarded = True
        outlive_parent(True)
        self._interrupts.open()
        self._bell = Bell(self._line.socket)
        self._thread = threading.Thread(target=self._run, name="drivetrain-failure", daemon=True)
        self._thread.start()
        self._stopping.wake, self._stopping.shared = self._bell.ring, True
        self._order.tell = self._tell
        return self

    def report(self, error: BaseException, besides: str = "") -> None:
        """Report an error on this rank, and wait a moment to learn whether it was the first.

        Leaving the context with an error does the same. Only the first report of a rank counts.
        """
        if self._line is None or self._reported is not None:
            return
        self._reported = error
        if self._decided.is_set():
            return
        cause = Cause.of_error(self.rank, self._place(place_of_error(error)), error, besides)
        self._line.send(kind="cause", cause=cause.to_json(), **self._state())
        self._decided.wait(self._timing.deciding)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._line is None:
            return
        is_agreed = error is not None and error is self._stopping.ending  # raised by all ranks
        has_failed = error is not None and not is_agreed and not is_voluntary(error)
        if error is not None and has_failed:
            self.report(error)
        elif not self._decided.is_set():
            self._line.send(kind="bye", **self._state())
            if self._hub is not None:
                self._wait_for_others(self._timing.goodbye)
        self._out.set()
        cause = self._cause
        if cause is None:
            self._close(is_fine=not has_failed)
            return
        self._wait_for_exits()
        self._close(is_fine=False)
        if cause.kind == "hang":
            self._end(cause)
        elif cause.rank == self.rank:
            self._end_as_first(cause, error)
        elif isinstance(error, KeyboardInterrupt) and self._is_reporting():
            return
        elif self._is_reporting():
            raise cause.failure(self._stacks.told)
        else:
            end_now(self._stopping.exit_code or 1)

    def _wait_for_exits(self) -> None:
        """On rank 0, give the others time to end and to print their last lines.

        torch's agent kills all others once one has ended, and `drivetrain launch` prints last. Under them,
        the ranks that end because of another's failure give that rank, and rank 0, time to report it.
        """
        assert self._cause is not None
        until = time.monotonic() + self._timing.last
        if AGENT in os.environ:
            # Until rank 0 has closed its end of the connection.
            while (
                self.rank not in (0, self._cause.rank)
                and self._line is not None
                and self._line.is_open()
                and time.monotonic() < until
            ):
                time.sleep(0.02)
        elif self._hub is not None:
            self._hub.finished.wait(self._timing.last)
            wait_for(started.values(), until - time.monotonic())

    def _wait_for_others(self, seconds: float) -> None:
        assert self._hub is not None
        deadline = time.monotonic() + seconds
        while not (self._hub.finished.wait(0.02) or self._decided.is_set()) and time.monotonic() < deadline:
            pass
        if self._hub.cause is not None:
            self._decided.wait(self._timing.grace)  # until the channel's thread has received it too

    def _end_as_first(self, cause: Cause, error: BaseException | None) -> None:
        """Let this rank's error propagate, with a note that it was the first."""
        ranks = launched()
        if isinstance(error, SystemExit):  # the interpreter prints nothing for it
            if ranks is not None and isinstance(error.code, int):
                ranks.exit_code = error.code
            if self._is_reporting():
                sys.stderr.write(cause.block(self._stacks.told))
        elif error is not None and not isinstance(error, KeyboardInterrupt):
            if self._stacks.told:
                error.add_note(f"drivetrain: {self._stacks.told}")
            error.add_note(f"drivetrain: {cause}")
        elif isinstance(error, KeyboardInterrupt) and not self._is_reporting():
            end_now(130)
        if error is not None:
            record(error)

    def _close(self, is_fine: bool) -> None:
        assert self._line is not None
        if not is_fine:
            # Imported here: a run with one process does not need it.
            from drivetrain.distributed.group import note_failure

            note_failure()
        self._closed.set()
        self._interrupts.close()
        self._stopping.wake, self._stopping.shared = bool, False
        self._order.tell = int
        if self._thread is not None:
            self._bell.ring()
            self._thread.join()
            self._bell.close()
        self._stacks.wait()
        self._line.close()
        self._line = None
        if self._hub is not None:
            self._hub.leave()
        if self._cause is None:
            outlive_parent(False)
        ranks = launched()
        if ranks is not None:
            ranks.has_finished = ranks.has_finished or is_fine
            ranks.failure_told = ranks.failure_told or self._cause is not None
            ranks.is_guarded = False

    def _run(self) -> None:
        assert self._line is not None
        following, has_told = time.monotonic(), False
        while not self._closed.is_set():
            try:
                self._bell.wait(0.05)
                has_ended = self._hear(self._line)
                if not has_ended and time.monotonic() >= following:
                    following = time.monotonic() + self._timing.silence / 5
                    has_ended = self._beat()
            except Exception as error:  # a check that fails, for lack of a file descriptor say
                has_ended = False
                if not has_told:
                    has_told = True
                    with contextlib.suppress(Exception):
                        sys.stderr.write(f"drivetrain: the failure channel of rank {self.rank}: {error!r}\n")
                self._closed.wait(0.05)
            if has_ended:
                return

    def _hear(self, line: Line) -> bool:
        """Handle rank 0's messages and this rank's signals; returns whether the channel is over."""
        if not self._interrupted and self._interrupts.unheard() > self._timing.grace:
            self._interrupted = True
            cause = Cause("error", self.rank, self._state()["where"], "KeyboardInterrupt")
            line.send(kind="cause", cause=cause.to_json(), **self._state())
        wanted = self._stopping.wanted
        if wanted > self._asked_in and line.send(
            kind="ask", round=wanted, asked=self._stopping.asked, **self._state()
        ):
            self._asked_in = wanted
        try:
            messages = line.receive()
        except ValueError:
            messages = None
        if messages is None and self._hub is not None and self._hub.cause is not None:
            self._fail(self._hub.cause)  # the hub ended before its message to this process was read
            return True
        if messages is None:
            self._lost(
                DIED
                if line.broken is None or isinstance(line.broken, ConnectionError)
                else f"it did not read what this rank sent ({line.broken})"
            )
            return True
        for each in messages:
            self._rank_0.end()
            if each["kind"] == "end":
                line.close()  # so the hub knows that this was read
                self._stopping.abandon(RankFailure("rank 0 has ended, and cannot say when to stop"))
                return True
            if each["kind"] == "cause":
                self._fail(Cause.from_json(each["cause"]))
                return True
            if each["kind"] == "hold":
                line.send(kind="held", **{**self._state(), **self._stopping.hold(each["round"])})
            elif each["kind"] == "meet":
                self._stopping.set_answer(each["at"], each["reason"])
            else:
                self._rank_0_where = each["where"]
        return False

    def _beat(self) -> bool:
        """Send this rank's state to rank 0, and check on rank 0; returns whether the channel is over."""
        self._tell()
        found = self._rank_0.tick() if self.rank else None
        if found is None:
            return False
        self._rank_0.end_process()
        self._lost(found)
        return True

    def _tell(self) -> None:
        """Send this rank's state to rank 0, which could not ask for it after an abort in a collective."""
        if self._line is not None:
            self._line.send(kind="beat", **self._state())

    def _lost(self, what: str) -> None:
        self._fail(Cause("lost", 0, self._rank_0_where, what))

    def _fail(self, cause: Cause) -> None:
        """Handle the first failure, on this rank or another, in the channel's thread."""
        where = self._where(None if self._reported is None else place_of_error(self._reported))
        # A lost rank's last message is some time old; a rank that never connected has no place to report.
        if cause.kind == "lost" and (cause.where or cause.rank == 0):
            cause = replace(cause, what=f"{cause.what}; rank {self.rank} was {at(where)}")
        self._cause = cause
        if self._is_reporting() and cause.rank != self.rank:
            # At once: a launcher may kill this rank when another has ended.
            with contextlib.suppress(Exception):
                record(cause.failure(), cause.kind == "hang")
        self._decided.set()
        self._stopping.abandon(cause.failure(), cause.kind == "lost")
        self._expect_launcher(cause)
        if not cause.is_interrupt:
            with contextlib.suppress(Exception):  # the system may refuse a thread
                calls = f"{where}\n{self._order.listed()}".rstrip()
                self._stacks.begin(calls, self._reported, self._hub)
        if cause.kind != "hang" and cause.rank == self.rank and not self._interrupted:
            return
        if cause.kind == "hang" and self.rank in cause.stuck:
            with contextlib.suppress(Exception):
                sys.stderr.write(f"drivetrain: the stacks of rank {self.rank}:\n")
                sys.stderr.flush()
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self._leaves_in_time(self._timing.grace) or self._closed.is_set():
            return
        if self._hub is not None:
            self._wait_for_exits()
            # The others' end breaks the collective that the main thread is in.
            if self._leaves_in_time(self._timing.freed):
                return
        self._end(cause)

    def _expect_launcher(self, cause: Cause) -> None:
        """Prepare for the signal that a launcher sends to the ranks that are left."""
        signals = current()
        if signals is not None:
            signals.disregard_requeues()
        elif AGENT in os.environ and self._is_reporting() and cause.rank != self.rank:
            write_now(f"drivetrain: {cause}\n")  # the signal may kill this process before its last lines

    def _leaves_in_time(self, seconds: float) -> bool:
        """Return whether the main thread leaves the context by itself; with its own error it has longer."""
        return self._out.wait(seconds) or (
            self._reported is not None and self._out.wait(self._timing.unwinding)
        )

    def _end(self, cause: Cause) -> NoReturn:
        with contextlib.suppress(Exception):  # the process must end all the same
            self._stacks.wait()
            if self.rank:
                self._wait_for_exits()
            if self._is_reporting():
                sys.stderr.write(cause.block(self._stacks.told))
                record(cause.failure(), cause.kind == "hang" or cause.rank == self.rank)
        end_now(EXIT_HANG if cause.kind == "hang" else self._stopping.exit_code or 1)

    def _is_reporting(self) -> bool:
        """Return whether this rank reports the failure: rank 0, or the first of another machine."""
        if self.rank == 0:
            return True
        is_rank_0_lost = self._cause is not None and self._cause.kind == "lost" and self._cause.rank == 0
        return (is_rank_0_lost and self.rank == 1) or os.environ.get("LOCAL_RANK") == "0"

    def _state(self) -> dict[str, Any]:
        progress, signs, phase, place, doing = None, None, Phase.WORKS, "", ""
        with contextlib.suppress(Exception):  # a rank that says too little is better than a silent one
            progress = self._progress() if self._progress is not None else None
            signs = [self._signs(), self._describe()]
            if self._is_still((progress, signs)):
                phase, place = phase_of_thread(self._main)
                doing = place_of_thread(self._main)
            if self._is_outside():
                phase, place = Phase.OUTSIDE, ""
        return {
            "where": self._where(doing),
            "progress": progress,
            "signs": signs,
            "phase": phase,
            "place": place,
            "passed": self._stopping.passed,
        }

    def _is_still(self, signs: Any) -> bool:
        """Return whether there was no progress for so long that the frames may be read; see `place`."""
        now = time.monotonic()
        if signs != self._seen:
            self._seen, self._still_since = signs, now
        limit = self._timing.late if self._hang_timeout is None else self._hang_timeout / 2
        return now - self._still_since >= limit

    def _where(self, doing: str | None = None) -> str:
        """Return where this rank is, with its last call, for those who wonder why it waits or has gone."""
        return self._order.after(self._place(doing))

    def _place(self, doing: str | None) -> str:
        try:
            described = self._describe()
            doing = place_of_thread(self._main) if doing is None else doing
            return described if doing in described else f"{described}, {doing}" if described else doing
        except Exception as error:  # the run's own failure matters more
            return f"at an unknown place ({type(error).__name__}: {error})"
