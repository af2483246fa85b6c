"""Whatever an attempt does to buffers, it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.engine.buffers import KeptBuffers


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("none", None)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.counts = nn.Module()


def move(module: Buffered) -> None:
    module.norm(torch.randn(4, 2))


def replace(module: Buffered) -> None:
    module.mean = torch.ones(3)


def begin(module: Buffered) -> None:
    module.none = torch.ones(1)


def leave_out(module: Buffered) -> None:
    module.mean = None


def register(module: Buffered) -> None:
    module.counts.register_buffer("steps", torch.ones(1), persistent=False)


def take_away(module: Buffered) -> None:
    del module.passing


ATTEMPTS: list[Callable[[Buffered], None]] = [
    move,
    replace,
    begin,
    leave_out,
    register,
    take_away,
]


def state(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        f"{prefix}.{name}": None if buffer is None else buffer.clone()
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
    }


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert list(found) == list(expected)
    for name, each in expected.items():
        assert (found[name] is None) == (each is None)
        assert each is None or torch.equal(found[name], each)  # type: ignore[arg-type]


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_an_attempt_is_undone_and_a_good_one_is_kept(attempt: Callable[[Buffered], None]) -> None:
    module, kept = Buffered(), KeptBuffers()
    mean = module.mean
    for _ in range(2):
        before = state(module)
        keys = list(module.state_dict())
        kept.keep(module)
        attempt(module)
        with pytest.raises(AssertionError):
            assert_same(state(module), before)
        kept.put_back()
        assert_same(state(module), before)
        assert module.mean is mean
        assert list(module.state_dict()) == keys
    attempt(module)
    after = state(module)
    kept.keep(module)
    kept.put_back()
    assert_same(state(module), after)
    assert list(module.state_dict()) == list(copied(attempt).state_dict())


def copied(attempt: Callable[[Buffered], None]) -> Buffered:
    module = Buffered()
    attempt(module)
    return module


def test_a_buffer_without_values_yet_is_left_alone() -> None:
    module, kept = nn.Sequential(nn.LazyBatchNorm1d(), nn.BatchNorm1d(2)), KeptBuffers()
    kept.keep(module)
    module(torch.randn(4, 2) + 1)
    kept.put_back()
    first: Any = module[0].running_mean
    second: Any = module[1].running_mean
    assert first.abs().sum() > 0
    assert second.abs().sum() == 0
    before = state(module)
    kept.keep(module)
    module(torch.randn(4, 2))
    kept.put_back()
    assert_same(state(module), before)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules_keep_theirs() -> None:
    module, kept = nn.Sequential(torch.jit.script(Scripted()), torch.jit.script(nn.ReLU())), KeptBuffers()
    kept.keep(module)
    module(torch.ones(1))
    assert float(module[0].count) == 1
    kept.put_back()
    assert float(module[0].count) == 0


def test_autograd_refuses_a_loss_whose_graph_holds_what_was_put_back_but_for_norms() -> None:
    module, kept = nn.Module(), KeptBuffers()
    module.register_buffer("scale", torch.ones(1))
    module.norm = nn.BatchNorm1d(1)
    weight = nn.Parameter(torch.ones(1))
    kept.keep(module)
    held = (weight * module.scale).sum()
    normed = module.norm(weight * torch.ones(4, 1)).sum()
    kept.put_back()
    normed.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()
