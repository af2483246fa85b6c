"""An Accelerator for the duration of a run.

accelerate keeps global state in attributes of its classes and in the environment. Here each run gets a
separate Accelerator, and the global state is restored afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.group import Member
from drivetrain.distributed.launch.environment import detect
from drivetrain.strategies.accelerate.options import AccelerateConfig, variables
from drivetrain.strategies.deepspeed.library import environment


class Session:
    """The Accelerator of a run: the user's, or a new one."""

    def __init__(
        self,
        config: AccelerateConfig,
        mixed_precision: str,
        member: Member,
    ) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        self._shared = [each._shared_state for each in (PartialState, AcceleratorState, GradientState)]
        self._before = [dict(each) for each in self._shared]
        try:
            if config.accelerator is not None:
                self.accelerator = config.accelerator
            else:
                for each in self._shared:
                    each.clear()
                with environment():
                    _set(_processes(variables(config, os.environ), member))
                    self.accelerator = _made(config, mixed_precision, member)
        except BaseException:
            self._restore()
            raise
        self._lists = [self.accelerator._models, self.accelerator._optimizers]
        self._kept = [list(each) for each in self._lists]

    def autocast(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a factory of the autocast context; None without mixed precision."""
        from accelerate.utils.modeling import get_mixed_precision_context_manager

        made = self.accelerator
        if not made.native_amp:
            return None
        return partial(get_mixed_precision_context_manager, True, made.autocast_handler)

    def close(self) -> None:
        """Drop the prepared objects, and restore accelerate's global state."""
        for each, kept in zip(self._lists, self._kept, strict=True):
            each[:] = kept
        self._restore()

    def _restore(self) -> None:
        for shared, before in zip(self._shared, self._before, strict=True):
            shared.clear()
            shared.update(before)


def _made(config: AccelerateConfig, mixed_precision: str, member: Member) -> Any:
    from accelerate import Accelerator

    options = {**config.options, "cpu": member.device.type == "cpu", "mixed_precision": mixed_precision}
    try:
        made = Accelerator(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"accelerate refuses the options of strategy 'accelerate': {error}") from error
    if made.init_handler is not None:
        raise ConfigError(
            "InitProcessGroupKwargs has no effect, because the process group exists before the Accelerator:"
            " give AccelerateConfig(timeout=...)"
        )
    return made


def _processes(found: dict[str, str], member: Member) -> dict[str, str]:
    """Return the environment with the process numbers in accelerate's variables, for any launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if member.world_size == 1:
        return {name: value for name, value in found.items() if name not in names}
    launched = detect(found)
    local, beside = member.rank, member.world_size
    if launched is not None:
        local, beside = launched.local_rank, launched.local_world_size
    numbers = (member.rank, member.world_size, local, beside)
    # accelerate would set the number of threads permanently if it were not given.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return {**threads, **found, **dict(zip(names, map(str, numbers), strict=True))}


def _set(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
