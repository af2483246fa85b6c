"""How a loader's worker has ended that said nothing itself, and which worker is waited for."""

from __future__ import annotations

import re
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

_TORCHS = re.compile(r"DataLoader worker \((pid(?:\(s\))? [\d, ]+)\) (is killed|exited)")
"""How torch's error begins where a worker is gone."""

_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.\nOriginal Traceback ", re.ASCII)
"""How the text begins with which it raises here what was raised in a worker; the traceback follows."""

_DYING = 1.0
"""Seconds that a worker may take to end once its connections are closed."""

_ADVICE = {
    "SIGKILL": (
        "most often the system does that for want of memory, of which `dmesg` or the batch system's log"
        " tells. Each worker has prefetch_factor batches under way, and a copy of what it touches of the"
        " dataset: fewer num_workers, a smaller prefetch_factor, or a dataset in arrays or files rather"
        " than Python objects need less"
    ),
    "SIGBUS": (
        "the shared memory that workers hand over their batches in is full, or a mapped file has become"
        " shorter. Enlarge /dev/shm (docker run --shm-size=8g, or ipc: host), use fewer num_workers or a"
        " smaller prefetch_factor, or torch.multiprocessing.set_sharing_strategy('file_system')"
    ),
    "SIGSEGV": "native code that the dataset calls has crashed; with num_workers=0 a debugger can see it",
    "SIGABRT": "native code that the dataset calls has given up; what it said stands on standard error",
}


class WorkerEnded(Exception):  # noqa: N818 - what it is, rather than what was raised
    """A worker is gone that said nothing: killed, or ended by code that does not return."""


def how_ended(iterator: Any, error: Exception) -> str | None:
    """What became of the first of a loader's workers that is gone, and what helps; None if all are there.

    Args:
        iterator: The loader's.
        error: What it has raised. A broken connection is seen a moment before the worker's end is.
    """
    if not workers_of(iterator):
        return None
    deadline = time.monotonic() + (_DYING if isinstance(error, (OSError, EOFError)) else 0.0)
    while (ended := _ended(iterator)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended


def workers_of(iterator: Any) -> list[BaseProcess]:
    """The processes of a loader's iterator; none of any other, whatever it may call so."""
    found = getattr(iterator, "_workers", ())
    listed = found if isinstance(found, (list, tuple)) else ()
    return [each for each in listed if isinstance(each, BaseProcess)]


def _ended(iterator: Any) -> str | None:
    for number, process in enumerate(workers_of(iterator)):
        code = process.exitcode
        if code is None or code == 0:
            continue
        if code > 0:
            return (
                f"worker {number} (pid {process.pid}) ended by itself with exit code {code}: a library has"
                " called os._exit or sys.exit, or a batch could not be sent; what was said of it stands on"
                " standard error"
            )
        return f"worker {number} (pid {process.pid}) was killed by signal {_told(-code)}"
    return None


def note_on(error: BaseException | None) -> str | None:
    """Return what helps where torch says that a worker of a loader is gone; None for other errors."""
    found = _TORCHS.search(str(error)) if isinstance(error, RuntimeError) else None
    if error is None or found is None:
        return None
    text = f"{error} {error.__cause__}"  # it may have looked because the system had told it
    for each in signal.valid_signals():
        if f"killed by signal: {signal.strsignal(each)}" in text:
            return f"a worker of a loader ({found[1]}) was killed by signal {_told(each)}"
    return (
        f"a worker of a loader ({found[1]}) has ended by itself, or was killed. If it was killed by SIGKILL,"
        f" {_ADVICE['SIGKILL']}"
    )


def raised_in_worker(iterator: Any, error: Exception) -> tuple[str, str] | None:
    """Of what was raised in a loader's worker: which one, and the line that says what, without the traceback
    that torch puts into the text; None for what was raised here.
    """
    text = str(error.args[0]) if error.args else ""  # which a KeyError quotes
    found = _CAUGHT.match(text)
    if found is None:
        return None
    number, workers = int(found[1]), workers_of(iterator)
    pid = f" (pid {workers[number].pid})" if number < len(workers) else ""
    _, frame, after = text.rpartition('\n  File "')
    lines = (frame + after).splitlines()[2:] or text.splitlines()[-1:]
    what = next((each for each in lines if each and not each.startswith(" ")), lines[-1])
    return f", in worker {number}{pid}", what


def _told(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    advice = _ADVICE.get(name, "what it said stands on standard error")
    return f"{name}: {advice}{_shared_memory() if name == 'SIGBUS' else ''}"


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f". /dev/shm has {usage.free >> 20} of {usage.total >> 20} MiB free now"


def lacks_shared_memory(error: BaseException) -> str | None:
    """What helps where a worker found no room for its batch in the shared memory; None for other errors."""
    text = str(error)
    if "shared memory" in text and ("No space left" in text or "Cannot allocate" in text):
        return f"{_ADVICE['SIGBUS']}{_shared_memory()}"
    return None


def makers(iterator: Any) -> str:
    """Which worker of a loader makes what is given next, in a few words; called in any thread."""
    workers = workers_of(iterator)
    # torch's own books: for the number of each batch under way, the worker that it was given to.
    info = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
    number = info[0] if info else None
    if number is None or not 0 <= number < len(workers):
        return f"one of {len(workers)} workers makes"
    return (
        f"worker {number} (pid {workers[number].pid}) makes: in the dataset's __getitem__ or the collate_fn"
        f" (`py-spy dump --pid {workers[number].pid}`, or num_workers=0, shows the line)"
    )
