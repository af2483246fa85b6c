"""Fully sharded over all XLA devices of one process: tensors are annotated, and the compiler divides them.

Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021. What is annotated is
what torch_xla's SpmdFullyShardedDataParallel ("FSDPv2") annotates, with hooks in place of its wrapper, so
that modules and names stay as they are.
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

from drivetrain.data.batch import map_tensors
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.options import by_name
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, check_values
from drivetrain.strategies.fsdp_wrapping import Wrap, units
from drivetrain.strategies.xla_blocks import Again, check_blocks, checkpoint_blocks, forget_checkpointing
from drivetrain.strategies.xla_device import OnXLA, check_run_after, move, open_device
from drivetrain.strategies.xla_norms import correct_variances, forget_corrections
from drivetrain.task import StepModule

_DATA, _FSDP = "data", "fsdp"
"""The mesh's axes: copies of the model, and shards of each."""


@by_name
@dataclass(frozen=True, kw_only=True)
class XLAFSDPv2Config:
    """Options of strategy "xla_fsdp_v2".

    Attributes:
        wrap: The blocks whose outputs are divided by samples, so that the compiler gathers a block's
            parameters where it is used: "auto" for each of the model's repeated blocks, the names of classes,
            a least number of parameters, a function of a module, or () for none.
        replicas: How many groups of devices have a copy of the model each; it is sharded within a group.
        activation_checkpointing: False; "full" to compute each repeated block's activations again in
            backward; or the names of the classes whose activations are computed again.
        run_after: When XLA runs what was traced: after each "micro_batch", or once after the whole "update".
            The latter compiles all micro-batches of a window as one program, and a short window anew.
    """

    wrap: Wrap = "auto"
    replicas: int = 1
    activation_checkpointing: Again = False
    run_after: str = "micro_batch"

    def __post_init__(self) -> None:
        """Check each option.

        Raises:
            ConfigError: One is of no use; says what is allowed.
        """
        check_blocks(type(self).__name__, self.wrap, self.activation_checkpointing)
        check_run_after(type(self).__name__, self.run_after)
        if not isinstance(self.replicas, int) or isinstance(self.replicas, bool) or self.replicas < 1:
            raise ConfigError(f"replicas is a number of groups of devices, not {self.replicas!r}")


class XLAFSDPv2(OnXLA):
    """One shard of every parameter, gradient and optimizer state, and a part of every batch, per device of
    this process.

    A batch is this process's, whatever its devices: all numbers are those of one device. See `OnXLA` for the
    arguments.
    """

    name = "xla_fsdp_v2"
    config: XLAFSDPv2Config
    config_type = XLAFSDPv2Config
    needs = "torch_xla, and a TPU or a CPU; one process, of which it uses all devices"

    def __init__(
        self, config: XLAFSDPv2Config | None = None, *, device: str = "xla", world_size: int = 1
    ) -> None:
        super().__init__(config, device=device, world_size=world_size)
        self.place = self._shard_samples
        self._mesh: Any = None
        self._shards = self._parts = 1
        self._states: dict[Optimizer, int] = {}

    def setup(self) -> None:
        """Open the devices and lay them out.

        Raises:
            StrategyError: `replicas` does not divide them.
        """
        self.device = open_device(self.name, spmd=True)
        import numpy as np
        import torch_xla.runtime as runtime
        from torch_xla.distributed.spmd import Mesh

        count, replicas = runtime.global_runtime_device_count(), self.config.replicas
        if count % replicas:
            raise StrategyError(f"replicas={replicas} does not divide {count} devices")
        self._parts, self._shards = count, count // replicas
        self._mesh = Mesh(np.arange(count), (replicas, self._shards), (_DATA, _FSDP))

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, annotate, then make the optimizers on the parameters where they now are."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        move(module, self.device)
        correct_variances(module.task)
        module.context = self._trace.context(precision.forward_context(self.device))
        again = checkpoint_blocks(module.task, self.config.activation_checkpointing)
        hooks: list[RemovableHandle] = []
        for block in units(module.task, self.config.wrap):
            hooks += [
                block.register_forward_pre_hook(_keep_apart),
                block.register_forward_hook(self._shard_output),
            ]
        self._prepared.append((module, again, hooks))
        self._shard(module.parameters())
        optimizers = make_optimizers(module) if make_optimizers else {}
        self._states |= dict.fromkeys(optimizers.values(), 0)
        return Prepared(module, optimizers)

    def restore(self) -> None:
        """Bring the task into the host's memory, whole, and take the hooks away."""
        for module, again, hooks in self._prepared:
            for hook in hooks:
                hook.remove()
            forget_corrections(module)
            forget_checkpointing(again)
            move(module, "cpu")
        self._prepared, self._states = [], {}

    def _shard(self, tensors: Iterable[Tensor]) -> None:
        """Divide tensors along their longest dimension, unless it has fewer entries than there are shards."""
        from torch_xla.distributed.spmd import mark_sharding

        for tensor in tensors:
            spec: list[str | None] = [None] * tensor.ndim
            if tensor.ndim and max(tensor.shape) >= self._shards:
                spec[tensor.shape.index(max(tensor.shape))] = _FSDP
            mark_sharding(tensor, self._mesh, tuple(spec))

    def _shard_samples(self, tensor: Tensor) -> Tensor:
        """Divide a tensor by samples, its first dimension, where there is one for each device."""
        from torch_xla.distributed.spmd import mark_sharding

        if tensor.ndim and len(tensor) >= self._parts:
            mark_sharding(tensor, self._mesh, ((_DATA, _FSDP), *(None,) * (tensor.ndim - 1)))
        return tensor

    def _shard_output(self, block: nn.Module, inputs: Any, output: Any) -> None:
        map_tensors(self._shard_samples, output)

    def _shard_new_state(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's state as its parameters are; it is made in a first step."""
        if self._states.get(optimizer) != len(optimizer.state):
            self._states[optimizer] = len(optimizer.state)
            for parameter, state in optimizer.state.items():
                slots = (each for each in state.values() if isinstance(each, Tensor))
                self._shard(each for each in slots if each.shape == parameter.shape and each.ndim)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and run what was traced."""
        self._trace.update(optimizer, self._shard_new_state)
        return True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Divide again what was loaded, which was copied whole into tensors of this run."""
        for module, _, _ in self._prepared:
            self._shard(module.parameters())
        for optimizer in self._states:
            self._states[optimizer] = 0
            self._shard_new_state(optimizer)


def _keep_apart(block: nn.Module, inputs: Any) -> None:
    """Have a block's backward end before the next begins: the compiler would gather all of them at once."""
    if torch.is_grad_enabled():
        for each in inputs:
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(_end, block))  # type: ignore[no-untyped-call]


def _end(block: nn.Module, gradient: Tensor) -> None:
    """Hold back the gradient of a block's input until those of its parameters are there."""
    import torch_xla.core.xla_model as xla

    own = [each.grad for each in block.parameters() if each.grad is not None]
    xla.optimization_barrier_([*own, gradient])
