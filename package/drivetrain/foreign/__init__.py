"""What other programs have saved, brought into checkpoints of ours without running anything of it."""

from drivetrain.foreign.deepspeed import ImportedCheckpoint, import_deepspeed

__all__ = ["ImportedCheckpoint", "import_deepspeed"]
