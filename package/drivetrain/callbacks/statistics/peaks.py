"""Peak floating-point operations per second of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """The dense peaks of matrix products, in TFLOP/s; None for a dtype that the GPU does not support.

    Attributes:
        float16: With accumulation in float32, on tensor cores.
        bfloat16: The same.
        tf32: float32 rounded to 10 bits of mantissa, on tensor cores.
        float32: Without tensor cores.
    """

    float16: float
    bfloat16: float | None
    tf32: float | None
    float32: float


# From NVIDIA's data sheet of each product. The sheets of Ada, Hopper and Blackwell state tensor figures with
# structured sparsity, which training does not use, so they are halved here. Names are those that CUDA
# reports; a longer name comes before the shorter one that it contains.
PEAKS: dict[str, Peak] = {
    "B200": Peak(2250, 2250, 1125, 75),
    "GH200": Peak(989.5, 989.5, 494.5, 67),
    "H200 NVL": Peak(835.5, 835.5, 417.5, 60),
    "H200": Peak(989.5, 989.5, 494.5, 67),
    "H100 NVL": Peak(835.5, 835.5, 417.5, 60),
    "H100 PCIe": Peak(756.5, 756.5, 378, 51),
    "H100": Peak(989.5, 989.5, 494.5, 67),
    "A100": Peak(312, 312, 156, 19.5),
    "A10": Peak(125, 125, 62.5, 31.2),
    "L40S": Peak(362, 362, 183, 91.6),
    "L4": Peak(121, 121, 60, 30.3),
    "V100-PCIE": Peak(112, None, None, 14),
    "V100": Peak(125, None, None, 15.7),
    "T4": Peak(65, None, None, 8.1),
}


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak in FLOP/s of matrix products in `dtype`; None if unknown.

    Args:
        device_name: The value of `torch.cuda.get_device_name`.
        dtype: The dtype of the products.
        tf32: Whether float32 products may use tensor cores (`torch.backends.cuda.matmul.fp32_precision`).
    """
    # A slice of a GPU (MIG) is reported under the GPU's name, but has only a part of its peak.
    if "MIG" in device_name:
        return None
    for name, peak in PEAKS.items():
        if re.search(rf"\b{name}\b", device_name):
            tera = {
                torch.float16: peak.float16,
                torch.bfloat16: peak.bfloat16,
                torch.float32: (peak.tf32 if tf32 else None) or peak.float32,
            }.get(dtype)
            return None if tera is None else tera * 1e12
    return None
