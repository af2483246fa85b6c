"""A module's state: taken and given back whole, and refused by name where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.errors import CheckpointError
from drivetrain.module_state import load_module_state, module_state


class Tied(nn.Module):
    """Two names for one parameter, and a buffer that is not to be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Scaled(nn.Module):
    """Has a state of its own kind, as layers that compute in 8 bits have."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_what_was_taken_is_given_back() -> None:
    first, second = net(0), net(1)
    first(torch.randn(8, 3))  # moves the batch statistics
    tensors, extras = module_state(first)
    assert not extras
    load_module_state(second, tensors, extras, where="a file")
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name


def test_values_are_copied_and_parameters_stay_the_ones_that_optimizers_hold() -> None:
    module = net()
    before = list(module.parameters())
    tensors = {name: value.clone() for name, value in module_state(net(1))[0].items()}
    load_module_state(module, tensors, where="a file")
    assert all(now is was for now, was in zip(module.parameters(), before, strict=True))
    tensors["0.weight"].zero_()
    assert torch.count_nonzero(module.state_dict()["0.weight"])


def test_tied_parameters_stay_tied_and_scratch_buffers_are_not_stored() -> None:
    module = Tied()
    tensors, _ = module_state(module)
    assert sorted(tensors) == ["embedding.weight", "head.weight"]
    for adopt in (False, True):
        stored = {name: torch.full((5, 3), 2.0, dtype=torch.float64 if adopt else None) for name in tensors}
        load_module_state(module, stored, where="a file", adopt_dtypes=adopt)
        assert module.head.weight is module.embedding.weight
        assert module.head.weight.unique().item() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": None}, "missing '0.weight'"),
        ({"0.wieght": torch.zeros(1)}, r"unexpected '0.wieght' \(Did you mean '0.weight'\?\)"),
        ({"#": torch.zeros(1)}, "unexpected '#'$"),
        ({"0.weight": torch.zeros(4, 9)}, r"'0.weight' has shape \(4, 9\) there, \(4, 3\) here"),
        ({"0.bias": torch.zeros(4, dtype=torch.bfloat16)}, r"is torch.bfloat16 there, torch.float32 here"),
        ({"0._extra_state": {"scale": 1}}, "unexpected '0._extra_state'"),
    ],
)
def test_a_mismatch_is_named_and_nothing_is_taken_over(change: dict[str, Any], message: str) -> None:
    module = net(0)
    before = copied(module)
    tensors = {**module_state(net(1))[0], **change}
    extras = {name: value for name, value in tensors.items() if isinstance(value, dict)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    with pytest.raises(CheckpointError, match=message) as caught:
        load_module_state(module, tensors, extras, where="the file x")
    assert "the weights of the file x do not fit Sequential" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_long_list_of_mismatches_is_cut_short() -> None:
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(25))
    with pytest.raises(CheckpointError, match=r"; and 15 more$"):
        load_module_state(module, {}, where="a file")


def test_stored_dtypes_are_adopted_only_when_asked_for() -> None:
    module = net(0)
    tensors = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in module_state(net(1))[0].items()
    }
    load_module_state(module, tensors, where="a file", adopt_dtypes=True)
    for name, value in module.state_dict().items():
        assert value.dtype == tensors[name].dtype
        assert torch.equal(value, tensors[name])


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ({"scale": 2.5, "history": [1, 2]}, {}),
        (torch.tensor([1, 2, 3], dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),
        (torch.ones(3), None),
        (None, torch.ones(3)),
    ],
    ids=["mapping", "tensor of another size", "tensor for nothing", "nothing for a tensor"],
)
def test_an_extra_state_goes_through_whatever_it_is(stored: Any, own: Any) -> None:
    tensors, extras = module_state(nn.Sequential(Scaled(stored)))
    assert all(isinstance(each, Tensor) for each in tensors.values())
    module = Scaled(own)
    load_module_state(nn.Sequential(module), tensors, extras, where="a file")
    assert module.extra is stored or torch.equal(module.extra, stored)


def test_a_module_keeps_its_extra_state_where_none_is_stored() -> None:
    module = Scaled({"scale": 3})
    load_module_state(module, {"weight": torch.ones(2)}, where="a file")
    assert module.extra == {"scale": 3}
    assert module.weight.tolist() == [1, 1]
