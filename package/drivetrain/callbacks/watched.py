"""The logged value that a callback decides by: when it comes, and whether it comes at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from drivetrain.errors import ConfigError, nearest
from drivetrain.types import Every, Trigger

if TYPE_CHECKING:
    from drivetrain.run import Run


class Watched:
    """A value that a callback decides by, under the name that is logged.

    A value of validation comes with each validation, any other value with the log points. A log interval that
    is longer than an epoch becomes one epoch, so that a value of training comes at least once per epoch.

    A wrong name costs no work: what cannot come is refused before training; a name that turns out wrong later
    stops the run, which is saved and then raises.

    Args:
        name: The full name, such as "validation/loss" or "train/loss".
        who: The subject and verb of an error message, such as "early stopping watches".
        otherwise: A sentence that ends an error message.
        required: Whether it is an error if the value does not come.

    Attributes:
        of_validation: Whether the value comes with validations.
    """

    def __init__(self, name: str, who: str, otherwise: str = "", required: bool = True) -> None:
        self.name = name
        self.of_validation = name.startswith("validation/")
        self._who = f"{who} {name!r}"
        self._otherwise = f" {otherwise}" if otherwise else ""
        self._required = required
        self._others_log = False
        self._came_at = -1

    def begin(self, run: Run) -> None:
        """Check what can be known of the name before training.

        Raises:
            ConfigError: The value cannot come in this run.
        """
        self._came_at = -1
        if not self._required:
            return
        self._others_log = any(type(each).__module__.split(".")[0] != "drivetrain" for each in run.callbacks)
        if self.name.startswith(("test/", "predict/")):
            raise self._error("which a fit does not give", self._possible(run))
        if not self.of_validation:
            self._begin_logging(run)
        elif run.triggers.validate.every is None:
            raise ConfigError(
                f"{self._who} at each validation, but this fit never validates. Give `fit` validation_data,"
                " and the Trainer a `validate_every`, or name a value of training such as 'train/loss'."
                f"{self._otherwise}"
            )
        else:
            loaders = [loader for loader, _ in run.evaluation_feeds if loader is not None]
            if loaders and not self.name.startswith(tuple(f"validation/{each}/" for each in loaders)):
                raise self._error("which no validation loader gives", self._possible(run))

    def _begin_logging(self, run: Run) -> None:
        every, per_epoch = run.triggers.log.every, run.totals.updates_per_epoch
        if every is None:
            raise ConfigError(
                f"{self._who} at each log point, but log_every=None logs nothing during training. Give the"
                f" Trainer a log_every such as '1 epoch' or '50 steps'.{self._otherwise}"
            )
        if every.unit == "steps" and per_epoch and every.amount > per_epoch:
            run.triggers.log = Trigger(Every("1 epoch"))

    def _possible(self, run: Run) -> list[str]:
        """Names with the same last part that this run may well give."""
        last = self.name.rpartition("/")[2]
        feeds = run.evaluation_feeds if run.triggers.validate.every is not None else ()
        stages = ["validation" if loader is None else f"validation/{loader}" for loader, _ in feeds]
        return [f"{stage}/{last}" for stage in ("train", *stages)]

    def came(self, run: Run) -> bool:
        """Return, once for each value, whether the log points after the update just made gave the value."""
        if run.latest_at != run.progress.updates or run.latest_at == self._came_at:
            return False
        if self.name in run.latest:
            self._came_at = run.latest_at
            return True
        if self.name not in run.metrics and self._is_overdue(run):
            self._refuse(run)
        return False

    def _is_overdue(self, run: Run) -> bool:
        validated = any(each.startswith("validation/") for each in run.metrics)
        trained = any(each.startswith("train/") for each in run.metrics)
        if self.name.startswith(("validation/", "train/")):
            return validated if self.of_validation else trained
        if self._others_log:  # after an epoch, perhaps, for the log point after that
            return run.progress.epoch > 1
        return trained if run.triggers.validate.every is None else validated  # it may be meant to be either

    def forget(self) -> None:
        """Take note that the run was taken back to an earlier state."""
        self._came_at = -1

    def end(self, run: Run) -> None:
        """Check after training that the value has come."""
        if self.name not in run.metrics and run.stop_reason not in run.stopping.signals:
            self._refuse(run)

    def _refuse(self, run: Run) -> None:
        if self._required:
            run.fail(self._error("which is not logged", run.metrics))

    def _error(self, why: str, names: Iterable[str]) -> ConfigError:
        return ConfigError(f"{self._who}, {why}. {nearest(self.name, names)}{self._otherwise}")
