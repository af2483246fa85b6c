"""What the hostile files have in common: a good start, ways to alter it, and an attempt under limits."""

import json
import os
import pickle
import resource
import shutil
import signal
import tempfile
import traceback
from pathlib import Path

import torch
import xxhash
from tests.checkpoint.weights.models import Planted
from tests.support.held import in_files
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.strict_json import seal, unseal
from drivetrain.checkpoint.format.tree import pack
from drivetrain.checkpoint.saving.io import verify
from drivetrain.checkpoint.weights.load import find_weights
from drivetrain.core.errors import CheckpointError, DrivetrainError

MEMORY = 640 << 20  # beyond what the process has: ten times the largest JSON that is read at all
LARGE = 3 << 30  # for JSON of that size, which may be made of small lists and objects
COMPUTES, WAITS = 60, 600  # seconds of a processor; seconds after which one that computes nothing has hung

# By group and name: each plants something in a directory with a good checkpoint `c` and a good run `run`, and
# returns what is to be tried: one or several calls, each of which must end in an error of ours.
CASES = {}


def enter(name, make, group=None):  # enter a function as a case, in the group of its module
    CASES.setdefault(group or make.__module__.rpartition(".")[2], {})[name] = make


def case(make):
    enter(make.__name__, make)
    return make


def load(path):
    return lambda: DirectoryCheckpointIO().load(str(path))


def load_and_verify(path):
    return [load(path), lambda: verify(str(path))]


def read_plain(path, mapped=False):  # mapped: as a warm start
    return lambda: find_weights(path, mapped=mapped)


def harmless(act):  # to read what is odd and no attack: that it ends, and what it takes, is what counts
    def read():
        act()
        raise CheckpointError("it was read")

    return read


def open_directory(path):  # nothing is as good an answer as an error, where a warning refused all
    def newest():
        if CheckpointManager(str(path), CheckpointConfig()).load_latest() is None:
            raise CheckpointError("nothing was loaded")

    return newest


def checkpoint_of(directory):
    return directory / "run" / "checkpoints" / "step-00000005"


def resume(directory, epochs=2):
    trainer = quiet(max_epochs=epochs, run_dir=directory / "other", checkpoint=CheckpointConfig(by=None))
    return lambda: trainer.fit(Regression(), pairs(), resume=str(checkpoint_of(directory)))


def rewrite(checkpoint, change):
    path = checkpoint / "manifest.json"
    body = unseal(path.read_bytes(), "it")
    change(body)
    path.write_bytes(seal(body, "it"))


def replace(checkpoint, name, content):  # change a file, and tell the manifest its new size and hash
    in_files(checkpoint)
    (checkpoint / name).write_bytes(content)

    def change(body):
        record = body["files"][name]
        record["bytes"] = len(content)
        if "xxh3_128" in record:
            record["xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
        else:
            header = content[: 8 + int.from_bytes(content[:8], "little")]
            record["header_xxh3_128"] = xxhash.xxh3_128_hexdigest(header)

    rewrite(checkpoint, change)


def bomb(directory):
    return pickle.dumps(Planted(directory / "EXPLODED"))


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(1,), start=0, stop=4, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def prepare(directory):
    state, tensors = pack({"order": (1, 2), "tensor": torch.ones(2)})
    weights = {"weight": torch.ones(8, 3), "bias": torch.ones(3)}
    groups = {"model": weights, "optimizer": {"weight/exp_avg": torch.ones(8, 3)}, "state": tensors}
    objects = {"state": state, "hparams": {"values": {}, "unstored": []}}
    snapshot = Snapshot(groups, objects, {"steps": 1, "epoch": 0})
    DirectoryCheckpointIO().save(str(directory / "c"), snapshot)
    options = {"max_epochs": 1, "log_every": "50 steps"}  # values are left that no log point has taken
    policy = CheckpointConfig(by=None, best=0)
    trainer = quiet(**options, run_dir=directory / "run", checkpoint=policy)
    trainer.fit(Regression(), pairs())


def attempt_all(group, good):  # try all cases of a group, in a process of their own; what went wrong, by case
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as pipe:
                for name in CASES[group]:
                    print(json.dumps([name, "the process ended"]), file=pipe, flush=True)
                    outcome = _attempt(CASES[group][name], good, group)
                    print(json.dumps([name, outcome]), file=pipe, flush=True)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        outcomes = dict(json.loads(line) for line in pipe)
    os.waitpid(child, 0)
    assert outcomes
    untried = dict.fromkeys(CASES[group].keys() - outcomes.keys(), "not tried")
    return {name: outcome for name, outcome in {**outcomes, **untried}.items() if outcome}


def _attempt(make, good, group):
    memory = LARGE if group == "large" else MEMORY
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + COMPUTES
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    signal.alarm(WAITS)
    with tempfile.TemporaryDirectory(dir=good.parent) as scratch:
        directory = Path(scratch) / "d"
        shutil.copytree(good, directory)
        acts = make(directory)
        tried = [_try(act, memory) for act in (acts if isinstance(acts, list) else [acts])]
        ran = ["it ran the file's code"] if (directory / "EXPLODED").exists() else []
        return next((each for each in ran + tried if each), "")


def _try(act, memory):
    with open("/proc/self/status", encoding="ascii") as status:
        size = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.RLIM_INFINITY))
    try:
        act()
    except DrivetrainError:
        return ""
    except BaseException:
        return traceback.format_exc()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "it was read as if it were good"
