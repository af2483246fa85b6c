"""What other programs have saved, brought into checkpoints of ours without running anything of it."""

from drivetrain.foreign.deepspeed import ImportedCheckpoint, import_deepspeed
from drivetrain.foreign.weights import ImportedWeights, import_weights

__all__ = ["ImportedCheckpoint", "ImportedWeights", "import_deepspeed", "import_weights"]
