"""Checkpoints: a directory of safetensors and JSON files that is whole or does not exist.

From the ground up:

- files: `filesystem` (the operations, on a disk), `places` (which file system a path is in), `remote` with
  `retries` (object stores), `strict_json`, `files` (durable writing, hashed reading)
- the format: `tensors` (safetensors), `tree` (Python values to JSON and tensors), `records` and `format`
  (the manifest), `migrations` (older versions)
- checkpoints: `sharding` (who writes and reads which part), `reading`, `io` (writing, and storage as the
  manager sees it)
- those of a run: `index`, `recovery` (after a kill), `background` (saving behind the loop), `manager` (what
  is kept), `locate` (what a path means), `inspection`, `description` and `compare` (for people)
- weights by themselves: `export`, `outgoing`, `weight_files`, `torch_file`, `dtypes`, `weights`
"""

from typing import TYPE_CHECKING

from drivetrain.lazy import exports

if TYPE_CHECKING:
    from drivetrain.checkpoint.config import CheckpointConfig
    from drivetrain.checkpoint.export import export_weights
    from drivetrain.checkpoint.filesystem import DamagedCheckpointError
    from drivetrain.checkpoint.format import FORMAT_VERSION, Manifest, Snapshot
    from drivetrain.checkpoint.io import CheckpointIO, DirectoryCheckpointIO, read_manifest, verify
    from drivetrain.checkpoint.locate import resolve
    from drivetrain.checkpoint.manager import CheckpointManager, SavedCheckpoint
    from drivetrain.checkpoint.torch_file import export_torch
    from drivetrain.checkpoint.tree import pack, unpack
    from drivetrain.checkpoint.weights import load_weights
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.checkpoint.config": ("CheckpointConfig",),
            "drivetrain.checkpoint.export": ("export_weights",),
            "drivetrain.checkpoint.filesystem": ("DamagedCheckpointError",),
            "drivetrain.checkpoint.format": ("FORMAT_VERSION", "Manifest", "Snapshot"),
            "drivetrain.checkpoint.io": ("CheckpointIO", "DirectoryCheckpointIO", "read_manifest", "verify"),
            "drivetrain.checkpoint.locate": ("resolve",),
            "drivetrain.checkpoint.manager": ("CheckpointManager", "SavedCheckpoint"),
            "drivetrain.checkpoint.torch_file": ("export_torch",),
            "drivetrain.checkpoint.tree": ("pack", "unpack"),
            "drivetrain.checkpoint.weights": ("load_weights",),
        },
    )

__all__ = [
    "FORMAT_VERSION",
    "CheckpointConfig",
    "CheckpointIO",
    "CheckpointManager",
    "DamagedCheckpointError",
    "DirectoryCheckpointIO",
    "Manifest",
    "SavedCheckpoint",
    "Snapshot",
    "export_torch",
    "export_weights",
    "load_weights",
    "pack",
    "read_manifest",
    "resolve",
    "unpack",
    "verify",
]
