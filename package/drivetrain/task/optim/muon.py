"""Muon for a whole network: hidden matrices by Muon, everything else by AdamW, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.groups import embedding_parameters, norm_parameters, select_parameters

_MUON_SETTINGS = frozenset({"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn"})
_ADAMW_SETTINGS = frozenset({"betas", "eps"})


@final
class CombinedOptimizer(Optimizer):
    """Several optimizers over different parameters that behave as one.

    Its `param_groups` are the same dicts as the parts', so that a change of the learning rate reaches the
    part. Its `state` is the one mapping that all parts write to, so that ``optimizer.state[parameter]`` can
    be saved and restored as with any other optimizer.

    Args:
        parts: The optimizers, in stepping order. No parameter may be in two of them.

    Raises:
        ConfigError: No parts.
        ValueError: A parameter is in two parts (from torch).
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        if not parts:
            raise ConfigError("a combined optimizer needs at least one part")
        self.parts: tuple[Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        for part in parts:
            self.state.update(part.state)  # Adagrad, for example, makes its state when it is built
        self._share()

    def _share(self) -> None:
        """Give each part its groups and the common state; torch replaces both when it loads a state."""
        first = 0
        for part in self.parts:
            last = first + len(part.param_groups)
            # Through the part's own __setstate__, which adds what a state from an older torch lacks.
            part.__setstate__({"state": self.state, "param_groups": self.param_groups[first:last]})
            first = last

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while torch builds the optimizer.

        Raises:
            ConfigError: The optimizer is built: the group does not say which part should train it.
        """
        if self.parts:
            raise ConfigError(
                "a combined optimizer takes no further group: add it to a part, then combine again"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update with each part in turn; return the closure's value if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()


class Muon(torch.optim.Muon):
    """torch's Muon, also for matrices that are sharded over ranks (`DTensor`).

    Orthogonalisation needs the whole matrix: every rank gathers one matrix at a time, and keeps its part of
    the update. Weights and momentum stay sharded.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; return the closure's value if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
            self._init_group(group, *found)
            for parameter, gradient, average in zip(*found, strict=True):
                _step(group, parameter, gradient, average)
        return loss


def _step(group: dict[str, Any], parameter: Any, gradient: Any, average: Any) -> None:
    """Update a matrix as torch does."""
    momentum, rate = group["momentum"], float(group["lr"])
    average.lerp_(gradient, 1 - momentum)
    update = gradient.lerp(average, momentum) if group["nesterov"] else average
    placements = getattr(parameter, "placements", None)
    if placements is not None:
        update = update.full_tensor()
    update = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
    if placements is not None:
        update = type(gradient).from_local(update, parameter.device_mesh).redistribute(placements=placements)
    parameter.mul_(1 - rate * group["weight_decay"])
    parameter.add_(update, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], parameter.shape))


def _not_hidden(module: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters of norms and embeddings, which never count as hidden matrices."""
    return norm_parameters(module) | frozenset(embedding_parameters(module))


def _split(
    param_groups: Sequence[dict[str, Any]], by_adamw: frozenset[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the groups for Muon and those for AdamW, each with the settings that its part takes."""
    for_muon: list[dict[str, Any]] = []
    for_adamw: list[dict[str, Any]] = []
    for group in param_groups:
        hidden = [each for each in group["params"] if each.ndim == 2 and each not in by_adamw]
        rest = [each for each in group["params"] if each.ndim != 2 or each in by_adamw]
        # Both parts have an `eps`; ours is AdamW's.
        if hidden:
            settings = {key: value for key, value in group.items() if key not in _ADAMW_SETTINGS}
            for_muon.append({**settings, "params": hidden})
        if rest:
            settings = {key: value for key, value in group.items() if key not in _MUON_SETTINGS}
            for_adamw.append({**settings, "params": rest})
    if not for_muon:
        raise ConfigError(
            "the optimizer 'muon' finds no hidden matrix to train: all parameters are embeddings, norms, "
            "biases, kernels or named in adamw_parameters. Use 'adamw'"
        )
    return for_muon, for_adamw


def muon(
    param_groups: Sequence[dict[str, Any]],
    lr: float,
    *,
    module: nn.Module,
    adamw_parameters: str | Sequence[str] = (),
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    adjust_lr_fn: str = "match_rms_adamw",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    fused: bool | None = None,
) -> CombinedOptimizer:
    """Build an optimizer that uses Muon for the hidden matrices and AdamW for the rest.

    Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum of a matrix.
    It is meant for hidden layers. Embeddings, norms, biases, convolution kernels and everything else that is
    not two-dimensional go to AdamW. The output layer should too: name it in `adamw_parameters`. One learning
    rate and weight decay serve both, because by default Muon's update is scaled to the size of AdamW's:
    ``0.2 * sqrt(max(rows, columns))`` (Moonshot, "Muon is Scalable for LLM Training", arXiv 2502.16982).

    Args:
        param_groups: torch parameter groups.
        lr: The base learning rate, in both parts, of groups without one; `weight_decay` is the same for
            weight decay.
        module: The module that holds the parameters; decides which are embeddings and norms, and their names.
        adamw_parameters: Globs on the names of further parameters for AdamW.
        momentum: Muon's, as are `nesterov`, `ns_coefficients` and `ns_steps`; see `torch.optim.Muon`.
        adjust_lr_fn: Muon's: "match_rms_adamw", or "original" (Jordan's, which needs a different rate).
        betas: AdamW's, as are `eps` and `fused`; the default is that of arXiv 2502.16982.

    Raises:
        ConfigError: There is no matrix for Muon to train, or a pattern matches nothing.
    """
    patterns = (adamw_parameters,) if isinstance(adamw_parameters, str) else tuple(adamw_parameters)
    named = select_parameters(module, None, patterns, "adamw_parameters")
    by_adamw = _not_hidden(module) | {each.parameter for each in named}
    for_muon, for_adamw = _split(param_groups, by_adamw)
    muons: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": ns_coefficients,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
    }
    common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    parts: list[Optimizer] = [Muon(for_muon, **common, **muons)]
    if for_adamw:
        parts.append(torch.optim.AdamW(for_adamw, **common, betas=betas, eps=eps, fused=fused))
    return CombinedOptimizer(parts)
