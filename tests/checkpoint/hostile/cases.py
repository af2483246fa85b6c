"""What the hostile files have in common: a good start, ways to alter it, and an attempt under limits."""

import json
import math
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from tests.support.held import in_files
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    Snapshot,
    load_weights,
    pack,
)
from drivetrain.checkpoint.format.strict_json import seal, unseal
from drivetrain.core.errors import CheckpointError, DrivetrainError

MEMORY = 640 << 20
"""What a case may take beyond what the process has: ten times the largest JSON that is read at all."""

COMPUTES = 60
"""Seconds of a processor that a case may take, on however busy a machine; the times are printed."""

WAITS = 600
"""Seconds after which a case has hung that computes nothing, such as one that reads a pipe."""

CASES: dict[str, Callable[[Path], Callable[[], object] | list[Callable[[], object]]]] = {}
"""Each plants something in a directory with a good checkpoint `c` and a good run `run`, and returns what is
to be tried, each of which must be an error of ours."""


def case(make):
    """Enter a function as a case, by its name."""
    CASES[make.__name__] = make
    return make


def load(path):
    """To load a checkpoint."""
    return lambda: DirectoryCheckpointIO().load(str(path))


def read_plain(path):
    """To read weights."""
    return lambda: load_weights(path)


def open_directory(path):
    """To open a directory of checkpoints and load the newest."""
    return lambda: refuse_none(CheckpointManager(str(path), CheckpointConfig()).load_latest())


def harmless(act):
    """To read what is odd and no attack: that it ends, and what it takes, is what counts."""

    def read():
        act()
        raise CheckpointError("it was read")

    return read


def refuse_none(found):
    """Nothing to load is as good an answer as an error, where all there was is refused with a warning."""
    if found is None:
        raise CheckpointError("nothing was loaded")
    return found


def checkpoint_of(directory):
    """The checkpoint of the good run."""
    return directory / "run" / "checkpoints" / "update-00000005"


def resume(directory, task=Regression):
    """To resume from the run's checkpoint."""

    def attempt():
        config = CheckpointConfig(by=None)
        trainer = quiet(max_epochs=2, run_dir=directory / "other", checkpoint=config)
        trainer.fit(task(), pairs(), resume=str(checkpoint_of(directory)))

    return attempt


def rewrite(checkpoint, change):
    """Change the manifest, and seal it again."""
    path = checkpoint / "manifest.json"
    body = unseal(path.read_bytes(), "it")
    change(body)
    path.write_bytes(seal(body, "it"))


def replace(checkpoint, name, content):
    """Change a file, and tell the manifest its new size and hash."""
    in_files(checkpoint)
    (checkpoint / name).write_bytes(content)

    def change(body):
        record = body["files"][name]
        record["bytes"] = len(content)
        if "xxh3_128" in record:
            record["xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
        else:
            length = 8 + int.from_bytes(content[:8], "little")
            record["header_xxh3_128"] = xxhash.xxh3_128_hexdigest(content[:length])

    rewrite(checkpoint, change)


class Bomb:
    """Unpickled, it would leave a directory behind."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def bomb(directory):
    """A pickle that leaves a directory behind."""
    return pickle.dumps(Bomb(str(directory / "EXPLODED")))


def safetensors(header, data=b""):
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(1,), start=0, stop=4, dtype="F32"):
    """A tensor in a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def prepare(directory):
    """A good checkpoint, and a good run."""
    state, tensors = pack({"order": (1, 2), "tensor": torch.ones(2)})
    weights = {"weight": torch.ones(8, 3), "bias": torch.ones(3)}
    snapshot = Snapshot(
        {"model": weights, "optimizer": {"weight/exp_avg": torch.ones(8, 3)}, "state": tensors},
        {"state": state, "hparams": {"values": {}, "unstored": []}},
        {"updates": 1, "epoch": 0},
    )
    DirectoryCheckpointIO().save(str(directory / "c"), snapshot)
    trainer = quiet(max_epochs=1, run_dir=directory / "run", checkpoint=CheckpointConfig(by=None, best=0))
    trainer.fit(Regression(), pairs())


def attempt(name, good):
    """Try a case in a process of its own.

    Returns:
        What came of it: "" for one of our errors; the seconds, and the memory in bytes, that it took.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if not text:
            return f"the process ended with {os.waitstatus_to_exitcode(status)}", math.nan, math.nan
        found = json.loads(text)
        return found["outcome"], found["seconds"], found["memory"]
    try:
        os.close(reader)
        outcome, seconds, taken = _in_child(name, good)
        os.write(writer, json.dumps({"outcome": outcome, "seconds": seconds, "memory": taken}).encode())
    finally:
        os._exit(0)


def _in_child(name, good):
    resource.setrlimit(resource.RLIMIT_CPU, (COMPUTES, COMPUTES))
    signal.alarm(WAITS)
    with tempfile.TemporaryDirectory(dir=good.parent) as scratch:
        directory = Path(scratch) / "d"
        shutil.copytree(good, directory)
        acts = CASES[name](directory)
        tried = [_try(act) for act in (acts if isinstance(acts, list) else [acts])]
        outcome = next((each for each, _, _ in tried if each), "")
        if (directory / "EXPLODED").exists():
            outcome = "it ran the file's code"
        return outcome, max(each for _, each, _ in tried), max(each for _, _, each in tried)


def _try(act):
    before = _memory("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, resource.RLIM_INFINITY))
    # The peak is counted from here on.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    resident, start = _memory("VmRSS"), time.perf_counter()
    outcome = "it was read as if it were good"
    try:
        act()
    except DrivetrainError:
        outcome = ""
    except BaseException:
        outcome = traceback.format_exc()
    return outcome, time.perf_counter() - start, max(0, _memory("VmHWM") - resident)


def _memory(name):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))
