"""Maximal update parametrization: rates and initial values that keep their best settings over widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.groups import ParameterGroup, embedding_parameters, named_parameters


def mup(module: nn.Module, base: nn.Module, weight_decay: float = 0.0) -> list[ParameterGroup]:
    """Rescale a module's initial values, and return groups with the rates of its width, for Adam or AdamW.

    The rules are those of Yang et al., "Tensor Programs V" (arXiv 2203.03466), table 3, whose form needs no
    factors in forward. For Adam it equals table 8: that table's multiplier of the output is in the initial
    values and the rate here. Let r be the ratio of the widths. Hidden matrices have a rate of 1 / r. A matrix
    whose input grows and whose output does not has a rate of 1 / r, and initial values smaller by sqrt(r).
    Biases of layers whose input grows have larger ones by sqrt(r). Embeddings, norms and all else are
    unchanged. Layers are expected to be initialised as torch does, by 1 / sqrt(inputs), and attention scores
    to be divided by the size of the heads, not its root.

    Call it once, in the constructor of the task; `OptimizerConfig(groups=...)` takes the result. A head that
    is tied to an embedding needs logits divided by r in forward.

    Args:
        module: The module to train.
        base: The same module at the width whose rate was searched, on any device, such as "meta".
        weight_decay: The optimizer's weight decay. Matrices with a rate of 1 / r get r times it, so that a
            step takes the same share from the weights at any width, as in the package `mup`.

    Raises:
        ConfigError: The modules have other parameters, one with more than two dimensions grows, or a fit of
            the module has begun, which would rescale its values again.
    """
    if getattr(getattr(module, "run_length", None), "world_size", None) is not None:
        raise ConfigError(
            "mup in configure_optimizers would rescale the values in each fit, also trained ones. Call it in"
            " the constructor, and keep the groups: self.groups = mup(self, base)"
        )
    bases = {each.names[0]: each.parameter.shape for each in named_parameters(base)}
    named = {each.names[0]: each.parameter for each in named_parameters(module)}
    if bases.keys() != named.keys():
        raise ConfigError(
            f"mup: the module and its base differ in {sorted(bases.keys() ^ named.keys())[:4]}."
            " Give the same model, with another width alone"
        )
    embeddings, groups = set(embedding_parameters(module)), list[ParameterGroup]()
    for name, parameter in named.items():
        before = bases[name]
        if parameter.ndim != len(before) or (parameter.ndim > 2 and parameter.shape != before):
            raise ConfigError(
                f"mup takes matrices, embeddings and vectors to another width, and {name!r} has the shape"
                f" {list(parameter.shape)}, with {list(before)} in the base"
            )
        if parameter.ndim < 2 or parameter in embeddings or parameter.shape[1] == before[1]:
            continue
        ratio = parameter.shape[1] / before[1]
        groups.append(ParameterGroup(name, lr_scale=1 / ratio, weight_decay=weight_decay * ratio or None))
        bias = named.get(f"{name.removesuffix('weight')}bias")
        with torch.no_grad():
            if parameter.shape[0] == before[0]:
                parameter.div_(ratio**0.5)
            if bias is not None:
                bias.mul_(ratio**0.5)
    return groups


def check_coordinates(
    make: Callable[[int], nn.Module], widths: list[int], train: Callable[[nn.Module], Any]
) -> Mapping[int, Mapping[str, float]]:
    """Print and return the mean size of each layer's outputs, by width, before and after training steps.

    Under the right parametrization no column grows with the width.

    Args:
        make: Makes the module of a width.
        widths: The widths.
        train: Makes some steps with a module, and ends with a forward.
    """
    found: dict[int, dict[str, float]] = {}
    for width in widths:
        sizes = found[width] = {}

        def keep(name: str, sizes: dict[str, float] = sizes) -> Callable[..., None]:
            def hook(module: nn.Module, given: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    sizes[name] = output.detach().abs().mean().item()

            return hook

        module = make(width)
        for name, each in module.named_modules():
            if name and not list(each.children()):
                each.register_forward_hook(keep(name))
        train(module)
    names = list(dict.fromkeys(name for sizes in found.values() for name in sizes))
    print(f"{'width':>8}" + "".join(f"{name:>16}" for name in names))
    for width, sizes in found.items():
        print(f"{width:>8}" + "".join(f"{sizes.get(name, float('nan')):>16.4g}" for name in names))
    return found
