"""A LightningModule that notes each call of its hooks."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from tests.integrations.lightning import modules
from torch.nn import functional as F


class Noting(pl.LightningModule):
    """Notes each of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = modules.body()
        self.calls: list[str] = []

    def note(self, name: str) -> None:
        self.calls.append(f"{name} {self.current_epoch} {self.global_step}" if self._trainer else name)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"validation_step {batch_idx}")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"test_step {batch_idx}")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"predict_step {batch_idx}")
        return batch[1]


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Any, *arguments: Any, **options: Any) -> None:
        indices = [each for each in arguments if type(each) is int]
        given = [getattr(each, "value", each) for each in options.values()]
        self.note(" ".join(map(str, [name, *indices, *given])))

    return hook


_NOTED = ["on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
_NOTED += ["on_before_optimizer_step", "prepare_data", "setup", "teardown", "configure_model"]
for _stage in ("train", "validation", "test", "predict"):
    for _part in ("", "_epoch", "_batch"):
        _NOTED += [f"on_{_stage}{_part}_start", f"on_{_stage}{_part}_end"]
for _name in _NOTED:
    setattr(Noting, _name, _noting(_name))


class Recording(Noting):
    """A module with automatic optimization, whose overridden methods are noted too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"training_step {batch_idx}")
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.calls.append("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        self.note(f"optimizer_step {epoch} {batch_idx}")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.note("lr_scheduler_step")

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.note("configure_gradient_clipping")
