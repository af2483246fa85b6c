"""A task whose data say where its numbers break, and what tells whether a step left anything behind."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from tests.support.outcome import bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from drivetrain import Callback, OptimizerConfig, Run, TaskModule

FEATURES = 4
GOOD, NAN, INFINITE, GRADIENT, ONLY_LOSS, INPUT, LARGE = range(7)
"""What a sample's mark has its batch do: nothing; a NaN or infinite loss; a NaN gradient of a finite loss; a
NaN loss of a finite gradient; a NaN that the model is given; a large loss."""


def marked(marks: Sequence[int], batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(len(marks), FEATURES, generator=generator)
    target = features.sum(1, keepdim=True) + 0.1 * torch.randn(len(marks), 1, generator=generator)
    return DataLoader(TensorDataset(features, target, torch.tensor(marks)), batch_size=batch_size, **options)


class Fragile(TaskModule):  # A small model with a batch norm, whose running means a bad batch would spoil
    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        first = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()
        self.net = nn.Sequential(*first, nn.Linear(8, 8), nn.Linear(8, 1))
        self.optimizer = optimizer

    def forward(self, features: Tensor, mark: Tensor) -> Tensor:
        if bool((mark == INPUT).any()):
            features = features.clone()
            features[0, 0] = torch.nan
        return self.net(features)

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[2]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        worst = int(batch[2].max())
        loss = F.mse_loss(outputs.float(), batch[1].float())
        if worst == NAN:
            loss = loss * torch.nan
        elif worst == INFINITE:
            loss = loss * torch.inf
        elif worst == GRADIENT:
            loss = loss + (outputs.float() * 0).square().sum().sqrt()  # of which the derivative is 0 / 0
        elif worst == ONLY_LOSS:
            loss = loss + torch.nan
        elif worst == LARGE:
            loss = loss * 1000
        return loss

    def metrics(self) -> dict[str, Any]:
        return {"squares": MeanSquaredError()}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> Any:
        return outputs.float(), batch[1]

    def configure_optimizers(self) -> Any:
        if self.optimizer is None:
            return OptimizerConfig("adamw", lr=0.01, schedule="inverse_sqrt", warmup_steps=3)
        return self.optimizer


def _tensors(tree: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of a nested state, and its numbers as tensors."""
    if isinstance(tree, Tensor):
        inner = getattr(tree, "__tensor_flatten__", None)
        if hasattr(tree, "to_local"):
            return {name: tree.to_local()}
        if inner is not None and type(tree) is not nn.Parameter:
            return {f"{name}.{each}": getattr(tree, each) for each in inner()[0]}
        return {name: tree}
    if isinstance(tree, Mapping):
        return {k: v for key, each in tree.items() for k, v in _tensors(each, f"{name}.{key}").items()}
    if isinstance(tree, (list, tuple)):
        return {k: v for i, each in enumerate(tree) for k, v in _tensors(each, f"{name}.{i}").items()}
    return {name: torch.tensor(float(tree))} if isinstance(tree, (int, float)) else {}


class LeftBehind(Callback):
    """Notes of each window its loss, whether its step was made, and what a skipped one has changed."""

    def __init__(self) -> None:
        self.changed: dict[int, list[str]] = {}  # by the number of the window
        self.applied: list[bool] = []
        self.losses: list[float] = []

    def _state(self, run: Run) -> dict[str, Any]:
        optimizers = {name: each.optimizer.state_dict() for name, each in run.engine.updaters.items()}
        model, strategy = run.task.state_dict(), run.engine.strategy.state_dict()
        return deepcopy(bits(_tensors({"model": model, "optimizers": optimizers, "strategy": strategy})))

    def on_step_start(self, run: Run) -> None:
        self._before = self._state(run)

    def on_step_end(self, run: Run) -> None:
        assert run.result is not None
        after = self._state(run)
        if not run.result.applied:
            names = sorted({*after, *self._before})
            changed = [name for name in names if after.get(name) != self._before.get(name)]
            self.changed[len(self.applied)] = changed
        self.applied.append(run.result.applied)
        self.losses.append(float(run.result.step_values[0][1].reshape(-1)[0]))
