"""Tasks under XLA: batch norms take torch's statistics from a batch, and an error leaves an ordinary task."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.xla import QUIET, apart, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import OptimizerConfig, TaskModule, Trainer
from drivetrain.callbacks import LambdaCallback

NAMES = [("xla", 1), ("xla_fsdp", 2)]

Buffers = list[dict[str, Tensor]]


class Own(nn.BatchNorm1d):  # one of a user's: its own forward, with torch's buffers, as those of timm
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(input=x).relu()


class Images(TaskModule):
    # Norms of each kind on pictures; layers before them have no bias, whose gradient would be rounding alone.

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = nn.ModuleList([nn.BatchNorm1d(4, affine=False), Own(4, momentum=0.3)])
        self.plane = nn.ModuleList([nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=None)])
        self.solid = nn.BatchNorm3d(4, momentum=0.5)
        self.samples = nn.InstanceNorm2d(4, track_running_stats=True)
        self.fixed = nn.BatchNorm2d(4).eval()
        self.none = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.plane:
            x = each(x)
        x = self.none(self.fixed(self.samples(x)).tanh())
        x = self.solid(x.unsqueeze(-1)).squeeze(-1)
        x = self.solid(x.square().unsqueeze(-1)).squeeze(-1)  # once more
        x = self.flat[1](x.flatten(2))
        return self.head(self.flat[0](x.square().mean(-1)))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.005)


def pictures(samples: int) -> TensorDataset:
    x = torch.randn(samples, 1, 6, 6, generator=torch.Generator().manual_seed(1)) * 2 + 1
    return TensorDataset(x, x.mean((1, 2, 3)).unsqueeze(1))


def fitted(task: Images, trainer_of: Any) -> tuple[Buffers, float]:
    """The buffers after each step of two micro-batches of 8, or one of 5; the validation's loss."""
    seen: Buffers = []

    def note(run: Any) -> None:
        seen.append({name: each.detach().cpu().clone() for name, each in run.task.named_buffers()})

    made = trainer_of(callbacks=[LambdaCallback(on_step_end=note)], gradient_accumulation_steps=2)
    found = made.fit(task, DataLoader(pictures(21), batch_size=8), DataLoader(pictures(21), batch_size=5))
    return seen, found.metrics["validation/loss"]


def on_cpu(**options: Any) -> Trainer:
    return Trainer(strategy="cpu", **QUIET, **options)


@pytest.mark.parametrize(("name", "devices"), NAMES)
def test_batch_norm_buffers_and_validation_are_those_of_the_cpu(name: str, devices: int) -> None:
    def run() -> None:
        task = Images()
        start = copy.deepcopy(task)
        buffers, loss = fitted(task, partial(trainer, name, None, devices))
        expected, expected_loss = fitted(start, on_cpu)
        torch.testing.assert_close(buffers, expected, rtol=1e-4, atol=1e-5)
        assert task.fixed.num_batches_tracked == 0
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in task.modules())

    apart(run)


class Failing(TaskModule):
    # Its third step fails while it is traced, at `place`: "forward", "loss", "backward" or nowhere.

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = (nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh())
        self.blocks = nn.Sequential(*(nn.Sequential(*copy.deepcopy(kinds)) for _ in range(2)))
        self.place = ""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.fail("forward")
        return self.blocks(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.fail("loss")
        outputs.register_hook(lambda _: self.fail("backward"))  # type: ignore[no-untyped-call]
        return (outputs - batch).square().mean()

    def fail(self, place: str) -> None:
        if self.place == place and self.calls >= 3:
            raise KeyboardInterrupt if place == "loss" else ZeroDivisionError(place)


LANDING = pytest.param(*NAMES[0], marks=pytest.mark.landing)


@pytest.mark.parametrize(("name", "devices"), [LANDING, *NAMES[1:]])
def test_task_is_an_ordinary_one_after_any_error(name: str, devices: int) -> None:
    def run() -> None:
        data = DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)

        def interrupt(run: Any) -> None:
            if run.task.place == "callback" and run.progress.steps == 3:
                raise KeyboardInterrupt

        for place in ("forward", "loss", "backward", "callback"):
            task = Failing()
            names = sorted(task.state_dict())
            task.place = place
            made = trainer(name, None, devices, callbacks=[LambdaCallback(on_step_end=interrupt)])
            with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
                made.fit(task, data)
            assert sorted(task.state_dict()) == names
            assert {each.device.type for each in task.state_dict().values()} == {"cpu"}
            assert [type(each) for each in task.blocks] == [nn.Sequential] * 2
            assert not any(each._forward_hooks or each._forward_pre_hooks for each in task.modules())
        task.place = ""
        same = copy.deepcopy(task)
        trainer(name, None, devices).fit(task, data)
        Trainer(strategy="cpu", **QUIET).fit(same, data)
        torch.testing.assert_close(task.state_dict(), same.state_dict(), rtol=1e-5, atol=1e-6)

    apart(run)
