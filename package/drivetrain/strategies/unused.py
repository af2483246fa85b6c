"""Finding the parameters that a step did not use, on all ranks or on some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.collective_order import CollectiveOrder
from drivetrain.distributed.ranks import Ranks


def part_order(ranks: Ranks, needs_all: bool = False) -> CollectiveOrder:
    """Return a check that all ranks run the same parts of a model, for strategies that exchange them.

    Args:
        needs_all: Whether a step must use all parameters, so that ranks may not leave out the same ones.
    """
    ddp = "Or use strategy 'ddp' with DDPConfig(find_unused_parameters=True)"
    left_out = "what is left out (LayerDrop, early exit) from a seed that all ranks share"
    if needs_all:
        advice = (
            "Add the sum of the unused outputs or parameters to the loss, times zero."
            f" {ddp}, or 'fsdp', and draw {left_out}"
        )
    else:
        advice = (
            f"Draw {left_out}, or add the sum of the unused outputs or parameters to the loss, times zero."
            f" {ddp}"
        )
    return CollectiveOrder(
        ranks,
        "the ranks run different parts of the model in the same step",
        "Weights and gradients are exchanged in one order, so a rank would take those of one part for"
        f" another's. Let all ranks run the same blocks and use the same parameters. {advice}",
    )


Gradients: TypeAlias = "list[tuple[Tensor | None, int]]"
"""The gradient of each parameter before a backward, and torch's count of its changes."""


def gradients_now(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of parameters, to compare after a backward."""
    return [(each.grad, 0 if each.grad is None else each.grad._version) for each in parameters]


def check_used(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    allow: str,
    before: Gradients | None = None,
    needs_any: bool = True,
) -> None:
    """Check that a synchronised backward has given every parameter a gradient.

    A bucket that lacks a gradient is never averaged. torch reports that only at the next forward, if there is
    one.

    Args:
        before: The gradients of the window's earlier micro-batches; None if there were none.
        needs_any: Whether the backward must have used some of them.
    """
    if before is None:
        without = [index for index, each in enumerate(parameters) if each.grad is None]
    else:
        now = gradients_now(parameters)
        pairs = enumerate(zip(before, now, strict=True))
        without = [at for at, (old, new) in pairs if old[0] is new[0] and old[1] == new[1]]
    if not without or (len(without) == len(names) and not needs_any):
        return
    frozen = [names[index] for index in without if not parameters[index].requires_grad]
    if frozen:
        raise ConfigError(
            f"parameters were frozen after the run had started: {', '.join(frozen[:8])}. Freeze them by the"
            f" callback Freeze(...), or before the run, or give {allow}"
        )
    listed = ", ".join(names[index] for index in without[:8])
    more = f" and {len(without) - 8} more" if len(without) > 8 else ""
    raise ConfigError(
        f"{'the step' if before is None else 'the last micro-batch of the window'} used"
        f" {len(names) - len(without)} of {len(names)} trainable parameters; these got no gradient:"
        f" {listed}{more}. Freeze them, use them, or give {allow}"
    )


_AT_ZERO = (
    "DeepSpeed would update them with a gradient of zero, so that momentum, weight decay or running averages"
    " would change them or their state"
)
_STAGE_3 = "DeepSpeed's stage 3 would update them with the gradients of an earlier step"


class UsedParameters:
    """A record of the parameters that have got gradients in a step."""

    def __init__(self, task: nn.Module, optimizers: Collection[Optimizer]) -> None:
        self._optimizers = optimizers
        self._names: dict[Tensor, str] = {}
        self._used: set[Tensor] = set()
        self._handles: list[Any] = []
        self.watch(task)

    def watch(self, task: nn.Module) -> None:
        """Record the parameters of a task that are trained now."""
        self.stop()
        self._names = {each: name for name, each in task.named_parameters() if each.requires_grad}
        self._used.clear()
        self._handles = [
            each.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for each in self._names
        ]

    def stop(self) -> None:
        for each in self._handles:
            each.remove()

    def check(self) -> None:
        """Check that all parameters have got a gradient, and begin with the next step."""
        check_all_used(self._names, self._used, self._optimizers)
        self._used.clear()


def check_all_used(
    names: Mapping[Tensor, str], used: Collection[Tensor], optimizers: Collection[Optimizer], stage: int = 0
) -> None:
    """Check that a step of DeepSpeed's has used all parameters, unless a gradient of zero changes nothing."""
    unused = [name for each, name in names.items() if each not in used]
    if unused and not (stage < 3 and all(map(_is_idle_at_zero, optimizers))):
        more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
        raise ConfigError(
            f"this step used {len(names) - len(unused)} of {len(names)} trainable"
            f" parameters; these got no gradient: {', '.join(unused[:8])}{more}."
            f" {_STAGE_3 if stage == 3 else _AT_ZERO}. Freeze them or use them; or use strategy 'fsdp', or"
            " 'ddp' with DDPConfig(find_unused_parameters=True); or, below stage 3, train by 'sgd' without"
            " momentum and weight decay"
        )


def _is_idle_at_zero(optimizer: Optimizer) -> bool:
    """Return whether a gradient of zero changes neither a weight nor the optimizer's state."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )
