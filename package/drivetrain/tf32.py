"""TensorFloat-32: float32 weights, whose products are made of numbers with 10 bits after the leading one.

NVIDIA's GPUs since Ampere have it (NVIDIA, "A100 Tensor Core GPU Architecture", 2020); sums stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.precision import Dtypes, Precision

_AMPERE = (8, 0)


@dataclass(frozen=True)
class TF32(Precision):
    """float32, with matrix products and convolutions in TF32, forward and backward.

    torch keeps this as a setting of the process, which holds from the making of the engine to its end. Two
    engines that live at the same time compute in what the last one was made with.
    """

    def obstacle(self, device: torch.device) -> str:
        """It needs a GPU by NVIDIA, of Ampere or newer."""
        others = "use '32', or 'bf16-mixed'"
        if device.type != "cuda":
            return f"TF32 is a number format of NVIDIA's GPUs, which {device.type!r} has not; {others}"
        if torch.version.hip is not None:
            return f"TF32 is a number format of NVIDIA's GPUs, and this torch is built for AMD's; {others}"
        if torch.cuda.get_device_capability(device) < _AMPERE:
            name = torch.cuda.get_device_name(device)
            return f"{name} has no TF32, which came with Ampere; use '32', or '16-mixed'"
        return ""

    @property
    def dtypes(self) -> Dtypes:
        """As float32's, but for the products."""
        return super().dtypes._replace(compute="tf32")

    def running(self) -> AbstractContextManager[object]:
        """TF32 in cuBLAS and cuDNN."""
        return _allowed()


@contextmanager
def _allowed() -> Iterator[None]:
    backends: Any = torch.backends
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [each.fp32_precision for each in places]
    try:
        for each in places:
            each.fp32_precision = "tf32"
        yield
    finally:
        for each, value in zip(places, before, strict=True):
            each.fp32_precision = value


PRECISION = TF32("tf32")
