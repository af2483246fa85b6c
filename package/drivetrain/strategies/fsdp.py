"""Fully sharded data parallel: each process keeps a shard of every parameter, gradient and optimizer state.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; realised by
torch's `fully_shard` (FSDP2), which makes each parameter a DTensor under its own name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.distributed.environment import detect
from drivetrain.distributed.group import Member, join, leave
from drivetrain.distributed.ranks import ALONE
from drivetrain.distributed.tensors import broadcast_module
from drivetrain.errors import ConfigError, StrategyError, nearest
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy, Support
from drivetrain.strategies.fsdp_meta import Materialization, on_meta
from drivetrain.strategies.fsdp_wrapping import Wrap, batch_norms, repeated_blocks, units
from drivetrain.strategies.scaling import LossScale
from drivetrain.strategies.stepping import step
from drivetrain.task import StepModule

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid")


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of strategy "fsdp".

    Attributes:
        sharding: "full_shard": parameters are gathered for each use and freed after it (ZeRO 3);
            "shard_grad_op": they stay whole from forward to backward (ZeRO 2); "no_shard": every process
            keeps all; "hybrid": sharded over `shard_size` processes, replicated over the groups of them.
        wrap: What is gathered together: "auto" for each of the model's repeated blocks, the names of classes,
            a least number of parameters, a function of a module, or () for the whole model at once.
        shard_size: With "hybrid", over how many processes a parameter is sharded; None for those of a
            machine.
        cpu_offload: Keep shards and optimizer states in the host's memory.
        activation_checkpointing: False; "full" to compute each block's activations again in backward; or the
            names of the classes whose activations are.
        forward_prefetch: How many blocks ahead are gathered during forward, beyond what happens by itself.
        timeout: Seconds that a collective may take; None for torch's limit.
    """

    sharding: str = "full_shard"
    wrap: Wrap = "auto"
    shard_size: int | None = None
    cpu_offload: bool = False
    activation_checkpointing: bool | str | tuple[str, ...] = False
    forward_prefetch: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check each option.

        Raises:
            ConfigError: One is of no use; says what is allowed.
        """
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"unknown sharding {self.sharding!r}. {nearest(str(self.sharding), SHARDINGS)}")
        names = isinstance(self.wrap, (tuple, list)) and all(isinstance(each, str) for each in self.wrap)
        count = isinstance(self.wrap, int) and not isinstance(self.wrap, bool) and self.wrap > 0
        if not (names or count or self.wrap == "auto" or callable(self.wrap)):
            raise ConfigError(
                "FSDPConfig(wrap=...) is 'auto', names of classes, a number of parameters or a function of a"
                f" module, not {self.wrap!r}"
            )
        again = self.activation_checkpointing
        if not (again in (False, "full") or isinstance(again, (tuple, list))):
            raise ConfigError(
                "FSDPConfig(activation_checkpointing=...) is False, 'full' or names of classes, not"
                f" {again!r}"
            )
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ConfigError(f"shard_size is for sharding='hybrid', not {self.sharding!r}")
        for name, value in (("timeout", self.timeout), ("shard_size", self.shard_size)):
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"FSDPConfig({name}=...) must be a positive number, not {value!r}")
        if not isinstance(self.forward_prefetch, int) or self.forward_prefetch < 0:
            raise ConfigError(f"forward_prefetch is a number of blocks, not {self.forward_prefetch!r}")


class FSDP(Strategy):
    """One shard of the model per process, on a CPU or a GPU each.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.

    Raises:
        StrategyError: A `shard_size` that does not divide the number of processes.
    """

    name = "fsdp"
    config_type = FSDPConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    sharded = True

    def __init__(self, config: FSDPConfig | None = None, *, device: str = "cpu", world_size: int = 1) -> None:
        self.config = config or FSDPConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._member: Member | None = None
        self._scale: LossScale | None = None
        self._parameters: list[nn.Parameter] = []
        size = self.config.shard_size
        if size is not None and world_size % size:
            raise StrategyError(f"shard_size={size} does not divide {world_size} processes")

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Whether it can run on a machine; every one can, by processes on its CPU."""
        if not torch.distributed.is_available():
            return Support(False, "this build of torch has no torch.distributed")
        return Support(True)

    def supports(self, precision: Precision) -> Support:
        """All built-in precisions; bfloat16 needs a GPU that has it."""
        dtypes = (precision.param_dtype, precision.compute_dtype)
        if self.device.type == "cuda" and torch.bfloat16 in dtypes and not torch.cuda.is_bf16_supported():
            return Support(False, "this GPU has no bfloat16; use '16-mixed' or '32'")
        return Support(True)

    def setup(self) -> None:
        """Join the process group."""
        limit = None if self.config.timeout is None else timedelta(seconds=self.config.timeout)
        self._member = member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def teardown(self) -> None:
        """Leave the process group."""
        if self._member is not None:
            leave(self._member)
            self._member, self.ranks = None, ALONE

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, shard, then make the optimizers on the shards.

        A task on the meta device gets its values part by part while it is sharded.
        """
        values = Materialization(module) if on_meta(module) else None
        precision.convert_module(module)
        _check_shapes(module)
        if values is None:
            module.to(self.device)
            broadcast_module(module, self.world_size)
        module.context = precision.forward_context(self.device)
        self._scale = LossScale(self.device, self._agree) if precision.loss_scaling else None
        self._shard(module, precision, values)
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def _agree(self, found: Tensor) -> None:
        # Each process looks at its own shards only.
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)

    def _shard(self, module: StepModule, precision: Precision, values: Materialization | None) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        config = self.config
        policy = MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype,
            reduce_dtype=None if precision.compute_dtype is None else precision.reduce_dtype,
            cast_forward_inputs=False,  # the precision's own context casts what it needs
        )
        offload = OffloadPolicy()
        if config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        options: dict[str, Any] = {
            "mesh": self._mesh(),
            "reshard_after_forward": config.sharding not in ("shard_grad_op", "no_shard"),
            "mp_policy": policy,
            "offload_policy": offload,
        }
        mixed = precision.compute_dtype not in (None, precision.param_dtype or torch.float32)
        norms = batch_norms(module.task) if mixed else []
        uncast = {**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        blocks = [each for each in units(module.task, config.wrap) if each not in norms]
        self._checkpoint(module.task)

        def shard(part: nn.Module) -> None:
            fully_shard(part, **(uncast if part in norms else options))

        if values is None:
            for part in (*norms, *blocks):
                shard(part)
        else:
            values.run([*norms, *blocks], self.device, self.world_size, shard)
        # Of the root, what forward gathered is needed by the backward that follows at once.
        fully_shard(module, **{**options, "reshard_after_forward": False})
        ahead = config.forward_prefetch
        for index, block in enumerate(blocks if ahead else ()):
            sharded: Any = block
            sharded.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        kind, size = self.device.type, self.world_size
        if self.config.sharding == "no_shard":
            return init_device_mesh(kind, (size, 1), mesh_dim_names=("replicate", "shard"))
        if self.config.sharding == "hybrid":
            each = self.config.shard_size or _local_size(size)
            return init_device_mesh(kind, (size // each, each), mesh_dim_names=("replicate", "shard"))
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))

    def _checkpoint(self, task: nn.Module) -> None:
        again = self.config.activation_checkpointing
        if not again:
            return
        from torch.distributed._composable.checkpoint_activation import checkpoint

        for block in repeated_blocks(task) if again == "full" else units(task, tuple(again)):  # type: ignore[arg-type]
            checkpoint(block)

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Reduce gradients in the window's last micro-batch only."""
        sharded: Any = model
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient.

        The shards are no leaves of the graph, so that torch cannot be told of `inputs`: the gradients of all
        others are put back to what they were.
        """
        if self._scale is not None:
            loss = self._scale.scale(loss)
        root = None if share is None else torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        others = self._others(inputs) if inputs is not None else []
        before = [each.grad for each in others]
        for each in others:
            each.grad = None
        loss.backward(root)  # type: ignore[no-untyped-call]
        for each, gradient in zip(others, before, strict=True):
            each.grad = gradient

    def _others(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        mine = {id(each) for each in inputs}
        return [each for each in self._parameters if id(each) not in mine]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale."""
        if self._scale is not None:
            self._scale.unscale(optimizer)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded gradient."""
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, unless a gradient overflowed on any rank."""
        if self._scale is not None and self._scale.overflowed(optimizer):
            return False
        step(optimizer)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its growth counter."""
        return {} if self._scale is None else {"scaler": self._scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a loss scale; one saved under another precision is left alone."""
        if self._scale is not None and "scaler" in state:
            self._scale.load_state_dict(state["scaler"])


def _check_shapes(module: StepModule) -> None:
    for name, parameter in module.task.named_parameters():
        if parameter.ndim == 0:
            raise StrategyError(
                f"the parameter {name!r} is a scalar, which cannot be sharded; give it the shape (1,)"
            )


def _local_size(world_size: int) -> int:
    """The processes of this machine, if they divide all."""
    found = detect(os.environ)
    local = world_size if found is None else found.local_world_size
    return local if world_size % local == 0 else world_size
