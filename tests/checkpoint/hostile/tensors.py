"""Headers of safetensors files, and manifests, that lie."""

import json
import os

import xxhash
from tests.checkpoint.hostile.cases import CASES, case, entry, load, read_plain, replace, rewrite, safetensors

from drivetrain.checkpoint import verify

# Headers of safetensors files.


def with_header(content):
    def make(d):
        made = content() if callable(content) else content
        (d / "w.safetensors").write_bytes(made)
        replace(d / "c", "model.safetensors", made)

        return [read_plain(d / "w.safetensors"), load(d / "c"), lambda: verify(str(d / "c"))]

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
    "with_many_empty_tensors": lambda: safetensors(
        {f"{number}": entry((0,), 0, 0) for number in range(130_000)}
    ),
    "with_a_lone_surrogate": safetensors(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", b"\0" * 8),
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
        return [load(d / "c"), lambda: verify(str(d / "c"))]

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


@case
def two_pieces_in_one_file(d):
    """They would be read from the same bytes, of which only one hash was compared."""
    data = bytes(range(48))
    replace(d / "c", "model.safetensors", safetensors({"weight": entry((4, 3), 0, 48)}, data))
    pieces = {"cuts": [[0, 4], [0]], "files": [0, 0]}
    pieces["xxh3_128"] = [xxhash.xxh3_128_hexdigest(data), "0" * 32]

    def change(body):
        group = body["tensors"]["model"]
        group["tensors"] = {"weight": {**group["tensors"]["weight"], **pieces}}

    rewrite(d / "c", change)
    return [load(d / "c"), lambda: verify(str(d / "c"))]


@case
def a_file_under_two_names(d):
    """Likewise, but the group lists the file twice."""

    def change(body):
        group = body["tensors"]["model"]
        group["files"] *= 2
        weight = group["tensors"]["weight"]
        weight.update(cuts=[[0, 4], [0]], files=[0, 1], xxh3_128=weight["xxh3_128"] * 2)

    rewrite(d / "c", change)
    return [load(d / "c"), lambda: verify(str(d / "c"))]


def with_many_files(files, tensors):
    """As many files as said, all of them there and right but the last, to which all tensors are added."""

    def make(d):
        data = b"\0" * 4
        good = safetensors({"t": entry()}, data)
        header = xxhash.xxh3_128_hexdigest(good[:-4])
        names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
        for name in names:
            (d / "c" / name).write_bytes(good)
        cell = {"dtype": "F32", "files": [files - 1], "xxh3_128": ["0" * 32]}
        listed = {f"x{number}": {**cell, "shape": [0], "cuts": [[0]]} for number in range(tensors)}
        listed["t"] = {
            "dtype": "F32",
            "shape": [files],
            "cuts": [list(range(files))],
            "files": list(range(files)),
            "xxh3_128": [xxhash.xxh3_128_hexdigest(data)] * files,
        }

        def change(body):
            body["files"].update({name: {"bytes": len(good), "header_xxh3_128": header} for name in names})
            body["tensors"]["model"] = {"files": names, "tensors": listed}

        rewrite(d / "c", change)
        return [load(d / "c"), lambda: verify(str(d / "c"))]

    return make


CASES["a_manifest_of_many_files_and_tensors"] = with_many_files(500, 40_000)


@case
def a_manifest_of_as_many_pieces_as_are_read(d):
    """Well-formed to the last, so that it takes the seconds that an honest one of 1.3 million pieces does."""
    names = [f"model-{number:05d}-of-00064.safetensors" for number in range(1, 65)]
    record = {
        "dtype": "F32",
        "shape": [64],
        "cuts": [list(range(64))],
        "files": list(range(64)),
        "xxh3_128": ["0" * 32] * 64,
    }

    def change(body):
        body["files"].update({name: {"bytes": 1, "header_xxh3_128": "0" * 32} for name in names})
        tensors = {f"block.{number}.weight": record for number in range(20_000)}
        body["tensors"]["model"] = {"files": names, "tensors": tensors}

    rewrite(d / "c", change)
    return load(d / "c")
