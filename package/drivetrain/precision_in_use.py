"""What a precision does in an engine beside the forward pass: settings of the process, and updates."""

from __future__ import annotations

import copy
from contextlib import ExitStack

from torch import nn

from drivetrain.precision import Precision
from drivetrain.progress import Progress
from drivetrain.weight_updates import WeightUpdates


class PrecisionInUse:
    """A precision for as long as an engine lives.

    Args:
        precision: Of all that the engine runs.
        seed: The run's.
        progress: The run's.

    Attributes:
        precision: An object of this engine's own, equal to that which was given: by it are those modules
            told, whose code this engine has converted, from those that another one has.
        updates: How weights that the precision stores in 16 bits take updates.
    """

    def __init__(self, precision: Precision, seed: int, progress: Progress) -> None:
        self.precision = copy.copy(precision)
        self._modules: list[nn.Module] = []
        self.updates = WeightUpdates(precision.updates_of_weights, seed, progress)
        self._settings = ExitStack()
        self._settings.enter_context(self.precision.running())

    def note(self, module: nn.Module) -> None:
        """A module that is, or will be, converted."""
        self._modules.append(module)

    def __enter__(self) -> None:
        """Begin the end of the engine."""

    def __exit__(self, *_: object) -> None:
        """Put the process's settings back, and the modules' code, however the engine has ended."""
        self._settings.close()
        modules, self._modules = self._modules, []
        for each in modules:
            self.precision.restore_module(each)
