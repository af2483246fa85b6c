"""A thread that sleeps for ever is told from one that pauses, or waits for something that may come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not Path("/proc/self/syscall").exists(),
    reason="needs a Linux that tells in which call a thread is",
)

PROGRAM = """
import os, queue, subprocess, sys, threading, time
from drivetrain.distributed.asleep import Asleep
from installed import wait_in_it

event, lock = threading.Event(), threading.Lock()
lock.acquire()

def beside(act):
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread

def polling():
    while not event.wait(0.02):
        pass

def work():
    while True:
        pass

CASES = {
    "a sleep of a day": lambda: time.sleep(86400),
    "an event that nobody sets": lambda: event.wait(),
    "an event that nobody sets within an hour": lambda: event.wait(3600),
    "a join of a thread that waits just so": lambda: (beside(event.wait), threading.Event().wait()),
    "a queue that nobody fills": lambda: queue.Queue().get(),
    "a library that waits for a lock": lambda: wait_in_it(),
    "the end of a thread that sleeps": lambda: beside(lambda: time.sleep(86400)).join(),
    "the end of a thread that waits": lambda: beside(event.wait).join(),
    "the end of a thread that pauses": lambda: beside(lambda: time.sleep(240)).join(),
    "the end of a thread that works": lambda: beside(work).join(),
    "a pause of four minutes": lambda: time.sleep(240),
    "pauses, one after the other": lambda: [time.sleep(0.01) for _ in range(1000)],
    "an event with a limit of a minute": lambda: event.wait(60),
    "an event that another thread may set": lambda: (beside(polling), event.wait()),
    "an event that a reader of a pipe may set": lambda: (beside(lambda: os.read(pipe[0], 1)), event.wait()),
    "a pipe": lambda: os.read(pipe[0], 1),
    "another program": lambda: subprocess.run(["sleep", "1"]),
    "work": work,
}

def look(asleep, name):
    time.sleep(0.1)
    for _ in range(5):
        asleep.look()
        time.sleep(0.03)
    os.write(1, f"{name}: {asleep.looks} {asleep.place}\\n".encode())
    os._exit(0)

for name, act in CASES.items():
    pipe = os.pipe()
    if os.fork() == 0:
        # Named as the channel's own threads are, which are no part of the program.
        asleep = Asleep()
        threading.Thread(target=look, args=(asleep, name), name="drivetrain-look").start()
        act()
    os.wait()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """By case, for how many looks it was taken for one that never ends, and where."""
    directory = tmp_path_factory.mktemp("asleep")
    file, packages = directory / "cases.py", directory / "site-packages"
    file.write_text(PROGRAM, encoding="utf-8")
    packages.mkdir()
    library = "import threading\n\ndef wait_in_it():\n    threading.Event().wait()\n"
    (packages / "installed.py").write_text(library, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    lines = [each.partition(": ") for each in done.stdout.splitlines()]
    return {name: (int(rest.split()[0]), rest.partition(" ")[2]) for name, _, rest in lines}


@pytest.mark.parametrize(
    ("case", "place"),
    [
        ("a sleep of a day", "sleep (cases.py:"),
        ("an event that nobody sets", "lock (cases.py:"),
        ("an event that nobody sets within an hour", "lock (cases.py:"),
        ("a join of a thread that waits just so", "lock (cases.py:"),
        ("a queue that nobody fills", "lock (cases.py:"),
        ("a library that waits for a lock", "lock (cases.py:"),
        ("the end of a thread that sleeps", "lock (cases.py:"),
        ("the end of a thread that waits", "lock (cases.py:"),
    ],
)
def test_what_never_ends_is_found_with_its_line(
    found: dict[str, tuple[int, str]], case: str, place: str
) -> None:
    looks, where = found[case]
    assert looks == 4, "every look but the first, which has nothing to compare with"
    assert where.startswith(place)


@pytest.mark.parametrize(
    "case",
    [
        "a pause of four minutes",
        "pauses, one after the other",
        "an event with a limit of a minute",
        "the end of a thread that pauses",
        "the end of a thread that works",
        "an event that another thread may set",
        "an event that a reader of a pipe may set",
        "a pipe",
        "another program",
        "work",
    ],
)
def test_what_may_end_is_waited_for(found: dict[str, tuple[int, str]], case: str) -> None:
    assert found[case] == (0, "")
