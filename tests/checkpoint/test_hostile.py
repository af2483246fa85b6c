"""No file can make us run code, read outside of its directory, hang, or take the machine's memory.

Every case is a file that an attacker could make: hashes and seals are right where that takes the attack
further. Each is read in a process of its own with little memory, and must end in one of our errors. Run as a
program, it prints what each case takes: ``python -m tests.checkpoint.test_hostile``.
"""

import json
import math
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Engine
from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    Snapshot,
    load_weights,
    pack,
    read_manifest,
    resolve,
    verify,
)
from drivetrain.checkpoint.strict_json import seal, unseal
from drivetrain.errors import CheckpointError, DrivetrainError

MEMORY = 512 << 20
"""What a case may take beyond what the process has: several times the largest JSON that is read at all."""

PATIENCE = 60
"""Seconds after which a case has hung; the times themselves are printed, and not asserted."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and resource limits")

CASES: dict[str, Callable[[Path], Callable[[], object]]] = {}


def case(make):
    """A case: plants something in a directory with a good checkpoint `c`, and returns what is to be tried."""
    CASES[make.__name__] = make
    return make


def load(path):
    return lambda: DirectoryCheckpointIO().load(str(path))


def rewrite(checkpoint, change):
    """Change the manifest, and seal it again."""
    path = checkpoint / "manifest.json"
    body = unseal(path.read_bytes(), "it")
    change(body)
    path.write_bytes(seal(body, "it"))


def replace(checkpoint, name, content):
    """Change a file, and tell the manifest its new size and hash."""
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
    """Unpickled, it would leave a file behind."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def bomb(directory):
    return pickle.dumps(Bomb(str(directory / "EXPLODED")))


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    return len(text).to_bytes(8, "little") + text + data


def entry(shape=(1,), start=0, stop=4, dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


# Pickles and archives in the place of files.


@case
def a_pickle_for_weights(d):
    replace(d / "c", "model.safetensors", bomb(d))
    return load(d / "c")


@case
def a_pickle_for_an_object(d):
    replace(d / "c", "state.json", bomb(d))
    return load(d / "c")


@case
def a_pickle_for_the_manifest(d):
    (d / "c" / "manifest.json").write_bytes(bomb(d))
    return load(d / "c")


@case
def a_pickle_for_the_index(d):
    (d / "index.json").write_bytes(bomb(d))
    shutil.rmtree(d / "c")  # else it is made anew from the checkpoints
    return lambda: refuse_none(CheckpointManager(str(d), CheckpointConfig()).load_latest())


@case
def a_pickle_as_a_plain_file(d):
    (d / "w.safetensors").write_bytes(bomb(d))
    return lambda: load_weights(d / "w.safetensors")


@case
def a_torch_file_named_pt(d):
    torch.save({"w": torch.ones(1)}, d / "w.pt")
    return lambda: load_weights(d / "w.pt")


@case
def a_torch_file_named_safetensors(d):
    torch.save({"w": Bomb(str(d / "EXPLODED"))}, d / "w.safetensors")
    return lambda: load_weights(d / "w.safetensors")


@case
def a_folder_with_a_pytorch_model_bin(d):
    (d / "hub").mkdir()
    torch.save({"w": Bomb(str(d / "EXPLODED"))}, d / "hub" / "pytorch_model.bin")
    return lambda: load_weights(d / "hub")


@case
def a_zip_bomb_for_weights(d):
    with zipfile.ZipFile(d / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"\0" * (200 << 20))
    replace(d / "c", "model.safetensors", (d / "bomb").read_bytes())
    return load(d / "c")


# Paths.


def with_file(name):
    def make(d):
        def change(body):
            body["files"][name] = body["files"]["state.json"]

        rewrite(d / "c", change)
        return load(d / "c")

    return make


for number, name in enumerate(
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "C:\\x",
        "a/b",
        "a\\b",
        "a\0b",
        "x" * 5000,
        ".hidden",
        "con:",
        "é",
    ]
):
    CASES[f"a_file_name_{number}"] = with_file(name)


def with_group_file(name):
    def make(d):
        rewrite(d / "c", lambda body: body["tensors"]["model"].update(files=[name]))
        return load(d / "c")

    return make


for number, name in enumerate(["../other.safetensors", "/dev/zero", "state.json", "manifest.json"]):
    CASES[f"a_tensor_in_another_place_{number}"] = with_group_file(name)


def with_group(name):
    def make(d):
        def change(body):
            body["tensors"][name] = body["tensors"].pop("optimizer")

        rewrite(d / "c", change)
        return load(d / "c")

    return make


for number, name in enumerate(["../model", "MODEL", "", "manifest", "a/b", "x" * 300 + "/"]):
    CASES[f"a_group_named_{number}"] = with_group(name)


@case
def a_link_for_weights(d):
    os.rename(d / "c" / "model.safetensors", d / "elsewhere")
    os.symlink(d / "elsewhere", d / "c" / "model.safetensors")
    return load(d / "c")


@case
def a_link_for_the_manifest(d):
    os.rename(d / "c" / "manifest.json", d / "elsewhere")
    os.symlink(d / "elsewhere", d / "c" / "manifest.json")
    return load(d / "c")


@case
def a_link_for_the_checkpoint(d):
    os.symlink(d / "c", d / "link")
    return load(d / "link")


@case
def a_link_for_the_index(d):
    shutil.rmtree(d / "c")
    os.symlink("/dev/zero", d / "index.json")
    return lambda: refuse_none(CheckpointManager(str(d), CheckpointConfig()).load_latest())


@case
def a_device_for_weights(d):
    (d / "c" / "model.safetensors").unlink()
    os.symlink("/dev/zero", d / "c" / "model.safetensors")
    return load(d / "c")


@case
def a_pipe_for_weights(d):
    (d / "c" / "model.safetensors").unlink()
    os.mkfifo(d / "c" / "model.safetensors")
    return load(d / "c")


@case
def a_pipe_for_the_manifest(d):
    (d / "c" / "manifest.json").unlink()
    os.mkfifo(d / "c" / "manifest.json")
    return load(d / "c")


@case
def a_pipe_for_a_plain_file(d):
    os.mkfifo(d / "w.safetensors")
    return lambda: load_weights(d / "w.safetensors")


@case
def a_directory_for_weights(d):
    (d / "c" / "model.safetensors").unlink()
    (d / "c" / "model.safetensors").mkdir()
    return load(d / "c")


@case
def an_entry_that_leads_outside(d):
    body = {
        "format_version": 1,
        "checkpoints": [
            {
                "name": "../../x",
                "order": 1,
                "update": 1,
                "epoch": 0,
                "metrics": {},
                "resume": True,
                "keeper": True,
            }
        ],
    }
    shutil.rmtree(d / "c")
    (d / "index.json").write_bytes(seal(body, "it"))
    return lambda: refuse_none(CheckpointManager(str(d), CheckpointConfig()).load_latest())


def hub(d, weight_map):
    (d / "hub").mkdir()
    index = {"metadata": {"total_size": 4}, "weight_map": weight_map}
    (d / "hub" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (d / "outside.safetensors").write_bytes(safetensors({"w": entry()}, b"\0" * 4))
    return lambda: load_weights(d / "hub")


for number, weight_map in enumerate(
    [
        {"w": "../outside.safetensors"},
        {"w": "/etc/passwd"},
        {"w": 3},
        {"w": "absent.safetensors"},
        [],
        {"w": "a\0b"},
    ]
):
    CASES[f"an_index_of_a_hub_{number}"] = lambda d, weight_map=weight_map: hub(d, weight_map)


# Headers of safetensors files.


def with_header(content):
    def make(d):
        made = content() if callable(content) else content
        (d / "w.safetensors").write_bytes(made)
        replace(d / "c", "model.safetensors", made)

        def both():
            try:
                load_weights(d / "w.safetensors")
            except DrivetrainError:
                return DirectoryCheckpointIO().load(str(d / "c"))
            raise AssertionError("the plain file was read")

        return both

    return make


for name, content in {
    "empty": b"",
    "short": b"\1",
    "huge": b"\xff" * 8 + b"{}",
    "larger_than_the_file": (1 << 40).to_bytes(8, "little") + b"{}",
    "negative": (1 << 63).to_bytes(8, "little") + b"{}",
    "no_json": safetensors(b"\xff\xfe\0"),
    "a_list": safetensors([]),
    "deep": lambda: safetensors(b"[" * 30_000_000),
    "many": lambda: safetensors(b'{"a":' + b"[1]," * 15_000_000 + b"1}"),
    "overlapping": safetensors({"a": entry(), "b": entry()}, b"\0" * 4),
    "with_a_gap": safetensors({"a": entry(), "b": entry(start=8, stop=12)}, b"\0" * 12),
    "with_a_rest": safetensors({"a": entry()}, b"\0" * 400),
    "beyond_the_file": safetensors({"a": entry((1 << 40,), 0, 1 << 42)}, b"\0" * 4),
    "of_a_wrong_size": safetensors({"a": entry((2,))}, b"\0" * 4),
    "with_negative_offsets": safetensors({"a": entry(start=-4, stop=0)}, b"\0" * 4),
    "with_a_negative_shape": safetensors({"a": entry((-1, -1))}, b"\0" * 4),
    "whose_product_overflows": safetensors({"a": entry((1 << 32, 1 << 32), 0, 0)}),
    "of_endless_dimensions": safetensors({"a": entry([1] * 100_000)}, b"\0" * 4),
    "with_empty_giants": safetensors({"a": entry((0, 1 << 62, 1 << 62), 0, 0)}),
    "of_an_unknown_dtype": safetensors({"a": entry(dtype="PICKLE")}, b"\0" * 4),
    "with_extra_keys": safetensors({"a": {**entry(), "code": "import os"}}, b"\0" * 4),
    "twice": safetensors(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 4),
    "with_fractions": safetensors({"a": entry((1.0,))}, b"\0" * 4),
    "with_huge_numbers": safetensors(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
    ),
}.items():
    CASES[f"a_header_{name}"] = with_header(content)


# Manifests that lie.


def lying(**changes):
    def make(d):
        rewrite(d / "c", lambda body: body["tensors"]["model"]["tensors"]["weight"].update(changes))
        return load(d / "c")

    return make


for name, changes in {
    "shape": {"shape": [1 << 62], "cuts": [[0]]},
    "size": {"shape": [1 << 40, 3], "cuts": [[0], [0]]},
    "dtype": {"dtype": "F64"},
    "cuts": {"cuts": [[0, 4], [0]], "files": [0, 0], "xxh3_128": ["0" * 32] * 2},
    "hash": {"xxh3_128": ["0" * 32]},
    "number": {"files": [1 << 70]},
    "grid": {"shape": [1 << 20] * 3, "cuts": [list(range(1 << 12))] * 3},
}.items():
    CASES[f"a_manifest_with_another_{name}"] = lying(**changes)


@case
def a_manifest_that_promises_more_than_its_files(d):
    def change(body):
        record = body["tensors"]["model"]["tensors"]["weight"]
        record.update(shape=[1 << 33], cuts=[[0]])  # 32 GiB
        body["files"]["model.safetensors"]["bytes"] = 1 << 36

    rewrite(d / "c", change)
    return load(d / "c")


@case
def a_sparse_file_that_is_as_large_as_promised(d):
    size = 1 << 38  # 256 GiB of holes
    header = json.dumps({"weight": entry((size // 4,), 0, size)}).encode()
    path = d / "c" / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)

    def change(body):
        body["files"]["model.safetensors"] = {
            "bytes": 8 + len(header) + size,
            "header_xxh3_128": xxhash.xxh3_128_hexdigest(len(header).to_bytes(8, "little") + header),
        }
        group = body["tensors"]["model"]
        group["tensors"] = {"weight": {**group["tensors"]["weight"], "shape": [size // 4], "cuts": [[0]]}}

    rewrite(d / "c", change)
    return load(d / "c")


def manifest_of(content):
    def make(d):
        (d / "c" / "manifest.json").write_bytes(content() if callable(content) else content)

        return load(d / "c")

    return make


@case
def a_manifest_that_every_reader_meets(d):
    (d / "c" / "manifest.json").write_bytes(b"[" * (1 << 20))

    def every():
        for attempt in (read_manifest, verify, resolve):
            try:
                attempt(str(d / "c"))
            except CheckpointError:
                continue
            if attempt is not resolve:  # which only says where it is
                raise AssertionError("it was read")
        raise CheckpointError("all refused it")

    return every


for name, content in {
    "deep_lists": lambda: b"[" * (63 << 20),
    "deep_objects": lambda: b'{"a":' * (10 << 20),
    "depth_within_limits": lambda: b"[" * 190_000 + b"]" * 190_000,
    "many_numbers": lambda: b"[" + b"1," * (31 << 20) + b"1]",
    "many_lists": lambda: b"[" + b"[]," * (20 << 20) + b"1]",
    "many_keys": lambda: b"{" + b",".join(b'"%d":1' % number for number in range(4_000_000)) + b"}",
    "as_many_keys_as_are_read": lambda: (
        b"{" + b",".join(b'"%d":1' % number for number in range(390_000)) + b"}"
    ),
    "a_long_number": lambda: b"[" + b"9" * (60 << 20) + b"]",
    "a_long_text": lambda: b'["' + b"a" * (60 << 20) + b'"]',
    "too_long": lambda: b" " * (65 << 20) + b"{}",
    "the_same_key_twice": b'{"format_version":1,"format_version":1}',
    "infinity": b'{"a":1e999,"xxh3_128":"x"}',
    "nan": b'{"a":NaN}',
    "bad_utf8": b'{"a":"\xff"}',
    "a_byte_order_mark": b'\xef\xbb\xbf{"a":1}',
    "a_lone_surrogate": b'{"a":"\\ud800","xxh3_128":"x"}',
    "nothing": b"",
    "zeros": b"\0" * 4096,
    "a_text": b'"manifest"',
    "null": b"null",
}.items():
    CASES[f"a_manifest_of_{name}"] = manifest_of(content)


# State that is not what a run, an engine or a task left.


def with_state(value):
    def make(d):
        run = Path(d / "run" / "checkpoints" / "update-00000005")
        replace(run, "state.json", json.dumps(value).encode("utf-8"))

        def resume():
            trainer = quiet(max_epochs=2, run_dir=d / "other", checkpoint=CheckpointConfig(by=None))
            trainer.fit(Regression(), pairs(), resume=str(run))

        return resume

    return make


def deep(levels):
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


for name, value in {
    "a_list": [],
    "a_number": 3,
    "null": None,
    "empty": {},
    "deep": deep(900),
    "a_long_integer": {"$int": "0x" + "f" * 3_000_000},
    "bad_bytes": {"$bytes": "!"},
    "an_unknown_tag": {"$object": "os.system"},
    "two_tags": {"$tuple": [], "$int": "0x1"},
    "an_absent_tensor": {"$tensor": "nothing"},
    "the_wrong_types": dict.fromkeys(
        [
            "seed",
            "optimizers",
            "schedules",
            "buffer",
            "callbacks",
            "loggers",
            "module_extras",
            "strategy",
            "data",
        ],
        3,
    ),
}.items():
    CASES[f"a_state_{name}"] = with_state(value)


def with_changed_state(place, value):
    def make(d):
        run = Path(d / "run" / "checkpoints" / "update-00000005")
        state = json.loads((run / "state.json").read_text(encoding="utf-8"))
        spot = state
        for key in place[:-1]:
            spot = spot[key]
        if value is KeyError:
            del spot[place[-1]]
        else:
            spot[place[-1]] = value
        replace(run, "state.json", json.dumps(state).encode("utf-8"))

        def resume():
            trainer = quiet(max_epochs=2, run_dir=d / "other", checkpoint=CheckpointConfig(by=None))
            trainer.fit(Regression(), pairs(), resume=str(run))

        return resume

    return make


for number, (place, value) in enumerate(
    [
        (("optimizers",), {}),
        (("optimizers",), []),
        (("optimizers", "default"), 3),
        (("optimizers", "default", "groups"), [3]),
        (("optimizers", "default", "groups"), {}),
        (("optimizers", "default", "groups", 0, "parameters"), ["absent"]),
        (("optimizers", "default", "parameters"), {"line.weight": 3}),
        (("optimizers", "default", "slots"), {"line.weight/momentum": "float32[1, 4]"}),
        (("schedules",), 3),
        (("schedules",), {}),
        (("buffer",), []),
        (("buffer",), {"sums": 3}),
        (("callbacks",), 3),
        (("loggers",), [1]),
        (("module_extras",), 3),
        (("host_streams",), {"python": [1, 2]}),
        (("host_streams",), 3),
        (("metrics",), 3),
        (("timing",), "long"),
        (("values",), 3),
        (("seed",), KeyError),
        (("host_streams",), KeyError),
        (("strategy",), KeyError),
        (("timing",), KeyError),
    ]
):
    CASES[f"a_run_with_another_{place[-1]}_{number}"] = with_changed_state(place, value)


def with_progress(progress):
    def make(d):
        run = Path(d / "run" / "checkpoints" / "update-00000005")
        rewrite(run, lambda body: body.update(progress=progress))

        def resume():
            trainer = quiet(max_epochs=2, run_dir=d / "other", checkpoint=CheckpointConfig(by=None))
            trainer.fit(Regression(), pairs(), resume=str(run))

        return resume

    return make


for number, progress in enumerate(
    [{}, {"updates": "many"}, {"updates": -1}, {"updates": 1 << 80, "epoch": 0}]
):
    CASES[f"a_run_with_another_progress_{number}"] = with_progress(progress)


def with_hparams(value):
    def make(d):
        run = Path(d / "run" / "checkpoints" / "update-00000005")
        replace(run, "hparams.json", json.dumps(value).encode("utf-8"))
        return lambda: Regression.from_checkpoint(run)

    return make


for number, value in enumerate(
    [3, [], {}, {"values": 3}, {"values": {"optimizer": {"$class": "os.system"}}}, {"values": {"absent": 3}}]
):
    CASES[f"hparams_{number}"] = with_hparams(value)


@case
def an_engine_state_of_another_shape(d):
    state, tensors = pack({"user": 3, "strategy": {}, "module_extras": {}, "optimizers": {}})
    snapshot = Snapshot({"model": {}, "optimizer": {}, "state": tensors}, {"state": state}, {"updates": 1})
    DirectoryCheckpointIO().save(str(d / "e"), snapshot)
    return lambda: Engine(strategy="cpu").load(str(d / "e"), something=3)


def refuse_none(found):
    # Nothing to load is as good an answer as an error, where all that there was is refused with a warning.
    if found is None:
        raise CheckpointError("nothing was loaded")
    return found


# What is done with them.


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
        What came of it: "" for one of our errors; the seconds; and the memory, in bytes, that it took.
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
        outcome, seconds, memory = _in_child(name, good)
        os.write(writer, json.dumps({"outcome": outcome, "seconds": seconds, "memory": memory}).encode())
    finally:
        os._exit(0)


def _in_child(name, good):
    signal.alarm(PATIENCE)
    outcome = ""
    with tempfile.TemporaryDirectory(dir=good.parent) as scratch:
        directory = Path(scratch) / "d"
        shutil.copytree(good, directory)
        act = CASES[name](directory)
        before = memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, before + MEMORY))
        peak = memory("VmHWM")
        start = time.perf_counter()
        try:
            act()
            outcome = "it was read as if it were good"
        except DrivetrainError:
            pass
        except BaseException:
            outcome = traceback.format_exc()
        seconds = time.perf_counter() - start
        if (directory / "EXPLODED").exists():
            outcome = "it ran the file's code"
        return outcome, seconds, memory("VmHWM") - peak


def memory(name):
    with open("/proc/self/status", encoding="ascii") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith(name)), 0)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "good"
    directory.mkdir()
    prepare(directory)
    return directory


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc to measure memory")
@pytest.mark.filterwarnings("ignore")  # of what was set aside; here the errors count
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_ends_in_an_error_of_ours(name, good):
    outcome, _, _ = attempt(name, good)
    assert not outcome, outcome


def test_what_the_cases_begin_with_is_good(good):
    assert struct.calcsize("P") == 8  # the sizes above are meant for 64 bits
    verify(str(good / "c"))
    assert resolve(good / "run").endswith("update-00000005")
    Regression.from_checkpoint(good / "run")


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "good"
        start.mkdir()
        prepare(start)
        results = {name: attempt(name, start) for name in CASES}
    for name, (outcome, seconds, taken) in sorted(results.items(), key=lambda item: item[1][1]):
        print(f"{seconds:8.3f} s {taken / 1e6:8.1f} MB  {name}  {outcome[-200:]}")
    failed = sum(bool(outcome) for outcome, _, _ in results.values())
    print(f"{len(results)} cases, {failed} failed; at most {max(s for _, s, _ in results.values()):.2f} s")
    sys.exit(bool(failed))
