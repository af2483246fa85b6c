"""``python -m tests.checkpoint.make_corpus``, once for each format version: what it writes is read always."""

import sys
from pathlib import Path

import torch
from tests.support.storage import everything
from tests.support.tasks import Regression, pairs, quiet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import FORMAT_VERSION, DirectoryCheckpointIO, Snapshot, pack
from drivetrain.distributed.ranks import Ranks
from drivetrain.testing.distributed import run_distributed

CORPUS = Path(__file__).parent / "corpus"


def grid() -> dict[str, torch.Tensor]:  # whole tensors whose sizes no number of ranks divides
    return {
        "rows": torch.arange(63.0).reshape(9, 7),
        "columns": torch.arange(-15, 0, dtype=torch.bfloat16).reshape(3, 5),
        "both": torch.arange(35.0, dtype=torch.float64).reshape(5, 7),
        "copied": torch.tensor([1, 2, 3]),
        "plain": torch.tensor(2.5),
        "few": torch.ones(1, 2),
        "größe/日本": torch.tensor([True, False]),
    }


def tree() -> dict[str, object]:  # every kind of value that a state may have
    return {
        "tuple": (1, (2.5, None)),
        "keys": {1: "one", "$x": "dollar"},
        "large": 1 << 80,
        "floats": [float("inf"), -0.0, 1e-320],
        "bytes": b"\0\xff",
        "tensor": torch.arange(3),
        "text": "Ünïcödé 😀",
    }


def sharded(path: str) -> None:  # what each rank does for a sharded checkpoint
    ranks = Ranks.of_job()
    columns = 1 if ranks.size < 4 else 2
    mesh = init_device_mesh("cpu", (ranks.size // columns, columns))
    cuts = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "copied": [Replicate(), Replicate()],
        "few": [Shard(0), Replicate()],
    }
    tensors = {
        name: distribute_tensor(whole, mesh, cuts[name]) if name in cuts else whole
        for name, whole in grid().items()
    }
    state, state_tensors = pack(tree())
    groups = {"model": tensors, "state": state_tensors}
    snapshot = Snapshot(groups, {"state": state}, {"steps": 3, "epoch": 1})
    DirectoryCheckpointIO(ranks=ranks).save(path, snapshot)


def run(directory: Path) -> None:
    policies = [
        CheckpointConfig(every="4 steps", keep_last=2, best=1),
        CheckpointConfig(every="1 epoch", keep_last=None, by="train/loss", best=1),
    ]
    trainer = quiet(max_epochs=2, run_dir=directory, checkpoint=policies, max_grad_norm=1.0)
    trainer.fit(Regression(), pairs(), pairs(4, seed=1))


def main() -> int:  # write the corpus of this version, if it is not there
    directory = CORPUS / f"v{FORMAT_VERSION}"
    if directory.exists():
        print(f"{directory} is there already, and is never written again", file=sys.stderr)
        return 1
    DirectoryCheckpointIO().save(str(directory / "everything"), everything(1.0))
    for size in (1, 2, 4):
        run_distributed(sharded, str(directory / f"sharded-by-{size}"), world_size=size)
    run(directory / "run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
