"""Lightning's `min_epochs`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

from drivetrain.callbacks import Callback
from drivetrain.core.errors import ConfigError

if TYPE_CHECKING:
    from drivetrain.run.run import Run


@final
class LeastEpochs(Callback):
    """Lets no callback or module end a fit before so many epochs.

    Args:
        epochs: The complete epochs.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_fit_start(self, run: Run) -> None:
        """Count the steps of the epochs.

        Raises:
            ConfigError: The training data has no known length.
        """
        length = run.length
        if length.calendar.length is None:
            raise ConfigError(
                f"min_epochs={self.epochs} needs training data of known length. Give min_steps instead"
            )
        steps = length.calendar.windows_before(self.epochs)
        run.length = replace(length, min_steps=max(length.min_steps, steps))
