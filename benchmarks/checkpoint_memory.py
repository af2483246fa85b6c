"""The peak of one save or load above what the process held before, for `checkpoint.py`.

Run in a process of its own, so that nothing of what another contestant left behind is used again; prints
bytes. The peak is the kernel's own (VmHWM), reset just before: nothing between two samples is missed.

    python benchmarks/checkpoint_memory.py save|load|asynchronous CONTESTANT PATH GIGABYTES
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from contestants import CONTESTANTS, Groups, gpt_like, shapes_of
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot


def resident(key: str) -> int:
    """What the kernel says of this process's memory: "VmRSS" is now, "VmHWM" the peak since the reset."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
    assert found is not None
    return int(found[1]) * 1024


def save_behind(path: Path, groups: Groups) -> None:
    """One asynchronous save by the manager, waited for."""
    manager = CheckpointManager(str(path), CheckpointConfig(best=0, asynchronous=True))
    manager.save(1, 0, {}, lambda: Snapshot(dict(groups)))
    manager.wait()


def main(what: str, name: str, path: Path, gigabytes: float) -> int:
    """Do it once with little, so that nothing is imported or built later on, and then measure it."""
    contestant = next(each for each in CONTESTANTS if each.name == name)
    save = save_behind if what == "asynchronous" else contestant.save
    groups = gpt_like(gigabytes)
    if what == "load":
        groups = shapes_of(groups)
    with tempfile.TemporaryDirectory(dir=path.parent) as small:
        save(Path(small, "c"), gpt_like(0))
        if what == "load":
            contestant.load(Path(small, "c"), gpt_like(0))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    kept = contestant.load(path, groups) if what == "load" else save(path, groups)
    peak = resident("VmHWM") - before
    del kept
    return peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.distributed.checkpoint says that it is alone
    print(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])))
