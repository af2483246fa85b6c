"""Whatever an attempt does to buffers, it can be undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from drivetrain.engine.buffers import KeptBuffers


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("none", None)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.counts = nn.Module()


ATTEMPTS: dict[str, Callable[[Buffered], object]] = {
    "move": lambda module: module.norm(torch.randn(4, 2)),
    "replace": lambda module: setattr(module, "mean", torch.ones(3)),
    "begin": lambda module: setattr(module, "none", torch.ones(1)),
    "leave out": lambda module: setattr(module, "mean", None),
    "register": lambda module: module.counts.register_buffer("steps", torch.ones(1), persistent=False),
    "delete": lambda module: delattr(module, "passing"),
}


def state(module: nn.Module) -> list[tuple[str, list[float] | None]]:
    return [
        (f"{prefix}.{name}", None if buffer is None else buffer.flatten().tolist())
        for prefix, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
    ]


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=list(ATTEMPTS))
def test_an_attempt_is_undone_and_a_good_one_is_kept(attempt: Callable[[Buffered], object]) -> None:
    module, kept, alone = Buffered(), KeptBuffers(), Buffered()
    mean = module.mean
    for _ in range(2):
        before, keys = state(module), list(module.state_dict())
        kept.keep(module)
        attempt(module)
        assert state(module) != before
        kept.put_back()
        assert state(module) == before
        assert module.mean is mean
        assert list(module.state_dict()) == keys
    attempt(module)
    after = state(module)
    kept.keep(module)
    kept.put_back()
    assert state(module) == after
    attempt(alone)
    assert list(module.state_dict()) == list(alone.state_dict())


def test_a_lazy_buffer_without_values_yet_is_left_alone() -> None:
    module, kept = nn.Sequential(nn.LazyBatchNorm1d(), nn.BatchNorm1d(2)), KeptBuffers()
    kept.keep(module)
    module(torch.randn(4, 2) + 1)
    kept.put_back()
    assert [bool(each.running_mean.abs().sum() > 0) for each in module] == [True, False]
    before = state(module)
    kept.keep(module)
    module(torch.randn(4, 2))
    kept.put_back()
    assert state(module) == before
