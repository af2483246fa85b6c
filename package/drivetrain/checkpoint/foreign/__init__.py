"""Checkpoints and weights of other programs, imported as checkpoints of ours; none of their code is run."""
