"""Parameters that a step leaves out, which DeepSpeed would update as if their gradient were zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from drivetrain.errors import ConfigError


class Unused:
    """Watches which parameters get gradients, until it is asked.

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

    def check(self) -> None:
        """See that all have got one, and watch no longer.

        Raises:
            ConfigError: Some have not; names them.
        """
        for each in self._handles:
            each.remove()
        unused = [name for each, name in self._names.items() if each not in self._used]
        if unused:
            more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
            raise ConfigError(
                f"the first update used {len(self._names) - len(unused)} of {len(self._names)} trainable"
                f" parameters; these got no gradient: {', '.join(unused[:8])}{more}. DeepSpeed would update"
                " them as if it were zero, so that momentum and weight decay would move them. Freeze them or"
                " use them, or use strategy 'ddp' with DDPConfig(find_unused_parameters=True)"
            )
