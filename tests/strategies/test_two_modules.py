"""Two modules with an optimizer each in your own loop, in turns or by one loss, as in torch's loops."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, Engine


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)), nn.Linear(2, 1)


def of_discriminator(g: nn.Module, d: nn.Module, x: Tensor) -> Tensor:
    fake, real = d(torch.cat([g(x).detach(), x])).chunk(2)
    return F.softplus(fake - real).mean()


def of_generator(g: nn.Module, d: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(-d(g(x))).mean()


def noise(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(24, 2, generator=torch.Generator().manual_seed(1)), batch_size=batch_size)


def torchs(how: str) -> list[Tensor]:
    g, d = networks()
    both = [sgd(g.parameters()), sgd(d.parameters())]
    turns = [(of_discriminator, both[1:]), (of_generator, both[:1])]
    for x in noise():
        for loss, optimizers in turns if how == "in turns" else [(of_generator, both)]:
            for each in optimizers:
                each.zero_grad()
            loss(g, d, x).backward()
            if how == "together":
                nn.utils.clip_grad_norm_([*g.parameters(), *d.parameters()], 0.05)
            for each in optimizers:
                each.step()
    return [each.detach() for each in (*g.parameters(), *d.parameters())]


def ours(how: str, parts: int = 1, strategy: str = "cpu") -> list[Tensor]:
    (g, d), devices = networks(), 1 if strategy == "cpu" else 2
    with Engine(strategy, devices=devices) as engine:
        (discriminator, b), (generator, a) = engine.prepare(d, sgd), engine.prepare(g, sgd)
        turns = [(of_discriminator, [b]), (of_generator, [a])]
        for x in engine.prepare_data(noise(4 // devices)):
            for loss, optimizers in turns if how == "in turns" else [(of_generator, [a, b])]:
                for part in range(parts):
                    engine.backward(loss(generator, discriminator, x[part::parts]), len(x) / parts)
                if how == "together":
                    engine.step(optimizers, max_grad_norm=0.05)
                else:
                    for each in optimizers:
                        engine.step(each)
        trained = [*g.parameters(), *d.parameters()]
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in trained]


HOW = ("in turns", "together", "one after another")


@pytest.mark.parametrize("how", HOW)
def test_your_own_loop_with_two_optimizers_equals_torchs(how: str) -> None:
    for parts in (1, 2):
        torch.testing.assert_close(ours(how, parts), torchs(how), rtol=0, atol=1e-6)


def on_ranks() -> list[list[Tensor]]:
    return [ours(how, 1, strategy) for how in HOW[:2] for strategy in ("ddp", "fsdp")]


def test_two_modules_of_your_own_loop_on_ranks_may_leave_out_one_another() -> None:
    want = [torchs(how) for how in HOW[:2] for _ in range(2)]
    for found in on_two_ranks(on_ranks):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


def test_steps_of_several_optimizers_are_refused_where_they_cannot_be_made(tmp_path: Path) -> None:
    def begun(precision: str) -> tuple[Any, ...]:
        engine = Engine("cpu", precision)
        (g, a), (d, b) = (engine.prepare(module, sgd) for module in networks())
        engine.backward(d(g(torch.ones(4, 2))).mean())
        engine.step(a)
        return engine, a, b

    (engine, a, b), (scaled, _, second) = begun("32"), begun("16-mixed")
    cases: dict[str, tuple[Any, ...]] = {
        "twice": (lambda: engine.step(a), "Each optimizer makes one step from a loss"),
        "a loss scale": (lambda: scaled.step(second), "engine.step([a, b])"),
        "saved": (lambda: (engine.save(tmp_path / "saved"), engine.step(b)), "before engine.save()"),
    }
    assert_refused(ConfigError, cases)


def test_a_pass_that_is_left_ends_its_epoch_unless_it_is_loaded(tmp_path: Path) -> None:
    engine = Engine("cpu")
    data, path = engine.prepare_data(noise()), str(tmp_path / "saved")
    next(iter(data))
    passes = [len([*data]), len([*data])]
    for number, _ in enumerate(data):
        if number == 1:
            break
    engine.save(path)
    assert (passes, len([*data]), engine.progress.epoch) == ([6, 6], 6, 5)
    other = Engine("cpu")
    left = other.prepare_data(noise())
    for each, rest in ((other, left), (engine, data)):
        each.load(path)
        assert (len([*rest]), each.progress.epoch) == (4, 4)
