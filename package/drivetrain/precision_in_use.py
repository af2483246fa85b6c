"""What a precision does in an engine beside the forward pass: settings of the process, and updates."""

from __future__ import annotations

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
        updates: How weights that the precision stores in 16 bits take updates.
    """

    def __init__(self, precision: Precision, seed: int, progress: Progress) -> None:
        self._precision = precision
        self._modules: list[nn.Module] = []
        self.updates = WeightUpdates(precision.updates_of_weights, seed, progress)
        self._settings = ExitStack()
        self._settings.enter_context(precision.running())

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
            self._precision.restore_module(each)
