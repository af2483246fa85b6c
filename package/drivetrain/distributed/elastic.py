"""torch's elastic agent as a launcher: it passes signals on, and starts nothing again that ended in order.

Imported only by who launches: it brings torch's whole agent.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as meetings
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from drivetrain.distributed.children import LAUNCHER, ending, parent_mark
from drivetrain.distributed.environment import AGAIN
from drivetrain.distributed.last_words import TRAINING
from drivetrain.errors import EXIT_REQUEUE, EXIT_STOPPED

_IN_ORDER = {EXIT_REQUEUE: EXIT_REQUEUE, EXIT_STOPPED: EXIT_STOPPED, -signal.SIGINT: EXIT_STOPPED}
"""How processes end that a signal has ended in order, and the launcher after them."""

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")

_USAGE = 2
"""How programs end that cannot read their command line; argparse's, and Python's without the program."""

_REFUSAL = re.compile(r"(^|: )(drivetrain\.errors\.)?(ConfigError|MissingDependencyError): ")
"""What a process tells of itself that was refused what it asked for, or of another that was."""

_SHARES_NOT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""An option of torch's agent, read when its processes are about to meet."""

_FAILING = 6.0
"""Seconds that processes have to end by themselves once another has failed."""

_ENDING = 60.0
"""Seconds that processes have to end once one of them has, in order."""


class Agent(LocalElasticAgent):
    """Watches over the processes of this machine, and starts them again with those of the others.

    A signal that this process gets is passed on to them, each time, and they decide: the first one ends their
    training in order, a second one at once. After that nothing is started again, and the exit code is theirs.
    A process that asks for it by itself, by the code for a requeue, is started again as after a failure.

    Attributes:
        code: How the processes have ended in order; None if they have not.
        received: The first signal that was passed on.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.code: int | None = None
        self.received: int | None = None
        self._since = 0.0
        self._failed: tuple[float, str] | None = None
        self._ended_at: float | None = None
        self._failing_since: float | None = None
        self._first = 0
        self._has_started = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.received is not None:
            received = signal.Signals(self.received)
            raise SignalException(f"ended by {received.name}", received)
        with _changed(AGAIN, "1" if self._has_started else "0"):
            found: dict[int, Any] = super()._start_workers(worker_group)
        self._has_started = True
        if threading.current_thread() is threading.main_thread():
            for name in _PASSED_ON:
                if hasattr(signal, name):
                    signal.signal(getattr(signal, name), self._pass_on)
        return found

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            self._remaining_restarts = 0
        for pid in self._pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _pids(self) -> list[int]:
        return [each.id for each in self._worker_group.workers if isinstance(each.id, int)]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [_peek(pid) for pid in self._pids()]
        self._report_training()
        ended = [each for each in codes if each is not None]
        if ended and all(each in _IN_ORDER for each in ended) and not self._wants_again(ended):
            self._ended_at = time.monotonic() if self._ended_at is None else self._ended_at
            if None in codes and time.monotonic() - self._ended_at < _ENDING:
                return RunResult(state=WorkerState.HEALTHY)
            self.code = _IN_ORDER[ended[0]]
            if self.code == EXIT_REQUEUE and self._has_hung_again():
                self.code = 1
                _say("the restarts are used up, and the run has hung again: exit code 1, for no requeue")
            everyone = {each.global_rank: None for each in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=everyone)
        if self._is_failing(codes):  # by themselves the others end sooner, and say why
            return RunResult(state=WorkerState.HEALTHY)
        found: RunResult = super()._monitor_workers(worker_group)
        self._failing_since = None
        if found.state == WorkerState.FAILED:
            first = worker_group.workers[self._first].global_rank
            if first in found.failures:  # the others have ended because of it
                found.failures = {first: found.failures[first]}
            if self._remaining_restarts > 0 and any(map(_is_refused, found.failures.values())):
                self._remaining_restarts = 0
                _say("not started again: what is wrong would be wrong again")
            elif self._remaining_restarts > 0:
                self._tell_restart(found)
        return found

    def _wants_again(self, codes: Sequence[int]) -> bool:
        """Whether processes that nobody has sent a signal by this one ask to be started again, and may be."""
        return self.received is None and self._remaining_restarts > 0 and EXIT_REQUEUE in codes

    def _has_hung_again(self) -> bool:
        """Whether processes that could be started again, and cannot any more, have ended by a hang, of which
        they have told, rather than by a signal.
        """
        if self.received is not None or self._worker_group.spec.max_restarts == 0 or self._pcontext is None:
            return False
        return any(Path(each).exists() for each in self._pcontext.error_files.values())

    def _is_failing(self, codes: Sequence[int | None]) -> bool:
        """Whether a process has failed, and the others still have time to end by themselves."""
        if not any(codes):
            return False
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
            self._first = (killed or [index for index, code in enumerate(codes) if code])[0]
        return None in codes and time.monotonic() - self._failing_since < _FAILING

    def _tell_restart(self, found: RunResult) -> None:
        rank, failure = min(found.failures.items(), key=lambda each: each[1].timestamp)
        what = f"rank {rank} {ending(failure.exitcode)}"
        self._failed = (time.monotonic(), what)
        left = self._remaining_restarts - 1
        _say(f"{what}; all are started again ({left} more {'time' if left == 1 else 'times'} if need be)")

    def _report_training(self) -> None:
        """Once all train again, say how long that took."""
        if self._failed is None or self._pcontext is None:
            return
        if any((Path(each).parent / TRAINING).exists() for each in self._pcontext.error_files.values()):
            (since, what), self._failed = self._failed, None
            _say(f"training again {time.monotonic() - since:.1f} s after {what}")


def _is_refused(failure: ProcessFailure) -> bool:
    """Whether a process has ended by what no start heals: words or settings that cannot work."""
    if failure.exitcode == _USAGE:
        return True
    told = failure.message.get("message", "") if isinstance(failure.message, dict) else failure.message
    return failure.exitcode == 1 and _REFUSAL.search(str(told)) is not None


def _peek(pid: int) -> int | None:
    """How a child has ended, which stays to be asked for by others; None while it runs."""
    if not hasattr(os, "waitid"):  # Windows
        return None
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def launch(words: Sequence[str]) -> int:
    """Start a program's processes, wait for them and return the exit code.

    Args:
        words: As torchrun takes them.

    Raises:
        ChildFailedError: One has failed, and none is to be started again.
        SignalException: A signal has come before there was anything to pass it on to.
    """
    spec, options = _spec(words)
    agent = Agent(spec=spec, **options)
    is_over = True
    try:
        # Processes that are started again are to meet in a new store: torch's agent would give them the old
        # one, in which they find the addresses of those that are gone.
        with _changed(_SHARES_NOT, "1"), _changed(LAUNCHER, parent_mark()):
            result = agent.run()
    except SignalException:
        is_over = False  # of this machine alone; the others may go on
        raise
    finally:
        if is_over:
            spec.rdzv_handler.shutdown()
    if agent.code is not None:
        return agent.code
    if result is not None and result.is_failed():
        raise ChildFailedError(name=str(spec.entrypoint), failures=result.failures)
    return 0


def _spec(words: Sequence[str]) -> tuple[WorkerSpec, dict[str, Any]]:
    """What is to be started, and how else the agent is told of it."""
    arguments = torchrun.parse_args(list(words))  # type: ignore[no-untyped-call]
    if arguments.standalone:
        arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
        arguments.rdzv_id = str(uuid.uuid4())
    if arguments.master_port is None:
        arguments.master_port = 29500
    config, entrypoint, rest = torchrun.config_from_args(arguments)
    meeting = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    address, port = None, None
    if config.rdzv_backend == "static":
        address, port = parse_rendezvous_endpoint(config.rdzv_endpoint.strip(), default_port=-1)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(rest),
        rdzv_handler=meetings.get_rendezvous_handler(meeting),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
    )
    return spec, {"logs_specs": config.logs_specs, "start_method": config.start_method}


@contextmanager
def _changed(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _say(text: str) -> None:
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
