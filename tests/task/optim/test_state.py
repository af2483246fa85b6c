"""An optimizer's state by parameter names: what is saved is what goes on."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from drivetrain.core.errors import CheckpointError
from drivetrain.task.optim.build import apply_factor, build_optimizer
from drivetrain.task.optim.config import OPTIMIZERS, OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.quantized import QUANTIZED
from drivetrain.task.optim.state import load_state_by_name, state_by_name


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh())
        self.head = nn.Linear(width, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.head(self.body(self.table(tokens))).mean(1)


def model(dtype: torch.dtype = torch.float32, **sizes) -> Net:
    torch.manual_seed(0)
    return Net(**sizes).to(dtype)


def names_of(net: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in net.named_parameters()}


def update(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    net(torch.randint(0, 6, (5, 3), generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(net: nn.Module, optimizer: torch.optim.Optimizer):
    """As a file would hold it: tensors copied, the rest through strict JSON."""
    tensors, meta = state_by_name(optimizer, names_of(net))
    return {key: value.clone() for key, value in tensors.items()}, json.loads(
        json.dumps(meta, allow_nan=False)
    )


CONFIGS = [
    *((name, {}) for name in OPTIMIZERS if name not in ("sparseadam", *QUANTIZED)),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "fused": False}),
    ("adamw", {"amsgrad": True, "betas": (0.8, 0.95)}),
    ("adamw", {"fused": False, "foreach": True}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "options"), CONFIGS)
def test_training_goes_on_bit_for_bit(name, options, dtype):
    rules = [ParameterGroup("head.*", lr_scale=0.5)]
    config = OptimizerConfig(name, lr=1e-2, groups=rules, **options)
    net = model(dtype)
    optimizer = build_optimizer(config, net)
    for seed in range(3):
        update(net, optimizer, seed)
    apply_factor(optimizer, 0.5)
    other = copy.deepcopy(net)
    fresh = build_optimizer(config, other)
    load_state_by_name(fresh, names_of(other), *saved(net, optimizer))
    for seed in range(3, 6):
        update(net, optimizer, seed)
        update(other, fresh, seed)
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    first, second = saved(net, optimizer), saved(other, fresh)
    assert first[1] == second[1]
    assert {key: (value.dtype, value.device) for key, value in first[0].items()} == {
        key: (value.dtype, value.device) for key, value in second[0].items()
    }
    assert all(torch.equal(value, second[0][key]) for key, value in first[0].items())


def test_a_sparse_optimizers_plain_numbers_are_kept():
    def run(table, optimizer, seeds):
        for seed in seeds:
            table(torch.tensor([seed, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = build_optimizer(OptimizerConfig("sparseadam"), table)
    run(table, optimizer, range(3))
    tensors, meta = saved(table, optimizer)
    assert meta["scalars"] == {"weight/step": 3}
    other = copy.deepcopy(table)
    fresh = build_optimizer(OptimizerConfig("sparseadam"), other)
    load_state_by_name(fresh, names_of(other), tensors, meta)
    run(table, optimizer, range(3, 6))
    run(other, fresh, range(3, 6))
    assert torch.equal(table.weight, other.weight)


def test_settings_and_rates_come_back_in_their_own_types():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("adamw", lr=1e-2, betas=(0.8, 0.9), eps=1e-6), net)
    apply_factor(optimizer, 0.5)
    other = model()
    fresh = build_optimizer(OptimizerConfig("adamw", lr=1.0), other)
    load_state_by_name(fresh, names_of(other), *saved(net, optimizer))
    group = fresh.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["betas"], group["eps"]) == (0.005, 0.01, (0.8, 0.9), 1e-6)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    net, rate = model(), torch.tensor(0.1)
    fresh = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.3), foreach=False)
    load_state_by_name(fresh, names_of(net), *saved(net, optimizer))
    assert fresh.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.3))


def test_a_checkpoint_does_not_decide_how_the_update_is_computed():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("adamw"), net)
    update(net, optimizer, 0)
    fresh = build_optimizer(OptimizerConfig("adamw", fused=False), net)
    load_state_by_name(fresh, names_of(net), *saved(net, optimizer))
    assert fresh.param_groups[0]["fused"] is False
    update(net, fresh, 1)


def test_a_checkpoint_cannot_exchange_the_parameters():
    net, optimizer = trained()
    tensors, meta = saved(net, optimizer)
    meta["groups"][0].update(params=[], fused=False)
    load_state_by_name(optimizer, names_of(net), tensors, meta)
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
    assert optimizer.param_groups[0]["fused"] is True


def test_loading_leaves_nothing_of_the_state_before():
    net = model()
    early = saved(net, build_optimizer(OptimizerConfig("adamw"), net))
    optimizer = build_optimizer(OptimizerConfig("adamw"), net)
    update(net, optimizer, 0)
    load_state_by_name(optimizer, names_of(net), *early)
    assert not optimizer.state


def test_state_is_named_by_parameter_and_slot():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("adamw"), net)
    update(net, optimizer, 0)
    tensors, meta = state_by_name(optimizer, names_of(net))
    assert {"head.weight/exp_avg", "head.weight/exp_avg_sq", "head.weight/step"} <= set(tensors)
    assert not any(key.startswith("unused/") for key in tensors)  # it never had a gradient
    assert "unused" in meta["groups"][0]["parameters"]
    assert not set(map(id, optimizer.state)) & {id(net.unused)}  # and looking made no entry


def test_what_is_loaded_is_not_shared():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("adamw"), net)
    update(net, optimizer, 0)
    tensors, meta = saved(net, optimizer)
    before = {key: value.clone() for key, value in tensors.items()}
    load_state_by_name(optimizer, names_of(net), tensors, meta)
    update(net, optimizer, 1)
    assert all(torch.equal(value, before[key]) for key, value in tensors.items())


def test_state_takes_its_parameters_memory_layout():
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(OptimizerConfig("adamw"), net)
    net(torch.ones(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    tensors, meta = saved(net, optimizer)
    contiguous = {key: value.contiguous() for key, value in tensors.items()}  # as a tensor file holds it
    load_state_by_name(optimizer, names_of(net), contiguous, meta)
    assert optimizer.state[net.weight]["exp_avg"].stride() == net.weight.stride()


def trained(name: str = "adamw", **options):
    net = model()
    optimizer = build_optimizer(OptimizerConfig(name, **options), net)
    update(net, optimizer, 0)
    return net, optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (model(), "sgd", {}), "the optimizer is 'AdamW', here 'SGD'"),
        (
            lambda: (model(width=9), "adamw", {}),
            r"the parameter 'body.0.bias' is float32\[8\], here float32\[9\]",
        ),
        (lambda: (model(torch.bfloat16), "adamw", {}), r"is float32\[8\], here bfloat16\[8\]"),
        (lambda: (model(), "adamw", {"parameters": "head.*"}), "here not there"),
        (lambda: (model(), "adamw", {"weight_decay": 0.1}), "the parameter group of"),
    ],
)
def test_another_optimizer_or_model_is_refused(make, message):
    tensors, meta = saved(*trained())
    net, name, options = make()
    optimizer = build_optimizer(OptimizerConfig(name, **options), net)
    with pytest.raises(CheckpointError, match=message):
        load_state_by_name(optimizer, names_of(net), tensors, meta)


def test_a_parameter_that_the_checkpoint_lacks_is_named():
    net = model()
    part = build_optimizer(OptimizerConfig("adamw", parameters="head.*"), net)
    tensors, meta = saved(net, part)
    with pytest.raises(CheckpointError, match=r"the parameter 'body.0.bias' is not there, here float32"):
        load_state_by_name(build_optimizer(OptimizerConfig("adamw"), net), names_of(net), tensors, meta)


KEY = "head.weight/exp_avg"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda tensors, meta: tensors.pop(KEY),
            rf"the tensor '{KEY}' is float32\[2, 8\], here not there.*damaged",
        ),
        (
            lambda tensors, meta: tensors.update({KEY: tensors[KEY].T}),
            rf"'{KEY}' is float32\[2, 8\], here float32\[8, 2\]",
        ),
        (
            lambda tensors, meta: tensors.update({KEY: tensors[KEY].double()}),
            rf"'{KEY}' is float32\[2, 8\], here float64",
        ),
        (lambda tensors, meta: tensors.update(more=torch.ones(1)), "the tensor 'more' is not there, here"),
        (
            lambda tensors, meta: meta["scalars"].update({"nobody/step": 1}),
            "'nobody/step' belongs to no parameter",
        ),
        (lambda tensors, meta: meta.pop("groups"), "no list 'groups'"),
        (lambda tensors, meta: meta.update(slots=[]), "no dict 'slots'"),
        (lambda tensors, meta: meta["groups"][0].pop("parameters"), "without the names 'parameters'"),
        (
            lambda tensors, meta: meta["groups"][0].update(parameters=[["a"]]),
            "without the names 'parameters'",
        ),
        (lambda tensors, meta: meta["groups"][0]["parameters"].pop(0), "the parameter group of"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    net, optimizer = trained()
    tensors, meta = saved(net, optimizer)
    damage(tensors, meta)
    optimizer.param_groups[0]["lr"] = 0.5
    before, _ = saved(net, optimizer)
    with pytest.raises(CheckpointError, match=message):
        load_state_by_name(optimizer, names_of(net), tensors, meta)
    after, _ = saved(net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("slot", "value", "message"),
    [
        ("history", [1], "'head.bias/history' is a list, which cannot be stored"),
        ("a/b", 1, "slot 'a/b', which is not a plain name"),
        (3, 1, "slot 3, which is not a plain name"),
    ],
)
def test_a_state_that_cannot_be_stored_is_an_error_that_names_it(slot, value, message):
    net, optimizer = trained()
    optimizer.state[net.head.bias][slot] = value
    with pytest.raises(CheckpointError, match=message):
        state_by_name(optimizer, names_of(net))


def test_state_that_belongs_to_no_parameter_is_an_error():
    net, optimizer = trained()
    optimizer.state["global"] = {"k": 1}
    with pytest.raises(CheckpointError, match="belongs to no parameter"):
        state_by_name(optimizer, names_of(net))


def test_a_parameter_outside_the_model_is_an_error():
    stray = nn.Parameter(torch.ones(7))
    with pytest.raises(CheckpointError, match=r"a parameter of shape \(7,\) that the model does not name"):
        state_by_name(torch.optim.SGD([stray]), {})
