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

import torch

from drivetrain.distributed.asleep import Asleep
from drivetrain.distributed.children import outlive_parent, started, wait_for
from drivetrain.distributed.doing import doing_now, doing_when
from drivetrain.distributed.environment import detect
from drivetrain.distributed.failure_hub import Hub
from drivetrain.distributed.failure_wire import Cause, Line, at, connect, is_voluntary, own_hosts
from drivetrain.distributed.interrupts import Interrupts
from drivetrain.distributed.last_words import end_now, record
from drivetrain.distributed.launch import launched
from drivetrain.distributed.silence import DIED, Silence, machine
from drivetrain.distributed.stack_files import StackFiles, now
from drivetrain.distributed.stopping import Stopping
from drivetrain.distributed.waiting import Waiting
from drivetrain.distributed.watchdog import EXIT_HANG
from drivetrain.errors import RankFailure, StrategyError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_GRACE = 1.0
"""Seconds that the main thread has to end by itself once another rank has failed."""

_UNWINDING = 4.0
"""Seconds that it has in addition when it was seen to have an error of its own: files are closed then."""

_DECIDING = 3.0
"""Seconds that a failing rank waits to hear whose failure was the first: more than rank 0 needs to decide."""

_LAST = 2.0
"""Seconds that rank 0 leaves the others to end before it does, so that its last lines are the last."""

_FREED = 0.5
"""Seconds that rank 0's main thread then has to end by itself, as it must where it is a notebook's."""

_GOODBYE = 60.0
"""Seconds that rank 0, whose threads the channel lives in, waits at its end for the others."""


class FailureChannel:
    """A context manager around what the ranks do together, entered by all of them.

    Beside the training, and without a collective, every rank has a line to rank 0. A rank that raises tells
    its error, one that dies breaks its line, one that is stopped falls silent. Rank 0 decides which was the
    first cause: an error that only says that a connection was lost or a time was up waits two seconds for a
    better one. The rank with the first cause ends with its own error, rank 0 with a `RankFailure` that names
    it, in the last lines of the program; the other ranks end in silence with exit code 1. A rank whose main
    thread does not come back, from a collective that waits for ever, is ended from outside after a second.

    When all ranks leave the context without an error nothing happens, also when they leave at different
    moments. Rank 0 then waits up to a minute for the others.

    Args:
        rank: This process.
        world_size: How many there are.
        store: A store of torch's that all ranks share, for the first contact; None takes the default process
            group's.
        timeout: Seconds of silence after which a rank that is seen to be stopped or gone counts as lost. One
            that cannot be seen, or does nothing, has twelve times as long; one that is seen to run is waited
            for: a call that holds the interpreter keeps a rank silent too.
        describe: Says how far this rank is, such as "update 17" or "in training, after update 17". Called in
            a thread.
        progress: A number that grows with every step; called in a thread.
        hang_timeout: Seconds without progress on any rank after which the run is ended with exit code 75,
            naming the ranks that are behind; needs `progress`. Where none is behind it is at least four
            fifths of `timeout`, until it is known who waits. None for no limit.
        deadlock_timeout: Seconds after which ranks that all wait for one another, in collectives that do not
            match, or for one that sleeps for ever, are ended, naming where each is; `Waiting` and `Asleep`
            say how that is known. None to let them.
        directory: Where the stacks of all ranks go when one fails, into "failures"; None for nowhere.
        stopping: Agrees with the other ranks on when to stop, over these lines.
        on_failure: Is told of another rank's failure before this process ends; called in a thread.

    Raises:
        StrategyError: Rank 0 cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None = None,
        *,
        timeout: float = 5.0,
        describe: Callable[[], str] = str,
        progress: Callable[[], int] | None = None,
        hang_timeout: float | None = None,
        deadlock_timeout: float | None = 5.0,
        directory: Path | None = None,
        stopping: Stopping | None = None,
        on_failure: Callable[[RankFailure], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._describe = describe
        self._progress = progress
        self._hang_timeout = hang_timeout if progress is not None else None
        self._deadlock_timeout = deadlock_timeout
        self._stopping = stopping if stopping is not None else Stopping()
        self._on_failure = on_failure
        self._stacks = StackFiles(rank, world_size, directory)
        self._waiting: Waiting
        self._asleep: Asleep
        self._main = threading.get_ident()
        self._interrupts = Interrupts()
        self._interrupted = False
        self._cause: Cause | None = None
        self._decided = threading.Event()
        self._out = threading.Event()
        self._closed = threading.Event()
        self._reported: BaseException | None = None
        self._hub: Hub | None = None
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._rank_0: Silence
        self._rank_0_where = ""

    def __enter__(self) -> FailureChannel:
        if self.world_size == 1:
            return self
        self._waiting, self._asleep, self._main = Waiting(), Asleep(), threading.get_ident()
        store = self._store if self._store is not None else _default_store()
        environment = detect(os.environ)
        # How often this rank has opened one on this store: the same number on every rank.
        opened = store.add(f"drivetrain/failure/opened/{self.rank}", 1)
        key = f"drivetrain/failure/at/{opened}"
        if self.rank == 0:
            local = environment is not None and environment.local_world_size == self.world_size
            self._hub = Hub(self.world_size, local, self._timeout, self._hang_timeout, self._deadlock_timeout)
            found = {"port": self._hub.port, "token": self._hub.token, "hosts": [] if local else own_hosts()}
            found = {**found, "machine": machine(), "pid": os.getpid(), "began": now()}
            store.set(key, json.dumps(found))
        try:
            offer = json.loads(store.get(key))
            self._line = connect(
                self.rank, offer, environment.address if environment is not None else None, self._timeout
            )
        except BaseException:
            if self._hub is not None:
                self._hub.leave()
            raise
        self._rank_0 = Silence(offer["machine"], offer["pid"], self._timeout)
        me = {"rank": self.rank, "machine": machine(), "pid": os.getpid()}
        stacks = self._stacks.open(offer["began"])
        self._line.send(kind="hello", token=offer["token"], stacks=stacks, **me, **self._state())
        ranks = launched()
        if ranks is not None:
            ranks.is_guarded = True
        outlive_parent(True)
        self._interrupts.open()
        self._thread = threading.Thread(target=self._run, name="drivetrain-failure", daemon=True)
        self._thread.start()
        self._stopping.shared = True
        return self

    def report(self, error: BaseException, besides: str = "") -> None:
        """Tell the others of an error on this rank, and wait a moment to hear whether it is the first.

        Leaving the context with an error does the same. Only the first report of a rank counts.

        Args:
            error: What was raised here.
            besides: A sentence to add to it.
        """
        if self._line is None or self._reported is not None:
            return
        self._reported = error
        if self._decided.is_set():
            return
        cause = Cause.of_error(self.rank, self._where(doing_when(error)), error, besides)
        self._line.send(kind="cause", cause=cause.to_json(), **self._state())
        self._decided.wait(_DECIDING)

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
                self._wait_for_others(_GOODBYE)
        self._out.set()
        cause = self._cause
        if cause is None:
            self._close(is_fine=not has_failed)
            return
        self._outlast()
        self._close(is_fine=False)
        if cause.kind == "hang":
            self._end(cause)
        elif cause.rank == self.rank:
            self._own_end(cause, error)
        elif isinstance(error, KeyboardInterrupt) and self._tells():
            return
        elif self._tells():
            failure = cause.failure(self._stacks.told)
            record(failure)
            raise failure
        else:
            end_now(self._stopping.exit_code or 1)

    def _outlast(self) -> None:
        """On rank 0, leave the others time to end, and to print the last of it."""
        if self._hub is not None:
            until = time.monotonic() + _LAST
            self._hub.finished.wait(_LAST)
            wait_for(started.values(), until - time.monotonic())

    def _wait_for_others(self, seconds: float) -> None:
        assert self._hub is not None
        deadline = time.monotonic() + seconds
        while not (self._hub.finished.wait(0.02) or self._decided.is_set()) and time.monotonic() < deadline:
            pass
        if self._hub.cause is not None:
            self._decided.wait(_GRACE)  # until the channel's thread has heard of it too

    def _own_end(self, cause: Cause, error: BaseException | None) -> None:
        """This rank's error goes on, and whoever prints it says that it was the first."""
        ranks = launched()
        if isinstance(error, SystemExit):  # which prints nothing
            if ranks is not None and isinstance(error.code, int):
                ranks.exit_code = error.code
            if self._tells():
                sys.stderr.write(cause.block(self._stacks.told))
        elif error is not None and not isinstance(error, KeyboardInterrupt):
            if self._stacks.told:
                error.add_note(f"drivetrain: {self._stacks.told}")
            error.add_note(f"drivetrain: {cause}")
        elif isinstance(error, KeyboardInterrupt) and not self._tells():
            end_now(130)
        if error is not None:
            record(error)

    def _close(self, is_fine: bool) -> None:
        assert self._line is not None
        self._closed.set()
        self._interrupts.close()
        self._stopping.shared = False
        if self._thread is not None:
            self._thread.join()
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
        tick = self._timeout / 5
        following = time.monotonic() + tick
        has_asked = False
        while not self._closed.wait(0.05):
            if not self._interrupted and self._interrupts.unheard() > _GRACE:
                self._interrupted = True
                cause = Cause("error", self.rank, self._state()["where"], "KeyboardInterrupt")
                self._line.send(kind="cause", cause=cause.to_json(), **self._state())
            if self._stopping.asked is not None and not has_asked:
                has_asked = self._line.send(kind="stop", **self._state(), asked=self._stopping.asked)
            try:
                messages = self._line.receive()
            except ValueError:
                messages = None
            if messages is None and self._hub is not None and self._hub.cause is not None:
                self._fail(self._hub.cause)  # the hub was done before its word to this very process was read
                return
            if messages is None:
                self._lost(DIED)
                return
            for each in messages:
                self._rank_0.end()
                if each["kind"] == "end":
                    self._line.close()  # which tells the hub that this was heard
                    self._stopping.abandon(RankFailure("rank 0 has ended, and cannot say when to stop"))
                    return
                if each["kind"] == "cause":
                    self._fail(Cause.from_json(each["cause"]))
                    return
                if each["kind"] == "hold":
                    self._line.send(kind="held", **{**self._state(), **self._stopping.hold()})
                elif each["kind"] == "stop":
                    self._stopping.tell(each["at"], each["reason"])
                else:
                    self._rank_0_where = each["where"]
            if time.monotonic() >= following:
                following = time.monotonic() + tick
                if self._deadlock_timeout or self._hang_timeout:
                    self._waiting.look()
                    self._asleep.look()
                self._line.send(kind="beat", **self._state())
                found = self._rank_0.tick() if self.rank else None
                if found is not None:
                    self._rank_0.end_process()
                    self._lost(found)
                    return

    def _lost(self, what: str) -> None:
        self._fail(Cause("lost", 0, self._rank_0_where, what))

    def _fail(self, cause: Cause) -> None:
        """Another rank, or this one, was the first to fail; in the channel's thread."""
        where = self._where(None if self._reported is None else doing_when(self._reported))
        # Of the lost one was last heard some time ago; one that never came tells nothing of a place.
        if cause.kind == "lost" and (cause.where or cause.rank == 0):
            cause = replace(cause, what=f"{cause.what}; rank {self.rank} was {at(where)}")
        self._cause = cause
        self._decided.set()
        self._stopping.abandon(cause.failure())
        if not cause.is_interrupt:
            self._stacks.begin(where, self._reported, self._hub)
        if cause.kind != "hang" and cause.rank == self.rank and not self._interrupted:
            return
        if self._on_failure is not None:
            with contextlib.suppress(Exception):  # the process has to end all the same
                self._on_failure(cause.failure())
        if cause.kind == "hang" and self.rank in cause.stuck:
            sys.stderr.write(f"drivetrain: the stacks of rank {self.rank}:\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        is_out = self._out.wait(_GRACE) or (self._reported is not None and self._out.wait(_UNWINDING))
        if is_out or self._closed.is_set():
            return
        if self._hub is not None:
            self._outlast()
            # The end of the others breaks the collective that held the main thread.
            if self._out.wait(_FREED) or (self._reported is not None and self._out.wait(_UNWINDING)):
                return
        self._end(cause)

    def _end(self, cause: Cause) -> NoReturn:
        self._stacks.wait()
        if self._tells():
            sys.stderr.write(cause.block(self._stacks.told))
            record(cause.failure())
        end_now(EXIT_HANG if cause.kind == "hang" else self._stopping.exit_code or 1)

    def _tells(self) -> bool:
        """Whether this rank is the one that says why all end: rank 0, or the first of another machine."""
        if self.rank == 0:
            return True
        is_rank_0_lost = self._cause is not None and self._cause.kind == "lost" and self._cause.rank == 0
        return (is_rank_0_lost and self.rank == 1) or os.environ.get("LOCAL_RANK") == "0"

    def _state(self) -> dict[str, Any]:
        return {
            "where": self._where(),
            "progress": self._progress() if self._progress is not None else None,
            "looks": self._waiting.looks,
            "asleep": self._asleep.looks,
            "place": self._asleep.place if self._asleep.looks else self._waiting.place,
            "passed": self._stopping.passed,
        }

    def _where(self, doing: str | None = None) -> str:
        try:
            doing = doing_now(self._main) if doing is None else doing
            return ", ".join(filter(None, (self._describe(), doing)))
        except Exception as error:  # what is wrong with the run matters more than what is wrong here
            return f"a place that cannot be told ({type(error).__name__}: {error})"


def _default_store() -> Store:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise StrategyError("a failure channel without a store needs a process group, and there is none")
    store: Store = torch.distributed.distributed_c10d._get_default_store()
    return store
