"""Short runs that save often, for what becomes of what they cannot save, or have lost."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule


class Wide(TaskModule):  # of 65,536 weights: with AdamW's two moments a checkpoint takes 0.8 MB
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(64, 1024)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=1e-3)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(48, 64, generator=generator), torch.randn(48, 1024, generator=generator)
    return DataLoader(TensorDataset(*pairs), batch_size=4)


def at(step: int, act: Callable[[], Any]) -> LambdaCallback:  # something that happens after a step

    def on_step_end(run: Any) -> None:
        if run.progress.steps == step:
            act()

    return LambdaCallback(on_step_end=on_step_end)


def train(directory: Path, *callbacks: Any, asynchronous: bool = False, **options: Any) -> tuple[Any, Any]:
    task = Wide()
    options = {"max_steps": 12, "loggers": (), "on_save_error": "warn", **options}
    keeps = {"every": "2 steps", "by": None, "asynchronous": asynchronous}
    keeps = {**keeps, **options.pop("keeps", {})}
    options = {"checkpoint": CheckpointConfig(**keeps), **options}
    validation = data() if "validate_every" in options else None
    trainer = quiet(**options, callbacks=callbacks, run_dir=directory)
    return task, trainer.fit(task, data(), validation, resume="auto" if options["checkpoint"] else None)


def let_writing_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "drivetrain-checkpoint":
            thread.join(20)


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


@contextmanager
def told(expected: str, besides: str | None = None) -> Iterator[list[str]]:
    """One warning of that kind, however often it happens, and one of another."""
    found: list[str] = []
    with heard() as caught:
        yield found
    found += caught
    if besides is not None:
        found.remove(next(each for each in found if besides in each))
    assert len(found) == 1, found
    assert expected in found[0]


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:  # no file of this process may grow beyond so many bytes
    resource = pytest.importorskip("resource", reason="this system has no such limits")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
