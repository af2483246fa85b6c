"""Muon for a whole network, and optimizers combined into one."""

import copy
import pickle

import pytest
import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import apply_factor, build_optimizer
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.muon import CombinedOptimizer, Muon


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 12)
        self.hidden = nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 12))
        self.convolution = nn.Conv1d(12, 12, 3, padding=1)
        self.head = nn.Linear(12, 4)

    def forward(self, tokens):
        hidden = self.hidden(self.embedding(tokens))
        return self.head(self.convolution(hidden.transpose(1, 2)).mean(2))


def built(net: nn.Module, **options) -> CombinedOptimizer:
    return build_optimizer(OptimizerConfig("muon", **options), net)


def update(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    tokens = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(net(tokens), (tokens.float().mean(1) / 4).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained_by(net: nn.Module, optimizer: CombinedOptimizer) -> dict[str, str]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    groups = [(part, group) for part in optimizer.parts for group in part.param_groups]
    return {names[each]: type(part).__name__ for part, group in groups for each in group["params"]}


def test_only_hidden_matrices_go_to_muon():
    net = Classifier()
    optimizer = built(net, adamw_parameters="head.*")
    parts = trained_by(net, optimizer)
    assert len(parts) == len(list(net.parameters()))
    assert {name for name, part in parts.items() if part == "Muon"} == {"hidden.0.weight", "hidden.3.weight"}
    assert trained_by(net, built(net))["head.weight"] == "Muon"


def test_muon_learns_with_the_rate_of_adamw():
    """Muon's update has the size of AdamW's: a root mean square of 0.2 (arXiv 2502.16982)."""
    net = Classifier()
    optimizer = built(net, lr=5e-3, adamw_parameters="head.*")
    losses = [update(net, optimizer, seed % 4) for seed in range(60)]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    net = nn.Linear(96, 64, bias=False)
    optimizer, before = built(net, lr=1e-2), net.weight.detach().clone()
    net(torch.randn(256, 96)).square().sum().backward()
    optimizer.step()
    size = (net.weight - before).square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * 1e-2, rel=0.25)  # the iteration orthogonalises only roughly


def test_schedules_and_group_settings_reach_the_part_they_are_for():
    optimizer = built(Classifier(), lr=0.1)
    apply_factor(optimizer, 0.5)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.05, 0.05]
    settings = {"lr": 0.5, "momentum": 0.8, "betas": (0.5, 0.6), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = built(Classifier(), groups=[ParameterGroup("hidden.*", **settings)])
    by_muon, by_adamw = (part.param_groups[-1] for part in optimizer.parts)
    assert (by_muon["momentum"], by_muon["eps"], by_muon["weight_decay"]) == (0.8, 1e-7, 0.1)
    assert (by_adamw["betas"], by_adamw["eps"], by_adamw["lr"]) == ((0.5, 0.6), 1e-6, 0.5)
    assert ("betas" in by_muon, "momentum" in by_adamw) == (False, False)


def by_state_dict(net, optimizer):
    other = copy.deepcopy(net)
    fresh = built(other, lr=3e-3)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's loading shares the tensors
    return other, fresh


def test_a_combined_optimizer_resumes_bit_for_bit():
    for resumed in (by_state_dict, lambda *pair: pickle.loads(pickle.dumps(pair))):
        net = Classifier()
        optimizer = built(net, lr=3e-3)
        for seed in range(3):
            update(net, optimizer, seed)
        groups = [group for part in optimizer.parts for group in part.param_groups]
        assert all(mine is its for mine, its in zip(optimizer.param_groups, groups, strict=True))
        assert set(optimizer.state) == set(net.parameters())
        apply_factor(optimizer, 0.5)
        other, fresh = resumed(net, optimizer)
        for seed in range(3, 6):
            for one, each in ((net, optimizer), (other, fresh)):
                update(one, each, seed)
                apply_factor(each, 0.25)
        assert all(map(torch.equal, net.parameters(), other.parameters()))
        assert all(part.state is fresh.state for part in fresh.parts)


def test_a_closure_is_called_once_with_gradients():
    net, losses = nn.Linear(3, 3), []
    optimizer = built(net)

    def closure():
        losses.append(net(torch.ones(1, 3)).sum())
        losses[-1].backward()
        return losses[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1


@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_step_of_muon_is_that_of_torch_to_the_bit(dtype, nesterov):
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


def orthogonal(matrix):
    x = matrix.bfloat16()
    x = x.T if matrix.size(0) > matrix.size(1) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.size(0) > matrix.size(1) else x).float()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.experts, self.scale = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens):
        return self.head(
            torch.einsum("bh,nho->bo", self.hidden(self.embedding(tokens)), self.experts) * self.scale
        )


def test_groups_as_in_nanochat_with_stacks_and_cautious_decay_equal_a_program_by_hand():
    """Matrices and stacks by Muon; the embedding, the head and scalars by AdamW, each with its own rate."""
    net, plain = Experts(), Experts()
    rates = {"embedding.weight": 0.2, "head.weight": 0.004, "scale": 0.05, "hidden.bias": 0.02}
    optimizer = built(
        net, lr=0.02, weight_decay=1.0, cautious_decay=True, adjust_lr_fn="original", betas=(0.8, 0.95),
        adamw_parameters="head.*", stacks="experts",
        groups=[ParameterGroup(name, lr=rate, weight_decay=0) for name, rate in rates.items()],
    )  # fmt: skip
    named = dict(plain.named_parameters())
    groups = [{"params": [named[name]], "lr": rate} for name, rate in rates.items()]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), weight_decay=0)
    momenta = {name: torch.zeros_like(named[name]) for name in ("hidden.weight", "experts")}
    for seed in range(4):
        tokens = torch.randint(8, (16,), generator=torch.Generator().manual_seed(seed))
        for each in (net, plain):
            each.zero_grad()
            nn.functional.cross_entropy(each(tokens), tokens.flip(0)).backward()
        optimizer.step()
        adamw.step()
        for name, momentum in momenta.items():
            weight, gradient = named[name].detach(), named[name].grad
            momentum.lerp_(gradient, 0.05)
            found = gradient.lerp(momentum, 0.95)
            found = orthogonal(found) if found.ndim == 2 else torch.stack([*map(orthogonal, found)])
            shrink = 0.02 * weight * (found * weight >= 0)
            rows, columns = weight.shape[-2:]
            weight -= shrink + 0.02 * max(1, rows / columns) ** 0.5 * found
    start = dict(Experts().named_parameters())
    for name, each in net.named_parameters():  # Muon computes in bfloat16
        assert (each - named[name]).norm() < 0.2 * (named[name] - start[name]).norm(), name


def test_refusals_of_muon():
    net = nn.Linear(2, 2)
    twice = [torch.optim.SGD(net.parameters()), torch.optim.Adam(net.parameters())]
    no_matrix = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
    cases = {
        "no hidden matrix": (lambda: built(no_matrix), "Use 'adamw'"),
        "a stack of 2": (
            lambda: built(Classifier(), stacks="hidden.0.weight"),
            "'hidden.0.weight'",
            "[24, 12]",
        ),
        "a stack for AdamW": (
            lambda: built(Experts(), stacks="experts", adamw_parameters="experts"),
            "AdamW",
        ),
        "no match": (lambda: built(Classifier(), adamw_parameters="heads.*"), "'heads.*'"),
        "a parameter in two parts": (lambda: CombinedOptimizer(twice), "more than one parameter group"),
    }
    assert_refused((ConfigError, ValueError), cases)
