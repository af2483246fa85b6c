"""Muon for a whole network, and optimizers combined into one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import apply_factor, build_optimizer
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.muon import CombinedOptimizer, Muon


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.hidden = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 12))
        self.convolution = nn.Conv1d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 4)

    def forward(self, tokens):
        hidden = self.hidden(self.embedding(tokens))
        return self.head(self.convolution(hidden.transpose(1, 2)).mean(2))


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def update(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (32, 6), generator=generator)
    loss = nn.functional.cross_entropy(net(tokens), (tokens.float().mean(1) / 4).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def trained_by(net: nn.Module, optimizer: CombinedOptimizer) -> dict[str, str]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    return {
        names[parameter]: type(part).__name__
        for part in optimizer.parts
        for group in part.param_groups
        for parameter in group["params"]
    }


def test_only_hidden_matrices_go_to_muon():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("muon", adamw_parameters="head.*"), net)
    assert isinstance(optimizer, CombinedOptimizer)
    parts = trained_by(net, optimizer)
    assert len(parts) == len(list(net.parameters()))
    assert {name for name, part in parts.items() if part == "Muon"} == {"hidden.0.weight", "hidden.3.weight"}
    assert trained_by(net, build_optimizer(OptimizerConfig("muon"), net))["head.weight"] == "Muon"


def test_muon_learns():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("muon", lr=5e-3, adamw_parameters="head.*"), net)
    losses = [update(net, optimizer, seed % 4) for seed in range(60)]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def test_one_rate_fits_both_parts():
    """Muon's update has the size of AdamW's: a root mean square of 0.2 (arXiv 2502.16982)."""
    torch.manual_seed(0)
    net = nn.Linear(96, 64, bias=False)
    optimizer = build_optimizer(OptimizerConfig("muon", lr=1e-2), net)
    before = net.weight.detach().clone()
    net(torch.randn(256, 96)).square().sum().backward()
    optimizer.step()
    size = (net.weight - before).square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * 1e-2, rel=0.25)  # the iteration orthogonalises only roughly


def test_a_schedule_reaches_both_parts():
    optimizer = build_optimizer(OptimizerConfig("muon", lr=0.1), model())
    apply_factor(optimizer, 0.5)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.05, 0.05]


def test_group_settings_reach_the_part_they_are_for():
    rules = [ParameterGroup("hidden.*", lr=0.5, momentum=0.8, betas=(0.5, 0.6), eps=1e-6, weight_decay=0.1)]
    optimizer = build_optimizer(OptimizerConfig("muon", groups=rules), model())
    by_muon, by_adamw = (part.param_groups[-1] for part in optimizer.parts)
    assert (by_muon["momentum"], by_muon["eps"], by_muon["weight_decay"]) == (0.8, 1e-7, 0.1)
    assert (by_adamw["betas"], by_adamw["eps"], by_adamw["lr"]) == ((0.5, 0.6), 1e-6, 0.5)
    assert "betas" not in by_muon
    assert "momentum" not in by_adamw


def test_a_network_without_hidden_matrices_is_told_to_use_adamw():
    with pytest.raises(ConfigError, match="Use 'adamw'"):
        build_optimizer(OptimizerConfig("muon"), nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"'heads\.\*' in adamw_parameters matches no parameter"):
        build_optimizer(OptimizerConfig("muon", adamw_parameters="heads.*"), model())


def test_a_matrix_alone_needs_no_second_part():
    optimizer = build_optimizer(OptimizerConfig("muon"), nn.Linear(3, 3, bias=False))
    assert [type(part).__name__ for part in optimizer.parts] == ["Muon"]


def test_groups_and_state_are_the_parts_own():
    net = model()
    optimizer = build_optimizer(OptimizerConfig("muon"), net)
    update(net, optimizer, 0)
    groups = [group for part in optimizer.parts for group in part.param_groups]
    assert all(mine is its for mine, its in zip(optimizer.param_groups, groups, strict=True))
    assert all(part.state is optimizer.state for part in optimizer.parts)
    assert set(optimizer.state) == set(net.parameters())


def resumed_by_state_dict(net, optimizer):
    other = copy.deepcopy(net)
    fresh = build_optimizer(OptimizerConfig("muon", lr=3e-3), other)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's loading shares the tensors
    return other, fresh


def resumed_by_copy(net, optimizer):
    return copy.deepcopy((net, optimizer))


def resumed_by_pickle(net, optimizer):
    return pickle.loads(pickle.dumps((net, optimizer)))


@pytest.mark.parametrize("resumed", [resumed_by_state_dict, resumed_by_copy, resumed_by_pickle])
def test_training_goes_on_bit_for_bit(resumed):
    net = model()
    optimizer = build_optimizer(OptimizerConfig("muon", lr=3e-3), net)
    for seed in range(3):
        update(net, optimizer, seed)
    apply_factor(optimizer, 0.5)
    other, fresh = resumed(net, optimizer)
    for seed in range(3, 6):
        update(net, optimizer, seed)
        update(other, fresh, seed)
        apply_factor(optimizer, 0.25)
        apply_factor(fresh, 0.25)
    assert all(map(torch.equal, weights(net), weights(other)))
    assert all(part.state is fresh.state for part in fresh.parts)


def test_a_closure_is_called_once_with_gradients():
    net = nn.Linear(3, 3)
    optimizer = build_optimizer(OptimizerConfig("muon"), net)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = net(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert (calls, loss.numel()) == ([True], 1)


def test_a_group_cannot_be_added_to_nobody_in_particular():
    optimizer = build_optimizer(OptimizerConfig("muon"), model())
    with pytest.raises(ConfigError, match="add it to a part"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_parameter_in_two_parts_is_refused():
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        CombinedOptimizer([torch.optim.SGD(net.parameters()), torch.optim.Adam(net.parameters())])
    with pytest.raises(ConfigError, match="at least one part"):
        CombinedOptimizer([])


def test_what_the_parts_have_learnt_so_far_is_kept():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    parts = [torch.optim.Adagrad(first.parameters(), 0.1), torch.optim.Adam(second.parameters(), 0.1)]

    def backward():
        second(first(torch.ones(1, 2))).sum().backward()

    backward()
    for part in parts:
        part.step()
    optimizer = CombinedOptimizer(parts)
    backward()
    optimizer.step()
    assert optimizer.state[first.weight]["step"].item() == 2
    assert optimizer.state[second.weight]["step"].item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_its_update_is_that_of_torch_to_the_bit(dtype, nesterov):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(6, 4, dtype=dtype)) for _ in range(2)] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(6, 4, generator=generator).to(dtype)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))


def test_hooks_on_its_steps_are_called_once_in_each():
    called = []
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])  # with which torch hooks its own step
    optimizer = Muon([parameter])
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    handle = register_optimizer_step_post_hook(lambda *_: called.append("all"))
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert called == ["own", "all"]
