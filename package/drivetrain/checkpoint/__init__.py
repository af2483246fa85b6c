"""Checkpoints: a directory of safetensors and JSON files that is whole or does not exist.

From the ground up: `filesystem` (operations on files, on a disk) and `places` (which file system a path is
in), `strict_json`, `files` (durable writing, hashed reading), `tensors` (safetensors), `tree` (Python values
to JSON and tensors), `format` (snapshot and manifest), `sharding` (who writes, reads which part), `writing`,
`reading`, `io` (storage as the manager sees it), `index`, `recovery` (after a kill), `background` (saving
behind the loop), `manager` (what is kept), `locate` (what a path means), `weights` (weights in), `export` and
`torch_file` (weights out).
"""

from drivetrain.checkpoint.config import CheckpointConfig
from drivetrain.checkpoint.export import export_weights
from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.format import FORMAT_VERSION, Manifest, Snapshot
from drivetrain.checkpoint.io import CheckpointIO, DirectoryCheckpointIO, read_manifest, verify
from drivetrain.checkpoint.locate import resolve
from drivetrain.checkpoint.manager import CheckpointManager, SavedCheckpoint
from drivetrain.checkpoint.torch_file import export_torch
from drivetrain.checkpoint.tree import pack, unpack
from drivetrain.checkpoint.weights import read_weights as load_weights

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
