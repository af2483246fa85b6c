"""The failure channel: when one rank fails, all end within seconds, and the last lines say why."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from drivetrain.core.errors import RankFailure
from drivetrain.distributed.call_order import CallOrder
from drivetrain.distributed.failure import messages as failure_wire
from drivetrain.distributed.failure.heartbeat import DIED, UNREACHABLE, Heartbeat, machine
from drivetrain.distributed.failure.last_words import end_now, record, write_now
from drivetrain.distributed.failure.location import Phase, error_location, phase_of_thread, thread_location
from drivetrain.distributed.failure.messages import (
    TOKEN_BYTES,
    Cause,
    Line,
    LocalLine,
    Timing,
    at,
    connect,
    is_voluntary,
    own_hosts,
)
from drivetrain.distributed.failure.stack_files import StackFiles, now
from drivetrain.distributed.failure.watchdog import EXIT_HANG
from drivetrain.distributed.interfaces import own_address
from drivetrain.distributed.launch.children import count_channel, end_all, started, wait_for
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.programs import launched
from drivetrain.distributed.launch.rendezvous import default_store
from drivetrain.distributed.secret import derived, signed, verified
from drivetrain.distributed.signals import AGENT, Signals, current
from drivetrain.distributed.sockets import Wakeup, is_unreachable
from drivetrain.distributed.stopping import Stopping

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from drivetrain.distributed.failure.monitor import Monitor


_BEATS = 1024
"""The most heartbeats that rank 0 reads in a second: they take 5 to 8 % of its interpreter."""


@dataclass(frozen=True)
class Status:
    """The functions by which a rank reports its state. All are called in a thread.

    Attributes:
        describe: Says how far this rank is, such as "step 17" or "in training, after step 17".
        progress: Returns a number that grows with every step and is the same on all ranks at the same point;
            None before the first step.
        signs: Other signs of progress: returns any JSON value that changes with it.
        is_outside: Returns whether this rank is in the body of the program's own loop.
    """

    describe: Callable[[], str] = str
    progress: Callable[[], int | None] = lambda: None
    signs: Callable[[], Any] = int
    is_outside: Callable[[], bool] = bool


class FailureChannel:
    """A context manager around the ranks' common work, entered by all of them.

    Every rank has a connection to rank 0, outside the training and without collectives. A rank that raises
    reports its error, one that dies breaks its connection, and one that is stopped sends no heartbeat. Rank 0
    decides which failure was the first: an error that only reports a lost connection or a timeout waits two
    seconds for a better one. The rank that failed first ends with its own error, and rank 0 with a
    `RankFailure` that names it in the last lines of the program. The other ranks end silently with exit code
    1. A rank whose main thread hangs in a collective is killed from another thread after a second.

    When all ranks leave the context without an error nothing happens, even if they leave at different
    moments. Rank 0 then waits up to a minute for the others. Each rank has one thread for all of this; rank
    0's receives from the others too.

    Args:
        store: A torch store that all ranks share, for the first contact; None uses that of the default
            process group.
        status: How this rank reports its state, until `follow` changes it.
        hang_timeout: Seconds without progress on any rank after which the run exits with code 75 and names
            the ranks that are behind; needs `Status.progress`. Progress is a change of what the status
            returns, the hook or the part of the step. Compilations, saves and loads, which show none, have an
            hour more. None disables it.
        directory: Where the stacks of all ranks go after a failure, into "failures"; None writes none.
        order: The calls that the ranks make in one order. The last one is part of every message that says
            where a rank is.

    Attributes:
        stopping: Agrees with the other ranks on when to stop or to act together, over these connections.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None = None,
        *,
        timing: Timing | None = None,
        status: Status = Status(),
        hang_timeout: float | None = None,
        directory: Path | None = None,
        order: CallOrder | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stopping = Stopping()
        self._store = store
        self._timing = failure_wire.TIMING if timing is None else timing
        if world_size > _BEATS:
            self._timing = replace(self._timing, heartbeat=self._timing.heartbeat * world_size / _BEATS)
        self._status = status
        self._hang_timeout = hang_timeout
        self._seen: Any = None
        self._still_since = time.monotonic()
        self._order = order if order is not None else CallOrder()
        self._stacks = StackFiles(rank, directory)
        self._main = threading.get_ident()
        self._signals: Signals | None = None
        self._own_signals: Signals | None = None
        self._interrupted = False
        self._asked_in = -1
        self._has_complained = False
        self._cause: Cause | None = None
        self._decided = threading.Event()
        self._out = threading.Event()
        self._closed = threading.Event()
        self._reported: BaseException | None = None
        self._monitor: Monitor | None = None
        self._line: Line | LocalLine | None = None
        self._thread = threading.Thread(target=self._run, name="drivetrain-failure", daemon=True)
        self._selector: selectors.BaseSelector
        self._wakeup: Wakeup
        self._rank_0: Heartbeat
        self._rank_0_where = ""

    def __enter__(self) -> FailureChannel:
        if self.world_size == 1:
            return self
        self._main = threading.get_ident()
        try:
            self._line = self._join()
        except BaseException:
            if self._monitor is not None:
                self._monitor.close()
            raise
        if (ranks := launched()) is not None:
            ranks.open_channel()
        count_channel(1)
        self._listen_for_interrupts()
        self._wakeup = Wakeup(self._selector)
        self._thread.start()
        self.stopping.wake, self.stopping.shared = self._wakeup.send, True
        self._order.tell = self._tell
        return self

    def _listen_for_interrupts(self) -> None:
        """Learn of a Ctrl-C that the main thread cannot hear of, in a collective, unless the program has its
        own handler.
        """
        self._signals = current()
        if self._signals is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._signals = self._own_signals = Signals((), (signal.SIGINT,), lambda _: None, write_now)
            self._own_signals.open()

    def _join(self) -> Line | LocalLine:
        """Return a connection to rank 0, which writes to the store where it listens."""
        store = self._store if self._store is not None else default_store()
        environment = detect(os.environ)
        address = environment.address if environment is not None else None
        # How many channels this rank has opened on this store: the same number on every rank.
        opened = store.add(f"drivetrain/failure/opened/{self.rank}", 1)
        key = f"drivetrain/failure/at/{opened}"
        secret = derived(key)  # which is not in the store, where others may read it
        token = None if secret is None else secret[:TOKEN_BYTES]
        if self.rank == 0:
            offer = self._listen(address, environment is not None and environment.one_machine, token)
            store.set(key, signed(key, json.dumps(offer)))
        else:
            offer = json.loads(verified(key, store.get(key).decode()))
        self._rank_0 = Heartbeat(offer["machine"], offer["pid"], self._timing.heartbeat)
        me = {"rank": self.rank, "machine": machine(), "pid": os.getpid()}
        self._stacks.open(offer["began"])
        hello = {**me, **self._state()}
        if self._monitor is not None:
            line = LocalLine()
            self._monitor.add(line.other, hello)
            self._selector = self._monitor.selector
            return line
        connection = connect(
            self.rank, offer if token is None else {**offer, "token": token}, address, self._timing.heartbeat
        )
        connection.send(kind="hello", **hello)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection.socket, selectors.EVENT_READ)
        return connection

    def _listen(self, address: str | None, is_local: bool, token: str | None) -> dict[str, Any]:
        """Begin to listen on rank 0; returns what the others need to know."""
        from drivetrain.distributed.failure.monitor import Monitor

        host = "127.0.0.1" if is_local else own_address(address or "") or ""
        monitor = self._monitor = Monitor(
            self.world_size, host, self._timing, self._hang_timeout, token=token
        )
        offer = {"port": monitor.port, "hosts": [host] if host else own_hosts(), "machine": machine()}
        if token is None:  # a store of a test's, or of a program's own group
            offer["token"] = monitor.token
        return {**offer, "pid": os.getpid(), "began": now()}

    def follow(
        self, status: Status, hang_timeout: float | None = None, directory: Path | None = None
    ) -> None:
        """Report by another status from now on, as once the set-up of a run is done; see the constructor."""
        self._status, self._hang_timeout = status, hang_timeout
        self._stacks.directory = directory
        if self._monitor is not None:
            self._monitor.limit(hang_timeout)
        self._tell()

    def report(self, error: BaseException, besides: str = "") -> None:
        """Report an error on this rank, and wait a moment to learn whether it was the first.

        Leaving the context with an error does the same. Only the first report of a rank counts.
        """
        if self._line is None or self._reported is not None:
            return
        self._reported = error
        if self._decided.is_set():
            return
        cause = Cause.of_error(self.rank, self._location(error_location(error)), error, besides)
        self._line.send(kind="cause", cause=cause.to_json(), **self._state())
        self._wakeup.send()
        self._decided.wait(self._timing.deciding)

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if self._line is None:
            return
        is_agreed = error is not None and error is self.stopping.ending  # raised by all ranks
        has_failed = error is not None and not is_agreed and not is_voluntary(error)
        if error is not None and has_failed:
            self.report(error)
        elif not self._decided.is_set():
            self._leave(self._line)
        self._out.set()
        cause = self._cause
        if cause is not None:
            self._wait_for_exits()
        self._close(is_fine=cause is None and not has_failed)
        if cause is not None:
            self._end_after(cause, error)

    def _leave(self, line: Line | LocalLine) -> None:
        """Say goodbye; on rank 0, wait for the others, whom its thread serves."""
        line.send(kind="bye", **self._state())
        self._wakeup.send()
        if self._monitor is None:
            return
        until = time.monotonic() + self._timing.goodbye
        while not (self._monitor.finished.wait(0.02) or self._decided.is_set()) and time.monotonic() < until:
            pass
        if self._monitor.cause is not None:
            self._decided.wait(self._timing.grace)  # until the channel itself has received it too

    def _end_after(self, cause: Cause, error: BaseException | None) -> None:
        """End this rank in the way that it must after a failure, or return to let its own error propagate.

        Raises:
            RankFailure: Another rank has failed, and this one reports it.
        """
        if cause.kind == "hang":
            self._end(cause)
        if cause.rank == self.rank:
            self._end_as_first(cause, error)
        elif not self._is_reporting():
            end_now(self.stopping.exit_code or 1)
        elif not isinstance(error, KeyboardInterrupt) and not cause.is_also(error):
            raise cause.failure(self._stacks.told)

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
        elif self._monitor is not None:
            self._wait_for(self._monitor.finished, self._timing.last)
            wait_for(started.values(), until - time.monotonic())

    def _wait_for(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event; rank 0's thread serves the other ranks meanwhile."""
        if self._monitor is None or threading.current_thread() is not self._thread:
            return event.wait(seconds)
        until = time.monotonic() + seconds
        while not event.is_set() and time.monotonic() < until:
            self._try(self._turn)
        return event.is_set()

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
        if self._own_signals is not None:
            self._own_signals.close()
        self.stopping.wake, self.stopping.shared = bool, False
        self._order.tell = int
        self._wakeup.send()
        self._thread.join()
        self._stacks.wait()
        self._line.close()
        self._line = None
        self._wakeup.close()
        self._selector.close()
        count_channel(-1)
        if (ranks := launched()) is not None:
            ranks.close_channel(is_fine, failure_told=self._cause is not None)

    def _run(self) -> None:
        self._serve()
        if self._monitor is not None:
            while not (self._closed.is_set() or self._monitor.is_over()):  # not all know of a failure yet
                self._try(self._turn)
            self._monitor.close()

    def _serve(self) -> None:
        assert self._line is not None
        line, following = self._line, time.monotonic()
        while not self._closed.is_set():
            self._try(self._turn)
            if self._try(lambda: self._hear(line)):
                return
            if time.monotonic() >= following:
                following = time.monotonic() + self._timing.heartbeat / 5
                if self._try(self._beat):
                    return

    def _try(self, act: Callable[[], bool | None]) -> bool | None:
        """Call a part of the channel's work; report the first that fails, for lack of a descriptor say."""
        try:
            return act()
        except Exception as error:
            if not self._has_complained:
                self._has_complained = True
                with contextlib.suppress(Exception):  # nobody may be reading
                    sys.stderr.write(f"drivetrain: the failure channel of rank {self.rank}: {error!r}\n")
            self._closed.wait(0.05)
            return False

    def _turn(self) -> None:
        """Wait a moment for what arrives; on rank 0, serve the other ranks."""
        if self._monitor is not None:
            self._monitor.turn()
            return
        for key, _ in self._selector.select(0.05):
            if key.data is not None:
                key.data()

    def _hear(self, line: Line | LocalLine) -> bool:
        """Handle this rank's signals and rank 0's messages; returns whether the channel is over."""
        unheard = 0.0 if self._signals is None else self._signals.unheard()
        if not self._interrupted and unheard > self._timing.grace:
            self._interrupted = True
            cause = Cause("error", self.rank, self._state()["where"], "KeyboardInterrupt")
            line.send(kind="cause", cause=cause.to_json(), **self._state())
        wanted = self.stopping.wanted
        if wanted > self._asked_in and line.send(
            kind="ask", round=wanted, asked=self.stopping.asked, **self._state()
        ):
            self._asked_in = wanted
        try:
            messages = line.receive()
        except ValueError:
            messages = None
        if messages is None:
            is_dead = line.broken is None or isinstance(line.broken, ConnectionError)
            lost = DIED if is_dead else f"it did not read what this rank sent ({line.broken})"
            self._lost(UNREACHABLE if is_unreachable(line.broken) else lost)
            return True
        return any(self._take(line, each) for each in messages)

    def _take(self, line: Line | LocalLine, message: dict[str, Any]) -> bool:
        """Handle a message of rank 0; returns whether the channel is over."""
        self._rank_0.beat()
        match message["kind"]:
            case "end":
                line.close()  # so the monitor knows that this was read
                self.stopping.abandon(RankFailure("rank 0 has ended, and cannot say when to stop"))
                return True
            case "cause":
                self._fail(Cause.from_json(message["cause"]))
                return True
            case "stacks":
                self._show_stacks()
            case "hold":
                line.send(kind="held", **{**self._state(), **self.stopping.hold(message["round"])})
            case "meet":
                self.stopping.set_answer(message["at"], message["reason"])
            case _:
                self._rank_0_where = message["where"]
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
        where = self._where(None if self._reported is None else error_location(self._reported))
        # A lost rank's last message is some time old; a rank that never connected has no location to report.
        if cause.kind == "lost" and (cause.where or cause.rank == 0):
            cause = replace(cause, what=f"{cause.what}; rank {self.rank} was {at(where)}")
        self._cause = cause
        if self._is_reporting() and cause.rank != self.rank:
            # At once: a launcher may kill this rank when another has ended.
            with contextlib.suppress(Exception):
                record(cause.failure(), cause.kind == "hang")
        self._decided.set()
        self.stopping.abandon(cause.failure(), cause.kind == "lost")
        self._expect_launcher(cause)
        self._write_stacks(cause, where)
        if cause.kind == "hang" or cause.rank != self.rank or self._interrupted:
            self._end_in_time(cause)

    def _write_stacks(self, cause: Cause, where: str) -> None:
        if not cause.is_interrupt:
            with contextlib.suppress(Exception):  # the system may refuse a thread
                calls = f"{where}\n{self._order.listed()}".rstrip()
                self._stacks.begin(calls, self._reported)
        if cause.kind == "hang" and self.rank in cause.stuck:
            self._show_stacks()

    def _show_stacks(self) -> None:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"drivetrain: the stacks of rank {self.rank}:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)

    def _end_in_time(self, cause: Cause) -> None:
        """End this process unless its main thread soon leaves the context by itself."""
        if self._leaves_in_time(self._timing.grace) or self._closed.is_set():
            return
        if self._monitor is not None:
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
        return self._wait_for(self._out, seconds) or (
            self._reported is not None and self._wait_for(self._out, self._timing.unwinding)
        )

    def _end(self, cause: Cause) -> NoReturn:
        with contextlib.suppress(Exception):  # the process must end all the same
            self._stacks.wait()
            if self.rank:
                self._wait_for_exits()
            end_all(started.values(), 0)  # such as one whose call holds the interpreter's lock
            if self._is_reporting():
                sys.stderr.write(cause.block(self._stacks.told))
                record(cause.failure(), cause.kind == "hang" or cause.rank == self.rank)
        end_now(EXIT_HANG if cause.kind == "hang" else self.stopping.exit_code or 1)

    def _is_reporting(self) -> bool:
        """Return whether this rank reports the failure: rank 0, or the first of another machine."""
        if self.rank == 0:
            return True
        is_rank_0_lost = self._cause is not None and self._cause.kind == "lost" and self._cause.rank == 0
        return (is_rank_0_lost and self.rank == 1) or os.environ.get("LOCAL_RANK") == "0"

    def _state(self) -> dict[str, Any]:
        progress, signs, phase, collective, doing = None, None, Phase.WORKS, "", ""
        status = self._status
        with contextlib.suppress(Exception):  # a rank that says too little is better than a silent one
            progress = status.progress()
            signs = [status.signs(), status.describe()]
            if self._is_still((progress, signs)):
                phase, collective = phase_of_thread(self._main)
                doing = thread_location(self._main)
            if status.is_outside():
                phase, collective = Phase.OUTSIDE, ""
        return {
            "where": self._where(doing),
            "progress": progress,
            "signs": signs,
            "phase": phase,
            "collective": collective,
            "passed": self.stopping.passed,
        }

    def _is_still(self, signs: Any) -> bool:
        """Return whether there was no progress for so long that the frames may be read; see `location`."""
        now = time.monotonic()
        if signs != self._seen:
            self._seen, self._still_since = signs, now
        limit = self._timing.late if self._hang_timeout is None else self._hang_timeout / 2
        return now - self._still_since >= (limit if signs[0] else min(limit, self._timing.late))

    def _where(self, doing: str | None = None) -> str:
        """Return where this rank is, with its last call, for those who wonder why it waits or has gone."""
        return self._order.after(self._location(doing))

    def _location(self, doing: str | None) -> str:
        try:
            described = self._status.describe()
            doing = thread_location(self._main) if doing is None else doing
            return described if doing in described else f"{described}, {doing}" if described else doing
        except Exception as error:  # the run's own failure matters more
            return f"at an unknown location ({type(error).__name__}: {error})"
