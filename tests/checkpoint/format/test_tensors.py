"""Our safetensors files are everybody's safetensors files, and no malformed one gets through."""

import json
import struct

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn
from xxhash import xxh3_128_hexdigest

from drivetrain.checkpoint import DamagedCheckpointError, export_weights, load_weights
from drivetrain.checkpoint.format.tensors import CHUNK, DTYPES, Hashes, tensor_chunks
from drivetrain.core.errors import CheckpointError

NUMBERS = torch.tensor([[0.0, 1.0, 2.0], [4.0, 0.5, 8.0]])


def test_every_dtype_is_read_alike_by_us_and_by_safetensors(tmp_path, helpers):
    for code, dtype in DTYPES.items():
        tensor = NUMBERS.to(dtype)
        export_weights({"x": tensor, "scalar": tensor[0, 1]}, tmp_path / f"{code}.safetensors")
        ours = load_weights(tmp_path / f"{code}.safetensors")
        with safe_open(tmp_path / f"{code}.safetensors", "pt") as file:
            theirs = {name: file.get_tensor(name) for name in ("x", "scalar")}
            assert file.metadata() == {"format": "pt", "written_by": "drivetrain"}
        for read in (ours, theirs):
            assert helpers.same_bits(read["x"], tensor), code
            assert helpers.same_bits(read["scalar"], tensor[0, 1]), code


def test_a_file_of_safetensors_is_read(tmp_path, helpers):
    tensors = {"a": torch.rand(3, 2), "b": torch.arange(5), "c": torch.zeros(0, 2), "d": torch.tensor(1.0)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors", metadata={"by": "others"})
    read = load_weights(tmp_path / "w.safetensors")
    assert read.keys() == tensors.keys()
    assert all(helpers.same_bits(read[name], tensors[name]) for name in tensors)


def test_views_of_every_kind_are_stored_by_value(tmp_path):
    base = torch.arange(24.0)
    tensors = {
        "transposed": base.reshape(4, 6).t(),
        "strided": base[::5],
        "expanded": base[:1].expand(7, 1),
        "overlap": base[2:9],
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "empty": torch.empty(0, 5),
        "requires grad": torch.ones(2, requires_grad=True),
    }
    export_weights(tensors, tmp_path / "w.safetensors")
    read = load_weights(tmp_path / "w.safetensors")
    assert all(read[name].tolist() == each.tolist() for name, each in tensors.items())
    assert read["empty"].shape == (0, 5)


def test_small_tensors_share_a_chunk_and_large_ones_are_cut(tmp_path, helpers):
    small = {code: NUMBERS.to(dtype).t() for code, dtype in DTYPES.items()}
    small |= {"scalar": torch.tensor(2.0), "one": torch.arange(9.0)[::5][1:], "empty": torch.ones(0, 3)}
    small |= {"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(), "trained": nn.Parameter(torch.ones(2))}
    tensors = {"large": torch.rand(CHUNK // 4 + 7), "medium": torch.rand(CHUNK // 8), **small}
    hashes = Hashes()
    header, *chunks = map(bytes, tensor_chunks(tensors, "it", hashes))
    assert sorted(map(len, chunks))[-1] == CHUNK
    assert len(chunks) == 4  # what comes before the large one by width and name, its two, and the rest
    (tmp_path / "w.safetensors").write_bytes(header + b"".join(chunks))
    read = load_weights(tmp_path / "w.safetensors")
    assert read.pop("one").tolist() == [5.0]  # its stride is 5, although it is contiguous
    assert read.keys() == tensors.keys() - {"one"}
    assert all(helpers.same_bits(each, tensors[name]) for name, each in read.items())
    assert hashes.header == xxh3_128_hexdigest(header)
    spans = json.loads(header[8:])
    for name in tensors:
        start, stop = spans[name]["data_offsets"]
        assert hashes.tensors[name] == xxh3_128_hexdigest(b"".join(chunks)[start:stop])
        assert (len(header) + start) % tensors[name].element_size() == 0  # each is aligned to its dtype


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    export_weights({"a": torch.zeros(3), "b": torch.zeros(1001)}, tmp_path / "w.safetensors")
    read = load_weights(tmp_path / "w.safetensors")
    assert {name: each.untyped_storage().nbytes() for name, each in read.items()} == {"a": 12, "b": 4004}
    assert all(each.data_ptr() % 64 == 0 for each in read.values())


def test_what_cannot_be_stored_leaves_no_file(tmp_path):
    bad = {"good": torch.ones(1), "bad": torch.ones(1, dtype=torch.complex128)}
    with pytest.raises(CheckpointError, match=r"'bad': dtype torch\.complex128"):
        export_weights(bad, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="rename the tensor"):  # the format keeps this name for itself
        export_weights({"__metadata__": torch.ones(1)}, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(data=b"1234", **changes):
    return raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}, data)


MALFORMED = {  # more are in `hostile/tensors.py`
    "short": b"\x01\x00\x00",
    "header beyond the file": raw({}, length=100),
    "no header": raw(b""),
    "name twice": raw(b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'),
    "gap": one(b"12345678", data_offsets=[4, 8]),
    "data left over": one(b"12345678"),
    "data missing": one(b"12"),
    "negative": one(b"", shape=[-1], data_offsets=[4, 0]),
    "dtype no text": one(dtype=["F32"]),
    "true as a size": one(shape=[True]),
    "three offsets": one(data_offsets=[0, 4, 4]),
    "many dimensions": one(shape=[1] * 65),
    "key missing": raw({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
    "key too many": one(exec="x"),
}


def test_a_malformed_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(one())
    load_weights(path)
    for content in MALFORMED.values():
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
            load_weights(path)
