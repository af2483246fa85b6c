"""Matrix products of linear layers in 8 bits, by torchao; everything else in bfloat16 mixed precision.

Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. For each product the inputs, weights
and output gradients are scaled to the range of float8 and rounded. Storage is unchanged, so checkpoints have
the same names and dtypes as with other precisions.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import by_name
from drivetrain.strategies.precision.base import Dtypes, Precision

RECIPES = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""torchao's scaling recipes, each with the compute capability that it needs."""

_MULTIPLE = 16
"""The sides of a matrix must be multiples of this for products in 8 bits."""

_ADDED = "_added_by_float8"
"""The attribute of a converted layer that lists the attributes added to it."""

_USERS = "_users_of_float8"
"""The attribute of a converted layer that lists its users: the last user to restore the layer reverts it."""


@by_name
@dataclass(frozen=True)
class Float8(Precision):
    """Linear layers in float8, for training.

    Attributes:
        name: The name in messages.
        compute_dtype: The dtype of all other products.
        recipe: "tensorwise", the fastest, has one scale for a tensor. "rowwise" has one for each row and
            loses less to outliers. "rowwise_with_gw_hp" is "rowwise" with weight gradients in
            `compute_dtype`.
        leave_out: Globs on the names of layers that stay in `compute_dtype`. None leaves out the last linear
            layer that the task created, usually the output's; `()` leaves out no layer.
        emulate: Round to float8 but multiply in float32, on a device without float8. It is slow, and shows
            how training would go.

    Raises:
        ConfigError: The recipe is unknown, or the combination is not allowed by `Precision`.
    """

    name: str = "fp8"
    compute_dtype: torch.dtype | None = torch.bfloat16
    recipe: str = "tensorwise"
    leave_out: str | tuple[str, ...] | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe not in RECIPES:
            raise ConfigError(f"unknown recipe {self.recipe!r}. {nearest(str(self.recipe), RECIPES)}")
        if self.leave_out is not None:
            globs = (self.leave_out,) if isinstance(self.leave_out, str) else tuple(self.leave_out)
            object.__setattr__(self, "leave_out", globs)

    def obstacle(self, device: torch.device) -> str:
        """Return why this device does not support float8; empty if it does, or if float8 is emulated.

        Raises:
            MissingDependencyError: torchao is not installed.
        """
        if not is_installed("torchao"):
            raise MissingDependencyError("torchao", "torchao", f"precision {self.name!r}")
        if self.emulate:
            allowed = device.type in ("cpu", "cuda")
            return "" if allowed else f"float8 is emulated on CPUs and CUDA GPUs, not on {device.type!r}"
        instead = "use 'bf16-mixed', or Float8(emulate=True), which is slow, to see how training would go"
        if device.type != "cuda" or torch.version.hip is not None:
            return f"products in float8 need an NVIDIA GPU since Ada or Hopper; {instead}"
        needed = RECIPES[self.recipe]
        if torch.cuda.get_device_capability(device) < needed:
            name = torch.cuda.get_device_name(device)
            version = ".".join(map(str, needed))
            return (
                f"{self.recipe} products in float8 need compute capability {version}, which {name} does not"
                f" have; {instead}"
            )
        return ""

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of bfloat16 mixed precision, with float8 in linear layers."""
        others = super().dtypes
        return others._replace(compute=f"float8_e4m3fn in linear layers, else {others.compute}")

    def layers(self, module: nn.Module) -> dict[str, str]:
        """Return which linear layers of a task compute in float8.

        Args:
            module: A task, or any module.

        Returns:
            The reason why each layer is left out, by the layer's name; empty if it computes in float8.
        """
        return {name: reason for name, _, reason in self._layers(module)}

    def _layers(self, module: nn.Module) -> Iterator[tuple[str, nn.Linear, str]]:
        found = [
            (clean_name(name).removeprefix("task."), each)
            for name, each in module.named_modules()
            if isinstance(each, nn.Linear)
        ]
        globs = (found[-1][0],) if self.leave_out is None and found else self.leave_out or ()
        for name, each in found:
            yield name, each, _reason(name, each, tuple(globs))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Make the linear layers compute in float8, in place: the layers stay the same objects.

        Raises:
            ConfigError: No layer can compute in float8, or a glob of `leave_out` matches no layer.
        """
        super().convert_module(module)
        layers = list(self._layers(module))
        for glob in self.leave_out or ():
            if not fnmatch.filter([name for name, _, _ in layers], glob):
                names = [name for name, _, _ in layers]
                raise ConfigError(f"leave_out={glob!r} names no linear layer. {nearest(glob, names)}")
        chosen = [each for _, each, reason in layers if not reason]
        if not chosen:
            why = "; ".join(f"{name!r} {reason}" for name, _, reason in layers[:8])
            raise ConfigError(
                f"no layer can compute in float8 under precision {self.name!r}: {why or 'no linear layers'}."
                " Use 'bf16-mixed', or Float8(leave_out=...)"
            )
        self._convert(chosen)
        return module

    def _convert(self, layers: list[nn.Linear]) -> None:
        config = _library().Float8LinearConfig.from_recipe_name(self.recipe)
        object.__setattr__(config, "emulate", self.emulate)
        # The product for a weight's gradient sums over the batch's rows, and needs a multiple of 16. A last
        # batch, or a part of one, may have any number.
        object.__setattr__(config, "pad_inner_dim", True)
        for layer in layers:
            if not hasattr(layer, _ADDED):
                self._make_float8(layer, config)
            users = vars(layer).get(_USERS, _Users())
            vars(layer)[_USERS] = _Users(*users.but(self), self)

    def _make_float8(self, layer: nn.Linear, config: Any) -> None:
        # The layer takes the class and settings of a torchao layer. A new object would lose the layer's hooks
        # and the references that others hold to it.
        with torch.device("meta"):
            made = _library().convert_to_float8_training(nn.Linear(16, 16, bias=False), config=config)
        own = vars(layer)
        added = {name: value for name, value in vars(made).items() if name not in own}
        own.update(added)
        own[_ADDED] = tuple(added)
        kind: Any = type(made)
        layer.__class__ = _emulated(kind) if self.emulate else kind

    def restore_module(self, module: nn.Module) -> None:
        """Revert the layers that this object converted, except those that another engine still uses: a task
        may be evaluated while it is trained.
        """
        for each in module.modules():
            users: _Users = vars(each).get(_USERS, _Users())
            if self not in users:
                continue
            left = vars(each)[_USERS] = _Users(*users.but(self))
            if not left:
                for name in (*vars(each)[_ADDED], _ADDED, _USERS):
                    vars(each).pop(name, None)
                each.__class__ = nn.Linear


class _Users:
    """The living objects that converted a layer and have not restored it; a copied layer starts without."""

    def __init__(self, *users: Float8) -> None:
        self._users = tuple(map(weakref.ref, users))

    def but(self, user: Float8) -> list[Float8]:
        """Return the other users, compared by identity."""
        return [each for ref in self._users if (each := ref()) is not None and each is not user]

    def __contains__(self, user: Float8) -> bool:
        return any(ref() is user for ref in self._users)

    def __bool__(self) -> bool:
        return any(ref() is not None for ref in self._users)

    def __reduce__(self) -> tuple[type[_Users], tuple[()]]:
        return _Users, ()


def _reason(name: str, layer: nn.Linear, globs: tuple[str, ...]) -> str:
    if type(layer) is not nn.Linear and not hasattr(layer, _ADDED):
        return f"is a {type(layer).__name__}, which may compute in another way"
    if any(fnmatch.fnmatchcase(name, glob) for glob in globs):
        return "is left out"
    sides = (layer.in_features, layer.out_features)
    if any(side % _MULTIPLE for side in sides):
        return f"has sides of {sides[0]} and {sides[1]}, which are not both multiples of {_MULTIPLE}"
    return ""


def _library() -> Any:
    """Import torchao's float8 training without its messages about other parts that are missing here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao import float8
    finally:
        logging.disable(before)
    return float8


@functools.cache
def _emulated(kind: type[nn.Linear]) -> type[nn.Linear]:
    """Return torchao's layer with support for autocast on the CPU; torchao handles only CUDA's."""

    class Float8Linear(kind):  # type: ignore[valid-type,misc]
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled(input.device.type):
                input = input.to(torch.get_autocast_dtype(input.device.type))
            output: torch.Tensor = super().forward(input)
            return output

    return Float8Linear


PRECISION = Float8()
