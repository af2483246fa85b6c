"""The metric that a callback or a schedule monitors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from drivetrain.callbacks.lambda_callback import LambdaCallback
from drivetrain.core.calendar import Trigger
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.intervals import Every
from drivetrain.core.public import HOMES

if TYPE_CHECKING:
    from drivetrain.run.run import Run


class MonitoredMetric:
    """A metric that a callback or a schedule depends on, under its logged name.

    A validation value comes with each validation, any other value with the log points. A log interval longer
    than an epoch becomes one epoch, so that a training value comes at least once per epoch. The log interval
    stays if a validation may give the value: a callback may log it, or the task names its values itself.

    A wrong name loses no work. A value that cannot come is refused before training. If a name turns out wrong
    later, the run stops, is saved, and raises.

    Args:
        name: The full name, such as "validation/loss" or "train/loss".
        who: The subject and verb of an error message, such as "early stopping monitors".
        otherwise: A sentence that ends an error message.
        required: Whether a missing value is an error.
        of_validations: Whether only a validation may give the value.
    """

    def __init__(
        self, name: str, who: str, otherwise: str = "", required: bool = True, of_validations: bool = False
    ) -> None:
        self.name = name
        self._of_validations = of_validations
        self._who = f"{who} {name!r}"
        self._otherwise = f" {otherwise}" if otherwise else ""
        self._required = required
        self._user_callbacks_log = False
        self._value_at = -1

    def begin(self, run: Run) -> None:
        """Check the name as far as possible before training."""
        self._value_at = -1
        if not self._required:
            return
        self._user_callbacks_log = any(map(_is_of_the_user, run.callbacks))
        stage, validates = run.names.stage_of(self.name), run.triggers.validate.every is not None
        if stage in ("test", "predict"):
            raise self._error("which a fit does not give", self._possible(run))
        if not validates and (stage == "validation" or self._of_validations):
            instead = "" if self._of_validations else ", or name a value of training such as 'train/loss'"
            raise ConfigError(
                f"{self._who} at each validation, but this fit never validates. Give `fit` validation_data,"
                f" and the Trainer a `validate_every`{instead}.{self._otherwise}"
            )
        if stage is None and validates and (self._user_callbacks_log or run.names.are_own):
            return  # it may come with a validation
        if stage == "validation":
            self._check_loader(run)
        elif self._of_validations:
            raise self._error("which no validation gives", self._possible(run))
        else:
            self._begin_logging(run)

    def _check_loader(self, run: Run) -> None:
        loaders = tuple(f"validation/{loader}/" for loader, _ in run.evaluation_feeds if loader is not None)
        if loaders and not self._user_callbacks_log and not self.name.startswith(loaders):
            raise self._error("which no validation loader gives", self._possible(run))

    def _begin_logging(self, run: Run) -> None:
        every, per_epoch = run.triggers.log.every, run.length.steps_per_epoch
        if every is None:
            raise ConfigError(
                f"{self._who} at each log point, but log_every=None logs nothing during training. Give the"
                f" Trainer a log_every such as '1 epoch' or '50 steps'.{self._otherwise}"
            )
        if every.unit == "steps" and per_epoch and every.amount > per_epoch:
            run.triggers.log = Trigger(Every("1 epoch"))

    def _possible(self, run: Run) -> list[str]:
        """Return names with the same last part that this run can give."""
        last = self.name.rpartition("/")[2]
        feeds = run.evaluation_feeds if run.triggers.validate.every is not None else ()
        validations = [run.task.metric_name("validation", loader, last) for loader, _ in feeds]
        train = None if self._of_validations else run.task.metric_name("train", None, last)
        names = [train, *validations]
        return [name for name in names if name is not None] or [*run.metrics]

    def has_new_value(self, run: Run) -> bool:
        """Return, once for each value, whether the log points after the last step gave the value."""
        if run.latest_at != run.progress.steps or run.latest_at == self._value_at:
            return False
        if self.name in run.latest:
            self._value_at = run.latest_at
            return True
        if self.name not in run.metrics and self._is_overdue(run):
            self._refuse(run)
        return False

    def _is_overdue(self, run: Run) -> bool:
        stages, stage = run.names.stages, run.names.stage_of(self.name)
        if stage is not None:
            return stage in stages
        if self._user_callbacks_log:  # perhaps after an epoch, for the next log point
            return run.progress.epoch > 1
        validates = run.triggers.validate.every is not None
        if run.names.are_own and validates and run.triggers.log.every is not None:
            return {"train", "validation"} <= stages  # the name may belong to either
        return ("validation" if validates else "train") in stages

    def end(self, run: Run) -> None:
        """Check after training that the value has come, if this program has made a step."""
        cut_short = run.stop_reason in run.stopping.signals or run.nonfinite.diverged is not None
        if self.name not in run.metrics and not cut_short and run.result is not None:
            self._refuse(run)

    def _refuse(self, run: Run) -> None:
        if self._required:
            run.fail(self._error("which is not logged", run.metrics))

    def _error(self, why: str, names: Iterable[str]) -> ConfigError:
        return ConfigError(f"{self._who}, {why}. {nearest(self.name, names)}{self._otherwise}")


def _is_of_the_user(callback: object) -> bool:
    module = type(callback).__module__
    is_ours = module.startswith("drivetrain.callbacks.") or module in HOMES["drivetrain.callbacks"].values()
    return isinstance(callback, LambdaCallback) or not is_ours
