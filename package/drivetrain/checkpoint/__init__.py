"""Checkpoints: a directory of safetensors and JSON files that is complete or does not exist.

From the ground up: `storage/` (disks and object stores), `format/` (files, manifest),
`saving/` (one checkpoint, and the checkpoints of a run), `weights/` (weights by name, also of other
programs' files) and `inspection/` (listings, descriptions and comparisons for people).
"""

from drivetrain.core.lazy import exports
from drivetrain.distributed.failure.named_locations import register_opaque

register_opaque(__file__)

__getattr__, __dir__, __all__ = exports(__name__)
