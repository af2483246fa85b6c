"""Precision as data: which dtypes a run stores, computes and reduces in.

Each strategy applies it: single-device and DDP runs as autocast, FSDP as its mixed-precision policy,
DeepSpeed as its configuration. Only two methods touch torch's global state: `forward_context` during one
step, and `running` while an engine lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.validation import by_name

_AUTOCAST = (torch.bfloat16, torch.float16)
"""Dtypes that torch.autocast supports on every device."""

_16_BITS = (torch.bfloat16, torch.float16)
"""Weights stored in these lose small updates when results are rounded to the nearest."""

UPDATES = ("stochastic", "master", "nearest")
"""Ways to update weights stored in 16 bits; see `drivetrain.task.optim.low_precision`."""


class Dtypes(NamedTuple):
    """The dtypes of a run, by torch's names.

    Attributes:
        storage: Weights, and their gradients.
        compute: Matrix products and convolutions.
        reduce: Sums of gradients over processes.
        optimizer: The optimizer's state, and the float32 copies of the weights if there are any.
    """

    storage: str
    compute: str
    reduce: str
    optimizer: str


@by_name
@dataclass(frozen=True)
class Precision:
    """The dtypes that a run stores, computes and reduces in; `PRECISIONS` has the built-in ones.

    Attributes:
        name: What a user writes.
        param_dtype: The dtype that parameters are stored in; None leaves them as the task made them.
        compute_dtype: The dtype of matrix products and convolutions; None uses the parameters' dtype.
        reduce_dtype: The dtype of gradient reductions between ranks.
        loss_scaling: Whether losses are scaled so that float16 gradients do not underflow
            (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740); an update whose gradients
            overflow is skipped.
        updates: How weights stored in 16 bits are updated. Most updates are smaller than the distance to the
            next 16-bit number. With "stochastic" and "master" the optimizer computes in float32 and keeps its
            state in float32. "stochastic" rounds a new weight up or down at random. "master" keeps a float32
            copy of the weights in the optimizer's state. With "nearest" the optimizer computes and keeps its
            state in 16 bits, so weights much larger than their updates do not change.

    A plug-in that needs code is a subclass with its own `convert_module`, `forward_context` or `running`.

    Raises:
        ConfigError: Autocast and loss scaling cannot provide this combination.
    """

    name: str
    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    loss_scaling: bool = False
    updates: str = "stochastic"

    def __post_init__(self) -> None:
        """Check the combination: torch would silently run some of them at a lower precision."""
        if self.updates not in UPDATES:
            raise ConfigError(
                f"precision {self.name!r}: unknown updates {self.updates!r}."
                f" {nearest(str(self.updates), UPDATES)}"
            )
        stored, computed = self.param_dtype or torch.float32, self.compute_dtype
        for dtype in (stored, computed):
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"precision {self.name!r}: {dtype} is not a floating-point dtype")
        if self.loss_scaling and (stored is torch.float16 or computed is not torch.float16):
            raise ConfigError(
                f"precision {self.name!r}: loss scaling needs parameters in float32 and compute in float16,"
                f" not parameters in {stored} and compute in {computed or stored}. Use '16-mixed', or set"
                " loss_scaling=False"
            )
        if type(self).forward_context is not Precision.forward_context:  # autocast's limits do not apply
            return
        if computed not in (None, stored) and (stored is not torch.float32 or computed not in _AUTOCAST):
            raise ConfigError(
                f"precision {self.name!r}: parameters in {stored} cannot compute in {computed}. Mixed"
                " precision stores float32 and computes in bfloat16 or float16; otherwise give the same dtype"
                " for both"
            )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are cast to; None leaves them, as under autocast."""
        return self.param_dtype

    @property
    def converts_layers(self) -> bool:
        """Whether `convert_module` is the plug-in's own, which may replace the code of layers."""
        return type(self).convert_module is not Precision.convert_module

    @property
    def updates_of_weights(self) -> str:
        """`updates` if weights are stored in 16 bits, else "nearest", as plain optimizers round."""
        return self.updates if self.param_dtype in _16_BITS else "nearest"

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of a run whose task creates its weights in float32."""
        storage = _short(self.param_dtype or torch.float32)
        optimizer = storage if self.updates_of_weights == "nearest" else "float32"
        if self.updates_of_weights == "master":
            optimizer += ", with the weights in float32"
        compute = storage if self.compute_dtype is None else _short(self.compute_dtype)
        return Dtypes(storage, compute, _short(self.reduce_dtype), optimizer)

    def obstacle(self, device: torch.device) -> str:
        """Return why a kind of device does not support this precision, and what to use; empty if it does.

        Called when a Trainer or Engine is constructed, before the strategy is.
        """
        return ""

    def process_context(self) -> AbstractContextManager[object]:
        """Return the context that applies process-wide while an engine with this precision lives."""
        return nullcontext()

    def restore_module(self, module: nn.Module) -> None:
        """Undo the changes of `convert_module` to the module's code when the engine ends; keep the dtypes."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the module's floating-point parameters and buffers in `param_dtype`, in place.

        Integers and complex buffers keep their dtype. A cast would drop the imaginary part of a complex
        buffer, such as a rotary embedding.
        """
        dtype = self.param_dtype
        if dtype is not None:
            module._apply(  # type: ignore[no-untyped-call]
                lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
            )
        return module

    def forward_context(self, device: torch.device) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a factory of the context for a forward pass; None if it needs no context."""
        if self.compute_dtype not in (None, self.param_dtype or torch.float32):
            return partial(torch.autocast, device.type, dtype=self.compute_dtype)
        if self.param_dtype is not None:
            return partial(_default_dtype, self.param_dtype)
        return None

    def __str__(self) -> str:
        return f"{self.name} (parameters {self.dtypes.storage}, compute {self.dtypes.compute})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Tensors that a task creates inside its step (masks, noise) get the dtype of its parameters.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
