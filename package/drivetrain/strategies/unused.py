"""Finding the parameters that a step did not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError


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
        self._names = {each: name for name, each in task.named_parameters() if each.requires_grad}
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
        unused = [name for each, name in self._names.items() if each not in self._used]
        if unused:
            more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
            raise ConfigError(
                f"the first update used {len(self._names) - len(unused)} of {len(self._names)} trainable"
                f" parameters; these got no gradient: {', '.join(unused[:8])}{more}. DeepSpeed would update"
                " them with a gradient of zero, so momentum and weight decay would change them. Freeze"
                " them or use them, or use strategy 'ddp' with DDPConfig(find_unused_parameters=True)"
            )
