"""The memory that training state takes in each process: `python benchmarks/distributed_memory.py`.

A GPT is trained for two steps by each strategy, and in the second, when all gradients are there and the
step is about to be made, every tensor that is alive and was not before the run is counted once. That is
compared with the bytes for a parameter that the paper gives (Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models", SC 2020, section 3): parameters and gradients in 16 bits, 2 each,
and 12 for Adam's float32 weights and two moments; and with 4, 4 and 8 in float32, where a strategy keeps no
second copy of the weights.

    python benchmarks/distributed_memory.py [--processes 2] [--width 512] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from distributed import Task
from drivetrain import DeepSpeedConfig, FSDPConfig, LambdaCallback, Trainer
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.deepspeed.strategy import DeepSpeed
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed
from workloads import GPT, GPT_10M

BUCKET = 500_000
"""Gradients that DeepSpeed reduces together: the paper's figures leave buffers out, and so they are small."""

ROWS = [
    ("ddp", "32", lambda n: 16.0),
    ("fsdp", "32", lambda n: 16.0 / n),
    ("fsdp", "bf16-mixed", lambda n: 16.0 / n),
    ("zero1", "bf16-mixed", lambda n: 4 + 12 / n),
    ("zero2", "bf16-mixed", lambda n: 2 + 14 / n),
    ("zero3", "bf16-mixed", lambda n: 16.0 / n),
]
"""Strategy, precision, and bytes for a parameter in each of n processes."""


def strategy_of(name: str, processes: int) -> Any:
    """A strategy by its name."""
    if name == "ddp":
        return DDP(world_size=processes)
    if name == "fsdp":
        return FSDP(FSDPConfig(), world_size=processes)
    zero = {
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
        "stage3_max_live_parameters": BUCKET,
        "stage3_param_persistence_threshold": 0,
    }
    config = DeepSpeedConfig(stage=int(name[-1]), config={"zero_optimization": zero}, gather_at_end=False)
    return DeepSpeed(config, world_size=processes)


def alive() -> dict[int, int]:
    """The bytes of every tensor's memory, by its address."""
    found: dict[int, int] = {}
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, Tensor) and each.device.type == "cpu" and not hasattr(each, "to_local"):
            try:
                storage = each.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue  # one that has no memory
            found[storage.data_ptr()] = storage.nbytes()
    return found


def measure(name: str, precision: str, width: int) -> tuple[float, int]:
    """Bytes for a parameter in this process, and the number of parameters."""
    processes = torch.distributed.get_world_size()
    before = set(alive())
    counted: list[int] = []

    def count(run: Any) -> None:
        if run.progress.steps == 1:
            counted.append(sum(size for place, size in alive().items() if place not in before))

    work = replace(GPT_10M, model=lambda: GPT(width=width, heads=width // 64))
    task = Task(work)
    number = sum(each.numel() for each in task.parameters())
    Trainer(
        max_steps=2, precision=precision, checkpoint=False, loggers=(), progress_bar=False,
        strategy=strategy_of(name, processes), callbacks=[LambdaCallback(on_before_optimizer_step=count)],
    ).fit(task, work.batches(2 * processes, work.rows))  # fmt: skip
    return counted[0] / number, number


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    rows = []
    print(f"{'bytes for a parameter, in each process':40}{'measured':>10}{'theory':>9}{'ratio':>8}")
    for name, precision, theory in ROWS:
        found, number = run_distributed(
            measure, name, precision, arguments.width, world_size=arguments.processes, timeout=1800
        )[0]
        expected = theory(arguments.processes)
        rows.append({"strategy": name, "precision": precision, "measured": found, "theory": expected})
        print(f"{name + ', ' + precision:40}{found:10.2f}{expected:9.2f}{found / expected:8.3f}", flush=True)
    print(f"{number:,} parameters")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
