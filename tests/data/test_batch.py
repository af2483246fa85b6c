"""What a batch may be, and that it keeps its form on the way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

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


class Window(Mapping[str, Any]):
    """A mapping whose constructor takes no mapping."""

    def __init__(self, *, length: int) -> None:
        self._length = length

    def __getitem__(self, key: str) -> Tensor:
        return {"features": torch.ones(self._length, 2)}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["features"])

    def __len__(self) -> int:
        return 1


class Graph:
    """As graph libraries give: no mapping and no sequence, but with `to`."""

    def __init__(self, nodes: Tensor, graphs: int) -> None:
        self.nodes, self.num_graphs = nodes, graphs

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device), self.num_graphs)


class Boxes:
    """As image libraries give: counted by its length, moved by `to`."""

    def __init__(self, corners: Tensor) -> None:
        self.corners = corners

    def __len__(self) -> int:
        return len(self.corners)

    def to(self, device: torch.device) -> Boxes:
        return Boxes(self.corners.to(device))


ONES = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (ONES, 3),
        (torch.nn.Parameter(ONES), 3),
        ({"features": ONES, "label": torch.zeros(3)}, 3),
        ({"scale": torch.tensor(2.0), "features": ONES}, 3),
        ({"name": ["a", "b"], "features": ONES}, 3),
        ({"image": {"left": ONES}}, 3),
        ((ONES, torch.zeros(3)), 3),
        ([[ONES], 1], 3),
        (Pair(ONES, torch.zeros(3)), 3),
        (Sample(ONES), 3),
        (OrderedDict(features=ONES), 3),
        (Encoding({"features": ONES}, encoder="x"), 3),
        (Window(length=3), 3),
        (Graph(torch.ones(7, 2), graphs=3), 3),
        (Boxes(ONES), 3),
        (pack_sequence([torch.ones(4), torch.ones(2), torch.ones(1)]), 3),
        ((pack_sequence([torch.ones(4), torch.ones(2), torch.ones(1)]), torch.zeros(3)), 3),
        (torch.ones(0, 2), 0),
        (torch.tensor(1.0), None),
        ({}, None),
        (["a", "b"], None),
        ("text", None),
        (7, None),
        (Sample, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_number_of_samples_is_the_first_dimension_of_the_first_tensor(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


@pytest.mark.parametrize(
    "batch",
    [
        {"features": ONES, "name": "a"},
        (ONES, 1, None),
        [ONES, "a"],
        Pair(ONES, 4),
        OrderedDict(features=ONES),
        MappingProxyType({"features": ONES}),
        {"outer": [{"inner": (ONES, Pair(ONES, ONES))}]},
    ],
    ids=str,
)
def test_a_moved_batch_keeps_its_form_and_leaves_the_original_alone(batch: Any) -> None:
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
    encoding = Encoding({"features": ONES}, encoder="x")
    moved = move(encoding, META)
    assert type(moved) is Encoding
    assert moved.encoder == "x"
    assert moved["features"].device == META
    assert encoding["features"].device == CPU
    lists = defaultdict(list, features=ONES)
    moved = move(lists, META)
    assert moved["missing"] == []
    assert moved["features"].device == META
    assert lists["features"].device == CPU


def test_a_mapping_that_cannot_be_made_anew_becomes_a_dict() -> None:
    moved = move(Window(length=3), META)
    assert type(moved) is dict
    assert moved["features"].device == META


@pytest.mark.parametrize("wrap", [lambda graph: graph, lambda graph: {"pair": (graph, torch.zeros(3))}])
def test_an_object_with_to_moves_itself_wherever_it_stands(wrap: Any) -> None:
    moved = move(wrap(Graph(ONES, graphs=3)), META)
    graph = moved if isinstance(moved, Graph) else moved["pair"][0]
    assert graph.nodes.device == META
    assert graph.num_graphs == 3


def test_a_packed_sequence_keeps_its_lengths_on_the_host() -> None:
    packed = pack_sequence([torch.ones(4), torch.ones(2)])
    moved, label = move((packed, torch.zeros(2)), META, torch.float64)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == label.device == META
    assert moved.data.dtype == label.dtype == torch.float64
    assert moved.batch_sizes.device == CPU
    assert moved.batch_sizes.dtype == torch.int64


def test_only_floating_point_tensors_are_cast() -> None:
    batch = {
        "float": ONES,
        "half": ONES.half(),
        "index": torch.arange(3),
        "mask": torch.ones(3, dtype=torch.bool),
        "complex": torch.ones(3, dtype=torch.complex64),
    }
    moved = move(batch, CPU, torch.bfloat16)
    assert {name: each.dtype for name, each in moved.items()} == {
        "float": torch.bfloat16,
        "half": torch.bfloat16,
        "index": torch.int64,
        "mask": torch.bool,
        "complex": torch.complex64,
    }


def test_nothing_is_copied_that_is_already_in_place() -> None:
    batch = {"features": ONES, "label": torch.arange(3)}
    moved = move(batch, CPU)
    assert all(moved[name] is batch[name] for name in batch)


def test_outputs_come_to_the_host_without_their_graph_and_in_their_dtype() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = to_host({"logits": (weight * 2).bfloat16(), "names": ["a"]})
    assert not outputs["logits"].requires_grad
    assert outputs["logits"].dtype == torch.bfloat16
    assert outputs["names"] == ["a"]
