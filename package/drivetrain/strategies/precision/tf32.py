"""TensorFloat-32: float32 weights, multiplied with a mantissa of 10 bits.

NVIDIA's GPUs support it since Ampere (NVIDIA, "A100 Tensor Core GPU Architecture", 2020); sums stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.strategies.precision.base import Dtypes, Precision

_AMPERE = (8, 0)


@dataclass(frozen=True)
class TF32(Precision):
    """float32, with matrix products and convolutions in TF32, forward and backward.

    TF32 is a process-wide setting of torch. It is on from the construction of the engine until its end. If
    two engines exist at the same time, the one constructed last decides for both.
    """

    def obstacle(self, device: torch.device) -> str:
        """Return why this device has no TF32; empty for NVIDIA's GPUs since Ampere."""
        others = "use '32' or 'bf16-mixed'"
        if device.type != "cuda":
            return f"TF32 needs an NVIDIA GPU, and the device is {device.type!r}; {others}"
        if torch.version.hip is not None:
            return f"TF32 needs an NVIDIA GPU, and this torch is built for AMD's; {others}"
        if torch.cuda.get_device_capability(device) < _AMPERE:
            name = torch.cuda.get_device_name(device)
            return f"TF32 needs an NVIDIA GPU since Ampere, and this is a {name}; use '32' or '16-mixed'"
        return ""

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of float32, with products in TF32."""
        return super().dtypes._replace(compute="tf32")

    def process_context(self) -> AbstractContextManager[object]:
        """Return a context that turns TF32 on in cuBLAS and cuDNN."""
        return _allowed()


@contextmanager
def _allowed() -> Iterator[None]:
    # torch's older names set the newer ones too. The reverse does not hold: after a newer name was set, the
    # older ones cannot be read, which the compiler's autotuning does (torch 2.13).
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    before = [each.fp32_precision for each in switches]
    older = "highest", True
    with suppress(RuntimeError):  # the user has set a newer name
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        backends.cudnn.allow_tf32 = True
        yield
    finally:
        torch.set_float32_matmul_precision(older[0])
        backends.cudnn.allow_tf32 = older[1]
        for each, value in zip(switches, before, strict=True):
            each.fp32_precision = value


PRECISION = TF32("tf32")
