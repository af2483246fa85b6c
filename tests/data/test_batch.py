"""What a batch may be, and that it keeps its form on the way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from drivetrain.data import batch_size, map_tensors, move, to_host

META = torch.device("meta")
CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["features", "label"])


@dataclass
class Sample:
    features: Tensor
    name: str = "a"


@dataclass(frozen=True, slots=True)
class Frozen:
    features: Tensor
    doubled: Tensor = field(init=False)
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "doubled", self.features * scale)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As tokenizers give: a mapping with an attribute beside its items, whose constructor wants it."""

    def __init__(self, data: dict[str, Any], *, encoder: str) -> None:
        super().__init__(data)
        self.encoder = encoder


class Graph:  # as graph libraries give: no mapping and no sequence, but with `to`
    def __init__(self, nodes: Tensor, graphs: int) -> None:
        self.nodes, self.num_graphs = nodes, graphs

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device), self.num_graphs)


ONES = torch.ones(3, 2)


def test_the_number_of_samples_is_the_first_dimension_of_the_first_tensor() -> None:
    packed = pack_sequence([torch.ones(4), torch.ones(2), torch.ones(1)])
    three = (
        ONES, torch.nn.Parameter(ONES), {"features": ONES, "label": torch.zeros(3)}, (ONES, torch.zeros(3)),
        {"scale": torch.tensor(2.0), "features": ONES}, {"name": ["a", "b"], "features": ONES},
        {"image": {"left": ONES}}, [[ONES], 1], Pair(ONES, torch.zeros(3)), Sample(ONES),
        OrderedDict(features=ONES), Encoding({"features": ONES}, encoder="x"),
        Graph(torch.ones(7, 2), graphs=3), packed, (packed, torch.zeros(3)),
    )  # fmt: skip
    assert [batch_size(each) for each in three] == [3] * len(three)
    assert batch_size(torch.ones(0, 2)) == 0
    unknown: tuple[Any, ...] = (torch.tensor(1.0), {}, ["a", "b"], "text", 7, Sample)
    assert [batch_size(each) for each in unknown] == [None] * len(unknown)


def test_a_moved_batch_keeps_its_form_and_leaves_the_original_alone() -> None:
    for batch in (
        {"features": ONES, "name": "a"},
        (ONES, 1, None),
        [ONES, "a"],
        Pair(ONES, 4),
        OrderedDict(features=ONES),
        MappingProxyType({"features": ONES}),
        {"outer": [{"inner": (ONES, Pair(ONES, ONES))}]},
    ):
        moved = move(batch, META)
        assert _form(moved) == _form(batch)
        assert _devices(moved) == {"meta"}
        assert _devices(batch) == {"cpu"}


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return type(value), {key: _form(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [_form(each) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _devices(value: Any) -> set[str]:
    found = set()
    map_tensors(lambda tensor: found.add(tensor.device.type), value)
    return found


def test_a_dataclass_is_moved_without_being_constructed_again() -> None:
    sample = Sample(ONES, name="b")
    moved = move(sample, META)
    assert type(moved) is Sample
    assert moved.name == "b"
    assert moved.features.device == META
    assert sample.features.device == CPU
    frozen = Frozen(ONES, scale=3.0)
    moved = move(frozen, CPU, torch.float64)
    assert moved.doubled.dtype == torch.float64
    assert torch.equal(moved.doubled, 3.0 * ONES.double())
    assert frozen.doubled.dtype == torch.float32


def test_mappings_keep_what_they_carry_beside_their_items() -> None:
    encoding, lists = Encoding({"features": ONES}, encoder="x"), defaultdict(list, features=ONES)
    moved, moved_lists = move(encoding, META), move(lists, META)
    assert (type(moved), moved.encoder) == (Encoding, "x")
    assert moved_lists["missing"] == []
    assert {each["features"].device for each in (moved, moved_lists)} == {META}
    assert {each["features"].device for each in (encoding, lists)} == {CPU}


def test_only_floating_point_tensors_are_cast_and_nothing_is_copied_that_is_in_place() -> None:
    dtypes = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)
    batch = [torch.ones(3, dtype=each) for each in dtypes]
    cast = [each.dtype for each in move(batch, CPU, torch.bfloat16)]
    assert cast == [torch.bfloat16, torch.bfloat16, *dtypes[2:]]
    assert all(one is other for one, other in zip(move(batch, CPU), batch, strict=True))


def test_outputs_come_to_the_host_without_their_graph_and_in_their_dtype() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = to_host({"logits": (weight * 2).bfloat16(), "names": ["a"]})
    assert not outputs["logits"].requires_grad
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["names"] == ["a"]
