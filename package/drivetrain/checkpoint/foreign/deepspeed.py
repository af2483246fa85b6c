"""Import the weights of checkpoints that DeepSpeed's `save_checkpoint` wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.foreign.deepspeed_folder import Files, TypedEntries, find_files
from drivetrain.checkpoint.foreign.deepspeed_shards import Joined, Shapes, join_shards
from drivetrain.checkpoint.foreign.torch_archive import StoredTensor, TorchArchive
from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tree import well_formed
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.module_state import is_extra
from drivetrain.checkpoint.weights.rename import Rename, renamed
from drivetrain.core.errors import CheckpointError
from drivetrain.core.progress import Progress


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The result of `import_deepspeed`; its text is a line.

    Attributes:
        path: The new checkpoint.
        version: The version of the DeepSpeed that saved the folder; empty if unknown.
        stage: The stage of ZeRO.
        processes: The number of processes that saved it.
        steps: The number of steps made.
        tensors: The number of weights and buffers.
        dropped: The names that `rename` dropped.
    """

    path: str
    version: str
    stage: int
    processes: int
    steps: int
    tensors: int
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.tensors} tensors, after {self.steps} steps of DeepSpeed"
            f" {self.version or 'of an unknown version'} with ZeRO {self.stage} on {self.processes}"
            f" process{'es' if self.processes != 1 else ''}"
        )


def import_deepspeed(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    tag: str | None = None,
    rename: Rename | None = None,
) -> ImportedCheckpoint:
    """Write a checkpoint of the weights that DeepSpeed's `save_checkpoint` wrote with ZeRO 1, 2 or 3.

    DeepSpeed is not needed. Its files are pickles; they are read without running or importing anything that
    they name. Weights are read in float32, as the optimizer had them, and are all in the CPU's memory at
    once. The optimizer's states are not read.

    Args:
        folder: The folder that was given to `save_checkpoint`, or the one inside with the files.
        path: The checkpoint to write; also an address. `task.load_weights` takes it.
        tag: The name of the folder inside; None uses the one in the file `latest`.
        rename: The rule from source names to the task's, as for `task.load_weights`.

    Returns:
        A summary of the new checkpoint.

    Raises:
        CheckpointError: There is no such folder, a file is missing or damaged, the parallelism is of
            another kind, or `path` exists.
        ConfigError: `rename` has a wrong type.
    """
    storage, target = DirectoryCheckpointIO(), os.fspath(path)
    if storage.exists(target):  # raise before reading the folder
        raise CheckpointError(f"there is a checkpoint at {target!r} already, and nothing is ever overwritten")
    files = find_files(folder, tag)
    where = repr(str(files.folder))
    with well_formed(where):
        model = _Model(files)
        joined = join_shards(files, model.shapes)
        weights, progress = model.state(joined), model.progress()
    new_names, dropped = renamed({name: name for name in weights}, rename, where)
    snapshot = Snapshot(
        tensors={"model": {new: weights[old] for new, old in new_names.items()}},
        progress=dict(progress.to_json()),
    )
    storage.save(target, snapshot)
    return ImportedCheckpoint(
        path=target,
        version=joined.version,
        stage=joined.stage,
        processes=len(files.optimizer),
        steps=progress.steps,
        tensors=len(new_names),
        dropped=tuple(dropped),
    )


class _Model:
    """The content of the model's files, without the optimizer's."""

    def __init__(self, files: Files) -> None:
        self._files = files
        with TorchArchive(self._path(0)) as archive:
            self._table = TypedEntries(archive.content, repr(archive.path))
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
        config = TypedEntries(self._table.get("ds_config", dict, {}), self._table.where)
        told = config.values.get("gradient_accumulation_steps")
        accumulated = told if isinstance(told, int) and told > 0 else 1  # it may also be "auto"
        progress = Progress(
            steps=steps - skipped,
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
        for name in [*module, *(joined.weights.keys() - module.keys())]:
            first = name if name in joined.weights else shared.get(name)
            if first in joined.weights:
                state[name] = joined.weights[first]
            elif name in rest:
                state[name] = rest[name]
        return state

    def _untrained(
        self, module: Mapping[str, Any], joined: Joined, shared: Mapping[str, str]
    ) -> dict[str, Tensor]:
        wanted = {
            name: stored
            for name, stored in module.items()
            if name not in joined.weights and name not in shared and not is_extra(name)
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
                own = TypedEntries(archive.content, repr(archive.path)).table("frozen_param_fragments")
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
