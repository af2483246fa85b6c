"""A module's state: taken and given back whole, and refused by name where it does not fit."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.checkpoint.weights.models import Tied
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from drivetrain.checkpoint.weights.module_state import load_module_state, module_state, parameter_names
from drivetrain.core.errors import CheckpointError


class Scaled(nn.Module):  # has a state of its own kind, as layers that compute in 8 bits have
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, str):
            raise ValueError("not this one")
        self.extra = state


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def load(module: nn.Module, tensors: Any, extras: Any = None, **options: Any) -> None:
    load_module_state(module, tensors, extras or {}, where="the file x", **options)


def holds(module: nn.Module, tensors: dict[str, Tensor]) -> bool:
    found = module_state(module)[0]
    return found.keys() == tensors.keys() and all(
        found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in tensors.items()
    )


def test_what_was_taken_is_given_back_and_parameters_stay_the_ones_that_optimizers_hold() -> None:
    first, second = net(0), net(1)
    first(torch.randn(8, 3))  # moves the batch statistics
    tensors, extras = module_state(first)
    assert not extras
    before = list(second.parameters())
    tensors = {name: value.clone() for name, value in tensors.items()}
    load(second, tensors)
    assert holds(second, tensors)
    assert list(second.state_dict()) == list(first.state_dict()) == list(tensors)
    assert all(now is was for now, was in zip(second.parameters(), before, strict=True))
    tensors["0.weight"].zero_()
    assert torch.count_nonzero(second.state_dict()["0.weight"])


def test_tied_parameters_stay_tied_and_scratch_buffers_are_not_stored() -> None:
    for compile_one_side in (False, True):
        module = Tied()
        module.register_buffer("scratch", torch.zeros(2), persistent=False)
        if compile_one_side:
            module.head = torch.compile(module.head, backend="eager")  # type: ignore[assignment]
        tensors = module_state(module)[0]
        assert {"embedding.weight", "head.weight"} <= tensors.keys()
        assert "scratch" not in tensors
        parameters = parameter_names(module).values()
        assert [name for name in parameters if "norm" not in name] == ["embedding.weight"]
        for adopt in (False, True):
            stored = {name: torch.full_like(each, 2) for name, each in tensors.items()}
            if adopt:
                stored = {name: each.double() for name, each in stored.items()}
            load(module, stored, adopt_dtypes=adopt)
            assert module.head.weight is module.embedding.weight
            assert module.head.weight.unique().item() == 2


def test_a_mismatch_is_named_and_nothing_is_taken_over() -> None:
    for change, message in (
        ({"0.weight": None}, "missing '0.weight'"),
        ({"0.wieght": torch.zeros(1)}, r"unexpected '0.wieght' \(Did you mean '0.weight'\?\)"),
        ({"0.weight": torch.zeros(4, 9)}, r"'0.weight' has shape \(4, 9\) there, \(4, 3\) here"),
        ({"0.bias": torch.zeros(4, dtype=torch.bfloat16)}, r"is torch.bfloat16 there, torch.float32 here"),
    ):
        module = net(0)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        given = {**module_state(net(1))[0], **change}
        tensors = {name: value for name, value in given.items() if value is not None}
        with pytest.raises(CheckpointError, match=rf"weights of the file x do not fit Sequential.*{message}"):
            load(module, tensors)
        assert holds(module, before)


def test_an_extra_state_goes_through_whatever_it_is() -> None:
    for stored, own in (
        ({"scale": 2.5, "history": [1, 2]}, {}),
        (torch.ones(3), None),
        (None, torch.ones(3)),
    ):
        tensors, extras = module_state(nn.Sequential(Scaled(stored)))
        assert all(isinstance(each, Tensor) for each in tensors.values())
        module = Scaled(own)
        load(nn.Sequential(module), tensors, extras)
        assert module.extra is stored or torch.equal(module.extra, stored)
    module = Scaled({"scale": 3})  # it keeps its own where none is stored
    load(module, {"weight": torch.ones(2)})
    assert module.extra == {"scale": 3}
    assert module.weight.tolist() == [1, 1]


@pytest.mark.parametrize("adopt", [False, True])
def test_a_refused_extra_state_leaves_everything_as_it_was(adopt: bool) -> None:
    scaled = Scaled({"good": 1})
    module = nn.Sequential(nn.Linear(2, 2), scaled, nn.Linear(2, 2))
    before = {name: value.clone() for name, value in module_state(module)[0].items()}
    given = {name: value.to(torch.float64 if adopt else None) + 1 for name, value in before.items()}
    with pytest.raises(ValueError, match="not this one"):
        load(module, given, {"1._extra_state": "wrong"}, adopt_dtypes=adopt)
    assert scaled.extra == {"good": 1}
    assert holds(module, before)


def wrapped(how: str) -> nn.Module:  # `net(1)`, with its layers wrapped and the whole as well
    module = net(1)
    if how == "plain":
        return module
    wrap: Any = checkpoint_wrapper if how == "checkpointed" else partial(torch.compile, backend="eager")
    return wrap(nn.Sequential(*(wrap(child) for child in module)))


def test_how_a_module_is_wrapped_does_not_show_in_what_is_stored() -> None:
    kinds = ("plain", "compiled", "checkpointed")
    expected = net(1).state_dict()
    for source, to in [(source, to) for source in kinds for to in kinds]:
        first, second = wrapped(source), wrapped(to)
        names = parameter_names(first)
        assert list(names.values()) == [name for name, _ in net(1).named_parameters()]
        tensors = module_state(first)[0]
        assert list(tensors) == list(expected)
        assert all(tensors[name].data_ptr() == each.data_ptr() for each, name in names.items())
        torch.nn.init.zeros_(next(first.parameters()))
        load(second, tensors)
        assert holds(second, tensors)
        tensors = {name: each.bfloat16() if "num" not in name else each for name, each in tensors.items()}
        load(second, tensors, adopt_dtypes=True)
        assert holds(second, tensors)
