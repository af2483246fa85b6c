"""What ranks send each other keeps its type and value, and nothing that arrives is run."""

import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks

from drivetrain.core.errors import CheckpointError, ConfigError, DataError, RankFailure
from drivetrain.distributed.ranks import Ranks
from drivetrain.distributed.wire import decode, encode


class Point(NamedTuple):
    x: float
    y: Any


class Color(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    size: tuple[int, ...]
    made: list[int] = field(default_factory=list, init=False)


class Converting(UserDict[str, Any]):
    pass


class Unknown:
    pass


VALUES: list[Any] = [
    None, True, -7, 1 << 80, 2.5, "é\udc80", b"\x00\xff", [1, (2, 3)], {"a": {1: "b"}}, {("g", "n"): 1},
    {"$tuple": 1}, OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1]), Converting(a=1),
    Point(1.0, [2]), Part("a", (1, 2)), {Color.RED: Part("b", ())}, Path("/tmp/a"), {1, 2}, frozenset("ab"),
    1 + 2j, range(3), Decimal("1.10"), deque([1, (2,)], 3),
    torch.float16, torch.device("cpu"), torch.Size([2, 3]), np.float32(1.5), slice,
]  # fmt: skip


def test_a_value_keeps_its_type_through_the_bytes() -> None:
    for value in VALUES[:-1]:
        found = decode(encode(value))
        assert (type(found), found) == (type(value), value)
    assert math.isnan(decode(encode(math.nan)))
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.bool,
        torch.complex128,
        torch.int64,
        torch.float8_e4m3fn,
    ):
        tensors = [
            torch.tensor([[1, 0], [0, 1]]).to(dtype).t(),
            torch.zeros(0, 3, dtype=dtype),
            torch.ones(1, 4).to(dtype)[:, 1],
        ]
        for each, found in zip(tensors, decode(encode(tensors)), strict=True):
            assert (found.dtype, found.shape) == (dtype, each.shape)
            assert found.is_contiguous()
            assert torch.equal(found.to(torch.complex128), each.to(torch.complex128))
    assert decode(encode(np.arange(6).reshape(2, 3))).tolist() == [[0, 1, 2], [3, 4, 5]]
    weight = decode(encode({"w": torch.nn.Parameter(torch.ones(2))}))["w"]
    assert type(weight) is torch.Tensor
    assert type(decode(encode(torch.eye(2).max(1)))) is torch.return_types.max
    error = DataError("no row", 3)
    error.add_note("on rank 1")
    found = decode(encode(error))
    assert (type(found), found.args, found.__notes__) == (DataError, ("no row", 3), ["on rank 1"])


UNSENT = {"object": Unknown(), "class": slice, "function": lambda: 0, "meta": torch.ones(2, device="meta")}


@pytest.mark.parametrize("value", UNSENT.values(), ids=UNSENT)
def test_what_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"rows\.0: a "):
        encode({"rows": [value]})


def message(content: object) -> bytes:
    header = json.dumps([content, []]).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Path("a")),
        b"",
        message({"$typed": ["subprocess:Popen", ["true"]]}),
        message({"$typed": ["os:system", ["true"]]}),
        message({"$typed": ["no_such_module:Part", {}]}),
        message({"$typed": "Part"}),
        message({"$tensor": "a"}),
        message([])[:-1],
    ],
    ids=range(8),
)
def test_a_strange_message_is_an_error_and_runs_nothing(data: bytes) -> None:
    with pytest.raises(RankFailure, match="a message of another rank cannot be read"):
        decode(data)


def exchanged() -> list[Any]:
    ranks, found = Ranks.of_job(), list[Any]()
    mine = Part("mine", (ranks.rank,))
    found += [
        ranks.all_gather([mine] * 3 if ranks.rank else mine),
        ranks.gather_first(mine),
        ranks.first(lambda: mine),
    ]
    for act in (lambda: ranks.all_gather(Unknown() if ranks.rank else 1), lambda: ranks.first(Unknown)):
        try:
            act()
        except ConfigError as error:
            found.append("a 'Unknown' cannot be stored" in str(error))
    return [*found, ranks.all_gather("on")]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_ranks_exchange_values_of_any_size_and_all_are_told_of_one_that_cannot_be_sent() -> None:
    first, second = on_two_ranks(exchanged)
    parts = [Part("mine", (0,)), Part("mine", (1,))]
    everywhere = [parts[0], True, True, ["on", "on"]]
    assert first == [[parts[0], [parts[1]] * 3], parts, *everywhere]
    assert second == [[parts[0], [parts[1]] * 3], None, *everywhere]
