"""What ZeRO has divided, read from the files of all processes: float32 weights and Adam's moments by name.

See `state_dict` in DeepSpeed's runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.torch_archive import Foreign, StoredTensor, TorchArchive
from drivetrain.errors import CheckpointError
from drivetrain.foreign.deepspeed_folder import Files, Table
from drivetrain.foreign.deepspeed_layout import Joining

WEIGHT = "fp32"
"""Names the weight among a parameter's values."""

STEP = "step"

_SLOTS = ({"exp_avg", "exp_avg_sq"}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
NOT_SETTINGS = frozenset({"params", "fused", "foreach", "capturable", "differentiable", STEP})
"""What an optimizer's group has that does not say what it computes."""

Shapes = list[dict[str, tuple[int, ...]]]
"""The shapes of the trained parameters, by group, or in stage 3 by the pieces that a group is made of."""


@dataclass(slots=True)
class Joined:
    """What the optimizer's files of all processes hold together.

    Attributes:
        stage: Of ZeRO.
        version: Of DeepSpeed; empty if it is not told.
        values: By trained parameter: `WEIGHT` in float32, and the optimizer's slots if they are there.
        groups: The settings of the optimizer's groups, with the names under "parameters".
    """

    stage: int = 0
    version: str = ""
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def join_shards(files: Files, shapes: Shapes, *, weights_only: bool) -> Joined:
    """Read the files of all processes, one after another.

    Args:
        files: Where they are.
        shapes: As the model's file tells them.
        weights_only: Leave the optimizer's slots where they are.

    Raises:
        CheckpointError: Something is missing, or not as DeepSpeed writes it; or the slots are not Adam's.
    """
    found = Joined()
    joinings: dict[tuple[int, str], Joining] = {}
    steps: dict[int, float] = {}
    for rank, file in enumerate(files.optimizer):
        with TorchArchive(str(files.folder / file)) as archive:
            share = _Share(archive, shapes, len(files.optimizer), weights_only)
            if rank == 0:
                found.stage, found.version, found.groups = share.stage, share.version, share.groups
                steps = share.steps()
            elif (share.stage, share.steps()) != (found.stage, steps):
                raise CheckpointError(
                    f"{archive.path!r} is of another checkpoint than the first process's file"
                )
            for key, stored in share.pieces().items():
                piece = share.read(key, stored)
                if rank == 0:
                    joinings[key] = share.joining(key, piece)
                if key not in joinings:
                    raise CheckpointError(
                        f"{archive.path!r} has {key[1]!r}, and the first process's file has not"
                    )
                joinings[key].add(rank, piece)
    for (index, slot), joining in joinings.items():
        joining.finish()
        for name, value in joining.values.items():
            found.values.setdefault(name, {})[slot] = value
            if index in steps:
                found.values[name][STEP] = torch.tensor(steps[index])
    return found


class _Share:
    """What one process has saved.

    Attributes:
        stage: Of ZeRO.
        version: Of DeepSpeed.
        groups: As in `Joined`.

    Args:
        archive: Its file.
        shapes: Of the trained parameters.
        size: How many processes there are files of.
        weights_only: Leave the slots out.
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
        """By group and slot: this process's piece of the weights, and of the optimizer's slots like them."""
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
        """The numbers of a piece."""
        if not isinstance(stored, StoredTensor) or not stored.dtype.is_floating_point:
            raise CheckpointError(f"{self._state.where} has no numbers as {key[1]!r} of group {key[0]}")
        return self._archive.read(stored).reshape(-1)

    def joining(self, key: tuple[int, str], first: Tensor) -> Joining:
        """What all pieces of a group's slot are put together in."""
        index, slot = key
        told = self._state.get("param_alignment_paddings", list, [])
        paddings = told[index] if index < len(told) else []
        if not isinstance(paddings, list) or not all(
            isinstance(each, int) and each >= 0 for each in paddings
        ):
            raise CheckpointError(f"{self._state.where} has paddings that are no numbers")
        where = f"the pieces of {slot!r} in {self._archive.path!r} and those beside it"
        return Joining(self._shapes[index], paddings, self.stage, self._size, first, where)

    def steps(self) -> dict[int, float]:
        """How many updates the moments of each group have had; some optimizers count in their settings."""
        steps = {}
        for index in range(len(self._shapes) if self._slots else 0):
            told = self._slots[index].get(STEP)
            if told is None:
                told = next((group.get(STEP) for group in self.groups if index in group["params"]), None)
            is_tensor = isinstance(told, StoredTensor) and told.elements == 1
            number = self._archive.read(told).item() if is_tensor else told
            if not isinstance(number, (int, float)):
                raise CheckpointError(
                    f"{self._state.where} does not tell how many updates the moments have had"
                )
            steps[index] = float(number)
        return steps

    def _read_groups(self, base: Table) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = base.need("param_groups", list)
        for group in groups:
            if not isinstance(group, dict) or not _is_adam(group):
                raise CheckpointError(f"{base.where} has the settings of another optimizer. {_ADAM_ONLY}")
            if not set(group["params"]) <= set(range(len(self._shapes))):
                raise CheckpointError(f"{base.where} has settings of groups that there are not")
        return groups


def _is_adam(group: dict[Any, Any]) -> bool:
    """By its settings: RAdam and LAMB have slots of the same names, and compute something else from them."""
    is_one = "betas" in group and ("amsgrad" in group or "bias_correction" in group)
    return is_one and "max_coeff" not in group and isinstance(group.get("params"), list)


_ADAM_ONLY = "Adam's states are imported, and those of AdamW; for another optimizer import the weights only"


def _stage(state: Table) -> int:
    """The stage of ZeRO that a file says it is of."""
    told = state.get("zero_stage", (Foreign, int))
    number = told.args[0] if isinstance(told, Foreign) and told.args else told
    if number is None and "single_partition_of_fp32_groups" in state.values:
        return 1  # its optimizer for bfloat16 does not tell
    if isinstance(number, bool) or number not in (1, 2, 3):
        raise CheckpointError(
            f"{state.where} is of ZeRO stage {number}{state.version()}; the stages 1, 2 and 3 are imported"
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
