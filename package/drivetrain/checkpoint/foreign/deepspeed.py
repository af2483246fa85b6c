"""Import checkpoints that DeepSpeed's `save_checkpoint` wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.foreign.deepspeed_folder import Files, Table, find_files
from drivetrain.checkpoint.foreign.deepspeed_shards import NOT_SETTINGS, WEIGHT, Joined, Shapes, join_shards
from drivetrain.checkpoint.foreign.torch_archive import StoredTensor, TorchArchive
from drivetrain.checkpoint.format.manifest import IMPORTED, Snapshot
from drivetrain.checkpoint.format.tree import pack, well_formed
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.module_state import is_extra
from drivetrain.checkpoint.weights.rename import Rename, renamed
from drivetrain.core.errors import CheckpointError
from drivetrain.core.progress import Progress
from drivetrain.core.types import Json


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The result of `import_deepspeed`; its text is a line.

    Attributes:
        path: The new checkpoint.
        version: The version of the DeepSpeed that saved the folder; empty if unknown.
        stage: The stage of ZeRO.
        processes: The number of processes that saved it.
        updates: The number of updates made.
        tensors: The number of weights and buffers.
        moments: The number of parameters with an optimizer state.
        dropped: The names that `rename` dropped.
    """

    path: str
    version: str
    stage: int
    processes: int
    updates: int
    tensors: int
    moments: int
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line with what was imported and the version of DeepSpeed."""
        state = f"Adam's state of {self.moments} of them" if self.moments else "no optimizer's state"
        return (
            f"{self.path}: {self.tensors} tensors and {state}, after {self.updates} updates of DeepSpeed"
            f" {self.version or 'of an unknown version'} with ZeRO {self.stage} on {self.processes}"
            f" process{'es' if self.processes != 1 else ''}"
        )


def import_deepspeed(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    rename: Rename | None = None,
    weights_only: bool = False,
) -> ImportedCheckpoint:
    """Write a checkpoint from a folder that DeepSpeed's `save_checkpoint` wrote with ZeRO 1, 2 or 3.

    DeepSpeed is not needed. Its files are pickles; they are read without running or importing anything that
    they name. Weights are read in float32, as the optimizer had them. They and the states of Adam or AdamW
    are
    all in the CPU's memory at once: 12 bytes per parameter, and 16 while they are joined.

    Args:
        folder: The folder that was given to `save_checkpoint`, or the one inside with the files.
        path: The checkpoint to write; also an address. Its weights can be loaded (`task.load_weights`) and,
            with the optimizer's states, a run can resume from it.
        tag: The name of the folder inside; None uses the one in the file `latest`.
        rename: The rule from source names to the task's, as for `task.load_weights`.
        weights_only: Leave out the optimizer's states.

    Returns:
        A summary of the new checkpoint.

    Raises:
        CheckpointError: There is no such folder, a file is missing or damaged, the parallelism or optimizer
            is of another kind, or `path` exists.
        ConfigError: `rename` has a wrong type.
    """
    storage, target = DirectoryCheckpointIO(), os.fspath(path)
    if storage.exists(target):  # raise before reading the folder
        raise CheckpointError(f"there is a checkpoint at {target!r} already, and nothing is ever overwritten")
    files = find_files(folder, tag)
    where = repr(str(files.folder))
    with well_formed(where):
        model = _Model(files)
        joined = join_shards(files, model.shapes, weights_only=weights_only)
        weights, progress = model.state(joined), model.progress()
    new_names, dropped = renamed({name: name for name in weights}, rename, where)
    slots = _slots(joined, new_names)
    snapshot = Snapshot(
        tensors={"model": {new: weights[old] for new, old in new_names.items()}},
        progress=dict(progress.to_json()),
    )
    if slots:
        snapshot.tensors["optimizer"] = slots
        snapshot.objects["state"] = _state(joined, model.shapes, new_names)
    storage.save(target, snapshot)
    return ImportedCheckpoint(
        path=target,
        version=joined.version,
        stage=joined.stage,
        processes=len(files.optimizer),
        updates=progress.updates,
        tensors=len(new_names),
        moments=len({key.rpartition("/")[0] for key in slots}),
        dropped=tuple(dropped),
    )


class _Model:
    """The content of the model's files, without the optimizer's.

    Attributes:
        shapes: The shapes of the trained parameters.

    Args:
        files: The files.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        with TorchArchive(self._path(0)) as archive:
            self._table = Table(archive.content, repr(archive.path))
        self.shapes = self._shapes("param_shapes", list)

    def _path(self, rank: int) -> str:
        return str(self._files.folder / self._files.model[rank])

    def _shapes(self, key: str, kind: type) -> Shapes:
        given = self._table.need(key, kind) if kind is list else [self._table.get(key, kind, {})]
        for group in given:
            if not isinstance(group, dict) or not all(
                isinstance(name, str) and isinstance(shape, tuple) for name, shape in group.items()
            ):
                raise CheckpointError(f"{self._table.where} has {key!r} that are no shapes by name")
        return list(given)

    def progress(self) -> Progress:
        """Return the run's progress; DeepSpeed's files do not have its position in the epoch."""
        steps, skipped = (self._table.get(key, int, 0) for key in ("global_steps", "skipped_steps"))
        config = Table(self._table.get("ds_config", dict, {}), self._table.where)
        told = config.values.get("gradient_accumulation_steps")
        accumulated = told if isinstance(told, int) and told > 0 else 1  # it may also be "auto"
        progress = Progress(
            updates=steps - skipped,
            micro_batches=steps * accumulated,
            samples=self._table.get("global_samples", int, 0),
            skipped=skipped,
        )
        Progress().load_json(dict(progress.to_json()))  # raises if a value is not a count
        return progress

    def state(self, joined: Joined) -> dict[str, Tensor]:
        """Return all weights and buffers in the module's order, trained and not trained."""
        module = self._table.need("module", dict)
        shared = self._table.get("shared_params", dict, {})
        rest = self._untrained(module, joined, shared)
        state: dict[str, Tensor] = {}
        for name in [*module, *(joined.values.keys() - module.keys())]:
            first = name if name in joined.values else shared.get(name)
            if first in joined.values:
                state[name] = joined.values[first][WEIGHT]
            elif name in rest:
                state[name] = rest[name]
        return state

    def _untrained(
        self, module: Mapping[str, Any], joined: Joined, shared: Mapping[str, str]
    ) -> dict[str, Tensor]:
        wanted = {
            name: stored
            for name, stored in module.items()
            if name not in joined.values and name not in shared and not is_extra(name)
        }
        frozen = self._shapes("frozen_param_shapes", dict)[0] if joined.stage == 3 else {}
        with TorchArchive(self._path(0)) as archive:
            rest = {
                name: _in_float32(archive.read(self._stored(name, stored)))
                for name, stored in wanted.items()
                if name not in frozen
            }
        return {**rest, **self._frozen(frozen)}

    def _stored(self, name: str, value: Any) -> StoredTensor:
        if not isinstance(value, StoredTensor):
            raise CheckpointError(f"{self._table.where} has no tensor as {name!r} of the module")
        return value

    def _frozen(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Join the frozen parameters: in stage 3 each process has a part of them."""
        parts: dict[str, list[Tensor]] = {name: [] for name in shapes}
        for rank in range(len(self._files.model) if shapes else 0):
            with TorchArchive(self._path(rank)) as archive:
                own = Table(archive.content, repr(archive.path)).table("frozen_param_fragments")
                for name, kept in parts.items():
                    kept.append(archive.read(self._stored(name, own.values.get(name))).reshape(-1))
        joined = {name: torch.cat(kept) for name, kept in parts.items()}
        for name, shape in shapes.items():
            elements = torch.Size(shape).numel()
            if joined[name].numel() < elements:
                raise CheckpointError(
                    f"the files in {str(self._files.folder)!r} have {joined[name].numel()} of the {elements}"
                    f" numbers of {name!r}: one is missing, or of another checkpoint"
                )
            joined[name] = _in_float32(joined[name][:elements].view(shape))
        return joined


def _in_float32(tensor: Tensor) -> Tensor:
    """Widen a tensor that DeepSpeed has cast to 16 bits for the forward pass."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _slots(joined: Joined, new_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the optimizer's slots by their names in our checkpoints."""
    return {
        f"{new}/{slot}": value
        for new, old in new_names.items()
        for slot, value in joined.values.get(old, {}).items()
        if slot != WEIGHT
    }


def _state(joined: Joined, shapes: Shapes, new_names: Mapping[str, str]) -> Json:
    """Return the checkpoint's origin, and the optimizer's settings by group, as in a run's state."""
    renamed_to = {old: new for new, old in new_names.items()}
    groups: list[Json] = []
    for group in joined.groups:
        members = [name for index in group["params"] for name in shapes[index] if name in renamed_to]
        settings = {key: _plain(value) for key, value in group.items() if key not in NOT_SETTINGS}
        groups.append({**settings, "parameters": [renamed_to[name] for name in members]})
    decoupled = any(group.get("decoupled_weight_decay") for group in joined.groups)
    optimizer = {"optimizer": "AdamW" if decoupled else "Adam", "groups": groups}
    origin = {"program": "DeepSpeed", "version": joined.version, "stage": joined.stage}
    return pack({IMPORTED: origin, "optimizers": {"default": optimizer}})[0]


def _plain(value: Any) -> Json:
    """Return a setting as JSON; None for anything except numbers, texts and lists of these."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) else None
