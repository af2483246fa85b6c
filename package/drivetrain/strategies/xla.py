"""One XLA device: a core of a TPU, or the CPU by XLA's compiler."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.options import by_name
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, check_values
from drivetrain.strategies.xla_device import OnXLA, check_run_after, move, open_device
from drivetrain.strategies.xla_norms import correct_variances, forget_corrections
from drivetrain.task import StepModule


@by_name
@dataclass(frozen=True, kw_only=True)
class XLAConfig:
    """Options of strategy "xla".

    Attributes:
        run_after: When XLA runs what was traced: after each "micro_batch", or once after the whole "update".
            The latter compiles all micro-batches of a window as one program, and a short window anew.
    """

    run_after: str = "micro_batch"

    def __post_init__(self) -> None:
        """Check the option.

        Raises:
            ConfigError: It is of no use; says what is allowed.
        """
        check_run_after(type(self).__name__, self.run_after)


class XLA(OnXLA):
    """Runs the step module as it is on one device of XLA; see `OnXLA` for its arguments."""

    name = "xla"
    config: XLAConfig
    config_type = XLAConfig
    needs = "torch_xla, and a TPU or a CPU; one process, of which it uses one device"

    def setup(self) -> None:
        """Open the device."""
        self.device = open_device(self.name)

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, then make the optimizers on the parameters where they now are."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        move(module, self.device)
        correct_variances(module.task)
        module.context = self._trace.context(precision.forward_context(self.device))
        self._prepared.append(module)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def restore(self) -> None:
        """Bring the task into the host's memory, where its operations run when they are called."""
        for module in self._prepared:
            forget_corrections(module.task)
            move(module, "cpu")
        self._prepared = []
