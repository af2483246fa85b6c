"""One XLA device: a core of a TPU, or the CPU by XLA's compiler."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.validation import by_name
from drivetrain.strategies.base import MakeOptimizers, Prepared
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.xla.device import OnXLA, check_run_after, move, open_device
from drivetrain.strategies.xla.norms import forget_corrections
from drivetrain.task.task import StepModule


@by_name
@dataclass(frozen=True, kw_only=True)
class XLAConfig:
    """Options of strategy "xla".

    Attributes:
        run_after: When XLA runs traced operations: after each "micro_batch", or once after the "step".
            "step" compiles all micro-batches of a window as one program, and a short window as another.
    """

    run_after: str = "micro_batch"

    def __post_init__(self) -> None:
        check_run_after(type(self).__name__, self.run_after)


class XLA(OnXLA):
    """One process that runs the step module unwrapped on one XLA device; see `OnXLA` for the arguments."""

    name = "xla"
    config: XLAConfig
    config_type = XLAConfig
    needs = "torch_xla, and a TPU or a CPU; one process, and one of its devices"

    def setup(self) -> None:
        self.device = open_device(self.name)

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert and move the module, then build the optimizers on the moved parameters."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        self.move_to_device(module, precision)
        self._prepared.append(module)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def restore(self) -> None:
        """Move the task to the host's memory, where operations run when they are called."""
        for module in self._prepared:
            forget_corrections(module.task)
            move(module, "cpu")
        self._prepared = []
