"""Join the float32 weights that ZeRO has sharded, from the files of all processes.

Stages 1 and 2 concatenate the parameters of a group, and cut the result into one piece per process. Stage 3
cuts each parameter, and a process's piece is the concatenation of its parts. See DeepSpeed's
utils/zero_to_fp32.py, and `state_dict` in its runtime/zero/stage_1_and_2.py, stage3.py and
runtime/bf16_optimizer.py. The mappings that its checkpoint/ds_to_universal.py uses are wrong with
`round_robin_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.foreign.deepspeed_folder import Files, TypedEntries
from drivetrain.checkpoint.foreign.torch_archive import Foreign, StoredTensor, TorchArchive
from drivetrain.core.errors import CheckpointError

Shapes = list[dict[str, tuple[int, ...]]]
"""The shapes of the trained parameters by group, or in stage 3 by the pieces of a group."""


@dataclass(slots=True)
class Joined:
    """The content of the optimizer's files of all processes.

    Attributes:
        stage: The stage of ZeRO.
        version: The version of DeepSpeed; empty if unknown.
        weights: The trained parameters in float32, by name.
    """

    stage: int = 0
    version: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)


def join_shards(files: Files, shapes: Shapes) -> Joined:
    """Read the files of all processes, one after another."""
    found = Joined()
    pieces: list[list[Tensor]] = [[] for _ in shapes]
    paddings: list[Any] = []
    steps: list[float] = []
    for rank, file in enumerate(files.optimizer):
        with TorchArchive(str(files.folder / file)) as archive:
            share = _RankShard(archive, shapes, len(files.optimizer))
            if rank == 0:
                found.stage, found.version = share.stage, share.version
                steps, paddings = share.steps(), share.paddings()
            elif (share.stage, share.steps()) != (found.stage, steps):
                raise CheckpointError(
                    f"{archive.path!r} is of another checkpoint than the first process's file"
                )
            for index, own in enumerate(pieces):
                own.append(share.read(index))
    for index, own in enumerate(pieces):
        padding = paddings[index] if index < len(paddings) else []
        try:
            found.weights.update(_join(own, shapes[index], padding, found.stage))
        except ValueError as error:
            raise CheckpointError(
                f"the pieces of group {index} in {str(files.folder)!r} are not as ZeRO {found.stage} divides"
                f" them among {len(files.optimizer)} processes: {error}. A file is from another checkpoint,"
                " or from an unsupported version of DeepSpeed"
            ) from None
        own.clear()
    return found


def _join(
    pieces: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], stage: int
) -> dict[str, Tensor]:
    """Join the parameters of a group.

    Args:
        paddings: The number of padding elements after each parameter; empty if there is no padding.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    values: dict[str, Tensor] = {}
    position = 0
    if stage == 3:
        needed = sum(-(-size // len(pieces)) for size in sizes.values())
        if min(piece.numel() for piece in pieces) < needed:
            raise ValueError(f"each must have {needed} numbers")
        for name, size in sizes.items():
            room = -(-size // len(pieces))
            parts = [piece[position : position + room] for piece in pieces]
            values[name] = torch.cat(parts)[:size].view(shapes[name])
            position += room
        return values
    gaps = list(paddings) or [0] * len(shapes)
    needed, there = sum(sizes.values()) + sum(gaps), sum(piece.numel() for piece in pieces)
    # The end is padded so that it can be divided, with less than twice the number of processes.
    if len(gaps) != len(shapes) or not needed <= there < needed + 2 * len(pieces):
        raise ValueError(f"they have {there} numbers, and {needed} belong there")
    whole = torch.cat(list(pieces))
    for (name, size), gap in zip(sizes.items(), gaps, strict=True):
        values[name] = whole[position : position + size].view(shapes[name])
        position += size + gap
    return values


class _RankShard:
    """The file of one process."""

    def __init__(self, archive: TorchArchive, shapes: Shapes, size: int) -> None:
        self._archive = archive
        top = TypedEntries(archive.content, repr(archive.path))
        self._state = state = top.table("optimizer_state_dict")
        self.version = str(top.get("ds_version", str) or state.get("ds_version", str, ""))
        state.values.setdefault("ds_version", self.version or None)
        self.stage = _stage(state)
        _check_processes(state, size)
        flat = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        self._weights: list[Any] = state.need(flat, list)
        if len(self._weights) != len(shapes):
            raise CheckpointError(
                f"{state.where} has {len(self._weights)} pieces of weights, the model's file the names of"
                f" {len(shapes)}"
            )

    def read(self, index: int) -> Tensor:
        """Read this process's piece of a group."""
        stored = self._weights[index]
        if not isinstance(stored, StoredTensor) or not stored.dtype.is_floating_point:
            raise CheckpointError(f"{self._state.where} has no numbers as the weights of group {index}")
        return self._archive.read(stored).reshape(-1).float()

    def paddings(self) -> list[Any]:
        """Return the number of padding elements after each parameter, by group."""
        told: list[Any] = self._state.get("param_alignment_paddings", list, [])
        for each in told:
            if not isinstance(each, list) or not all(isinstance(gap, int) and gap >= 0 for gap in each):
                raise CheckpointError(f"{self._state.where} has paddings that are not numbers")
        return told

    def steps(self) -> list[float]:
        """Return the counts of steps that the optimizer's state has, which all processes' files share."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = self._state.values.get(key)
        slots = base.get("state") if isinstance(base, dict) else None
        told = [each.get("step") for each in slots.values() if isinstance(each, dict)] if slots else []
        counts = [
            self._archive.read(each).item() if isinstance(each, StoredTensor) and each.elements == 1 else each
            for each in told
        ]
        return [float(each) for each in counts if isinstance(each, (int, float))]


def _stage(state: TypedEntries) -> int:
    told = state.get("zero_stage", (Foreign, int))
    number = told.args[0] if isinstance(told, Foreign) and told.args else told
    if number is None and "single_partition_of_fp32_groups" in state.values:
        return 1  # DeepSpeed's optimizer for bfloat16 does not store it
    if isinstance(number, bool) or number not in (1, 2, 3):
        raise CheckpointError(
            f"{state.where} has ZeRO stage {number}{state.version()}; only stages 1, 2 and 3 are imported"
        )
    return int(number)


def _check_processes(state: TypedEntries, there: int) -> None:
    told = state.get("partition_count", (int, list), there)
    counts = told if isinstance(told, list) else [told]
    if counts != [there] * len(counts):
        raise CheckpointError(
            f"{state.where} was saved by {max(counts)} processes, and there are files of {there}. Copy all"
            " files, and none of another checkpoint"
        )
