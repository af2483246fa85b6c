"""The names of exported files, what goes into which, and what an index may say."""

import json

import pytest
import torch

from drivetrain.checkpoint import DamagedCheckpointError
from drivetrain.checkpoint.weights.files import WeightFiles, divide, dump_index, parse_index, parse_size
from drivetrain.core.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (1, 1),
        (12_345, 12_345),
        ("50 GB", 50 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5 KB", 1500),
        ("2 GiB", 2 << 30),
        (" 3tib ", 3 << 40),
        ("1_000", 1000),
        ("7 b", 7),
    ],
)
def test_a_size_is_a_number_or_a_text(given, size):
    assert parse_size(given) == size


@pytest.mark.parametrize("given", [0, -1, True, 1.5, None, "", "GB", "-5 GB", "5 GB each", "0.2 B", "nan GB"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ConfigError, match=r"max_shard_size must be .* such as '5 GB', not "):
        parse_size(given)


def test_an_unknown_unit_is_answered_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown unit 'GBit' in the size '5 GBit'. Did you mean 'GB'\?.*'TB'"
    ):
        parse_size("5 GBit")


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([], [[]]),
        ([0, 0], [[0, 1]]),
        ([6, 6, 2, 6, 2, 2], [[0], [1, 2], [3, 4, 5]]),
        ([10, 1], [[0], [1]]),
        ([11, 1, 12, 9], [[0], [2], [1, 3]]),  # what is too large does not end the file that is being filled
        ([11], [[0]]),
    ],
)
def test_tensors_are_divided_as_hugging_face_divides_them(sizes, files):
    tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    assert divide(tensors, 10) == [[str(number) for number in file] for file in files]


def test_names_follow_from_the_single_file():
    files = WeightFiles("model.safetensors")
    assert files.several(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert files.index == "model.safetensors.index.json"
    assert all(map(files.is_one_of_several, files.several(3)))
    others = [
        "model.safetensors",
        "my-model-00001-of-00002.safetensors",
        "model-00001-of-00002.safetensors.index",
    ]
    assert not any(map(files.is_one_of_several, others))
    assert WeightFiles("a+b").several(1) == ["a+b-00001-of-00001.safetensors"]
    assert WeightFiles("a+b").is_one_of_several("a+b-00001-of-00001.safetensors")


def test_what_was_written_is_read():
    data = dump_index(12, {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"})
    assert json.loads(data)["metadata"] == {"total_size": 12}
    assert parse_index(data, "it") == {"x.safetensors": ["a", "c"], "y.safetensors": ["b"]}


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".safetensors",
        ".hidden.safetensors",
        "x.safetensors\0",
        "x.safetensors\n",
        "",
        None,
        3,
        ["x.safetensors"],
    ],
)
def test_an_index_leads_nowhere_but_beside_itself(file):
    data = json.dumps({"weight_map": {"w": file}}).encode()
    with pytest.raises(DamagedCheckpointError, match=r"the index places 'w' in .*"):
        parse_index(data, "the index")


def test_an_index_names_only_files_of_weights():
    with pytest.raises(DamagedCheckpointError, match=r"'w-00001.npz', which is no .safetensors or .bin file"):
        parse_index(b'{"weight_map": {"w": "w-00001.npz"}}', "the index")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": 1}']
)
def test_what_is_no_index_is_named(text):
    with pytest.raises(DamagedCheckpointError, match=r"^the index "):
        parse_index(text.encode(), "the index")
