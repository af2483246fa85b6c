"""Hugging Face's accelerate: an Accelerator places and wraps the model, and the engine makes the step.

Gugger et al., "Accelerate: Training and inference at scale made simple, efficient and adaptable", 2022,
https://github.com/huggingface/accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.distributed.group import Member
from drivetrain.distributed.launch.environment import detect
from drivetrain.strategies.accelerate.options import (
    PRECISIONS,
    AccelerateConfig,
    asked,
    other_precision,
    variables,
    word_of,
)
from drivetrain.strategies.base import MakeOptimizers, Prepared, Support, has_collectives, installed
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.deepspeed.library import environment
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.replicated import Replicated
from drivetrain.strategies.sparse import refuse_sparse
from drivetrain.task.task import StepModule


class Accelerate(Replicated):
    """An Accelerator that places and wraps the model, on a CPU or a GPU per process.

    Each process has a copy of the model. Our engine handles the weights of micro-batches, the loss scale,
    clipping and the data.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        StrategyError: An option is not supported.
    """

    name = "accelerate"
    config_type = AccelerateConfig
    leaves_out = (
        "AccelerateConfig(options={'kwargs_handlers':"
        " [DistributedDataParallelKwargs(find_unused_parameters=True)]})"
    )
    needs = "the package accelerate; processes on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals: Mapping[str, str] = {**dict.fromkeys(("skipping", "value_clipping", "unfreezing"), "")}

    def __init__(
        self, config: AccelerateConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or AccelerateConfig()
        self._asked = asked(self.config, os.environ)
        if self._asked.fsdp is not None:
            raise StrategyError(
                "our own strategy 'fsdp' trains with accelerate's FSDP plugin: give its configuration by"
                " Trainer(strategy=...)"
            )
        self.device = torch.device(self._asked.device or device)
        self.world_size = world_size
        self._session: _Session | None = None
        self._begin()

    @property
    def asked_precision(self) -> str | None:
        """The precision of the configuration; None means any."""
        return self.config.asked_precision

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Return whether accelerate is installed; each machine can run processes on its CPU."""
        return installed("accelerate", "accelerate") and has_collectives()

    def supports(self, precision: Precision) -> Support:
        """Support accelerate's precisions, unless the configuration asks for another mixed precision."""
        word = word_of(precision)
        if word is None:
            names = "', '".join(PRECISIONS.values())
            return Support(False, f"accelerate supports '{names}' and precisions that are not mixed")
        if reason := other_precision(self.config, precision):
            return Support(False, reason)
        if word == "fp16" and self.device.type == "cpu":
            return Support(False, "accelerate has no fp16 on CPUs, and would ignore it; use 'bf16-mixed'")
        return Support(True)

    def setup(self) -> None:
        """Join the process group; a single process needs none."""
        if self.world_size > 1:
            self._join(self.config.timeout)
        elif self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def teardown(self) -> None:
        """Leave the process group, and restore accelerate's global state."""
        self._begin()
        if self._session is not None:
            self._session.close()
            self._session = None
        self._leave()

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert and move the module, let the Accelerator wrap it, then build the optimizers."""
        check_values(module.task, self.name)
        if make_optimizers is not None and self.world_size > 1:
            refuse_sparse(module.task, self.name, "its gradients are exchanged whole")
        if self._session is None:
            word = word_of(precision)
            assert word is not None
            member = Member(self.rank, self.world_size, self.device, self.ranks)
            self._session = _Session(self.config, word, member)
        precision.convert_module(module)
        module.to(self.device)
        module.context = self._session.autocast() or precision.forward_context(self.device)
        self._scale = LossScale(self.device) if precision.loss_scaling else None
        scaler = self._session.accelerator.scaler
        if (
            self._scale is not None and scaler is not None
        ):  # the user may have set its initial scale and growth
            self._scale.load_state_dict(scaler.state_dict())
        return self._replicate(module, make_optimizers)

    def _wrapper(self, module: StepModule, init_sync: bool) -> nn.Module:
        assert self._session is not None
        prepared: nn.Module = self._session.accelerator.prepare(module)
        # The module's context has its autocast already, without the cast of outputs.
        for name in ("forward", "_original_forward"):
            vars(module).pop(name, None)
        return prepared


class _Session:
    """The Accelerator of a run.

    accelerate keeps global state in attributes of its classes and in the environment. Here each run gets a
    separate Accelerator, and the global state is restored afterwards.
    """

    def __init__(self, config: AccelerateConfig, mixed_precision: str, member: Member) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        self._shared = [each._shared_state for each in (PartialState, AcceleratorState, GradientState)]
        self._before = [dict(each) for each in self._shared]
        for each in self._shared:
            each.clear()
        try:
            with environment():
                wanted = _processes(variables(config, os.environ), member)
                for name in os.environ.keys() - wanted.keys():
                    del os.environ[name]
                os.environ.update(wanted)
                self.accelerator = _made(config, mixed_precision, member)
        except BaseException:
            self.close()
            raise

    def autocast(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Return a factory of the autocast context; None without mixed precision."""
        from accelerate.utils.modeling import get_mixed_precision_context_manager

        made = self.accelerator
        if not made.native_amp:
            return None
        return partial(get_mixed_precision_context_manager, True, made.autocast_handler)

    def close(self) -> None:
        """Restore accelerate's global state."""
        for shared, before in zip(self._shared, self._before, strict=True):
            shared.clear()
            shared.update(before)


def _made(config: AccelerateConfig, mixed_precision: str, member: Member) -> Any:
    from accelerate import Accelerator

    options = {**config.options, "cpu": member.device.type == "cpu", "mixed_precision": mixed_precision}
    made = Accelerator(**options)
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
