"""One XLA device: a core of a TPU, or the CPU by XLA's compiler."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.validation import by_name, one_of
from drivetrain.strategies.xla.device import RUN_AFTER, OnXLA, open_device


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
        one_of("run_after of XLAConfig", self.run_after, RUN_AFTER)


class XLA(OnXLA):
    """One process that runs the step module unwrapped on one XLA device; see `OnXLA` for the arguments."""

    name = "xla"
    config: XLAConfig
    config_type = XLAConfig
    needs = "torch_xla, and a TPU or a CPU; one process, and one of its devices"

    def setup(self) -> None:
        self.device = open_device(self.name)
