"""Print the peaks of memory above what was held before, by what was done in the given directory."""

import gc
import json
import re
import sys

import torch

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot, verify

torch.set_num_threads(1)
io, directory, peaks = DirectoryCheckpointIO(), sys.argv[1], {}


def memory(key):
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{key}:\s+(\d+) kB", file.read(), re.M)[1]) * 1024


def measure(name, act):
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = memory("VmRSS")
    kept = act()
    peaks[name] = memory("VmHWM") - before
    del kept


def behind(name, tensors):
    manager = CheckpointManager(f"{directory}/{name}", CheckpointConfig(best=0, asynchronous=True))
    for update in (1, 2):
        manager.save(update, 0, {}, lambda: Snapshot({"model": tensors}))
    manager.wait()


small = {"w": torch.ones(4).t()}
io.save(f"{directory}/warm", Snapshot({"model": small}))  # whatever is imported or made once
io.load(f"{directory}/warm")
behind("warm-behind", small)
many = {f"w{number}": torch.ones(1 << 20) for number in range(48)}
measure("save", lambda: io.save(f"{directory}/many", Snapshot({"model": many})))
measure("save behind", lambda: behind("behind", many))
many.clear()
measure("load", lambda: io.load(f"{directory}/many"))
measure("verify", lambda: verify(f"{directory}/many"))
large = {f"w{number}": torch.ones(3 << 12, 1 << 11).t() for number in range(3)}
measure("save transposed", lambda: io.save(f"{directory}/large", Snapshot({"model": large})))
print(json.dumps(peaks))
