"""Exact resume: a run killed at any step, and resumed, is bitwise the uninterrupted one."""

import multiprocessing
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.promises.example import QUIET, Line, batches, samples
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drivetrain import CheckpointConfig, LambdaCallback, Run, Trainer

STEPS = 8


class Augmented(Dataset[dict[str, Tensor]]):  # samples that are augmented by all generators there are
    def __init__(self) -> None:
        self.samples = samples(14)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return {**self.samples[number], "x": self.samples[number]["x"] + 0.1 * noise}


class Mixing(Line):  # draws in its step too
    def training_step(self, batch: Mapping[str, Tensor]) -> Any:
        return super().training_step({**batch, "x": batch["x"] * (random.random() + float(np.random.rand()))})


def train(run_dir: Path, data: Any, killed_at: int = -1) -> None:
    """Train two epochs with dropout, shuffling, validation and a checkpoint at every second step."""

    def kill(run: Run) -> None:
        if run.progress.steps == killed_at:
            os._exit(9)

    options = {"strategy": "cpu", "checkpoint": CheckpointConfig(every="2 steps"), **QUIET}
    trainer = Trainer(max_epochs=2, run_dir=run_dir, callbacks=[LambdaCallback(on_step_end=kill)], **options)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(Mixing(dropout=0.2), loader, batches(4, 2), resume="auto")


@pytest.mark.parametrize("data", [samples(14), Augmented()], ids=["as they are", "augmented"])
def test_a_run_killed_at_any_step_resumes_bitwise(data: Any, tmp_path: Path) -> None:
    train(tmp_path / "whole", data)
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        run_dir = tmp_path / f"killed at {step}"
        process = multiprocessing.get_context("fork").Process(target=train, args=(run_dir, data, step))
        process.start()
        process.join()
        assert process.exitcode == 9
        train(run_dir, data)
        assert (run_dir / "model.safetensors").read_bytes() == expected, f"killed at step {step}"
