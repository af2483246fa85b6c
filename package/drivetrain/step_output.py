"""What a step returned, taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from drivetrain.data.batch import map_tensors
from drivetrain.errors import ConfigError
from drivetrain.types import Batch, StepOutput

StepValues: TypeAlias = tuple[Tensor | None, tuple[str, ...], Tensor | None, Any]
"""A step's return value, taken apart: the scalar to optimise, with its graph (None when a validation step
returned nothing); the names of the scalars to log; those scalars, detached; the model's outputs, or None."""


_LOSS = ("loss",)


def read_output(output: Any) -> StepValues:
    """Take apart what a step returned: a scalar, a mapping with "loss", a `StepOutput`, or None.

    Raises:
        ConfigError: Anything else, a mapping without "loss", a value that is no scalar, or one that is given
            twice; names it.
    """
    outputs = None
    extra: Mapping[str, Any] | None = None
    loss = output
    if isinstance(output, StepOutput):
        loss, outputs, extra = output.loss, output.outputs, output.metrics
        if extra:
            _check_extra(loss, extra)
    if isinstance(loss, Tensor):
        if loss.ndim:
            loss = _scalar("loss", loss)
        if not extra:
            return loss, _LOSS, loss.detach(), outputs
        named = {"loss": loss, **extra}
    elif isinstance(loss, Mapping):
        named = {**loss, **extra} if extra else dict(loss)
        if "loss" not in named:
            raise ConfigError(
                f"a step returned a mapping without 'loss'; it has {', '.join(map(repr, named))}"
            )
        loss = named["loss"]
        if not isinstance(loss, Tensor):
            raise ConfigError(f"a step's 'loss' must be a tensor, not a {type(loss).__name__}")
        if loss.ndim:
            named["loss"] = loss = _scalar("loss", loss)
    elif loss is None:
        return None, tuple(extra or ()), _stacked(extra, None) if extra else None, outputs
    else:
        given = "" if loss is output else "the loss as "
        raise ConfigError(
            f"a step returned {given}a {type(loss).__name__}; allowed are a scalar tensor, a mapping"
            " with 'loss', or a StepOutput"
        )
    return loss, tuple(named), _stacked(named, loss), outputs


def without_other_graphs(step: Callable[[Batch], Any], keep_outputs: bool) -> Callable[[Batch], Any]:
    """The step, of whose result the loss alone has a graph.

    For wrappers that hook every returned tensor that requires a gradient: each costs FSDP one more pass of
    its backward hook, though only the loss is led back.

    Args:
        step: A training step.
        keep_outputs: Whether anybody looks at the outputs; else they are dropped.
    """

    def run(batch: Batch) -> Any:
        output = step(batch)
        if not isinstance(output, StepOutput):
            return output
        if keep_outputs:
            return StepOutput(output.loss, map_tensors(Tensor.detach, output.outputs), output.metrics)
        return StepOutput(output.loss, None, output.metrics) if output.metrics else output.loss

    return run


def _check_extra(loss: Any, extra: Mapping[str, Any]) -> None:
    taken = loss if isinstance(loss, Mapping) else () if loss is None else _LOSS
    twice = [name for name in extra if name in taken]
    if twice:
        raise ConfigError(
            f"a step returned {', '.join(map(repr, twice))} twice: as StepOutput's loss and among its"
            " metrics. Give the metric another name"
        )


def _stacked(named: Mapping[str, Any], loss: Tensor | None) -> Tensor:
    # Copied at once: a task may go on changing a tensor that it returned.
    with torch.no_grad():
        try:
            stacked = torch.stack(tuple(named.values()))
        except (TypeError, RuntimeError):  # numbers among the tensors, other devices, or shapes such as (1,)
            tensors = (each for each in (loss, *named.values()) if isinstance(each, Tensor))
            device = next((each.device for each in tensors), torch.device("cpu"))
            wide = wide_dtype(device)
            return torch.stack([_scalar(name, value).to(device, wide) for name, value in named.items()])
        if stacked.ndim > 1 or hasattr(stacked, "full_tensor"):  # alike in shape, but no scalars; or sharded
            return torch.stack([_scalar(name, value) for name, value in named.items()])
        return stacked


def wide_dtype(device: torch.device) -> torch.dtype:
    """In which sums are made on a device."""
    return torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have


def _scalar(name: str, value: Any) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"the value {name!r} that a step returned is a {type(value).__name__}, not a number"
        ) from None
    if hasattr(tensor, "full_tensor"):  # of sharded parameters; in a step all processes are together
        tensor = tensor.full_tensor()
    if tensor.numel() != 1:
        raise ConfigError(
            f"the value {name!r} that a step returned has shape {tuple(tensor.shape)}; only scalars can be "
            "optimised and logged. Take its mean, or return it as StepOutput(outputs=...)"
        )
    return tensor.reshape(())
