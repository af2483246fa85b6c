"""The peak memory of a sharded start from pretrained weights: `python benchmarks/sharded_start_memory.py`.

Two processes start a language model of 200M parameters (0.8 GB in float32) from a folder of safetensors
files, once made whole in each process and once on the meta device. A small fit of the same kind goes first,
so that imports, process groups and compiled kernels count for neither. Then Linux' mark of the largest
resident memory is cleared, and read again when the fit is about to make its first step (`on_fit_start`). A
page of a mapped file counts as long as it is mapped.

    OMP_NUM_THREADS=1 python benchmarks/sharded_start_memory.py [--zero] [--processes 2]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import DeepSpeedConfig, FSDPConfig, LambdaCallback, OptimizerConfig, TaskModule, Trainer
from drivetrain.checkpoint import export_weights
from drivetrain.testing.distributed import run_distributed

WIDTH, BLOCKS, VOCABULARY = 1024, 20, 32_000


class Block(nn.Module):
    """A feed-forward block of 8.4M parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the layers make of it."""
        result: Tensor = x + self.narrow(self.wide(self.norm(x)).relu())
        return result


class Model(TaskModule):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) / 1024))
        return logits

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        """Return the cross entropy of the next token."""
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> OptimizerConfig:
        """Return SGD, which has no state."""
        return OptimizerConfig("sgd", lr=1e-4)


def status(name: str) -> int:
    """Return a size in bytes that Linux has of this process: "VmRSS", or "VmHWM" for the largest."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def measured(folder: str, strategy: Any, processes: int, device: str) -> tuple[float, float]:
    """Return the peak of this process in parts of the model's bytes, and the loss of the second step."""
    peaks: list[int] = []
    look = LambdaCallback(on_fit_start=lambda run: peaks.append(status("VmHWM")))
    options: dict[str, Any] = {"progress_bar": False, "checkpoint": False, "loggers": (), "max_steps": 2}
    trainer = Trainer(strategy=strategy, devices=processes, callbacks=[look], **options)
    data = [torch.arange(8).reshape(1, 8)] * 2 * processes
    trainer.fit(Model(8, 2, 16), data)
    with torch.device(device):
        Model(8, 2, 16)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    with torch.device(device):
        task = Model()
    size = sum(each.nbytes for each in task.parameters())
    task.load_weights(folder)
    result = trainer.fit(task, data)
    return (peaks[-1] - before) / size, result.metrics["train/loss"]


def export(folder: str) -> None:
    """Write the weights."""
    torch.manual_seed(0)
    weights = Model().state_dict()
    del weights["head.weight"]  # tied
    export_weights(weights, os.path.join(folder, "model.safetensors"), max_shard_size="300 MB")


def main(arguments: list[str]) -> None:
    """Print the peak of each process under both starts, and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zero", action="store_true", help='"zero3" instead of "fsdp"')
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    strategy: Any = FSDPConfig(gather_at_end=False)
    if options.zero:
        strategy = DeepSpeedConfig(stage=3, gather_at_end=False)
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(export, folder, world_size=1)  # which leaves no memory in this process
        for device in ("cpu", "meta"):
            found = run_distributed(
                measured, folder, strategy, options.processes, device, world_size=options.processes
            )
            for rank, (peak, loss) in enumerate(found):
                print(f"made on {device:<4}  rank {rank}  peak {peak:.2f} of the model  loss {loss!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
