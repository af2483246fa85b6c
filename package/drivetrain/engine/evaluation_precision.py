"""Evaluations with weights stored in another precision than in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.select import check_precision
from drivetrain.task.task import StepModule


def check_evaluation_precision(spec: str | int | Precision | None, strategy: Strategy) -> Precision | None:
    """Return the precision of evaluations after a check; None for that of training."""
    if spec is None:
        return None
    precision = as_precision(spec)
    asked = f"evaluation_precision={precision.name!r}"
    if precision.param_dtype is None or type(precision).convert_module is not Precision.convert_module:
        raise ConfigError(
            f"{asked} stores no weights in a dtype of its own. Use 'bf16-true', '16-true' or '64', or None to"
            " evaluate in the precision of training"
        )
    check_supported(strategy, "evaluation_precision", asked, "Leave it out, or use one device or 'ddp'")
    check_precision(strategy, precision, "evaluation_precision={!r}")
    return precision


@contextmanager
def stored_in(precision: Precision, module: StepModule, device: torch.device) -> Iterator[None]:
    """Run the block with the task's floating-point parameters and buffers in another dtype.

    Afterwards they have the values of before, bitwise: also buffers that the block has changed.
    """
    dtype, context = precision.param_dtype, module.context
    tensors = [
        each for each in (*module.task.parameters(), *module.task.buffers()) if each.is_floating_point()
    ]
    values = [each.data for each in tensors]
    try:
        for each in tensors:
            each.data = each.data.to(dtype)
        module.context = precision.forward_context(device)
        yield
    finally:
        for each, value in zip(tensors, values, strict=True):
            each.data = value
        module.context = context
