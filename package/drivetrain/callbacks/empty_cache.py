"""Returns unused memory of the device at an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name, count

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_WITH_CACHE = ("cuda", "mps", "xpu")


@by_name
class EmptyCache(Callback):
    """Empties the cache of the device's memory allocator after every n-th step.

    Training then needs less memory at its peak if the cache has become fragmented, as with batches of many
    shapes. Each time costs some milliseconds, because the device must finish its work and allocate anew.

    Args:
        every: The number of steps between two times.

    Raises:
        ConfigError: `every` is no whole number, at least 1; by the Trainer: the device has no such cache.
    """

    def __init__(self, every: int) -> None:
        self.every = count("EmptyCache: every", every, at_least=1)

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the device has a cache."""
        if strategy.device.type not in _WITH_CACHE:
            raise ConfigError(
                f"EmptyCache on {strategy.device.type!r}, whose allocator has no cache to empty. Leave it out"
            )

    def on_step_end(self, run: Run) -> None:
        """Empty the cache if it is due."""
        if run.progress.steps % self.every == 0:
            torch.get_device_module(run.engine.device).empty_cache()
