"""What the manifest of a large sharded run takes: planned saves of Llama 70B with AdamW on simulated ranks.

    python benchmarks/manifest.py --ranks 1024 4096

Each row is measured in a process of its own, with torch's fake process group: the tensors are `DTensor`s
whose local parts are never touched. The plan, the manifest and the plan of a load are the real ones. Only the
files of tensors are not written. Seconds are the processor's, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from drivetrain.checkpoint import Manifest
from drivetrain.checkpoint.format.manifest import SavePlan
from drivetrain.checkpoint.format.records import FileRecord, file_name
from drivetrain.checkpoint.saving.sharding import box_to_read, is_sharded, plan_save
from drivetrain.distributed.ranks import Ranks

T = TypeVar("T")


def shapes(layers: int = 80, width: int = 8192) -> dict[str, tuple[int, ...]]:
    """The parameters of Llama 70B, or of one like it with fewer layers and another width."""
    inner, heads = width * 7 // 2, width // 8
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, width)}
    for number in range(layers):
        for name, shape in {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (heads, width),
            "self_attn.v_proj": (heads, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            found[f"model.layers.{number}.{name}.weight"] = shape
    return {**found, "model.norm.weight": (width,), "lm_head.weight": (32000, width)}


def state(parameters: dict[str, tuple[int, ...]], ranks: int, rank: int) -> dict[str, dict[str, Tensor]]:
    """Weights, AdamW's moments and counts as `fully_shard` leaves them on one of the ranks.

    To be called within the fake process group of that rank.
    """
    mesh = init_device_mesh("cpu", (ranks,))

    def rows(shape: tuple[int, ...]) -> Tensor:
        chunk = -(-shape[0] // ranks)
        local = torch.empty((max(0, min(chunk, shape[0] - rank * chunk)), *shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )

    optimizer: dict[str, Tensor] = {}
    for name, shape in parameters.items():
        optimizer[f"{name}/exp_avg"] = rows(shape)
        optimizer[f"{name}/exp_avg_sq"] = rows(shape)
        optimizer[f"{name}/step"] = torch.tensor(0.0)
    return {"model": {name: rows(shape) for name, shape in parameters.items()}, "optimizer": optimizer}


class Simulated(Ranks):
    """One of many ranks, in a process alone: what rank 0 broadcasts is given to the others beforehand."""

    sent: Any = None

    def first(self, act: Callable[[], T]) -> T:
        """See `Ranks.first`."""
        value: T = act() if self.rank == 0 else pickle.loads(type(self).sent)
        if self.rank == 0:
            type(self).sent = pickle.dumps(value)
        return value

    def together(self, act: Callable[[], T]) -> list[T]:
        """See `Ranks.together`."""
        return [act()]


def planned(parameters: dict[str, tuple[int, ...]], ranks: int, rank: int) -> tuple[SavePlan, Any, float]:
    """The plan that one of the ranks makes, its state, and the seconds that the plan took."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        tensors = state(parameters, ranks, rank)
        start = time.process_time()
        plan = plan_save(tensors, (), Simulated(rank, ranks))
        return plan, tensors, time.process_time() - start
    finally:
        torch.distributed.destroy_process_group()


def manifest_of(plan: SavePlan) -> Manifest:
    """The manifest of a planned save, with the sizes and hashes made up."""
    files = {}
    for group, records in plan.records.items():
        writers = (record.writers((0,) * len(record.shape), record.shape) for record in set(records.values()))
        for number in sorted(set().union(*writers)):
            files[file_name(group, number, plan.processes)] = FileRecord(1 << 27, "0" * 32)
    return Manifest(files, plan.records, {"steps": 1}, {}, processes=plan.processes)


def planned_reads(manifest: Manifest, tensors: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    """How many files of each group a rank opens to load its part."""
    opened = {}
    for group, records in manifest.tensors.items():
        numbers = set()
        for name, record in records.items():
            pattern = tensors[group][name]
            box = box_to_read(name, record.shape, pattern if is_sharded(pattern) else None)
            if all(box[1]):
                numbers |= record.writers(*box)
        opened[group] = len(numbers)
    return opened


def measure(ranks: int, layers: int = 80, width: int = 8192) -> dict[str, float]:
    """Measure one row: bytes of the manifest and the plan, seconds, files that a rank opens, and memory."""
    parameters = shapes(layers, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan, tensors, plan_seconds = planned(parameters, ranks, 0)
    manifest = manifest_of(plan)
    start = time.process_time()
    data = manifest.dump()
    write_seconds = time.process_time() - start
    start = time.process_time()
    parsed = Manifest.parse(data)
    read_seconds = time.process_time() - start
    assert parsed.tensors == plan.records
    start = time.process_time()
    opened = planned_reads(parsed, tensors)
    place_seconds = time.process_time() - start
    _, last, last_seconds = planned(parameters, ranks, ranks - 1)
    return {
        "ranks": ranks,
        "tensors": sum(map(len, plan.records.values())),
        "manifest_bytes": len(data),
        "sent_bytes": len(Simulated.sent),
        "plan_seconds": plan_seconds,
        "last_rank_plan_seconds": last_seconds,
        "write_seconds": write_seconds,
        "read_seconds": read_seconds,
        "place_seconds": place_seconds,
        "files_opened": sum(opened.values()),
        "files_opened_by_the_last": sum(planned_reads(parsed, last).values()),
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one is not None:
        print(json.dumps(measure(parsed.one, parsed.layers)))
        return 0
    columns = ("ranks", "tensors", "manifest KiB", "sent KiB", "plan s", "last rank's s")
    columns += ("write s", "read s", "place s", "files opened", "peak MiB")
    print(f"| {' | '.join(columns)} |")
    print(f"|{' ---: |' * len(columns)}")
    for ranks in parsed.ranks:
        command = [sys.executable, __file__, "--one", str(ranks), "--layers", str(parsed.layers)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600).stdout)
        cells = [f"{row['ranks']}", f"{row['tensors']}"]
        cells += [f"{row[name] / 1024:.0f}" for name in ("manifest_bytes", "sent_bytes")]
        for name in ("plan", "last_rank_plan", "write", "read", "place"):
            cells.append(f"{row[f'{name}_seconds']:.2f}")
        cells += [f"{row['files_opened']} and {row['files_opened_by_the_last']}", f"{row['peak_mib']:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
