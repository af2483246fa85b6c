"""Join the float32 weights and Adam's moments that ZeRO has sharded, from the files of all processes.

Stages 1 and 2 concatenate the parameters of a group, and cut the result into one piece per process. Stage 3
cuts each parameter, and a process's piece is the concatenation of its parts. The optimizer's slots are stored
in separate pieces in the same way. See DeepSpeed's utils/zero_to_fp32.py, and `state_dict` in its
runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py. The mappings that its
checkpoint/ds_to_universal.py uses are wrong with `round_robin_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.foreign.deepspeed_folder import Files, Table
from drivetrain.checkpoint.foreign.torch_archive import Foreign, StoredTensor, TorchArchive
from drivetrain.core.errors import CheckpointError

WEIGHT = "fp32"
"""The key of the weight among a parameter's values."""

STEP = "step"

_SLOTS = ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
NOT_SETTINGS = frozenset({"params", "fused", "foreach", "capturable", "differentiable", STEP})
"""Entries of an optimizer's group that do not affect its result."""

Shapes = list[dict[str, tuple[int, ...]]]
"""The shapes of the trained parameters by group, or in stage 3 by the pieces of a group."""


@dataclass(slots=True)
class Joined:
    """The content of the optimizer's files of all processes.

    Attributes:
        stage: The stage of ZeRO.
        version: The version of DeepSpeed; empty if unknown.
        values: For each trained parameter, `WEIGHT` in float32, and the optimizer's slots if they exist.
        groups: The settings of the optimizer's groups, with the names under "parameters".
    """

    stage: int = 0
    version: str = ""
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def join_shards(files: Files, shapes: Shapes, *, weights_only: bool) -> Joined:
    """Read the files of all processes, one after another.

    Args:
        files: The files.
        shapes: The shapes in the model's file.
        weights_only: Leave out the optimizer's slots.

    Raises:
        CheckpointError: Something is missing or malformed, or the slots are not Adam's.
    """
    found = Joined()
    pieces: dict[tuple[int, str], list[Tensor]] = {}
    paddings: list[Any] = []
    steps: dict[int, float] = {}
    for rank, file in enumerate(files.optimizer):
        with TorchArchive(str(files.folder / file)) as archive:
            share = _Share(archive, shapes, len(files.optimizer), weights_only)
            if rank == 0:
                found.stage, found.version, found.groups = share.stage, share.version, share.groups
                steps, paddings = share.steps(), share.paddings()
            elif (share.stage, share.steps()) != (found.stage, steps):
                raise CheckpointError(
                    f"{archive.path!r} is of another checkpoint than the first process's file"
                )
            own = share.pieces()
            if rank and own.keys() != pieces.keys():
                key = min(own.keys() ^ pieces.keys())
                raise CheckpointError(
                    f"{archive.path!r} and the first process's file do not both have {key[1]!r} of group"
                    f" {key[0]}"
                )
            for key, stored in own.items():
                pieces.setdefault(key, []).append(share.read(key, stored))
    for index, slot in list(pieces):
        padding = paddings[index] if index < len(paddings) else []
        try:
            values = _join(pieces.pop((index, slot)), shapes[index], padding, found.stage)
        except ValueError as error:
            raise CheckpointError(
                f"the pieces of {slot!r} of group {index} in {str(files.folder)!r} are not as ZeRO"
                f" {found.stage} divides them among {len(files.optimizer)} processes: {error}. A file is from"
                " another checkpoint, or from an unsupported version of DeepSpeed"
            ) from None
        for name, value in values.items():
            found.values.setdefault(name, {})[slot] = value
            if index in steps:
                found.values[name][STEP] = torch.tensor(steps[index])
    return found


def _join(
    pieces: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int], stage: int
) -> dict[str, Tensor]:
    """Join the parameters of a group.

    Args:
        pieces: The piece of each process.
        shapes: The parameters' shapes, in order.
        paddings: The number of padding elements after each parameter; empty if there is no padding.
        stage: The stage of ZeRO.

    Raises:
        ValueError: The pieces have too few or too many elements.
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


class _Share:
    """The file of one process.

    Attributes:
        stage: The stage of ZeRO.
        version: The version of DeepSpeed.
        groups: As in `Joined`.

    Args:
        archive: The file.
        shapes: The shapes of the trained parameters.
        size: The number of processes with files.
        weights_only: Leave out the slots.
    """

    def __init__(self, archive: TorchArchive, shapes: Shapes, size: int, weights_only: bool) -> None:
        self._archive, self._shapes, self._size = archive, shapes, size
        top = Table(archive.content, repr(archive.path))
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
        self._slots: dict[Any, Any] = {}
        self.groups: list[dict[str, Any]] = []
        if not weights_only:
            self._read_optimizer()

    def _read_optimizer(self) -> None:
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        if isinstance(self._state.values.get(key), list):
            raise CheckpointError(
                f"{self._state.where} was saved with elastic_checkpoint, without the optimizer's settings."
                " Import the weights only"
            )
        base = self._state.table(key)
        self._slots = base.need("state", dict)
        self.groups = self._read_groups(base) if self._slots else []

    def pieces(self) -> dict[tuple[int, str], Any]:
        """Return this process's pieces of the weights and of the optimizer's slots, by group and slot."""
        pieces: dict[tuple[int, str], Any] = {}
        for index, weights in enumerate(self._weights):
            pieces[index, WEIGHT] = weights
            slots = self._slots.get(index, {})
            if not self._slots:
                continue
            if not isinstance(slots, dict) or set(slots) - {STEP} not in _SLOTS:
                there = ", ".join(map(str, slots)) or "nothing"
                raise CheckpointError(
                    f"{self._state.where} has {there} as the optimizer's state of group {index}. {_ADAM_ONLY}"
                )
            pieces.update({(index, slot): each for slot, each in slots.items() if slot != STEP})
        return pieces

    def read(self, key: tuple[int, str], stored: Any) -> Tensor:
        """Read a piece."""
        if not isinstance(stored, StoredTensor) or not stored.dtype.is_floating_point:
            raise CheckpointError(f"{self._state.where} has no numbers as {key[1]!r} of group {key[0]}")
        return self._archive.read(stored).reshape(-1).float()

    def paddings(self) -> list[Any]:
        """Return the number of padding elements after each parameter, by group."""
        told: list[Any] = self._state.get("param_alignment_paddings", list, [])
        for each in told:
            if not isinstance(each, list) or not all(isinstance(gap, int) and gap >= 0 for gap in each):
                raise CheckpointError(f"{self._state.where} has paddings that are not numbers")
        return told

    def steps(self) -> dict[int, float]:
        """Return the number of updates of each group; some optimizers store it in their settings."""
        steps = {}
        for index in range(len(self._shapes) if self._slots else 0):
            told = self._slots[index].get(STEP)
            if told is None:
                told = next((group.get(STEP) for group in self.groups if index in group["params"]), None)
            is_tensor = isinstance(told, StoredTensor) and told.elements == 1
            number = self._archive.read(told).item() if is_tensor else told
            if not isinstance(number, (int, float)):
                raise CheckpointError(
                    f"{self._state.where} does not say how many updates the moments have had"
                )
            steps[index] = float(number)
        return steps

    def _read_groups(self, base: Table) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = base.need("param_groups", list)
        for group in groups:
            if not isinstance(group, dict) or not _is_adam(group):
                raise CheckpointError(f"{base.where} has the settings of another optimizer. {_ADAM_ONLY}")
            if not set(group["params"]) <= set(range(len(self._shapes))):
                raise CheckpointError(f"{base.where} has settings of groups that do not exist")
        return groups


def _is_adam(group: dict[Any, Any]) -> bool:
    """Recognise Adam by its settings: RAdam and LAMB have slots of the same names with another meaning."""
    is_one = "betas" in group and ("amsgrad" in group or "bias_correction" in group)
    return is_one and "max_coeff" not in group and isinstance(group.get("params"), list)


_ADAM_ONLY = "only states of Adam and AdamW are imported; for another optimizer import the weights only"


def _stage(state: Table) -> int:
    """Return the stage of ZeRO in a file."""
    told = state.get("zero_stage", (Foreign, int))
    number = told.args[0] if isinstance(told, Foreign) and told.args else told
    if number is None and "single_partition_of_fp32_groups" in state.values:
        return 1  # DeepSpeed's optimizer for bfloat16 does not store it
    if isinstance(number, bool) or number not in (1, 2, 3):
        raise CheckpointError(
            f"{state.where} has ZeRO stage {number}{state.version()}; only stages 1, 2 and 3 are imported"
        )
    return int(number)


def _check_processes(state: Table, there: int) -> None:
    told = state.get("partition_count", (int, list), there)
    counts = told if isinstance(told, list) else [told]
    if counts != [there] * len(counts):
        raise CheckpointError(
            f"{state.where} was saved by {max(counts)} processes, and there are files of {there}. Copy all"
            " files, and none of another checkpoint"
        )
