"""muP: rates and initial values by width against the published table, and the check of coordinates."""

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, OptimizerConfig, ParameterGroup, TaskModule
from drivetrain.optim import build_optimizer, check_coordinates, mup

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4
TOKENS = torch.randint(0, 11, (24, 3), generator=torch.Generator().manual_seed(2))


def net(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(module(X), Y).backward()
        optimizer.step()
    module(X)


def by_hand(width: int, base: int) -> nn.Module:
    """Table 3 of arXiv 2203.03466 for Adam, with the constants of torch's initial values at the base."""
    module, r = net(width), width / base
    with torch.no_grad():
        module[4].weight /= r**0.5  # a variance of 1 / inputs ** 2, and torch's is 1 / inputs
        for layer in (module[2], module[4]):
            layer.bias *= r**0.5  # a variance of 1, and torch's is 1 / inputs
    scaled = [module[2].weight, module[4].weight]
    rest = [*module[0].parameters(), module[2].bias, module[4].bias]
    train(module, torch.optim.Adam([{"params": scaled, "lr": 0.01 / r}, {"params": rest}], lr=0.01))
    return module


def test_rates_and_initial_values_are_those_of_the_table() -> None:
    module = net(64)
    groups = mup(module, net(16).to("meta"))
    train(module, build_optimizer(OptimizerConfig("adam", lr=0.01, groups=groups), module))
    for found, wanted in zip(module.parameters(), by_hand(64, 16).parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    same = net(16)
    assert all(each.lr_scale == 1 for each in mup(same, net(16)))
    assert all(map(torch.equal, same.parameters(), net(16).parameters()))


class Wide(TaskModule):  # an embedding, a hidden matrix and a head, by muP from a width of 16
    def __init__(self, width: int, uses_mup: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden = nn.Embedding(11, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 11)
        self.groups = mup(self, Wide(16, False).to("meta"), weight_decay=0.1) if uses_mup else []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens[:, 0])).relu())

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs, batch[:, 1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01, weight_decay=0.1, groups=self.groups, eps=1e-30)


def by_table_8(width: int, r: float) -> dict[str, Tensor]:
    """Train by table 8 of arXiv 2203.03466, which has a multiplier of 1 / r at the output, in plain torch."""
    task = Wide(width, False)
    with torch.no_grad():
        task.head.weight *= r**0.5  # a variance that does not depend on the width
        for layer in (task.hidden, task.head):
            layer.bias *= r**0.5
    groups = [
        {"params": [task.embedding.weight, task.head.weight], "weight_decay": 0.1},
        {"params": [task.hidden.weight], "lr": 0.01 / r, "weight_decay": 0.1 * r},
        {"params": [task.hidden.bias, task.head.bias]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-30, weight_decay=0)
    for batch in TOKENS.split(4):
        outputs = task.hidden(task.embedding(batch[:, 0])).relu() @ task.head.weight.T / r + task.head.bias
        optimizer.zero_grad()
        task.loss(outputs, batch).backward()
        optimizer.step()
    return {**task.state_dict(), "head.weight": task.head.weight.detach() / r}


def fitted(strategy: str = "cpu", size: int = 1) -> dict[str, Tensor]:
    task = Wide(64)
    quiet(max_epochs=1, strategy=strategy, devices=size).fit(task, DataLoader(TOKENS, batch_size=4 // size))
    return dict(task.state_dict())


def test_fits_on_one_and_two_ranks_are_those_of_the_table_with_multipliers() -> None:
    wanted = by_table_8(64, 4.0)
    torch.testing.assert_close(fitted(), wanted, rtol=0, atol=1e-5)
    for found in on_two_ranks(lambda: [fitted("ddp", 2), fitted("fsdp", 2)]):
        for each in found:
            torch.testing.assert_close(each, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("uses", "grows"), [(True, False), (False, True)])
def test_the_check_of_coordinates_tells_mup_from_torchs_defaults(uses, grows, capsys) -> None:
    rules: dict[nn.Module, list[ParameterGroup]] = {}

    def make(width: int) -> nn.Module:
        module = net(width)
        rules[module] = mup(module, net(64)) if uses else []
        return module

    def fit(module: nn.Module) -> None:
        train(module, build_optimizer(OptimizerConfig("adam", lr=0.01, groups=rules[module]), module))

    found = check_coordinates(make, [64, 512], fit)
    assert (max(found[512][name] / found[64][name] for name in ("2", "4")) > 1.5) is grows
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["width", "64", "512"]


def test_refusals_of_mup() -> None:
    deeper = nn.Sequential(*net(16), nn.Linear(4, 4))
    kernels = [nn.Conv1d(4, width, 3) for width in (4, 8)]

    class Late(Wide):
        def configure_optimizers(self) -> OptimizerConfig:
            return OptimizerConfig("adam", groups=mup(self, Wide(16, False)))

    cases = {
        "in each fit": (
            lambda: quiet(max_steps=1).fit(Late(32, False), DataLoader(TOKENS)),
            "constructor",
            "each fit",
        ),
        "another depth": (lambda: mup(deeper, net(16)), "'5.bias'"),
        "kernels": (lambda: mup(*kernels), "'weight'", "matrices, embeddings and vectors"),
    }
    assert_refused(ConfigError, cases)
