"""An optimizer's state by parameter names: what is saved is what goes on."""

import copy
import json

import pytest
import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.checkpoint.format.tree import well_formed
from drivetrain.core.errors import CheckpointError
from drivetrain.task.optim.build import apply_factor, build_optimizer
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.state import load_state_by_name, state_by_name


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh())
        self.head = nn.Linear(width, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.head(self.body(self.table(tokens))).mean(1)


def names_of(net: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in net.named_parameters()}


def update(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 6, (5, 3), generator=torch.Generator().manual_seed(seed))
    net(tokens).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(net: nn.Module, optimizer: torch.optim.Optimizer):
    """As a file would hold it: tensors copied, the rest through strict JSON."""
    tensors, meta = state_by_name(optimizer, names_of(net))
    copies = {key: value.clone() for key, value in tensors.items()}
    return copies, json.loads(json.dumps(meta, allow_nan=False))


def built(net: nn.Module, name: str = "adamw", **options) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig(name, **options), net)


def trained():
    update(net := Net(), optimizer := built(net), 0)
    return net, optimizer


# One of each form of state; those of torchao have tests of their own.
@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("sgd", {}, torch.float32), ("sgd", {"momentum": 0.9, "nesterov": True}, torch.bfloat16),
        ("adamw", {"amsgrad": True, "betas": (0.8, 0.95)}, torch.float32), ("adafactor", {}, torch.float32),
        ("nadam", {}, torch.float32), ("rmsprop", {"centered": True, "momentum": 0.5}, torch.float32),
        ("muon", {}, torch.bfloat16), ("asgd", {}, torch.float32), ("rprop", {}, torch.float32),
        ("sparseadam", {"parameters": "table.*", "groups": []}, torch.float32),  # its counter is no tensor
    ],
)  # fmt: skip
def test_state_of_an_optimizer_resumes_bit_for_bit(name, options, dtype):
    options = {"lr": 1e-2, "groups": [ParameterGroup("head.*", lr_scale=0.5)], **options}
    net = Net().to(dtype)
    net.table.sparse = name == "sparseadam"
    optimizer = built(net, name, **options)
    for seed in range(3):
        update(net, optimizer, seed)
    apply_factor(optimizer, 0.5)
    other = copy.deepcopy(net)
    fresh = built(other, name, **options)
    load_state_by_name(fresh, names_of(other), *saved(net, optimizer))
    for seed in range(3, 6):
        update(net, optimizer, seed)
        update(other, fresh, seed)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    first, second = saved(net, optimizer), saved(other, fresh)
    assert first[1] == second[1]
    assert first[0].keys() == second[0].keys()
    for key, value in first[0].items():
        assert (value.dtype, value.device) == (second[0][key].dtype, second[0][key].device)
        assert torch.equal(value, second[0][key])


def test_a_parameter_may_get_its_first_gradient_after_a_resume():
    """torch's fused SGD takes the momenta of all parameters or of none."""
    ends = []
    for fused in (False, None):
        net = Net()
        update(net, built(net, "sgd", momentum=0.9, fused=False), 1)
        first = built(net, "sgd", momentum=0.9, fused=False)
        update(net, first, 2)
        then = built(net, "sgd", momentum=0.9, fused=fused)
        load_state_by_name(then, names_of(net), *saved(net, first))
        net.unused.square().sum().backward()
        update(net, then, 3)
        ends.append(torch.cat([each.detach().flatten() for each in net.parameters()]))
    assert torch.allclose(*ends, rtol=1e-6, atol=1e-7)


def test_settings_and_rates_come_back_in_their_own_types():
    net = Net()
    optimizer = built(net, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    apply_factor(optimizer, 0.5)
    fresh = built(net, lr=1.0)
    load_state_by_name(fresh, names_of(net), *saved(net, optimizer))
    group = fresh.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["betas"], group["eps"]) == (0.005, 0.01, (0.8, 0.9), 1e-6)
    rate = torch.tensor(0.1)  # a rate that is a tensor stays the same tensor
    fresh = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.3), foreach=False)
    load_state_by_name(fresh, names_of(net), *saved(net, optimizer))
    assert fresh.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.3))


def test_a_checkpoint_decides_neither_how_a_step_is_computed_nor_the_parameters():
    net, optimizer = trained()
    tensors, meta = saved(net, optimizer)
    fresh = built(net, fused=False)
    load_state_by_name(fresh, names_of(net), tensors, meta)
    assert fresh.param_groups[0]["fused"] is False
    update(net, fresh, 1)
    meta["groups"][0].update(params=[], fused=False)
    load_state_by_name(optimizer, names_of(net), tensors, meta)
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters()))
    assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize("fused", [True, False])
def test_state_is_named_by_parameter_and_slot_and_loading_shares_and_leaves_nothing(fused):
    early = saved(net := Net(), optimizer := built(net, fused=fused))
    update(net, optimizer, 0)
    tensors, meta = saved(net, optimizer)
    assert {"head.weight/exp_avg", "head.weight/exp_avg_sq", "head.weight/step"} <= set(tensors)
    assert not any(key.startswith("unused/") for key in tensors)  # it never had a gradient
    assert "unused" in meta["groups"][0]["parameters"]
    assert id(net.unused) not in set(map(id, optimizer.state))  # and looking made no entry
    before = {key: value.clone() for key, value in tensors.items()}
    load_state_by_name(optimizer, names_of(net), tensors, meta)
    update(net, optimizer, 1)
    assert all(torch.equal(value, before[key]) for key, value in tensors.items())
    load_state_by_name(optimizer, names_of(net), *early)
    assert not optimizer.state


KEY = "head.weight/exp_avg"


def test_refusals_of_a_state_of_another_optimizer_or_model():
    state = saved(*trained())

    def load(net, name="adamw", tensors_and_meta=state, **options):
        return lambda: load_state_by_name(built(net, name, **options), names_of(net), *tensors_and_meta)

    stray = torch.optim.SGD([nn.Parameter(torch.ones(7))])
    cases = {
        "sgd": (load(Net(), "sgd"), "'AdamW', here 'SGD'"),
        "a width": (load(Net(9)), "'body.0.bias' is float32[8], here float32[9]"),
        "a part": (load(Net(), parameters="head.*"), "here not there"),
        "two groups": (load(Net(), weight_decay=0.1), "the parameter group of"),
        "a stray": (lambda: state_by_name(stray, {}), "(7,)", "does not name"),
    }
    assert_refused(CheckpointError, cases)


DAMAGES = {
    "a tensor less": (lambda tensors, meta: tensors.pop(KEY), f"'{KEY}' is float32[2, 8], here not there"),
    "transposed": (lambda tensors, meta: tensors.update({KEY: tensors[KEY].T}), "here float32[8, 2]"),
    "a dtype": (lambda tensors, meta: tensors.update({KEY: tensors[KEY].double()}), "here float64"),
    "a tensor more": (lambda tensors, meta: tensors.update(more=torch.ones(1)), "'more' is not there"),
    "a stranger": (lambda tensors, meta: meta["scalars"].update({"nobody/step": 1}), "'nobody/step'"),
    "no groups": (lambda tensors, meta: meta.pop("groups"), "'groups'"),
    "no names": (lambda tensors, meta: meta["groups"][0].pop("parameters"), "'parameters'"),
    "a name less": (lambda tensors, meta: meta["groups"][0]["parameters"].pop(0), "the parameter group of"),
}


def test_refusals_of_a_damaged_state_change_nothing():
    net, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.5
    before, _ = saved(net, optimizer)

    def load(damage):
        tensors, meta = saved(*trained())
        damage(tensors, meta)
        with well_formed("the state"):
            load_state_by_name(optimizer, names_of(net), tensors, meta)

    rows = {name: (lambda damage=damage: load(damage), word) for name, (damage, word) in DAMAGES.items()}
    assert_refused(CheckpointError, rows)
    after, _ = saved(net, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(value, after[key]) for key, value in before.items())
