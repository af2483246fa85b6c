"""One process on one device: CPU, CUDA, MPS or XPU."""

from __future__ import annotations

import torch
from torch import nn

from drivetrain.core.errors import StrategyError
from drivetrain.strategies.base import REFUSED, MakeOptimizers, Prepared, Strategy, Support, has_bfloat16
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.hardware import cuda_devices
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.sparse import trained_sparsely
from drivetrain.task.task import StepModule

_KINDS = ("cpu", "cuda", "mps", "xpu")


def _existing(spec: str | torch.device) -> torch.device:
    """Return the device, with its index if there may be several, or raise if it is not available."""
    try:
        device = torch.device(spec)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in _KINDS:
        raise StrategyError(f"a single device must be 'cpu', 'cuda', 'cuda:1', 'mps' or 'xpu', not {spec!r}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise StrategyError("device 'mps' is not available: it needs a Mac with Metal. Use 'cpu' or 'auto'")
    if device.type not in ("cuda", "xpu"):
        return device
    kind = device.type
    backend = torch.cuda if kind == "cuda" else torch.xpu
    count = cuda_devices() if kind == "cuda" else backend.device_count()
    if not count:
        maker = "CUDA" if kind == "cuda" else "Intel"
        raise StrategyError(
            f"device {str(spec)!r} is not available: torch sees no {maker} GPU. Use strategy='cpu' or 'auto'"
        )
    # The question for the current device would start CUDA, and then no fork of this process could use it.
    current = backend.current_device() if backend.is_initialized() else 0
    index = current if device.index is None else device.index
    if index >= count:
        raise StrategyError(
            f"device {str(spec)!r} does not exist: torch sees {count} GPU(s), the last is"
            f" '{kind}:{count - 1}'"
        )
    return torch.device(kind, index)


class SingleDevice(Strategy):
    """One process that runs the step module unwrapped on one device.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps" or "xpu".

    Raises:
        StrategyError: The device is unknown or not available.
    """

    refusals = dict.fromkeys(REFUSED, "")

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = _existing(device)
        self.name = "single"
        self._devices_before: list[int] = []  # of runs inside of one another
        self._sparse: list[nn.Parameter] = []

    def supports(self, precision: Precision) -> Support:
        """Support all built-in precisions on the CPU, all but 64 and 8 bits on MPS and XPU, and bfloat16 on
        GPUs that have it.
        """
        dtypes = (precision.param_dtype, precision.compute_dtype)
        lacking = [each for each in dtypes if each is not None and each.itemsize in (1, 8)]
        if self.device.type in ("mps", "xpu") and lacking:
            return Support(
                False,
                f"{self.device.type.upper()} has no {str(lacking[0]).removeprefix('torch.')}; allowed are"
                " '32', 'bf16-mixed', '16-mixed', 'bf16-true' and '16-true'",
            )
        return has_bfloat16(self.device, precision)

    def setup(self) -> None:
        """Make the GPU the current one, which a task's `device="cuda"` and its own kernels mean."""
        if self.device.type == "cuda":
            self._devices_before.append(torch.cuda.current_device())
            torch.cuda.set_device(self.device)

    def teardown(self) -> None:
        """Make the previous GPU the current one again."""
        if self._devices_before:
            torch.cuda.set_device(self._devices_before.pop())

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert and move the module, then build the optimizers on the moved parameters."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        self._scale = LossScale(self.device) if precision.loss_scaling else None
        self._sparse = trained_sparsely(module.task)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})
