"""Checkpoints: a directory of safetensors and JSON files that is whole or does not exist.

From the ground up: `files` (durable writing, hashed reading), `tensors` (safetensors), `tree` (Python values
to JSON and tensors), `format` (snapshot and manifest), `io` (storage), `index` and `manager` (what is kept),
`locate` (what a path means), `export` (plain weights).
"""

from drivetrain.checkpoint.config import CheckpointConfig
from drivetrain.checkpoint.export import export_weights, load_weights
from drivetrain.checkpoint.files import DamagedCheckpointError
from drivetrain.checkpoint.format import FORMAT_VERSION, Manifest, Snapshot
from drivetrain.checkpoint.io import CheckpointIO, LocalCheckpointIO, read_manifest, verify
from drivetrain.checkpoint.locate import resolve
from drivetrain.checkpoint.manager import CheckpointManager, SavedCheckpoint
from drivetrain.checkpoint.tree import pack, unpack

__all__ = [
    "FORMAT_VERSION",
    "CheckpointConfig",
    "CheckpointIO",
    "CheckpointManager",
    "DamagedCheckpointError",
    "LocalCheckpointIO",
    "Manifest",
    "SavedCheckpoint",
    "Snapshot",
    "export_weights",
    "load_weights",
    "pack",
    "read_manifest",
    "resolve",
    "unpack",
    "verify",
]
