"""An update that is no log point reads nothing from the device, whatever callbacks watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tests.support.host_syncs import HostSyncs
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointConfig, OptimizerConfig, TaskModule
from drivetrain.callbacks import (
    ActivationStats,
    Callback,
    CompileTime,
    DeviceStats,
    EarlyStopping,
    Freeze,
    GradientNorms,
    LambdaCallback,
    LearningRateMonitor,
    LossSpike,
    MemoryReport,
    ModelSummary,
    NonFiniteDetector,
    Profile,
    ProgressBar,
    SequenceLength,
    Throughput,
    WeightAverage,
    WeightHistograms,
)


class Language(TaskModule):
    """A model of tokens with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(input_ids)))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def batches(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(11, (count, 2, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each} for each in tokens]


# Left out are LossSpike("skip") and NonFiniteDetector(history=), which wait in every update, and say so.
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "EMA": WeightAverage,
    "SWA": lambda: WeightAverage("swa", every="1 step"),
    "LAWA": lambda: WeightAverage("lawa", every="1 step", window=2),
    "Freeze": lambda: Freeze("embedding"),
    "Freeze until": lambda: Freeze({"embedding": "4 steps", "norm": "6 steps"}),
    "SequenceLength": lambda: SequenceLength({0: 4, "5 steps": 6}),
    "table": lambda: Profile(kinds="table", show=False),
    "trace": lambda: Profile({"wait": 50, "warmup": 1, "active": 1}, show=False),
    "WeightHistograms": lambda: WeightHistograms(gradients=True),
    "GradientNorms": lambda: GradientNorms(per_layer=True),
    "ActivationStats": ActivationStats,
    "DeviceStats": DeviceStats,
    "EarlyStopping": lambda: EarlyStopping("train/loss"),
    "LossSpike": lambda: LossSpike("rollback", window=10),
    "NonFiniteDetector": NonFiniteDetector,
    "MemoryReport": lambda: MemoryReport(show=False),
    "ModelSummary": lambda: ModelSummary(sizes=True),
    "Throughput": Throughput,
    "LearningRateMonitor": LearningRateMonitor,
    "CompileTime": CompileTime,
    "ProgressBar": ProgressBar,
    "LambdaCallback": lambda: LambdaCallback(on_step_end=lambda run: None),
}


def finite(group: list[Tensor]) -> Tensor:
    return torch.stack([torch.isfinite(each).all() for each in group])


@pytest.mark.parametrize("name", CALLBACKS)
def test_an_update_that_is_no_log_point_waits_for_no_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a CPU, where a read waits for nothing, it reads a sum to save a comparison.
    monkeypatch.setattr("drivetrain.engine.skip._finite_on_cpu", finite)
    trainer = quiet(
        max_epochs=1,
        log_every="9 steps",
        loggers="jsonl",
        run_dir=tmp_path,
        checkpoint=CheckpointConfig(every="20 steps", best=0, by=None),
        callbacks=[CALLBACKS[name]()],
    )
    steps = trainer.steps(Language(), batches(20))
    next(steps), next(steps)
    with HostSyncs() as mode:
        for _ in range(6):  # the third update to the eighth
            next(steps)
    steps.close()
    assert mode.reads == []
