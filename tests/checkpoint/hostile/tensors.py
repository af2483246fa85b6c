"""Headers of safetensors files, and manifests, that lie."""

import json
import os

import xxhash
from tests.checkpoint.hostile import cases


def digest(content):
    return xxhash.xxh3_128_hexdigest(content)


def with_header(content):
    def make(d):
        made = content() if callable(content) else content
        (d / "w.safetensors").write_bytes(made)
        cases.replace(d / "c", "model.safetensors", made)
        return [
            *(cases.read_plain(d / "w.safetensors", mapped) for mapped in (False, True)),
            *cases.load_and_verify(d / "c"),
        ]

    return make


# What is large is made by a function, and takes seconds.
ENTRY, EMPTY = json.dumps(cases.entry()).encode(), cases.entry((0,), 0, 0)
for name, content in {
    "empty": b"",
    "short": b"\1",
    "huge": b"\xff" * 8 + b"{}",
    "larger_than_the_file": (1 << 40).to_bytes(8, "little") + b"{}",
    "negative": (1 << 63).to_bytes(8, "little") + b"{}",
    "no_json": cases.safetensors(b"\xff\xfe\0"),
    "a_list": cases.safetensors([]),
    "deep": lambda: cases.safetensors(b"[" * 30_000_000),
    "many": lambda: cases.safetensors(b'{"a":' + b"[1]," * 15_000_000 + b"1}"),
    "overlapping": cases.safetensors({"a": cases.entry(), "b": cases.entry()}, b"\0" * 4),
    "with_a_gap": cases.safetensors({"a": cases.entry(), "b": cases.entry(start=8, stop=12)}, b"\0" * 12),
    "with_a_rest": cases.safetensors({"a": cases.entry()}, b"\0" * 400),
    "beyond_the_file": cases.safetensors({"a": cases.entry((1 << 40,), 0, 1 << 42)}, b"\0" * 4),
    "of_a_wrong_size": cases.safetensors({"a": cases.entry((2,))}, b"\0" * 4),
    "with_negative_offsets": cases.safetensors({"a": cases.entry(start=-4, stop=0)}, b"\0" * 4),
    "with_a_negative_shape": cases.safetensors({"a": cases.entry((-1, -1))}, b"\0" * 4),
    "whose_product_overflows": cases.safetensors({"a": cases.entry((1 << 32, 1 << 32), 0, 0)}),
    "of_endless_dimensions": cases.safetensors({"a": cases.entry([1] * 100_000)}, b"\0" * 4),
    "with_empty_giants": cases.safetensors({"a": cases.entry((0, 1 << 62, 1 << 62), 0, 0)}),
    "of_an_unknown_dtype": cases.safetensors({"a": cases.entry(dtype="PICKLE")}, b"\0" * 4),
    "with_extra_keys": cases.safetensors({"a": {**cases.entry(), "code": "import os"}}, b"\0" * 4),
    "twice": cases.safetensors(b'{"a":%b,"a":%b}' % (ENTRY, ENTRY), b"\0" * 4),
    "with_a_lone_surrogate": cases.safetensors(b'{"\\ud800":' + ENTRY + b"}", b"\0" * 8),
    "with_fractions": cases.safetensors({"a": cases.entry((1.0,))}, b"\0" * 4),
    "with_huge_numbers": cases.safetensors(ENTRY.replace(b"[1]", b"[" + b"9" * 5000 + b"]")),
}.items():
    cases.enter(f"a_header_{name}", with_header(content), "large" if callable(content) else None)


def changed(change):
    def make(d):
        cases.rewrite(d / "c", change)
        return cases.load_and_verify(d / "c")

    return make


def lay(body, **changes):
    layout = {"dtype": "F32", "shape": [8, 3], "grid": [[], []], **changes}
    body["tensors"]["model"]["weight"] = [len(body["layouts"]), 0]
    body["layouts"].append(layout)


for name, changes in {
    "shape": {"shape": [1 << 62], "grid": [[]]},
    "size": {"shape": [1 << 40, 3]},
    "dtype": {"dtype": "F64"},
    "rule": {"shape": [1 << 20] * 3, "grid": [[[1 << 12, 1]]] * 3},
    "count": {"shape": [1 << 40], "grid": [[[1 << 40, 1]]]},
    "step": {"shape": [8, 3], "grid": [[[1, 1 << 70]], []]},
}.items():
    cases.enter(f"a_manifest_with_other_{name}", changed(lambda body, changes=changes: lay(body, **changes)))

for name, change in {
    "another": lambda named: named.update(weight="0" * 32),
    "no": lambda named: named.pop("weight"),
    "more_than_one": lambda named: named.update(other="0" * 32),
}.items():
    named = lambda body, change=change: change(body["files"]["model.safetensors"]["tensors_xxh3_128"])  # noqa: E731
    cases.enter(f"a_manifest_with_{name}_hash", changed(named))


def with_hashes_file(content):  # hashes in a file of their own, whose own hash is right
    def make(d):
        made = content() if callable(content) else content
        (d / "c" / "model.hashes.json").write_bytes(made)

        def change(body):
            size = body["files"]["model.safetensors"]["bytes"]
            body["files"]["model.safetensors"] = {"bytes": size, "hashes_xxh3_128": digest(made)}

        return changed(change)(d)

    return make


def hashes(tensors, header="0" * 32):
    return json.dumps({"header_xxh3_128": header, "tensors_xxh3_128": tensors}).encode()


for name, content in {
    "empty": b"",
    "a_list": b"[]",
    "of_nothing": b"{}",
    "of_lists": hashes([], []),
    "deep": lambda: b"[" * 30_000_000,
    "large": lambda: b" " * (65 << 20),
    "of_no_hashes": hashes({"weight": "0"}, "0"),
    "of_another_file": hashes({}),
    "of_many": lambda: hashes({f"{each}": "0" * 32 for each in range(290_000)}),
}.items():
    cases.enter(f"a_file_of_hashes_{name}", with_hashes_file(content), "large" if callable(content) else None)


@cases.case
def a_file_of_hashes_that_is_a_link(d):
    found = with_hashes_file(b"{}")(d)
    os.rename(d / "c" / "model.hashes.json", d / "elsewhere")
    os.symlink(d / "elsewhere", d / "c" / "model.hashes.json")
    return found


@cases.case
def a_manifest_that_promises_more_than_its_files(d):
    def change(body):
        lay(body, shape=[1 << 33], grid=[[]])  # 32 GiB
        body["files"]["model.safetensors"]["bytes"] = 1 << 36

    return changed(change)(d)[:1]


@cases.case
def a_sparse_file_that_is_as_large_as_promised(d):
    size = 1 << 38  # 256 GiB of holes
    header = cases.safetensors({"weight": cases.entry((size // 4,), 0, size)})
    (d / "c" / "model.safetensors").write_bytes(header)
    os.truncate(d / "c" / "model.safetensors", len(header) + size)
    record = {"bytes": len(header) + size, "header_xxh3_128": digest(header)}

    def change(body):
        body["files"]["model.safetensors"] = {**record, "tensors_xxh3_128": {"weight": "0" * 32}}
        body["tensors"]["model"] = {}
        lay(body, shape=[size // 4], grid=[[]])

    return changed(change)(d)[:1]


@cases.case
def two_pieces_in_one_file(d):  # they would be read from the same bytes, of which only one hash was compared
    data = bytes(range(48))
    content = cases.safetensors({"weight": cases.entry((4, 3), 0, 48)}, data)
    cases.replace(d / "c", "model.safetensors", content)

    def change(body):
        body["files"]["model.safetensors"]["tensors_xxh3_128"] = {"weight": digest(data)}
        body["tensors"]["model"] = {}
        body["processes"] = 2
        lay(body, grid=[[[2, 1]], [[2, 1]]])

    return changed(change)(d)


def alone(body, processes, layouts, tensors, files=()):  # only the objects and these tensors stay
    objects = {name: each for name, each in body["files"].items() if name.endswith(".json")}
    body.update(files={**objects, **dict(files)}, processes=processes)
    body.update(layouts=layouts, tensors={"model": tensors})


def many_files_and_tensors(d, files=500, tensors=40_000):  # all good but the last, to which all go
    good = cases.safetensors({"t": cases.entry()}, b"\0" * 4)
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    record = {"bytes": len(good), "header_xxh3_128": digest(good[:-4])}
    record["tensors_xxh3_128"] = {"t": digest(b"\0" * 4)}
    for name in names:
        (d / "c" / name).write_bytes(good)
    layouts = [
        {"dtype": "F32", "shape": [0], "grid": [[]]},
        {"dtype": "F32", "shape": [files], "grid": [[[files, 1]]]},
    ]
    placed = {**{f"x{number}": [0, files - 1] for number in range(tensors)}, "t": [1, 0]}
    return changed(lambda body: alone(body, files, layouts, placed, dict.fromkeys(names, record).items()))(d)


def as_many_tensors_as_are_read(d):  # well-formed but for the files: 290,000 in 64 pieces each
    names = [f"model-{number:05d}-of-00064.safetensors" for number in range(1, 65)]
    files = {name: {"bytes": 1, "hashes_xxh3_128": "0" * 32} for name in names}
    layouts = [{"dtype": "F32", "shape": [64], "grid": [[[64, 1]]]}]
    tensors = {f"block.{number}.weight": [0, 0] for number in range(290_000)}
    return changed(lambda body: alone(body, 64, layouts, tensors, files.items()))(d)


def many_pieces(d):  # layouts that differ, of a million pieces together; none of their files is there
    grid = [[[1 << 16, 1]], []]
    layouts = [{"dtype": "F32", "shape": [1 << 20, number], "grid": grid} for number in range(16)]
    tensors = {f"{number}": [number, 0] for number in range(16)}
    return changed(lambda body: alone(body, 1 << 16, layouts, tensors))(d)


for make in (many_files_and_tensors, as_many_tensors_as_are_read, many_pieces):
    cases.enter(f"a_manifest_of_{make.__name__}", make, "large")
