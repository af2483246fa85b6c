"""Files of `torch.save` are read as torch reads them, and whatever else is in them does nothing."""

import argparse
import collections
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from tests.checkpoint.weights.models import Planted
from torch import nn

from drivetrain.checkpoint import DamagedCheckpointError
from drivetrain.checkpoint.foreign.torch_archive import Foreign, StoredTensor, TorchArchive
from drivetrain.core.errors import CheckpointError


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file.pt")


def read(path):
    with TorchArchive(path) as archive:

        def numbers(value):
            if isinstance(value, StoredTensor):
                return archive.read(value)
            if isinstance(value, dict):
                return {key: numbers(each) for key, each in value.items()}
            return [numbers(each) for each in value] if isinstance(value, list) else value

        return numbers(archive.content)


def refused(path, text, error=DamagedCheckpointError):
    with pytest.raises(error, match=text) as caught:
        read(path)
    return str(caught.value)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


def test_tensors_of_every_dtype_are_read_bit_for_bit(path):
    for dtype in DTYPES:
        tensor = torch.arange(24).reshape(4, 6).to(dtype)
        torch.save({"whole": tensor, "view": tensor[1:, 2:4], "turned": tensor.T, "none": tensor[:0]}, path)
        found = read(path)
        for name, value in torch.load(path, weights_only=True).items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name].tolist() == value.tolist()


def test_plain_values_parameters_and_every_protocol_are_read(path):
    values = {"numbers": [3, 2**70, -(2**40), 0.1, None, True, False], "text": "ä" * 300, 5: "a key"}
    values |= {"pair": (1, ("two", ())), "ordered": collections.OrderedDict(b=1, a=2), "deep": [[{"x": [1]}]]}
    values["again"] = values["deep"]
    torch.save(values, path)
    found = read(path)
    assert found == values
    assert list(found["ordered"]) == ["b", "a"]
    torch.save({"parameter": nn.Parameter(torch.ones(2))}, path)
    assert read(path)["parameter"].tolist() == [1, 1]
    for protocol in (2, 3, 4, 5):
        torch.save({"x": torch.ones(2), "y": [(1, 2, 3, 4), b"bytes"]}, path, pickle_protocol=protocol)
        found = read(path)
        assert (found["x"].tolist(), found["y"][0]) == ([1, 1], (1, 2, 3, 4))


def test_what_a_file_says_to_import_or_to_call_is_named_and_nothing_more(path, tmp_path):
    sign = tmp_path / "it ran"
    values = {"planted": Planted(sign), "class": collections.Counter, "kept": torch.ones(2)}
    values["arguments"] = argparse.Namespace(lr=0.1)
    torch.save(values, path)
    found = read(path)
    assert not sign.exists()
    assert isinstance(found["planted"], Foreign)
    assert found["planted"].name.endswith(".mkdir")
    assert found["planted"].args == (str(sign),)
    assert found["arguments"].state == {"lr": 0.1}
    assert found["class"].name == "collections.Counter"
    assert found["kept"].tolist() == [1, 1]
    torch.load(path, weights_only=False)
    assert sign.exists()  # so that it is one that would have run


def rewritten(path, change, compression=zipfile.ZIP_STORED):  # each entry by its name and content
    torch.save({"x": torch.ones(4)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name, data))


def programmed(path, program):
    rewritten(path, lambda name, data: program if name.endswith("data.pkl") else data)


def tensor(offset=0, shape=4, stride=1, size=4, key=b"0"):
    numbers = [b"M" + each.to_bytes(2, "little") for each in (offset, shape, stride, size)]
    storage = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX" + len(key).to_bytes(4, "little") + key
    storage += b"X\x03\x00\x00\x00cpu" + numbers[3] + b"tQ"
    call = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + storage
    return call + numbers[0] + b"(" + numbers[1] + b"t(" + numbers[2] + b"t\x89}tR."


SENSELESS = {
    "leads out of its storage": [tensor(shape=5), tensor(offset=1), tensor(shape=60000, stride=0)],
    "16 bytes for 5 numbers": [tensor(size=5)],
    "16 bytes for 3 numbers": [tensor(size=3, shape=3)],
    "it lacks file/data/7": [tensor(key=b"7")],
    "is not to a storage": [tensor(key=b"../../x")],
    "before seeing STOP": [b"\x80\x02}"],
    "makes no sense": [b"\x80\x02R."],
    "calls what cannot be called": [b"\x80\x02]K\x01\x85R."],
    "only 4 remain": [b"\x80\x02X\xff\xff\xff\x7fabc."],
    "a shape is invalid": [b"\x80\x02ctorch\nSize\n(J\xff\xff\xff\xfft\x85R."],
}


def test_a_program_that_makes_no_sense_is_told(path):
    programmed(path, tensor())
    assert read(path).tolist() == [1, 1, 1, 1]
    for wrong, programs in SENSELESS.items():
        for program in programs:
            programmed(path, program)
            text = refused(path, "not what torch.save writes")
            assert wrong in text
            assert path in text


def test_a_changed_byte_or_half_a_file_is_found(path):
    torch.save({"x": torch.full((1000,), 0.25)}, path)
    data = Path(path).read_bytes()
    changed = bytearray(data)
    changed[data.find(torch.full((1000,), 0.25).numpy().tobytes()) + 1999] ^= 1
    Path(path).write_bytes(changed)
    refused(path, "CRC")
    for kept in (0, 10, 200, -1):
        Path(path).write_bytes(data[:kept])
        refused(path, "not what torch.save writes, or not all of it")


def test_other_files_are_told(path, tmp_path):
    Path(path).write_bytes(pickle.dumps(Planted(tmp_path / "it ran")))
    refused(path, "not a zip file")
    torch.save({"x": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    refused(path, "not a zip file")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello/world", b"")
    refused(path, r"has no data\.pkl")
    refused(str(tmp_path / "none.pt"), "cannot read", CheckpointError)
    assert not (tmp_path / "it ran").exists()
    rewritten(path, lambda name, data: data, zipfile.ZIP_DEFLATED)
    refused(path, "compressed")
    rewritten(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    refused(path, "not little-endian")
