"""Checkpoints and weights of other programs, imported as checkpoints of ours; none of their code is run."""

from drivetrain.foreign.deepspeed import ImportedCheckpoint, import_deepspeed
from drivetrain.foreign.weights import ImportedWeights, import_weights

__all__ = ["ImportedCheckpoint", "ImportedWeights", "import_deepspeed", "import_weights"]
