"""torchrun in a process of its own, which passes no signal on and says which rank failed first.

`drivetrain launch` runs this module once for each attempt. It brings torch's whole agent.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from drivetrain.distributed.children import LAUNCHER, children_of, end_with_launcher, ending, parent_mark
from drivetrain.distributed.environment import AGAIN
from drivetrain.errors import EXIT_STOPPED

_IGNORED = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
"""Signals that `drivetrain launch` sends to the ranks itself, which decide what to do."""

FAILURE = "failure.json"
"""The file in the directory of logs that tells of the first failure: its "rank", "code" and "text"."""

_SHARES_NOT = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""An option of torch's agent: ranks that it starts anew would find the last ones' addresses in its store."""


def main(words: Sequence[str], logs: Path) -> int:
    """Run torchrun; returns its exit code, that of the first rank that failed.

    Args:
        words: As torchrun takes them.
        logs: Its directory of logs.
    """
    end_with_launcher()
    for name in _IGNORED:
        if hasattr(signal, name):  # the ranks have them from the launcher; torch would end them after 30 s
            signal.signal(getattr(signal, name), lambda *_: None)
    logging.disable(logging.ERROR)  # the launcher says what failed, in its last line
    os.environ[_SHARES_NOT] = "1"
    words = ["--log-dir", str(logs), *words]
    arguments = torchrun.parse_args(words)  # type: ignore[no-untyped-call]
    errors: list[BaseException] = []

    def run() -> None:
        os.environ[LAUNCHER] = parent_mark()
        try:
            torchrun.run(arguments)  # type: ignore[no-untyped-call]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="torchrun")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if os.environ.get(AGAIN) == "0" and len(children_of(os.getpid())) >= int(arguments.nproc_per_node):
            os.environ[AGAIN] = "1"  # what is started from now on is so because a machine has come or gone
    if not errors:
        return 0
    if not isinstance(errors[0], ChildFailedError):
        closed = isinstance(errors[0], RendezvousClosedError)
        _tell(logs, rank=-1, code=1, text=f"torchrun failed: {errors[0]!r}", closed=closed)
        return 1
    rank, failure = errors[0].get_first_failure()
    code = EXIT_STOPPED if failure.exitcode == -signal.SIGINT else failure.exitcode
    text = first_cause(logs.rglob("error.json")) or f"rank {rank} failed first: it {ending(failure.exitcode)}"
    _tell(logs, rank=rank, code=failure.exitcode, text=text, closed=False)
    return code if code > 0 else 1


def first_cause(files: Iterable[Path]) -> str:
    """The first cause, from what ranks have recorded for torchrun; empty when none has."""
    told = ""
    for file in sorted(files):
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))["message"]
        except (OSError, ValueError, KeyError, TypeError):  # written in part, or by somebody else
            continue
        text = str(found.get("message", "")) if isinstance(found, dict) else str(found)
        stack = str(found.get("extraInfo", {}).get("py_callstack", "")) if isinstance(found, dict) else ""
        note = stack.strip().rpartition("\n")[2]
        if "failed first" in text or "no progress" in text:  # one rank tells of another, or of all
            return text.partition(": ")[2]
        if note.startswith("drivetrain: ") and "failed first" in note:
            return note.partition(": ")[2]
        told = told or f"rank {file.parent.name} failed first: {text}"
    return told


def _tell(logs: Path, **found: Any) -> None:
    (logs / FAILURE).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Path(sys.argv[1])))
