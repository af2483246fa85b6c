"""Programs of the folder `programs`, run to their ends side by side: they mostly wait."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.forked import Forked, undisturbed

PROGRAMS = Path(__file__).parent / "programs"
FSDP_YAML = PROGRAMS / "fsdp.yaml"
LIMIT = 300.0


class Ended(NamedTuple):  # its code, what it has written, and the lines of its errors
    code: int
    out: str
    errors: list[str]


def run_all(program: str, cases: Mapping[str, Mapping[str, Any]], at_once: int = 4) -> dict[str, Ended]:
    with ThreadPoolExecutor(at_once) as pool:
        running = {name: pool.submit(run, program, name, **options) for name, options in cases.items()}
        return {name: each.result() for name, each in running.items()}


def run(
    program: str,
    folder: str = "here",
    *,
    interrupt: signal.Signals | None = None,
    whole_group: bool = False,
    again: bool = False,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> Ended:
    """Run a program to its end; a rank that was left behind would hold the output open, and so be found.

    `interrupt` is a signal for rank 0, or for all ranks as a terminal's, once the program has made a file
    "waiting"; `again` sends it once more when the first has been handled, and is no echo of it.
    The program gets `variables` in its environment, and reads the other options as JSON.
    """
    directory = Path.cwd() / "".join(each if each.isalnum() else "-" for each in folder)
    directory.mkdir()
    words = [str(PROGRAMS / program), json.dumps(options)]
    process = Forked(words, directory, {**undisturbed(), **(variables or {})})
    send = os.killpg if whole_group else os.kill
    try:
        if interrupt is not None:
            deadline = time.monotonic() + LIMIT
            while not (directory / "waiting").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            send(process.pid, interrupt)
            if again:
                _send_again(process.pid, lambda: send(process.pid, interrupt), interrupt)
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT)
        pytest.fail(f"{folder}: a rank has not ended:\n{out}\n{err}")
    assert process.returncode is not None
    return Ended(process.returncode, out, err.splitlines())


def _send_again(pid: int, send: Callable[[], None], number: signal.Signals) -> None:
    """Send a signal once more, and again if it was taken for an echo of the first, as in half a second."""
    deadline = time.monotonic() + LIMIT
    with contextlib.suppress(OSError):  # the process has ended
        while _is_pending(pid, number) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(1.0)
        while time.monotonic() < deadline:
            send()
            until = time.monotonic() + 20
            while time.monotonic() < until:
                os.kill(pid, 0)
                time.sleep(0.05)


def _is_pending(pid: int, number: int) -> bool:  # whether the system has not given a signal to a process yet
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (number - 1) & 1)


def stacks(ended: Ended) -> dict[str, str]:  # by file
    told = next(each for each in ended.errors if "the stacks of all ranks that answered are in " in each)
    directory = Path(told.partition(" are in ")[2])
    assert directory.parent.name == "failures"
    return {each.name: each.read_text(encoding="utf-8") for each in directory.iterdir()}
