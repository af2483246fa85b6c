"""Checkpoints: a directory of safetensors and JSON files that is complete or does not exist.

From the ground up: `storage/` (disks and object stores), `format/` (files, manifest, older versions),
`saving/` (one checkpoint, and the checkpoints of a run), `weights/` (weights by name), `foreign/` (other
programs' files) and `inspection/` (listings, descriptions and comparisons for people).
"""

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports
from drivetrain.distributed.failure.named_places import register_opaque

register_opaque(__file__)

if TYPE_CHECKING:
    from drivetrain.checkpoint.assets import copy_assets
    from drivetrain.checkpoint.format.manifest import FORMAT_VERSION, Manifest, Snapshot
    from drivetrain.checkpoint.format.tree import pack, unpack
    from drivetrain.checkpoint.locate import resolve
    from drivetrain.checkpoint.saving.config import CheckpointConfig
    from drivetrain.checkpoint.saving.io import CheckpointIO, DirectoryCheckpointIO, read_manifest, verify
    from drivetrain.checkpoint.saving.manager import CheckpointManager, SavedCheckpoint
    from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
    from drivetrain.checkpoint.weights.export import export_weights
    from drivetrain.checkpoint.weights.load import load_weights
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.checkpoint.assets": ("copy_assets",),
            "drivetrain.checkpoint.saving.config": ("CheckpointConfig",),
            "drivetrain.checkpoint.weights.export": ("export_weights",),
            "drivetrain.checkpoint.storage.filesystem": ("DamagedCheckpointError",),
            "drivetrain.checkpoint.format.manifest": ("FORMAT_VERSION", "Manifest", "Snapshot"),
            "drivetrain.checkpoint.saving.io": (
                "CheckpointIO",
                "DirectoryCheckpointIO",
                "read_manifest",
                "verify",
            ),
            "drivetrain.checkpoint.locate": ("resolve",),
            "drivetrain.checkpoint.saving.manager": ("CheckpointManager", "SavedCheckpoint"),
            "drivetrain.checkpoint.format.tree": ("pack", "unpack"),
            "drivetrain.checkpoint.weights.load": ("load_weights",),
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
    "copy_assets",
    "export_weights",
    "load_weights",
    "pack",
    "read_manifest",
    "resolve",
    "unpack",
    "verify",
]
