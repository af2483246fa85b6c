"""Muon for a whole network: hidden matrices by Muon, everything else by AdamW, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.groups import embedding_parameters, norm_parameters, select_parameters

_MUON_SETTINGS = frozenset(
    {"momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "cautious_decay"}
)
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
            raise ConfigError("a combined optimizer takes no further group: add it to a part, and combine")
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
    """torch's Muon, also for stacks of matrices, and for what is sharded over ranks (`DTensor`).

    Each matrix of a stack ``[number, rows, columns]`` is a matrix of its own. Orthogonalisation needs whole
    matrices: every rank gathers one matrix or stack at a time, and keeps its part of the update. A stack that
    is sharded by its matrices is not gathered. Weights and momentum stay sharded.

    Args:
        params: Matrices and stacks, or groups of them.
        cautious_decay: Whether only elements that the update moves towards zero decay.
        **settings: Those of `torch.optim.Muon`.
    """

    def __init__(self, params: Iterable[Any], *, cautious_decay: bool = False, **settings: Any) -> None:
        super().__init__([torch.empty(1, 1)], **settings)  # checks the settings; it refuses stacks
        self.param_groups.clear()
        self.defaults["cautious_decay"] = cautious_decay
        given = list(params)
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

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
    """Update a matrix as torch does, or each matrix of a stack."""
    momentum, rate = group["momentum"], float(group["lr"])
    average.lerp_(gradient, 1 - momentum)
    update = gradient.lerp(average, momentum) if group["nesterov"] else average
    placements = getattr(parameter, "placements", None)
    if placements is None:
        update = _orthogonal(group, update)
    elif parameter.ndim == 3 and all(each.is_replicate() or each.is_shard(0) for each in placements):
        given = parameter.device_mesh, placements
        whole = {"shape": parameter.shape, "stride": parameter.stride()}
        update = type(gradient).from_local(_orthogonal(group, update.to_local()), *given, **whole)
    else:
        update = type(gradient).from_local(_orthogonal(group, update.full_tensor()), parameter.device_mesh)
        update = update.redistribute(placements=placements)
    decay = rate * group["weight_decay"]
    if group["cautious_decay"]:
        parameter.sub_(parameter * (update * parameter >= 0), alpha=decay)
    else:
        parameter.mul_(1 - decay)
    parameter.add_(update, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], parameter.shape[-2:]))


def _orthogonal(group: dict[str, Any], update: Tensor) -> Tensor:
    settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
    if update.ndim == 2:
        return _zeropower_via_newtonschulz(update, *settings)
    if not update.numel():  # a rank without a matrix of the stack
        return update
    # Once for all matrices: a call for each would be slow on a GPU.
    return torch.vmap(lambda matrix: _zeropower_via_newtonschulz(matrix, *settings))(update)


def _not_hidden(module: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters of norms and embeddings, which never count as hidden matrices."""
    return norm_parameters(module) | frozenset(embedding_parameters(module))


def _split(
    param_groups: Sequence[dict[str, Any]], by_adamw: frozenset[nn.Parameter], stacks: set[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the groups for Muon and those for AdamW, each with the settings that its part takes."""
    for_muon: list[dict[str, Any]] = []
    for_adamw: list[dict[str, Any]] = []
    for group in param_groups:
        by_muon = {e for e in group["params"] if e in stacks or (e.ndim == 2 and e not in by_adamw)}
        hidden = [each for each in group["params"] if each in by_muon]
        rest = [each for each in group["params"] if each not in by_muon]
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


def _stacks(
    module: nn.Module, patterns: Sequence[str], by_adamw: frozenset[nn.Parameter]
) -> set[nn.Parameter]:
    found = select_parameters(module, None, patterns, "stacks")
    for each in found:
        if each.parameter.ndim != 3 or each.parameter in by_adamw:
            raise ConfigError(
                "stacks of the optimizer 'muon' are parameters [number, rows, columns] that AdamW does not"
                f" get: {each.names[0]!r} has the shape {list(each.parameter.shape)}. Name only such ones"
            )
    return {each.parameter for each in found}


def muon(
    param_groups: Sequence[dict[str, Any]],
    lr: float,
    *,
    module: nn.Module,
    adamw_parameters: str | Sequence[str] = (),
    stacks: str | Sequence[str] = (),
    cautious_decay: bool = False,
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
        stacks: Globs on the names of parameters ``[number, rows, columns]`` that hold one matrix for each
            expert, for Muon.
        cautious_decay: Whether Muon's weight decay leaves out elements that the update moves away from zero
            (Chen et al., "Cautious Weight Decay", arXiv 2510.12402).
        momentum: Muon's, as are `nesterov`, `ns_coefficients` and `ns_steps`; see `torch.optim.Muon`.
        adjust_lr_fn: Muon's: "match_rms_adamw", or "original" (Jordan's, which needs a different rate).
        betas: AdamW's, as are `eps` and `fused`; the default is that of arXiv 2502.16982.

    Raises:
        ConfigError: There is no matrix for Muon to train, a pattern matches nothing, or a stack has not three
            dimensions.
    """
    patterns = (adamw_parameters,) if isinstance(adamw_parameters, str) else tuple(adamw_parameters)
    named = select_parameters(module, None, patterns, "adamw_parameters")
    by_adamw = _not_hidden(module) | {each.parameter for each in named}
    stacked = _stacks(module, (stacks,) if isinstance(stacks, str) else tuple(stacks), by_adamw)
    for_muon, for_adamw = _split(param_groups, by_adamw, stacked)
    muons: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": ns_coefficients,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
        "cautious_decay": cautious_decay,
    }
    common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    parts: list[Optimizer] = [Muon(for_muon, **common, **muons)]
    if for_adamw:
        parts.append(torch.optim.AdamW(for_adamw, **common, betas=betas, eps=eps, fused=fused))
    return CombinedOptimizer(parts)
