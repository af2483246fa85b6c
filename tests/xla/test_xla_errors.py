"""A run under XLA that fails leaves an ordinary task, which can be trained again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.xla import QUIET, apart, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import TaskModule, Trainer
from drivetrain.callbacks import LambdaCallback


class Failing(TaskModule):
    """Its third step fails while it is traced; nothing fails at another place.

    Attributes:
        place: Where: "forward", "loss", "backward" or nowhere.
    """

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


@pytest.mark.parametrize(("name", "devices"), [("xla", 1), ("xla_fsdp", 1), ("xla_fsdp_v2", 2)])
def test_the_task_is_an_ordinary_one_after_any_error(name: str, devices: int) -> None:
    def run() -> None:
        data = DataLoader(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)

        def interrupt(run: Any) -> None:
            if run.task.place == "callback" and run.progress.updates == 3:
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
