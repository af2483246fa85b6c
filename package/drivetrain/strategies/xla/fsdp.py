"""Fully sharded training on all XLA devices of one process, by annotations for the compiler.

Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021. The annotations are
those of torch_xla's SpmdFullyShardedDataParallel ("FSDPv2"). They are set by hooks instead of a wrapper, so
modules and names do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.validation import by_name, count, one_of
from drivetrain.data.batch import map_tensors
from drivetrain.strategies.base import MakeOptimizers, Prepared
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.wrapping import Wrap, are_names, check_wrap, units
from drivetrain.strategies.xla.device import RUN_AFTER, OnXLA, open_device
from drivetrain.task.blocks import repeated_blocks
from drivetrain.task.task import StepModule

_DATA, _FSDP = "data", "fsdp"
"""The mesh's axes: copies of the model, and shards of each."""

_PATCHED = ("forward", "_xla_checkpointed_forward_original", "_xla_checkpointed_forward_no_kwargs")
"""The attributes that torch_xla's `checkpoint_module` adds to a module."""


@by_name
@dataclass(frozen=True, kw_only=True)
class XLAFSDPConfig:
    """Options of strategy "xla_fsdp".

    Attributes:
        wrap: The blocks whose outputs are sharded by samples, so that the compiler gathers a block's
            parameters where the block is used: "auto" for each of the model's repeated blocks, the names of
            classes, a minimum number of parameters, a function of a module, or () for none.
        replicas: The number of groups of devices. Each group has a copy of the model, which is sharded within
            the group.
        activation_checkpointing: False; "full" to recompute each repeated block's activations in backward; or
            the names of the classes to recompute.
        run_after: When XLA runs traced operations: after each "micro_batch", or once after the "step".
            "step" compiles all micro-batches of a window as one program, and a short window as another.
    """

    wrap: Wrap = "auto"
    replicas: int = 1
    activation_checkpointing: bool | str | tuple[str, ...] = False
    run_after: str = "micro_batch"

    def __post_init__(self) -> None:
        check_wrap("XLAFSDPConfig", self.wrap)
        again = self.activation_checkpointing
        if not (again is False or again == "full" or are_names(again)):
            raise ConfigError(
                "XLAFSDPConfig(activation_checkpointing=...) must be False, 'full' or names of classes, not"
                f" {again!r}"
            )
        one_of("run_after of XLAFSDPConfig", self.run_after, RUN_AFTER)
        count("XLAFSDPConfig(replicas=...)", self.replicas, at_least=1)


class XLAFSDP(OnXLA):
    """One shard of every parameter, gradient, optimizer state and batch per device of this process.

    A batch is that of the process, for any number of devices: all results equal those of one device. See
    `OnXLA` for the arguments.
    """

    name = "xla_fsdp"
    config: XLAFSDPConfig
    config_type = XLAFSDPConfig
    needs = "torch_xla, and a TPU or a CPU; one process, and all of its devices"
    refusals: Mapping[str, str] = {"averages": "torch_xla keeps the weights in shards of its own"}

    def __init__(
        self, config: XLAFSDPConfig | None = None, *, device: str = "xla", world_size: int = 1
    ) -> None:
        super().__init__(config, device=device, world_size=world_size)
        self.place = self._shard_samples
        self._mesh: Any = None
        self._shards = self._parts = 1
        self._states: dict[Optimizer, int] = {}
        self._again: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []

    def setup(self) -> None:
        self.device = open_device(self.name, spmd=True)
        import numpy as np
        import torch_xla.runtime as runtime
        from torch_xla.distributed.spmd import Mesh

        count, replicas = runtime.global_runtime_device_count(), self.config.replicas
        if count % replicas:
            raise StrategyError(f"replicas={replicas} does not divide {count} devices")
        self._parts, self._shards = count, count // replicas
        self._mesh = Mesh(np.arange(count), (replicas, self._shards), (_DATA, _FSDP))

    def _annotate(self, module: StepModule) -> None:
        self._again += _checkpoint_blocks(module.task, self.config.activation_checkpointing)
        for block in units(module.task, self.config.wrap):
            self._hooks += [
                block.register_forward_pre_hook(_keep_apart),
                block.register_forward_hook(self._shard_output),
            ]
        self._shard(module.parameters())

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert, move and annotate the module, then build the optimizers on the moved parameters."""
        prepared = super().prepare(module, make_optimizers, precision)
        self._states |= dict.fromkeys(prepared.optimizers.values(), 0)
        return prepared

    def restore(self) -> None:
        """Remove the hooks, and move the whole task to the host's memory."""
        for hook in self._hooks:
            hook.remove()
        for block in self._again:
            for name in _PATCHED:
                vars(block).pop(name, None)
        self._hooks, self._again, self._states = [], [], {}
        super().restore()

    def _shard(self, tensors: Iterable[Tensor]) -> None:
        """Shard tensors along their longest dimension, unless it has fewer entries than there are shards."""
        from torch_xla.distributed.spmd import mark_sharding

        for tensor in tensors:
            spec: list[str | None] = [None] * tensor.ndim
            if tensor.ndim and max(tensor.shape) >= self._shards:
                spec[tensor.shape.index(max(tensor.shape))] = _FSDP
            mark_sharding(tensor, self._mesh, tuple(spec))

    def _shard_samples(self, tensor: Tensor) -> Tensor:
        """Shard a tensor by samples, its first dimension, if each device gets at least one."""
        from torch_xla.distributed.spmd import mark_sharding

        if tensor.ndim and len(tensor) >= self._parts:
            mark_sharding(tensor, self._mesh, ((_DATA, _FSDP), *(None,) * (tensor.ndim - 1)))
        return tensor

    def _shard_output(self, block: nn.Module, inputs: Any, output: Any) -> None:
        map_tensors(self._shard_samples, output)

    def _shard_new_state(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's state like its parameters; the state is created in the first step."""
        if self._states.get(optimizer) != len(optimizer.state):
            self._states[optimizer] = len(optimizer.state)
            for parameter, state in optimizer.state.items():
                slots = (each for each in state.values() if isinstance(each, Tensor))
                self._shard(each for each in slots if each.shape == parameter.shape and each.ndim)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and run the traced operations."""
        self._trace.update(optimizer, self._shard_new_state)
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Shard the loaded tensors again: loading has copied whole values into them."""
        for module in self._prepared:
            self._shard(module.parameters())
        for optimizer in self._states:
            self._states[optimizer] = 0
            self._shard_new_state(optimizer)


def _checkpoint_blocks(model: nn.Module, again: bool | str | tuple[str, ...]) -> list[nn.Module]:
    """Recompute blocks in backward, by torch_xla's `checkpoint_module`.

    XLA's compiler would undo torch's own recomputation, because it merges equal computations.
    """
    from torch_xla.distributed.fsdp import checkpoint_module

    if not again:
        return []
    blocks = repeated_blocks(model) if again == "full" else units(model, tuple(again))  # type: ignore[arg-type]
    for block in blocks:
        checkpoint_module(block)
    return blocks


def _keep_apart(block: nn.Module, inputs: Any) -> None:
    """End a block's backward before the next begins; else the compiler would gather all blocks at once."""
    if torch.is_grad_enabled():
        for each in inputs:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(_end, block))  # type: ignore[no-untyped-call]


def _end(block: nn.Module, gradient: Tensor) -> None:
    """Delay the gradient of a block's input until those of its parameters exist."""
    import torch_xla.core.xla_model as xla

    own = [each.grad for each in block.parameters() if each.grad is not None]
    xla.optimization_barrier_([*own, gradient])
