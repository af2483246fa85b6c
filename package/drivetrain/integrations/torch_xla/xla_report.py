"""A report of what XLA compiled and ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)


@by_name
class XLAReport(Callback):
    """Logs the counters and times of torch_xla at each log point, since the process began.

    A growing `CompileTime` shows a program that is compiled again and again, usually for a new shape. A
    counter of the form `aten::name` is an operation that XLA cannot run, and that goes through the host.

    Args:
        show: Whether the main rank logs the report.

    Attributes:
        text: The latest report of `torch_xla.debug.metrics`.

    Raises:
        ConfigError: When a Trainer is made: the device is not an XLA device.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.text = ""

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the run is on XLA.

        Raises:
            ConfigError: It is not.
        """
        if strategy.device.type != "xla":
            raise ConfigError(
                f"XLAReport on {strategy.device.type!r}: only the strategies 'xla' and 'xla_fsdp'"
                " have something to report. Leave it out"
            )

    def on_log(self, run: Run) -> None:
        """Report what was counted until now."""
        from torch_xla.debug import metrics

        self.text = metrics.metrics_report()
        if self.show and run.is_main:
            _LOG.info(f"step {run.progress.steps}, XLA:\n{self.text}")
