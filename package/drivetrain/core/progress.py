"""A run's progress: one clock with named units."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from drivetrain.core.deprecation import deprecated
from drivetrain.core.errors import CheckpointError


@dataclass(slots=True)
class Progress:
    """Counts since the start of the run, over all its restarts.

    Attributes:
        steps: Optimizer steps made; a skipped step is not counted.
        micro_batches: Micro-batches trained on.
        samples: Training samples seen.
        tokens: Training tokens seen, as counted by `TaskModule.tokens`.
        epoch: Full passes over the training data.
        epoch_steps: Steps made in the current epoch.
        epoch_batches: Micro-batches trained on in the current epoch.
        position: The data cursor in the current epoch: samples for indexed data, batches for iterable data.
        skipped: Steps that were skipped (an fp16 overflow, a window of weight zero, values that are not
            finite, a spike of the loss).
        seconds: Wall time spent in training runs.
        bad_batches: Micro-batches left out because loading them failed, summed over all ranks.
    """

    steps: int = 0
    micro_batches: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    epoch_steps: int = 0
    epoch_batches: int = 0
    position: int = 0
    skipped: int = 0
    seconds: float = 0.0
    bad_batches: int = 0

    @property
    def updates(self) -> int:
        """The older name of `steps`."""
        deprecated("Progress.updates", "Progress.steps", since="0.1.0", removed_in="0.3.0")
        return self.steps

    def to_json(self) -> dict[str, int | float]:
        """Return all counts by name."""
        return asdict(self)

    def load_json(self, state: dict[str, Any]) -> None:
        """Load counts written by `to_json`, all or none.

        Raises:
            CheckpointError: A count is missing, unknown, negative, or not a number.
        """
        names = {field.name for field in fields(self)}
        if set(state) != names:
            wrong = ", ".join(sorted(map(str, names ^ set(state))))
            raise CheckpointError(f"the checkpoint's progress does not fit: {wrong}")
        for name, value in state.items():
            kinds = (int, float) if name == "seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
                raise CheckpointError(f"the checkpoint's progress has {name}={value!r}, which is no count")
        for name, value in state.items():
            setattr(self, name, value)
