"""One XLA device: a core of a TPU, or the CPU by XLA's compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.options import by_name
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy, Support, check_values
from drivetrain.strategies.xla_device import (
    COMPILES,
    NO_SKIPPING,
    Trace,
    available,
    check_alone,
    check_run_after,
    move,
    open_device,
    restore_after_error,
    supports,
)
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


class XLA(Strategy):
    """Runs the step module as it is on one device of XLA.

    Args:
        config: The options.
        device: The kind of device, "xla".
        world_size: How many processes: 1.

    Raises:
        StrategyError: More than one process.
    """

    name = "xla"
    config_type = XLAConfig
    needs = "torch_xla, and a TPU or a CPU; one process, of which it uses one device"
    no_compile = COMPILES
    no_skipping = NO_SKIPPING

    def __init__(self, config: XLAConfig | None = None, *, device: str = "xla", world_size: int = 1) -> None:
        check_alone(self.name, world_size)
        self.config = config or XLAConfig()
        self.device = torch.device(device)
        self._trace = Trace(self.config.run_after)
        self._prepared: list[StepModule] = []

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Whether it can run on a machine."""
        return available(hardware)

    def supports(self, precision: Precision) -> Support:
        """float32 and bfloat16; float64 on a CPU."""
        return supports(precision)

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

    def teardown(self) -> None:
        """Leave no task on the device, whatever has happened."""
        restore_after_error(self.restore)

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient."""
        self._trace.backward(loss, share, inputs)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and run what was traced."""
        self._trace.update(optimizer)
        return True
