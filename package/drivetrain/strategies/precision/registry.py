"""The built-in precisions by name."""

from __future__ import annotations

import torch

from drivetrain.core.registry import Registry
from drivetrain.strategies.precision.base import UPDATES, Precision


def _true(name: str, dtype: torch.dtype) -> dict[str, Precision | str]:
    """Return the rows of one dtype for both storage and compute: a row for each way to update weights."""
    rows = {name: Precision(name, dtype, dtype, dtype)}
    for updates in UPDATES[1:]:
        row = f"{name}-{updates}"
        rows[row] = Precision(row, dtype, dtype, dtype, updates=updates)
    return {**rows}


PRECISIONS: Registry[Precision] = Registry(
    "precision",
    {
        "32": Precision("32"),
        "bf16-mixed": Precision("bf16-mixed", compute_dtype=torch.bfloat16),
        "16-mixed": Precision("16-mixed", compute_dtype=torch.float16, loss_scaling=True),
        **_true("bf16-true", torch.bfloat16),
        **_true("16-true", torch.float16),
        "64": Precision("64", torch.float64, torch.float64, torch.float64),
        "tf32": "drivetrain.strategies.precision.tf32:PRECISION",
        "fp8": "drivetrain.integrations.torchao.float8:PRECISION",
    },
)
"""Precisions by name."""


def as_precision(spec: str | int | Precision) -> Precision:
    """Return the precision with this name; a `Precision` is returned unchanged.

    Raises:
        ConfigError: The name is unknown; the message lists the allowed ones.
    """
    return spec if isinstance(spec, Precision) else PRECISIONS[str(spec).removeprefix("torch.")]
