"""torchrun in a process of its own, which forwards no signal and reports which rank failed first.

`drivetrain launch` runs this module once for each attempt. It imports torch's whole agent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from drivetrain.core.errors import EXIT_REQUEUE, EXIT_STOPPED, DrivetrainError
from drivetrain.distributed.failure.heartbeat import DIED
from drivetrain.distributed.launch.children import (
    FAILURE,
    FORWARDED,
    LAUNCHER,
    children_of,
    end_with_launcher,
    ending,
    parent_mark,
    say,
)
from drivetrain.distributed.launch.environment import AGAIN
from drivetrain.distributed.launch.machines import Machines
from drivetrain.distributed.launch.meeting import LATE, LIMIT, REPEAT, join_timeout

_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""An option of torch's agent: restarted ranks would find the earlier ranks' addresses in its store."""


_GRACE = 10.0
"""Seconds that this machine's ranks have to end by themselves once another machine has failed."""


def main(words: Sequence[str], logs: Path) -> int:
    """Run torchrun and return the exit code of the first rank that failed."""
    end_with_launcher()
    for number in FORWARDED:  # torch would kill the ranks after 30 s
        signal.signal(number, lambda *_: None)
    logging.disable(logging.ERROR)  # the launcher's last line says what failed
    os.environ[_NO_SHARED_STORE] = "1"
    words = ["--log-dir", str(logs), *words]
    arguments = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    machines = Machines(logs)
    errors: list[BaseException] = []

    def run() -> None:
        os.environ[LAUNCHER] = parent_mark(lasts=True)  # the agent ends its processes
        try:
            torchrun.run(arguments)  # type: ignore[no-untyped-call]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="torchrun")
    thread.start()
    heard = _wait(thread, arguments, machines)
    if not errors:
        return 0
    failure = heard or _failure(errors[0], logs, str(arguments.rdzv_endpoint))
    if failure["code"] not in (EXIT_REQUEUE, EXIT_STOPPED, -signal.SIGINT):  # which all ranks know of
        machines.tell(failure)
    (logs / FAILURE).write_text(json.dumps(failure), encoding="utf-8")
    code = EXIT_STOPPED if failure["code"] == -signal.SIGINT else int(failure["code"])
    return code if code > 0 else 1


def _wait(thread: threading.Thread, arguments: Any, machines: Machines) -> dict[str, Any] | None:
    """Wait for the end of torch's agent; return another machine's failure if this one has heard of it."""
    begun = time.monotonic()
    late, looks, heard = begun + LATE, begun, None
    while thread.is_alive():
        thread.join(0.1)
        if os.environ.get(AGAIN) == "0" and len(children_of(os.getpid())) >= int(arguments.nproc_per_node):
            os.environ[AGAIN] = "1"  # later starts follow a machine that has come or gone
        if heard is None and time.monotonic() >= looks:
            heard = machines.heard()
            looks = time.monotonic() + (1.0 if heard is None else _GRACE)
        elif time.monotonic() >= looks:  # such as ranks that wait for one of that machine
            for pid in children_of(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            thread.join()
        if time.monotonic() >= late:
            late = time.monotonic() + REPEAT
            # Numbered machines say themselves which one is missing.
            is_elastic = arguments.rdzv_backend == "drivetrain-elastic"
            if is_elastic and not children_of(os.getpid()):
                them = f"{arguments.nnodes.replace(':', ' to ')} machines"
                waits = f"waiting for {time.monotonic() - begun:.0f} s for {them}"
                say(f"{waits} to connect to {arguments.rdzv_endpoint}")
    return heard


def _failure(error: BaseException, logs: Path, endpoint: str) -> dict[str, Any]:
    """Return what failed first, by torchrun's error: the rank, -1 for the agent, its exit code and a text."""
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        own = f"rank {rank} failed first: it {ending(failure.exitcode)}"
        text = first_cause(logs.rglob("error.json")) or own
        if text.startswith(f"rank {rank} "):
            text = text.replace(DIED, f"it {ending(failure.exitcode)}")  # which other ranks cannot see
        return {"rank": rank, "code": failure.exitcode, "text": text, "closed": False, "began": True}
    text = f"torchrun failed: {error!r}"
    if isinstance(error, RendezvousTimeoutError):
        text = (
            f"not all machines have come to {endpoint} within {join_timeout():g} s. Start"
            f" them in that time, or set {LIMIT} to more seconds"
        )
    elif isinstance(error, RendezvousConnectionError):
        text = f"no launcher answers at {endpoint}: it has ended, cannot be reached, or the port is another's"
    elif isinstance(error, (DrivetrainError, RendezvousStateError)):
        text = str(error)
    closed = isinstance(error, (RendezvousClosedError, RendezvousConnectionError))  # the last meeting ends
    began = any(logs.glob("*/attempt_*"))  # the folders of the ranks' output
    return {"rank": -1, "code": 1, "text": text, "closed": closed, "began": began}


def first_cause(files: Iterable[Path]) -> str:
    """Return the first cause that a rank has recorded for torchrun; empty if none has."""
    told = ""
    for file in sorted(files):
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))["message"]
        except (OSError, ValueError, KeyError, TypeError):  # incomplete, or written by something else
            continue
        text = str(found.get("message", "")) if isinstance(found, dict) else str(found)
        stack = str(found.get("extraInfo", {}).get("py_callstack", "")) if isinstance(found, dict) else ""
        note = stack.strip().rpartition("\n")[2]
        if "failed first" in text or "no progress" in text:  # one rank reports another's failure, or a hang
            return text.partition(": ")[2]
        if note.startswith("drivetrain: ") and "failed first" in note:
            return note.partition(": ")[2]
        told = told or f"rank {file.parent.name} failed first: {text}"
    return told


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Path(sys.argv[1])))
