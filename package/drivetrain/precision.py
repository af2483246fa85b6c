"""Precision as data: which dtypes a run stores, computes and reduces in.

A strategy realises it: single-device and DDP runs as autocast, FSDP as its mixed-precision policy, DeepSpeed
as its configuration. Nothing here touches torch's global state but `forward_context`, and that for one step
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from drivetrain.errors import ConfigError
from drivetrain.registry import Registry

_AUTOCAST = (torch.bfloat16, torch.float16)
"""What torch.autocast can compute in on every device."""


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

    A plug-in that needs code, such as one for 8 bits, is a subclass with its own `convert_module` and
    `forward_context`.

    Raises:
        ConfigError: A combination that autocast and loss scaling cannot realise.
    """

    name: str
    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    loss_scaling: bool = False

    def __post_init__(self) -> None:
        """Refuse at once what would otherwise run as something weaker."""
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
        def short(dtype: torch.dtype | None, otherwise: str) -> str:
            return otherwise if dtype is None else str(dtype).removeprefix("torch.")

        parameters = short(self.param_dtype, "float32")
        return f"{self.name} (parameters {parameters}, compute {short(self.compute_dtype, parameters)})"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Tensors that a task makes inside its step (masks, noise) get the dtype of its parameters.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


PRECISIONS: Registry[Precision] = Registry(
    "precision",
    {
        "32": Precision("32"),
        "bf16-mixed": Precision("bf16-mixed", compute_dtype=torch.bfloat16),
        "16-mixed": Precision("16-mixed", compute_dtype=torch.float16, loss_scaling=True),
        "bf16-true": Precision("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        "16-true": Precision("16-true", torch.float16, torch.float16, torch.float16),
        "64": Precision("64", torch.float64, torch.float64, torch.float64),
    },
)


def as_precision(spec: str | int | Precision) -> Precision:
    """The precision that a user named.

    Raises:
        ConfigError: An unknown name, or something that is no name; lists the allowed ones.
    """
    return spec if isinstance(spec, Precision) else PRECISIONS[str(spec)]
