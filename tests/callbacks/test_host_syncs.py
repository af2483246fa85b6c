"""An update that is no log point reads nothing from the device, and callbacks that watch change no number."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.support.host_syncs import HostSyncs
from tests.support.outcome import weights
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointConfig, OptimizerConfig, TaskModule, callbacks


class Language(TaskModule):  # a model of tokens with a norm and dropout
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.dropout(self.embedding(input_ids))))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def batches(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(11, (count, 2, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each} for each in tokens]


# Left out are LossSpike("skip") and NonFiniteDetector(history=), which wait in every update, and say so.
CHANGE: dict[str, Callable[[], callbacks.Callback]] = {
    "EMA": callbacks.WeightAverage,
    "SWA": lambda: callbacks.WeightAverage("swa", every="1 step"),
    "LAWA": lambda: callbacks.WeightAverage("lawa", every="1 step", window=2),
    "Freeze": lambda: callbacks.Freeze("embedding"),
    "Freeze until": lambda: callbacks.Freeze({"embedding": "4 steps", "norm": "6 steps"}),
    "SequenceLength": lambda: callbacks.SequenceLength({0: 4, "5 steps": 6}),
}
WATCH: dict[str, Callable[[], callbacks.Callback]] = {
    "table": lambda: callbacks.Profile(kinds="table", show=False),
    "trace": lambda: callbacks.Profile({"wait": 12, "warmup": 1, "active": 1}, show=False),
    "WeightHistograms": lambda: callbacks.WeightHistograms(gradients=True),
    "GradientNorms": lambda: callbacks.GradientNorms(per_layer=True),
    "ActivationStats": callbacks.ActivationStats,
    "DeviceStats": callbacks.DeviceStats,
    "EarlyStopping": lambda: callbacks.EarlyStopping("train/loss", patience=99),
    "LossSpike": lambda: callbacks.LossSpike("rollback", window=10, threshold=1e6),
    "NonFiniteDetector": callbacks.NonFiniteDetector,
    "MemoryReport": lambda: callbacks.MemoryReport(show=False),
    "ModelSummary": lambda: callbacks.ModelSummary(sizes=True),
    "Throughput": callbacks.Throughput,
    "LearningRateMonitor": callbacks.LearningRateMonitor,
    "CompileTime": callbacks.CompileTime,
    "ProgressBar": callbacks.ProgressBar,
    "LambdaCallback": lambda: callbacks.LambdaCallback(on_step_end=lambda run: None),
}


def trainer_with(given: list[callbacks.Callback], run_dir: Path) -> Any:
    policy = CheckpointConfig(every="20 steps", best=0, by=None)
    options: Any = {"max_epochs": 1, "log_every": "9 steps", "loggers": "jsonl", "checkpoint": policy}
    return quiet(**options, run_dir=run_dir, callbacks=given)


def test_no_host_sync_in_an_update_that_is_no_log_point(tmp_path: Path, monkeypatch: Any) -> None:
    # On a CPU, where a read waits for nothing, it reads a sum to save a comparison.
    finite: Any = lambda group: torch.stack([torch.isfinite(each).all() for each in group])  # noqa: E731
    monkeypatch.setattr("drivetrain.engine.skip._finite_on_cpu", finite)
    reads = {}
    for name, make in {**CHANGE, **WATCH}.items():
        steps = trainer_with([make()], tmp_path / name).steps(Language(), batches(20))
        next(steps), next(steps)
        with HostSyncs() as mode:
            for _ in range(6):  # the third update to the eighth
                next(steps)
        steps.close()
        reads[name] = mode.reads
    assert not {name: each for name, each in reads.items() if each}


def test_callbacks_that_watch_change_no_number(tmp_path: Path) -> None:
    trainer_with([], tmp_path / "plain").fit(plain := Language(), batches(20))
    for name, make in WATCH.items():
        trainer_with([make()], tmp_path / name).fit(watched := Language(), batches(20))
        assert weights(watched) == weights(plain), name
