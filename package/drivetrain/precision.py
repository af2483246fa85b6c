"""Precision as data: which dtypes a run stores, computes and reduces in.

A strategy realises it: single-device and DDP runs as autocast, FSDP as its mixed-precision policy, DeepSpeed
as its configuration. Nothing here touches torch's global state but `forward_context`, and that for one step
at a time; and `running`, for as long as an engine lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from drivetrain.errors import ConfigError, nearest
from drivetrain.options import by_name
from drivetrain.registry import Registry

_AUTOCAST = (torch.bfloat16, torch.float16)
"""What torch.autocast can compute in on every device."""

_16_BITS = (torch.bfloat16, torch.float16)
"""Stored in these, a weight loses updates that are rounded to the nearest."""

UPDATES = ("stochastic", "master", "nearest")
"""How weights that are stored in 16 bits take updates; see `drivetrain.weight_updates`."""


class Dtypes(NamedTuple):
    """What a run keeps and computes in, by dtypes as torch calls them.

    Attributes:
        storage: Weights, and their gradients.
        compute: Matrix products and convolutions.
        reduce: Sums of gradients over processes.
        optimizer: The optimizer's state, and float32 copies of the weights where they are kept.
    """

    storage: str
    compute: str
    reduce: str
    optimizer: str


@by_name
@dataclass(frozen=True)
class Precision:
    """A frozen value; see `PRECISIONS` for the built-in ones.

    Attributes:
        name: What a user writes.
        param_dtype: The dtype that parameters are stored in; None leaves them as the task made them.
        compute_dtype: The dtype of matrix products and convolutions; None is that of the parameters.
        reduce_dtype: The dtype of gradient reductions between ranks.
        loss_scaling: Whether losses are scaled so that float16 gradients do not underflow
            (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740); an update whose gradients
            overflow is skipped.
        updates: How weights that are stored in 16 bits take updates, most of which are smaller than the
            distance to the next such number. "stochastic" and "master" have the optimizer compute in float32,
            and keep its state so. The first rounds to either neighbour at random; the second keeps the
            weights in float32, too, as the optimizer's state. "nearest" computes, and keeps the state, in the
            16 bits, so that weights far larger than their updates stay as they are.

    A plug-in that needs code is a subclass with its own `convert_module`, `forward_context` or `running`.

    Raises:
        ConfigError: A combination that autocast and loss scaling cannot realise.
    """

    name: str
    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    loss_scaling: bool = False
    updates: str = "stochastic"

    def __post_init__(self) -> None:
        """Refuse at once what would otherwise run as something weaker."""
        if self.updates not in UPDATES:
            raise ConfigError(
                f"precision {self.name!r}: unknown updates {self.updates!r}."
                f" {nearest(str(self.updates), UPDATES)}"
            )
        stored, computed = self.param_dtype or torch.float32, self.compute_dtype
        for dtype in (stored, computed):
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"precision {self.name!r}: {dtype} is no floating-point dtype")
        if self.loss_scaling and (stored is torch.float16 or computed is not torch.float16):
            raise ConfigError(
                f"precision {self.name!r}: loss scaling is for products in float16 whose gradients are kept"
                f" in float32, not for products in {computed or stored} of parameters in {stored}. Store them"
                " in float32 and compute in float16, as '16-mixed' does"
            )
        if type(self).forward_context is not Precision.forward_context:  # it knows what it can do
            return
        if computed not in (None, stored) and (stored is not torch.float32 or computed not in _AUTOCAST):
            raise ConfigError(
                f"precision {self.name!r}: parameters in {stored} cannot compute in {computed}. Mixed"
                " precision stores float32 and computes in bfloat16 or float16; otherwise give the same dtype"
                " for both"
            )

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; None leaves them alone, as autocast casts what it needs."""
        return self.param_dtype

    @property
    def updates_of_weights(self) -> str:
        """`updates` where weights are stored in 16 bits, and else "nearest", as optimizers make them."""
        return self.updates if self.param_dtype in _16_BITS else "nearest"

    @property
    def dtypes(self) -> Dtypes:
        """What is kept and computed in what, where a task brings weights in float32."""
        storage = _short(self.param_dtype or torch.float32)
        optimizer = storage if self.updates_of_weights == "nearest" else "float32"
        if self.updates_of_weights == "master":
            optimizer += ", with the weights in float32"
        compute = storage if self.compute_dtype is None else _short(self.compute_dtype)
        return Dtypes(storage, compute, _short(self.reduce_dtype), optimizer)

    def obstacle(self, device: torch.device) -> str:
        """Why a kind of device cannot compute in it, and what to use; empty where it can.

        Asked when a Trainer or Engine is made, before the strategy is.
        """
        return ""

    def running(self) -> AbstractContextManager[object]:
        """What holds for the whole process while an engine of this precision lives, and not afterwards."""
        return nullcontext()

    def restore_module(self, module: nn.Module) -> None:
        """Take back what `convert_module` has made of a module's code, when the engine ends; dtypes stay."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Store the module's floating-point parameters and buffers in `param_dtype`, in place.

        Integers stay as they are, and so do complex buffers (rotary embeddings), which would lose their
        imaginary part.
        """
        dtype = self.param_dtype
        if dtype is not None:
            module._apply(  # type: ignore[no-untyped-call]
                lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
            )
        return module

    def forward_context(self, device: torch.device) -> Callable[[], AbstractContextManager[object]] | None:
        """A factory of the context that a forward pass runs under; None when it needs none."""
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
    # Tensors that a task makes inside its step (masks, noise) get the dtype of its parameters.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _true(name: str, dtype: torch.dtype) -> dict[str, Precision | str]:
    """The rows of a dtype that all is stored and computed in, by how its weights take updates."""
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
        "tf32": "drivetrain.tf32:PRECISION",
        "fp8": "drivetrain.float8:PRECISION",
    },
)


def as_precision(spec: str | int | Precision) -> Precision:
    """The precision that a user named.

    Raises:
        ConfigError: An unknown name, or something that is no name; lists the allowed ones.
    """
    return spec if isinstance(spec, Precision) else PRECISIONS[str(spec).removeprefix("torch.")]
