"""Dataclasses come back as what the code says they are, or are not stored."""

from __future__ import annotations

import json
from dataclasses import InitVar, dataclass, field
from typing import Any, Optional

import pytest
import torch

from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.stored_dataclass import dataclass_of, make, pack_values


@dataclass
class Layer:
    width: int
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Model:
    first: Layer
    second: Layer | None = None
    names: tuple[str, ...] = ("a",)
    rate: float = float("inf")
    area: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.first.width**2)


@dataclass
class Wide(Layer):
    pass


@dataclass
class Derived:
    factor: InitVar[int]
    value: int = 0

    def __post_init__(self, factor: int) -> None:
        self.value = factor


def there_and_back(value: Any, annotation: Any) -> Any:
    packed, refused = pack_values({"x": value}, {"x": annotation}, globals())
    assert refused == {}
    stored: Any = json.loads(json.dumps(packed["dataclasses"]))
    kind = dataclass_of(stored["x"], annotation, globals())
    assert kind is type(value)
    return make(kind, stored["x"], "x")


@pytest.mark.parametrize("annotation", [Model, "Model", Model | None, "Optional[Model]", "Layer | Model"])
def test_a_dataclass_comes_back_with_all_that_is_in_it(annotation: Any) -> None:
    assert Optional  # the annotation above names it
    value = Model(first=Layer(3), second=Layer(4, bias=False), names=("x", "y"))
    again = there_and_back(value, annotation)
    assert again == value
    assert again.area == 9


def test_values_of_both_kinds_are_told_apart() -> None:
    given = {
        "plain": {"width": 3},
        "layer": Layer(3),
        "kind": Layer,
        "function": print,
        "tensor": torch.ones(1),
    }
    packed, refused = pack_values(given, {"layer": Layer}, {})
    assert packed == {
        "values": {"plain": {"width": 3}},
        "dataclasses": {"layer": {"class": "Layer", "values": {"width": 3, "bias": True}}},
    }
    assert list(refused) == ["kind", "function", "tensor"]
    assert pack_values({"a": 1}, {}, {}) == ({"values": {"a": 1}}, {})


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (Layer(1), None),
        (Layer(1), Any),
        (Layer(1), "Unknown"),
        (Layer(1), "1 +"),
        (Wide(1), Layer),
        (Layer(1), Wide),
        (Derived(3), Derived),
        (Layer(print), Layer),  # type: ignore[arg-type]
        (Model(first=Wide(1)), Model),
        ([Layer(1)], list[Layer]),
    ],
)
def test_what_could_not_be_made_again_is_not_stored(value: Any, annotation: Any) -> None:
    assert pack_values({"x": value}, {"x": annotation}, globals()) == ({"values": {}}, {"x": value})


def test_the_name_in_a_file_decides_nothing_that_the_code_does_not_allow() -> None:
    for name in ("Path", "builtins.print", "drivetrain.stored_dataclass.make", 3, None):
        assert dataclass_of({"class": name, "values": {}}, "Layer | Model", globals()) is None
    assert dataclass_of("Layer", Layer, {}) is None


@pytest.mark.parametrize(
    ("stored", "kind", "error", "message"),
    [
        (
            {"class": "Layer", "values": {"width": 1, "depth": 2}},
            Layer,
            ConfigError,
            r"unexpected keyword.*'depth'",
        ),
        ({"class": "Layer", "values": {}}, Layer, ConfigError, r"it does not fit Layer: missing.*'width'"),
        ({"class": "Layer", "values": 3}, Layer, CheckpointError, r"it is no stored Layer"),
        (
            {"class": "Layer", "values": {}, "dataclasses": []},
            Layer,
            CheckpointError,
            r"it is no stored Layer",
        ),
        (None, Layer, CheckpointError, r"it is no stored Layer"),
        (
            {"class": "Model", "values": {}, "dataclasses": {"first": {"class": "Wide", "values": {}}}},
            Model,
            ConfigError,
            r"it has a field 'first' that Model has no longer, or not of that class; pass the argument",
        ),
    ],
)
def test_what_does_not_fit_any_more_is_named(
    stored: Any, kind: type, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(kind, stored, "it")


def test_a_field_that_has_come_since_takes_its_default() -> None:
    assert make(Layer, {"class": "Layer", "values": {"width": 2}}, "it") == Layer(2)
