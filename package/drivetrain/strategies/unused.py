"""Finding the parameters that a step did not use, on all ranks or on some."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.collective_order import CollectiveOrder
from drivetrain.distributed.ranks import Ranks


def part_order(ranks: Ranks) -> CollectiveOrder:
    """Return a check that all ranks run the same parts of a model, for strategies that exchange them."""
    return CollectiveOrder(
        ranks,
        "the ranks run different parts of the model in the same step",
        "Weights and gradients are exchanged in one order, so a rank would take those of one part for"
        " another's. Let all ranks run the same blocks and use the same parameters. Draw what is left out"
        " (LayerDrop, early exit) from a seed that all ranks share, or add the sum of the unused outputs or"
        " parameters to the loss, times zero. Or use strategy 'ddp' with"
        " DDPConfig(find_unused_parameters=True)",
    )


def check_used(names: Sequence[str], parameters: Sequence[nn.Parameter], allow: str) -> None:
    """Check that every parameter has a gradient after a synchronised backward.

    A bucket that lacks a gradient is never averaged. torch reports that only at the next forward, if there is
    one.

    Args:
        names: The names of the parameters.
        parameters: The parameters that were trainable when the run started.
        allow: The option that allows unused parameters.

    Raises:
        ConfigError: A parameter has no gradient; the message names it.
    """
    without = [index for index, each in enumerate(parameters) if each.grad is None]
    if not without:
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
        f"the step used {len(names) - len(without)} of {len(names)} trainable parameters; these got no"
        f" gradient: {listed}{more}. Freeze them, use them, or give {allow}"
    )


class UsedParameters:
    """A record of which parameters have got gradients, kept until `check`.

    Args:
        task: The task.
    """

    def __init__(self, task: nn.Module) -> None:
        self._names: dict[Tensor, str] = {
            each: name for name, each in task.named_parameters() if each.requires_grad
        }
        self._used: set[Tensor] = set()
        self._handles: list[Any] = [
            each.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for each in self._names
        ]

    def stop(self) -> None:
        """Stop recording."""
        for each in self._handles:
            each.remove()

    def check(self) -> None:
        """Check that all parameters have got a gradient, and stop recording.

        Raises:
            ConfigError: Some have not; the message names them.
        """
        self.stop()
        check_all_used(self._names, self._used)


def check_all_used(names: Mapping[Tensor, str], used: Collection[Tensor]) -> None:
    """Check that an update of DeepSpeed's has used all parameters.

    Args:
        names: The names of the trained parameters.
        used: Those that have got a gradient.

    Raises:
        ConfigError: Some have not; the message names them.
    """
    unused = [name for each, name in names.items() if each not in used]
    if unused:
        more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
        raise ConfigError(
            f"this update used {len(names) - len(unused)} of {len(names)} trainable"
            f" parameters; these got no gradient: {', '.join(unused[:8])}{more}. DeepSpeed would update"
            " them with a gradient of zero, so momentum and weight decay would change them. Freeze"
            " them or use them, or use strategy 'ddp' with DDPConfig(find_unused_parameters=True)"
        )
