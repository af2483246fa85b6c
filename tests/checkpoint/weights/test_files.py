"""The names of exported files, what goes into which, and what an index may say."""

import json

import pytest
import torch

from drivetrain.checkpoint import DamagedCheckpointError
from drivetrain.checkpoint.weights.files import divide, dump_index, parse_index, parse_size


def test_max_shard_size_is_a_number_or_a_text():
    sizes = {
        1: 1,
        "50 GB": 50 * 10**9,
        "500MB": 5 * 10**8,
        "1.5 KB": 1500,
        "2 GiB": 2 << 30,
        " 3tib ": 3 << 40,
    }
    assert {each: parse_size(each) for each in [*sizes, "1_000", "7 b"]} == {**sizes, "1_000": 1000, "7 b": 7}


def test_tensors_are_divided_as_hugging_face_divides_them():
    for sizes, files in (
        ([], [[]]),
        ([0, 0], [[0, 1]]),
        ([6, 6, 2, 6, 2, 2], [[0], [1, 2], [3, 4, 5]]),
        ([10, 1], [[0], [1]]),
        ([11, 1, 12, 9], [[0], [2], [1, 3]]),  # what is too large does not end the file that is being filled
        ([11], [[0]]),
    ):
        tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
        assert divide(tensors, 10) == [[str(number) for number in file] for file in files]


OUTSIDE = ["../x", "/etc/x", "sub/x", "sub\\x", "C:x", "", ".hidden"]
OUTSIDE = [
    *(f"{name}.safetensors" for name in OUTSIDE),
    "..",
    "x.safetensors\0",
    "x.safetensors\n",
    "",
    None,
    3,
]


def test_an_index_is_read_back_and_leads_nowhere_but_beside_itself():
    data = dump_index(12, {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"})
    assert json.loads(data)["metadata"] == {"total_size": 12}
    assert parse_index(data, "it") == {"x.safetensors": ["a", "c"], "y.safetensors": ["b"]}
    for file in [*OUTSIDE, ["x.safetensors"]]:
        with pytest.raises(DamagedCheckpointError, match=r"the index places 'w' in .*"):
            parse_index(json.dumps({"weight_map": {"w": file}}).encode(), "the index")
    with pytest.raises(DamagedCheckpointError, match=r"'w-00001.npz', which is no .safetensors or .bin file"):
        parse_index(b'{"weight_map": {"w": "w-00001.npz"}}', "the index")
    for text in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": 1}'):
        with pytest.raises(DamagedCheckpointError, match=r"^the index "):
            parse_index(text.encode(), "the index")
