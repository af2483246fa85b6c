"""A module's state: taken and given back whole, and refused by name where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from drivetrain.checkpoint.weights.module_state import (
    clean_name,
    load_module_state,
    module_state,
    parameter_names,
)
from drivetrain.core.errors import CheckpointError
from drivetrain.task.optim.state import load_state_by_name, state_by_name


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


@pytest.mark.parametrize("adopt", [False, True])
def test_a_refused_extra_state_leaves_everything_as_it_was(adopt: bool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), Picky(), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in module_state(module)[0].items()}
    given = {name: value.to(torch.float64 if adopt else None) + 1 for name, value in before.items()}
    with pytest.raises(ValueError, match="not this one"):
        load_module_state(module, given, {"1._extra_state": "wrong"}, where="a file", adopt_dtypes=adopt)
    assert module[1].state == "good"
    for name, value in module_state(module)[0].items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


class Picky(nn.Module):
    """Takes one extra state only."""

    state = "good"

    def get_extra_state(self) -> str:
        return self.state

    def set_extra_state(self, state: str) -> None:
        if state != "good":
            raise ValueError("not this one")


def test_a_module_without_memory_says_how_it_gets_some() -> None:
    module = net().to("meta")
    with pytest.raises(CheckpointError, match=r"'0.*' of Sequential is on the meta device .*to_empty\("):
        load_module_state(module, module_state(net(1))[0], where="a file")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_layer_takes_the_shape_that_was_stored() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    tensors, _ = module_state(net(1))
    load_module_state(module, tensors, where="a file", adopt_dtypes=True)
    assert torch.equal(module[0].weight, tensors["0.weight"])


def wrapped(how: str) -> nn.Module:
    """`net(1)`, with its layers wrapped and the whole as well."""
    module = net(1)
    if how == "plain":
        return module
    wrap = compiled if how == "compiled" else checkpoint_wrapper
    return wrap(nn.Sequential(*(wrap(child) for child in module)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("to", ["plain", "compiled", "checkpointed"])
@pytest.mark.parametrize("source", ["plain", "compiled", "checkpointed"])
def test_how_a_module_is_wrapped_does_not_show_in_what_is_stored(source: str, to: str) -> None:
    first, second = wrapped(source), wrapped(to)
    expected = net(1).state_dict()
    for module in (first, second):
        assert list(module_state(module)[0]) == list(expected)
        assert list(parameter_names(module).values()) == [name for name, _ in net(1).named_parameters()]
        assert all(
            module_state(module)[0][name].data_ptr() == parameter.data_ptr()
            for parameter, name in parameter_names(module).items()
        )
    torch.nn.init.zeros_(next(first.parameters()))
    for adopt in (False, True):
        tensors = module_state(first)[0]
        if adopt:
            tensors = {name: each.double() for name, each in tensors.items()}
        load_module_state(second, tensors, where="a file", adopt_dtypes=adopt)
        for name, value in module_state(second)[0].items():
            assert value.dtype == tensors[name].dtype
            assert torch.equal(value, tensors[name]), name


def test_an_optimizer_goes_on_when_its_module_is_wrapped_otherwise() -> None:
    optimizers = {}
    for how in ("plain", "compiled"):
        module = wrapped(how)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, len(optimizers) + 1.0)
        optimizer.step()
        optimizers[how] = (optimizer, parameter_names(module))
    tensors, meta = state_by_name(*optimizers["compiled"])
    assert "0.weight/exp_avg" in tensors
    load_state_by_name(*optimizers["plain"], tensors, meta)
    plain, _ = state_by_name(*optimizers["plain"])
    assert all(torch.equal(plain[name], each) for name, each in tensors.items())


def test_a_tied_parameter_of_which_one_side_is_compiled_keeps_its_first_name() -> None:
    module = Tied()
    module.head = compiled(module.head)  # type: ignore[assignment]
    assert sorted(module_state(module)[0]) == ["embedding.weight", "head.weight"]
    assert list(parameter_names(module).values()) == ["embedding.weight"]
    load_module_state(
        module, {name: torch.ones(5, 3) for name in ("embedding.weight", "head.weight")}, where="a file"
    )
    assert module.embedding.weight.unique().item() == 1


class Clash(nn.Module):
    """Has a submodule that happens to be called as torch.compile calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self._orig_mod = nn.Linear(2, 1, bias=False)


def test_two_parameters_that_would_have_one_name_are_an_error_that_names_both() -> None:
    for act in (module_state, parameter_names):
        with pytest.raises(
            CheckpointError, match=r"Clash has 'weight' and '_orig_mod.weight', .* called 'weight'"
        ):
            act(Clash())


def test_only_whole_parts_of_a_name_are_taken_off() -> None:
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module._orig_mod.b") == "a.b"
    assert clean_name("my_orig_mod.weight") == "my_orig_mod.weight"
    assert clean_name("_orig_mod") == ""
