"""What a run left behind, in a form that two runs can be compared by."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack, resolve, unpack


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Tensors as their bytes, so that equality is of every bit (also of NaN, and of the sign of zero)."""
    found = {}
    for name, each in tensors.items():
        flat = each.detach().cpu().reshape(-1).contiguous()  # as bytes: numpy has no bfloat16, nor float8
        found[name] = each.dtype, tuple(each.shape), flat.view(torch.uint8).numpy().tobytes()
    return found


def weights(module: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return bits(module.state_dict())


def state_of(snapshot: Snapshot) -> dict[str, Any]:  # everything of a checkpoint but wall times
    tree = unpack(snapshot.objects["state"], snapshot.tensors["state"])
    assert isinstance(tree, dict)
    tree.pop("timing")
    structure, tensors = pack(tree)
    return {
        "weights": bits(snapshot.tensors["model"]),
        "optimizer": bits(snapshot.tensors["optimizer"]),
        "state": structure,
        "state's tensors": bits(tensors),
        "progress": {name: value for name, value in snapshot.progress.items() if name != "seconds"},
        "metrics": dict(snapshot.metrics),
    }


def outcome(run_dir: Path) -> dict[str, Any]:
    """The last checkpoint of a run but for times, its log files and weights, and what it keeps as best."""
    found = state_of(DirectoryCheckpointIO().load(resolve(run_dir)))
    for name in ("metrics.csv", "metrics.jsonl", "model.safetensors"):
        found[name] = (run_dir / name).read_bytes()
    index = json.loads((run_dir / "checkpoints" / "index.json").read_text(encoding="utf-8"))
    kept = ("step", "metrics", "resume", "best")
    found["kept"] = [tuple(each[name] for name in kept) for each in _entries(index)]
    return found


def _entries(node: Any) -> list[dict[str, Any]]:
    # Wherever they stand in the file: the format of the index is tested elsewhere.
    if isinstance(node, dict):
        return [node] if "best" in node else [e for value in node.values() for e in _entries(value)]
    return [e for value in node for e in _entries(value)] if isinstance(node, list) else []


class Counting(TorchDispatchMode):  # counts what torch computes
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
