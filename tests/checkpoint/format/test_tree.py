"""Trees of Python values survive the way to disk and back, and nothing else gets in or out."""

import json
import math
import struct
from collections import Counter, OrderedDict
from datetime import datetime

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.checkpoint.format.strict_json import dump_json, parse_json
from drivetrain.checkpoint.format.tree import pack, unpack
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.tree import MAX_DEPTH


def through_disk(tree):
    packed, tensors = pack(tree)
    return unpack(parse_json(dump_json(packed, "test"), "test"), tensors)


def identical(left, right):  # in value and type at every level; floats by bits, dicts in their order
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        left, right = list(left.items()), list(right.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(identical(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return left == right


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
keys = st.text(max_size=4) | st.sampled_from(["$int", "$"]) | st.integers()


def nodes(inner):
    lists = st.lists(inner, max_size=4)
    return lists | lists.map(tuple) | st.dictionaries(keys, inner, max_size=4)


@given(st.recursive(leaves, nodes, max_leaves=20))
def test_any_tree_comes_back_exactly(tree):
    assert identical(through_disk(tree), tree)


AWKWARD = [
    *([10**5000], -(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64, -0.0, 5e-324, math.inf, -math.nan),
    struct.unpack(">d", bytes.fromhex("7ff8dead0000beef"))[0],
    *("lone surrogate \ud800, null \0", {"$tensor": "x"}, {"$dict": []}, {1: "a", "1": "b"}),
    *({10**5000: torch.ones(1), -1: torch.ones(2)}, {"b": 1, "a": 2}, OrderedDict([("b", 1), ("a", 2)])),
    *(Counter({30: 1, 10: 2}), ((), [], {}, b""), np.arange(6.0).reshape(2, 3)[:, ::-1]),
    *(np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(3, dtype=np.int8)),
    *(np.zeros((0, 4), dtype=np.uint16), np.array([True, False]), np.float64(1.5), np.float32(np.nan)),
    *(np.bool_(True), np.uint64(2**64 - 1), torch.tensor(3), torch.rand(3, 4).t()),
    torch.zeros(0, 2, dtype=torch.bfloat16),
    # Places that read alike keep their own tensors.
    {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a.b#2": torch.tensor(3)},
]


def test_the_awkward_values_come_back_exactly():
    trees = [{"a": [value, (value,)]} for value in AWKWARD]
    assert [tree for tree in trees if not identical(through_disk(tree), tree)] == []
    array = np.arange(3)
    array.setflags(write=False)  # stored without a warning
    assert identical(through_disk(array), np.arange(3))
    back = through_disk([nn.Parameter(torch.ones(2))])[0]
    assert (type(back), back.requires_grad) == (torch.Tensor, False)
    assert list(pack({"optimizer": [{"step": torch.tensor(1)}]})[1]) == ["optimizer.0.step"]


class Subclass(dict):
    pass


def test_what_cannot_be_stored_is_named_with_its_path():
    cycle = []
    cycle.append(cycle)
    table = {
        "cannot be stored; allowed are": [datetime(2024, 1, 1)],
        "'set' cannot be stored": [{1, 2}],
        "'Subclass' cannot be stored": [Subclass()],
        "'builtin_function_or_method' cannot be stored": [print],
        "'complex' cannot be stored": [1j],
        "key (1, 2) is a 'tuple'": [{(1, 2): 3}],
        "key True is a 'bool'": [{True: 3}],
        "contain itself": [cycle],
        "best: numpy": [np.array(["a"]), np.array([object()]), np.datetime64("2024-01-01")],
        "best: dtype torch.complex128": [torch.zeros(2, dtype=torch.complex128)],
        "to_dense()": [torch.eye(2).to_sparse()],
        "on the meta device": [torch.empty(2, device="meta")],
    }
    at = "callbacks.early_stopping.best"
    cases = {}
    for text, values in table.items():
        for number, value in enumerate(values):
            tree = {"callbacks": {"early_stopping": {"best": value}}}
            words = (text,) if value is cycle else (text, at)
            cases[f"{text} {number}"] = (lambda tree=tree: pack(tree), *words)
    assert_refused(CheckpointError, cases)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED = [
    *({"$import": "os"}, {"$tuple": [], "x": 1}, {"$tuple": [], "$int": "0x1"}, {"$tuple": {"a": 1}}),
    *({"$int": "1" * 10_000_000}, {"$int": "0x"}, {"$int": 3}, {"$float": "nan"}, {"$float": None}),
    *({"$bytes": "!!!!"}, {"$bytes": 3}, {"$bytes": "ü"}, {"$tensor": "absent"}, {"$tensor": ["t"]}),
    *({"$scalar": "t"}, {"$array": "b"}, {"$scalar": "b"}, {"$dict": 3}, {"$dict": [["a"]]}),
    *({"$dict": [["a", 1], ["a", 2]]}, {"$dict": [[{"$tuple": []}, 1]]}, {"$dict": [[[1], 1]]}),
    *({"$Counter": [["a", 1, 2]]}, nested(MAX_DEPTH + 1)),
]


def test_json_that_pack_never_gives_is_refused():
    tensors = {"t": torch.ones(2), "b": torch.ones((), dtype=torch.bfloat16)}
    for value in REFUSED:
        with pytest.raises(DamagedCheckpointError, match="stored state"):
            unpack(value, tensors)


def test_the_deepest_tree_that_packs_also_unpacks_from_disk():
    tree = nested(MAX_DEPTH - 1)
    assert through_disk({1: tree}) == {1: tree}


def test_what_is_written_is_strict_json():
    packed, _ = pack([math.nan, math.inf, "é"])
    assert json.loads(dump_json(packed, "test"), parse_constant=pytest.fail) == packed
    with pytest.raises(CheckpointError, match=r"checkpoint\.tree\.pack"):
        dump_json(math.nan, "the state")
