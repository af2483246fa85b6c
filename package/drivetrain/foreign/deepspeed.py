"""A checkpoint that DeepSpeed's own `save_checkpoint` wrote, as one of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.format import IMPORTED, Snapshot
from drivetrain.checkpoint.io import DirectoryCheckpointIO
from drivetrain.checkpoint.torch_archive import StoredTensor, TorchArchive
from drivetrain.checkpoint.tree import pack, well_formed
from drivetrain.errors import CheckpointError
from drivetrain.foreign.deepspeed_folder import Files, Table, find_files
from drivetrain.foreign.deepspeed_shards import NOT_SETTINGS, WEIGHT, Joined, Shapes, join_shards
from drivetrain.module_state import is_extra
from drivetrain.progress import Progress
from drivetrain.renaming import Rename, renamed
from drivetrain.types import Json


@dataclass(frozen=True)
class ImportedCheckpoint:
    """The result of `import_deepspeed`; its text is a line.

    Attributes:
        path: The new checkpoint.
        version: Of the DeepSpeed that saved the folder; empty if it does not tell.
        stage: Of ZeRO.
        processes: How many had saved it.
        updates: How many updates the weights have had.
        tensors: How many weights and buffers there are.
        moments: Of how many parameters the optimizer's state is there.
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
        """The line: what was imported, and from which DeepSpeed."""
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

    DeepSpeed is not needed. Its files are pickles; they are read without running, or importing, anything
    that they name. Weights are taken in float32, as the optimizer had them. All of them, and the states of
    Adam or AdamW, are in the CPU's memory at once: 12 bytes for each parameter, and 16 while they are put
    together.

    Args:
        folder: The one that was given to `save_checkpoint`, or the one inside with the files.
        path: The checkpoint to write; also an address. It can be loaded from (`task.load_weights`), and,
            with the states, be resumed from.
        tag: The name of the folder inside; None for what the file `latest` says.
        rename: From names there to the task's, as for `task.load_weights`.
        weights_only: Leave the optimizer's states out.

    Returns:
        What was written.

    Raises:
        CheckpointError: No such folder, a missing or damaged file, another kind of parallelism or optimizer;
            or something is at `path` already.
        ConfigError: `rename` is none.
    """
    storage, target = DirectoryCheckpointIO(), os.fspath(path)
    if storage.exists(target):  # said before all of the folder is read
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
    """The content of the files that are not the optimizer's.

    Attributes:
        shapes: Of the trained parameters.

    Args:
        files: Where they are.
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
        """Where the run was; what it has seen of an epoch is not told."""
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
        Progress().load_json(dict(progress.to_json()))  # which refuses what is no count
        return progress

    def state(self, joined: Joined) -> dict[str, Tensor]:
        """All weights and buffers in the module's order, trained and not trained."""
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
        """Join the parameters that were not trained: in stage 3 each process has a part of them."""
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
    """Widen what DeepSpeed has cast to 16 bits for the forward pass."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _slots(joined: Joined, new_names: Mapping[str, str]) -> dict[str, Tensor]:
    """The optimizer's slots by the names that checkpoints have for them."""
    return {
        f"{new}/{slot}": value
        for new, old in new_names.items()
        for slot, value in joined.values.get(old, {}).items()
        if slot != WEIGHT
    }


def _state(joined: Joined, shapes: Shapes, new_names: Mapping[str, str]) -> Json:
    """Where the checkpoint comes from, and the optimizer's settings: by group, as those of a run."""
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
    """A setting as JSON; what is no number, text or list of these is of no use to another program."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) else None
