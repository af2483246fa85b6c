"""How a loader's worker has ended without a report, and which worker is waited for."""

from __future__ import annotations

import re
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

_TORCHS = re.compile(r"DataLoader worker \((pid(?:\(s\))? [\d, ]+)\) (is killed|exited)")
"""The beginning of torch's error for a dead worker."""

_CAUGHT = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.\nOriginal ", re.ASCII)
"""The beginning of torch's error for an exception in a worker; its traceback follows."""

_DYING = 1.0
"""Seconds that a worker may take to end once its connections are closed."""

_ADVICE = {
    "SIGKILL": (
        "most often by the system for lack of memory; `dmesg` or the batch system's log says so. Each worker"
        " prepares prefetch_factor batches and copies the parts of the dataset that it touches. To need less"
        " memory, use fewer num_workers, a smaller prefetch_factor, or a dataset in arrays or files instead"
        " of Python objects"
    ),
    "SIGBUS": (
        "the shared memory through which workers send their batches is full, or a mapped file was truncated."
        " Enlarge /dev/shm (docker run --shm-size=8g, or ipc: host), use fewer num_workers or a smaller"
        " prefetch_factor, or torch.multiprocessing.set_sharing_strategy('file_system')"
    ),
    "SIGSEGV": "native code that the dataset calls has crashed; use num_workers=0 to see it in a debugger",
    "SIGABRT": "native code that the dataset calls has aborted; its message is on standard error",
}


class WorkerEnded(Exception):  # noqa: N818 - a fact about a process, not an error that it raised
    """A worker has ended without a report: killed, or ended by code that does not return."""


def how_ended(iterator: Any, error: Exception) -> str | None:
    """Return how the first dead worker of a loader ended, with advice; None if all are alive.

    Args:
        error: The error it raised. A broken connection shows a moment before the worker's end does.
    """
    if not workers_of(iterator):
        return None
    is_cut_off = isinstance(error, (OSError, EOFError))
    has_died = is_cut_off or _TORCHS.search(str(error)) is not None
    deadline = time.monotonic() + (_DYING if is_cut_off else 0.0)
    while (ended := _ended(iterator, has_died)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended


def workers_of(iterator: Any) -> list[BaseProcess]:
    """Return the worker processes of a loader's iterator; none for any other object."""
    found = getattr(iterator, "_workers", ())
    listed = found if isinstance(found, (list, tuple)) else ()
    return [each for each in listed if isinstance(each, BaseProcess)]


def _ended(iterator: Any, has_died: bool) -> str | None:
    for number, process in enumerate(workers_of(iterator)):
        code = process.exitcode
        if code is None or (code == 0 and not has_died):  # a worker without samples left ends with 0
            continue
        if code >= 0:
            return (
                f"worker {number} (pid {process.pid}) ended by itself with exit code {code}: a library has"
                " called os._exit or sys.exit, or a batch could not be sent; its message is on standard"
                " error"
            )
        return f"worker {number} (pid {process.pid}) was killed by signal {_signal_name(-code)}"
    return None


def note_on(error: BaseException | None) -> str | None:
    """Return advice if torch reports a loader's dead worker; None for other errors."""
    found = _TORCHS.search(str(error)) if isinstance(error, RuntimeError) else None
    if error is None or found is None:
        return None
    return (
        f"a worker of a loader ({found[1]}) has ended by itself, or was killed. If it was killed by SIGKILL,"
        f" {_ADVICE['SIGKILL']}"
    )


def raised_in_worker(iterator: Any, error: Exception) -> tuple[str, str] | None:
    """Return which of a loader's workers raised an error, and the error's line without torch's traceback.

    Returns None for an error that was raised here.
    """
    text = str(error.args[0]) if error.args else ""  # str() of a KeyError would quote it
    found = _CAUGHT.match(text)
    if found is None:
        return None
    number, workers = int(found[1]), workers_of(iterator)
    pid = f" (pid {workers[number].pid})" if number < len(workers) else ""
    _, frame, after = text.rpartition('\n  File "')
    lines = (frame + after).splitlines()[2:] or text.splitlines()[-1:]
    what = next((each for each in lines if each and not each.startswith(" ")), lines[-1])
    return f", in worker {number}{pid}", what


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    advice = _ADVICE.get(name, "its message is on standard error")
    return f"{name}: {advice}"


def lacks_shared_memory(error: BaseException) -> str | None:
    """Return advice if shared memory had no room for a worker's batch; None for other errors."""
    text = str(error)
    if "shared memory" in text and ("No space left" in text or "Cannot allocate" in text):
        return _ADVICE["SIGBUS"]
    return None


def makers(iterator: Any) -> str:
    """Return which worker makes a loader's next batch, as a phrase; any thread may call it."""
    workers = workers_of(iterator)
    # torch's private table: each batch under way, by number, with its worker.
    info = getattr(iterator, "_task_info", {}).get(getattr(iterator, "_rcvd_idx", None))
    number = info[0] if info else None
    if number is None or not 0 <= number < len(workers):
        return f"one of {len(workers)} workers makes"
    return (
        f"worker {number} (pid {workers[number].pid}) makes: in the dataset's __getitem__ or the collate_fn"
        f" (`py-spy dump --pid {workers[number].pid}`, or num_workers=0, shows the line)"
    )
