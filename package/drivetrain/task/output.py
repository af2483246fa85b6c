"""The values that a step returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch, StepOutput, Term
from drivetrain.data.batch import map_tensors

StepValues: TypeAlias = tuple[
    Tensor | None, tuple[str, ...], Tensor | None, Any, Mapping[str, Any] | None, Mapping[str, Term] | None
]
"""A step's return value in parts.

First comes the scalar to optimise, with its graph; it is None when a validation step returned nothing. Then
come the names of the scalars to log, those scalars (detached), the model's outputs or None, the media or
None, and the further terms of the loss by name, None if there are none."""


class Optimized(NamedTuple):
    """One optimizer step, as `TaskModule.optimize` returns it.

    Attributes:
        step_values: The scalars of its micro-batches; see `Engine.accumulate`.
        applied: Whether an optimizer made its step.
        norm: The gradient's norm before clipping, or None.
        metric_inputs: The inputs of declared metrics that are updated once the step counts.
        dropped: Scalars that enter no average, because the step that they belong to was skipped.
    """

    step_values: list[Any]
    applied: bool
    norm: Tensor | None = None
    metric_inputs: Sequence[Any] = ()
    dropped: Sequence[Any] = ()


_LOSS = ("loss",)


def read_output(output: Any) -> StepValues:
    """Split a step's return value: a scalar, a mapping with "loss", a `StepOutput`, or None."""
    outputs = media = None
    extra: Mapping[str, Any] | None = None
    loss = output
    if isinstance(output, StepOutput):
        loss, outputs, extra, media = output
        if extra or media:
            _check_extra(loss, extra, media)
    if isinstance(loss, Tensor):
        if loss.ndim or loss.is_complex():
            loss = _scalar("loss", loss)
        if not extra:
            return loss, _LOSS, loss.detach(), outputs, media, None
        named = {"loss": loss, **extra}
    elif isinstance(loss, Mapping):
        named = {**loss, **extra} if extra else dict(loss)
        loss = named.get("loss")
        if not isinstance(loss, Tensor):
            raise _no_loss_in(named)
        if loss.ndim:
            named["loss"] = loss = _scalar("loss", loss)
    elif loss is None:
        if not extra:
            return None, (), None, outputs, media, None
        named = {**extra}
    else:
        raise _no_output(output, loss)
    values = _stacked(named, loss)
    if values is None:
        terms = _taken_terms(named, extra)
        return loss, tuple(named), _stacked(named, loss), outputs, media, terms
    return loss, tuple(named), values, outputs, media, None


def _no_loss_in(named: Mapping[str, Any]) -> ConfigError:
    if "loss" not in named:
        return ConfigError(
            f"a step returned a mapping without 'loss'; it has {', '.join(map(repr, named))}."
            " An evaluation's step without a loss returns StepOutput(None, metrics={...})"
        )
    own = " whose weight is what `loss_weight` returns" if isinstance(named["loss"], Term) else ""
    return ConfigError(f"a step's 'loss' must be a tensor{own}, not a {type(named['loss']).__name__}")


def _taken_terms(named: dict[str, Any], extra: Mapping[str, Any] | None) -> dict[str, Term]:
    """Take the terms out of the values that a step returned, and return them with scalars of one element."""
    terms: dict[str, Term] = {}
    for name, each in [*named.items()]:
        if not isinstance(each, Term):
            continue
        if name in (extra or ()):
            raise ConfigError(
                f"a step returned the Term {name!r} among StepOutput's metrics, which are only logged. Return"
                f" it in the mapping of the loss, {{'loss': ..., {name!r}: Term(...)}}"
            )
        value, weight, scale = named.pop(name)
        if not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise ConfigError(f"Term(scale=...) of {name!r} must be a finite number, not {scale!r}")
        weight = _scalar(f"Term(weight=...) of {name}", weight).detach()
        terms[name] = Term(_scalar(name, value), weight, scale)
    return terms


def _no_output(output: Any, loss: Any) -> ConfigError:
    given = "" if loss is output else "the loss as "
    return ConfigError(
        f"a step returned {given}a {type(loss).__name__}; allowed are a scalar tensor, a mapping with 'loss',"
        " or a StepOutput"
    )


class TermsFound(ConfigError):  # noqa: N818 - an error in a generator step only
    """A loss has terms, whose weights must be added up before the first backward of the window.

    The engine then runs the window by `accumulate_terms`; a generator step raises this error.
    """

    def __init__(self, read: StepValues) -> None:
        super().__init__(
            f"a generator training_step yielded the terms {[*(read[5] or ())]}: a yielded loss has the weight"
            " of its batch. Add a term's value to it"
        )
        self.read = read


def no_loss(task: object, read: StepValues) -> ConfigError:
    """Return the error of a training step that returned nothing to optimise, or that returned terms."""
    loss = read[0]
    if loss is not None and loss.requires_grad and read[5] is not None:
        return TermsFound(read)
    if loss is not None:
        return ConfigError(
            f"{type(task).__name__}.training_step returned a loss ({loss.dtype}) that depends on no"
            " parameter: it was detached, made without gradients, or is a whole number"
        )
    return ConfigError(
        f"{type(task).__name__}.training_step returned no loss; it must return a scalar, a mapping with"
        " 'loss', or a StepOutput"
    )


def without_other_graphs(step: Callable[[Batch], Any], keep_outputs: bool) -> Callable[[Batch], Any]:
    """Return a step whose result has a graph in the loss alone.

    For wrappers that hook every returned tensor that requires a gradient: each such tensor costs FSDP one
    more pass of its backward hook, although only the loss is used in the backward.
    """

    def run(batch: Batch) -> Any:
        output = step(batch)
        if not isinstance(output, StepOutput):
            return output
        if keep_outputs:
            return output._replace(outputs=map_tensors(Tensor.detach, output.outputs))
        return output._replace(outputs=None) if output.metrics or output.media else output.loss

    return run


def _check_extra(loss: Any, extra: Mapping[str, Any] | None, media: object) -> None:
    if media and not isinstance(media, Mapping):
        raise ConfigError(
            "StepOutput(media=...) takes values by name, as in {'samples': Image(...)}, not a"
            f" {type(media).__name__}"
        )
    taken = loss if isinstance(loss, Mapping) else () if loss is None else _LOSS
    twice = [name for name in extra or () if name in taken]
    if twice:
        raise ConfigError(
            f"a step returned {', '.join(map(repr, twice))} twice: as StepOutput's loss and among its"
            " metrics. Give the metric another name"
        )


def _stacked(named: Mapping[str, Any], loss: Tensor | None) -> Tensor | None:
    """Return the values to log as a tensor; None if there are terms, which have their own weights."""
    # Copied at once: a task may later change a tensor that it returned.
    with torch.no_grad():
        try:
            stacked = torch.stack(tuple(named.values()))
        except (TypeError, RuntimeError):  # numbers among the tensors, other devices, or shapes such as (1,)
            if any(isinstance(each, Term) for each in named.values()):
                return None
            tensors = (each for each in (loss, *named.values()) if isinstance(each, Tensor))
            device = next((each.device for each in tensors), torch.device("cpu"))
            wide = wide_dtype(device)
            return torch.stack([_placed(name, value, device, wide) for name, value in named.items()])
        # Equal shapes but no scalars, sharded, or complex.
        if stacked.ndim > 1 or stacked.is_complex() or hasattr(stacked, "full_tensor"):
            return torch.stack([_scalar(name, value) for name, value in named.items()])
        return stacked


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device."""
    # MPS has no float64, nor have many Intel GPUs.
    return torch.float32 if device.type in ("mps", "xpu") else torch.float64


def _placed(name: str, value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    if isinstance(value, (int, float)):  # goes to the kernel; a copy from the host would wait for the device
        return torch.full((), value, dtype=dtype, device=device)
    return _scalar(name, value).to(device, dtype)


def _scalar(name: str, value: Any) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the value {name!r} of a step is a {type(value).__name__}, not a number") from None
    if tensor.is_complex():
        raise ConfigError(
            f"the value {name!r} that a step returned is complex ({tensor.dtype}); only real numbers can be"
            " optimised and logged. Return its .abs() or its .real"
        )
    if hasattr(tensor, "full_tensor"):  # computed from sharded parameters; all ranks run the step together
        tensor = tensor.full_tensor()
    if tensor.numel() != 1:
        raise ConfigError(
            f"the value {name!r} that a step returned has shape {tuple(tensor.shape)}; only scalars can be "
            "optimised and logged. Take its mean, or return it as StepOutput(outputs=...)"
        )
    return tensor.reshape(())
