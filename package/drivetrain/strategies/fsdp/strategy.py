"""Fully sharded data parallel: each process keeps a shard of every parameter, gradient and optimizer state.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; realised by
torch's `fully_shard` (FSDP2), which makes each parameter a DTensor under its own name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.tensors import average_gradients, broadcast_buffers, broadcast_module, local_part
from drivetrain.strategies.base import (
    MakeOptimizers,
    Memory,
    Prepared,
    Strategy,
    Support,
    gradients_of,
    has_bfloat16,
    has_collectives,
)
from drivetrain.strategies.checks import (
    check_dimensions,
    check_dtypes,
    check_gathering,
    check_replaced,
    check_values,
)
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.fsdp.context_parallel import SCALARS_ONLY, ContextParallel, context_group
from drivetrain.strategies.fsdp.tensor_parallel import (
    ParallelModule,
    SameOutputs,
    TensorParallel,
    check_gradients,
    split_modules,
)
from drivetrain.strategies.fsdp.unshard import OriginalModules, forget_meshes, renew_dtypes, reshard
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.meta_device import (
    Materialization,
    check_alike,
    deferred_weights,
    on_meta,
    place,
    read_stored,
)
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.sparse import refuse_sparse
from drivetrain.strategies.transforms.recompute import RecomputeOption, chosen_blocks, recompute
from drivetrain.strategies.unused import ShardOrder
from drivetrain.strategies.wrapping import (
    around,
    batch_norms,
    ignored_names,
    indivisible_names,
    parameters_named,
    units,
)
from drivetrain.task.task import StepModule


class FSDP(Strategy):
    """One shard of the model per process, on a CPU or a GPU each.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        StrategyError: `tensor_parallel`, `context_parallel` or `shard_size` does not divide the number of
            processes.
    """

    name = "fsdp"
    refusals: Mapping[str, str] = {
        **dict.fromkeys(("skipping", "value_clipping", "unfreezing"), ""),
        "micro_batch": (
            "all processes gather parameters during a forward, so when one runs out of memory the others"
            " would wait for it"
        ),
    }
    config_type = FSDPConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    sharded = True

    def __init__(self, config: FSDPConfig | None = None, *, device: str = "cpu", world_size: int = 1) -> None:
        self.config = config or FSDPConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._parameters: list[nn.Parameter] = []
        self._ignored: list[nn.Parameter] = []
        self._kept: set[nn.Parameter] = set()
        self._has_run = False
        self._data_ranks = ALONE
        self._sharded: list[OriginalModules] = []
        self._order: ShardOrder | None = None
        self._synchronized = True
        self._has_buffers = False
        self._context_group: distributed.ProcessGroup | None = None
        self._contexts: list[ContextParallel] = []
        self._unchecked: list[tuple[nn.Module, Any]] = []  # until the first backward
        if device == "cpu" and self.config.sync_batchnorm:
            raise StrategyError("sync_batchnorm needs GPUs: torch has no synchronised batch norm for CPUs")
        split, size, parts = self.config.tensor_parallel, self.config.shard_size, self.config.context_parallel
        recomputation = ""
        if split > 1 or self.config.activation_checkpointing:
            recomputation = (
                "tensor_parallel splits modules first, and FSDPConfig has its own option: give"
                " FSDPConfig(activation_checkpointing=...)"
            )
        traced = "expert_parallel exchanges as many tokens as a step has, which torch cannot trace"
        self.refusals = {"recomputation": recomputation, "compile": traced * self.config.expert_parallel}
        if parts > 1:
            self.refusals = {**self.refusals, "outputs": SCALARS_ONLY}
        if world_size % (split * parts):
            sizes = {"tensor_parallel": split, "context_parallel": parts}
            given = " times ".join(f"{name}={each}" for name, each in sizes.items() if each > 1)
            raise StrategyError(
                f"{given} does not divide {world_size} processes; make devices times num_nodes a multiple of"
                " it"
            )
        if size is not None and self._sharing % size:
            what = f"groups of {split} processes in tensor_parallel" if split > 1 else "processes"
            raise StrategyError(f"shard_size={size} does not divide {self._sharing} {what}")

    @property
    def data_rank(self) -> int:
        """The number of this process's group of those that work on the same samples."""
        return self.rank // (self.config.tensor_parallel * self.config.context_parallel)

    @property
    def data_size(self) -> int:
        """The number of these groups."""
        return self.world_size // (self.config.tensor_parallel * self.config.context_parallel)

    @property
    def data_ranks(self) -> Ranks:
        """The ranks of these groups."""
        return self._data_ranks

    @property
    def part(self) -> tuple[int, int]:
        """The part of each sequence that this process has, and the number of parts."""
        parts = self.config.context_parallel
        return self.rank // self.config.tensor_parallel % parts, parts

    @property
    def _sharing(self) -> int:
        """The number of processes that the shards of a parameter, or of its part, are divided among."""
        return self.world_size // self.config.tensor_parallel

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Return whether a machine can run it; each can, with processes on the CPU."""
        return has_collectives()

    def supports(self, precision: Precision) -> Support:
        """Support all built-in precisions; bfloat16 needs a GPU with bfloat16."""
        if precision.converts_layers and self.config.tensor_parallel > 1:
            why = f"tensor_parallel cannot split layers that {precision.name!r} replaces; use 'bf16-mixed'"
            return Support(False, why)
        return has_bfloat16(self.device, precision)

    def setup(self) -> None:
        """Join the process group."""
        forget_meshes()
        self._join(self.config.timeout)
        split, parts = self.config.tensor_parallel, self.config.context_parallel
        self._data_ranks = self.ranks.grouped(split * parts)
        if parts > 1:
            self._context_group = context_group(self.world_size, parts, split)

    def teardown(self) -> None:
        """Leave the process group."""
        if self._order is not None:
            self._order.close()
        for each in self._contexts:
            each.remove()
        if self._context_group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._context_group)
        self._sharded, self._order, self._contexts, self._context_group = [], None, [], None
        self._unchecked.clear()
        forget_meshes()  # otherwise a fork of this process would free their groups
        self._leave()
        self._data_ranks = ALONE

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert, move, split and shard the module, then build the optimizers on the shards.

        A task on the meta device is initialised part by part while it is sharded, or is sharded first, and
        each process then reads its rows from files.
        """
        check_values(module.task, self.name, meta=True)
        if self.config.sync_batchnorm:
            module.task = nn.SyncBatchNorm.convert_sync_batchnorm(module.task)  # type: ignore[no-untyped-call]
        task = module.task
        if make_optimizers is not None:
            refuse_sparse(task, self.name, "torch has no sparse gradients of shards")
        before, parameters = OriginalModules(module), {id(each) for each in task.parameters()}
        check_alike(module, task, self.ranks)
        deferred = deferred_weights(task)
        values = Materialization(module) if deferred is None and on_meta(module) else None
        whole = ignored_names(task, self.config.ignored)
        plan = split_modules(task, self.config)
        _check(whole, plan)
        whole |= indivisible_names(task)
        precision.convert_module(module)
        if self.config.gather_at_end:
            check_gathering(task)
        if values is None:
            place(module, self.device)
            broadcast_module(module, self.world_size)
        module.context = precision.forward_context(self.device)
        agree = partial(distributed.all_reduce, op=distributed.ReduceOp.MAX)  # a plan counts it too
        self._scale = LossScale(self.device, agree) if precision.loss_scaling else None
        with _disable_current_modes():  # torch reads its meshes, and a plan's tensors have no values
            self._shard(module, precision, values, whole, plan)
        check_replaced(task, parameters, self.name)
        before.mark()
        of_shards = torch.device("cpu") if self.config.cpu_offload else self.device
        read_stored(module, task, self.device, of_shards)
        self._kept, self._has_run = parameters_named(task, whole), False
        self.retrain(module)
        self._synchronized = True
        self._has_buffers = self.config.broadcast_buffers and any(True for _ in module.buffers())
        self._sharded.append(before)
        if self.world_size > 1:
            self._order = self._order or ShardOrder(self.ranks.order, self.config.reduce_each_micro_batch)
            self._order.add(module)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def retrain(self, model: nn.Module) -> nn.Module:
        """Look up the trained parameters; torch copies each flag from a shard to the gathered parameter."""
        if self._has_run:
            renew_dtypes(model)
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._ignored = [each for each in self._parameters if each in self._kept]
        return model

    def reshard(self, model: nn.Module) -> None:
        """Free parameters that a forward without a backward, or a callback, has gathered."""
        reshard(model)

    def restore(self) -> None:
        """Gather the whole values in the host's memory, unless `gather_at_end` is off."""
        sharded, self._sharded = self._sharded, []
        for before in sharded if self.config.gather_at_end else ():
            before.restore()

    def _shard(
        self,
        module: StepModule,
        precision: Precision,
        values: Materialization | None,
        whole: frozenset[str],
        plan: list[ParallelModule],
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        config, task, mesh = self.config, module.task, self._mesh()
        if self._context_group is not None:
            self._contexts.append(ContextParallel(module, self._context_group))
        if config.tensor_parallel > 1:
            group = mesh["tensor"].get_group()
            module.register_forward_hook(SameOutputs(group))
            self._unchecked.append((task, group))
        splitting = TensorParallel(plan, mesh)
        if plan:
            # It warns for every parameter on two meshes that gathering takes two collectives.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        options = self._options(precision)
        options["mesh"] = mesh[tuple(self._sizes())] if plan else mesh
        mixed = precision.compute_dtype not in (None, precision.param_dtype or torch.float32)
        norms = batch_norms(task) if mixed else []
        kept = {"reshard_after_forward": False}  # of the root and heads, whose backward follows at once
        uncast = {**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        how: dict[nn.Module, dict[str, Any]] = dict.fromkeys(norms, uncast)
        experts = [each.module for each in plan if each.dimension == "shard"]
        how |= {each: {**options, "mesh": mesh["replicate"]} for each in experts}
        _check_recomputed(task, config.activation_checkpointing, experts)
        blocks = [each for each in units(task, config.wrap) if each not in how]
        if config.wrap == "auto":
            embeddings, heads = around(task, blocks, [each.module for each in plan])
            how |= {each: {**options, **kept} for each in heads}
            blocks = [*embeddings, *blocks, *heads]
        parts = [*norms, *experts, *blocks]
        _check_parts(task, (*parts, task), whole)

        def shard(part: nn.Module) -> None:
            splitting.split(part)
            fully_shard(part, ignored_params=parameters_named(task, whole), **how.get(part, options))

        if values is None:
            splitting.split(task)
            recompute(task, config.activation_checkpointing)
            for part in parts:
                shard(part)
        else:
            recompute(task, config.activation_checkpointing)
            values.run(parts, self.device, self.world_size, shard)
            splitting.split(task)
        fully_shard(module, ignored_params=parameters_named(task, whole), **{**options, **kept})
        self._prefetch(blocks)

    def _options(self, precision: Precision) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for every part."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        offload = OffloadPolicy()
        if self.config.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return {
            "reshard_after_forward": self.config.sharding not in ("shard_grad_op", "no_shard"),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=precision.compute_dtype,
                reduce_dtype=None if precision.compute_dtype is None else precision.reduce_dtype,
                cast_forward_inputs=False,  # the precision's context casts as needed
            ),
            "offload_policy": offload,
        }

    def _prefetch(self, blocks: Sequence[Any]) -> None:
        forward, backward = self.config.forward_prefetch, self.config.backward_prefetch
        for index, block in enumerate(blocks):
            if forward:
                block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + forward])
            if backward:
                block.set_modules_to_backward_prefetch(blocks[max(0, index - backward) : index][::-1])

    def _mesh(self) -> Any:
        """Return the mesh of processes; those of a tensor group are neighbours."""
        from torch.distributed.device_mesh import init_device_mesh

        split = self.config.tensor_parallel
        sizes = self._sizes()
        if self.config.expert_parallel:  # what is split over `shard` is sharded over another dimension
            sizes = {"replicate": 1, **sizes}
        if split > 1:
            sizes["tensor"] = split
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _sizes(self, local_size: int | None = None) -> dict[str, int]:
        """Return the processes that hold the same shards, if there may be several, and those that shard."""
        size, split = self._sharing, self.config.tensor_parallel
        if self.config.sharding == "no_shard":
            return {"replicate": size, "shard": 1}
        if self.config.sharding == "hybrid":
            each = self.config.shard_size or _local_size(self.world_size, split, local_size)
            return {"replicate": size // each, "shard": each}
        return {"shard": size}

    def memory(self, task: nn.Module, precision: Precision, local_size: int) -> Memory:
        """Return what is in the host's memory, and the dtype of a forward."""
        stored = precision.param_dtype or next((each.dtype for each in task.parameters()), torch.float32)
        return Memory(
            offloaded=Memory().divided if self.config.cpu_offload else frozenset(),
            forward_dtype=None if precision.compute_dtype == stored else precision.compute_dtype,
        )

    def shards(self, local_size: int) -> int:
        """Return the number of processes that shard the model, with so many on a machine."""
        return self._sizes(local_size)["shard"]

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Reduce gradients only in the window's last micro-batch, unless the configuration asks for each."""
        if self._has_buffers:
            broadcast_buffers(model, self.world_size)
        last = last or self.config.reduce_each_micro_batch
        if last != self._synchronized:  # torch walks all modules to set it
            self._synchronized = last
            sharded: Any = model
            sharded.set_requires_gradient_sync(last)
            sharded.set_is_last_backward(last)

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the factor as the gradient of the loss."""
        self._has_run = True
        root = None
        if factor is not None or self._scale is not None:
            loss, root = self._root(loss, factor)
        if self._order is not None:
            self._order.begin_backward()
        with gradients_of(inputs, self._parameters):
            loss.backward(root)  # type: ignore[no-untyped-call]
        if self._order is not None and self._synchronized:
            self._order.end_backward(inputs)
        while self._synchronized and self._unchecked:
            check_gradients(*self._unchecked.pop())
        if inputs is None and self._synchronized and self._ignored:
            average_gradients(self._ignored, self.world_size)

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of ignored parameters in a generator step; torch reduces the others."""
        mine = {id(each) for each in parameters}
        ignored = [each for each in self._ignored if id(each) in mine]
        if ignored:
            average_gradients(ignored, self.world_size)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded gradient."""
        return _clip_by_global_norm(parameters, max_norm, self.device, self.world_size)


def _clip_by_global_norm(
    parameters: Sequence[Tensor], max_norm: float, device: torch.device, world_size: int
) -> Tensor:
    """Clip by the norm of the whole gradient, and return that norm (0-d, the same on all processes).

    Parameters may be sharded over different meshes, or replicated; torch's own clipping only takes parameters
    of one mesh. A part that n processes hold is counted as 1/n by each, so one sum over all processes is
    enough.

    Args:
        parameters: The parameters; those without a gradient are skipped.
        max_norm: The largest norm.
        device: The device that processes exchange tensors on.
        world_size: The number of processes.
    """
    grouped: dict[tuple[torch.device, float], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local, share = local_part(parameter.grad, world_size)
            grouped.setdefault((local.device, share), []).append(local)
    dtypes = {each.dtype for gradients in grouped.values() for each in gradients}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    square = torch.zeros((), dtype=wide, device=device)
    for (_, share), gradients in grouped.items():
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
        square += (torch.stack(list(norms)).square().sum() * share).to(device)
    if world_size > 1:
        distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula, without a host sync
    for (where, _), gradients in grouped.items():
        torch._foreach_mul_(gradients, factor.to(where))
    return norm


def _check_parts(task: nn.Module, parts: Sequence[nn.Module], whole: frozenset[str]) -> None:
    """Check that torch can shard the parameters, and that each part's trained ones have one dtype.

    Args:
        task: The task.
        parts: The parts, inner ones before those that contain them.
        whole: Names of the parameters that are not sharded.

    Raises:
        StrategyError: They have several; or a parameter has hooks, or is not contiguous. Names them.
    """
    names = {each: name for name, each in task.named_parameters() if name not in whole}
    for each, name in names.items():
        if each._backward_hooks or each._post_accumulate_grad_hooks:
            raise StrategyError(
                f"the parameter {name!r} has hooks, which its shards would not have: change gradients in a"
                " callback's on_before_optimizer_step, or use strategy 'ddp'"
            )
        if not each.is_contiguous():
            raise StrategyError(
                f"the parameter {name!r} has strides {each.stride()}, and torch shards contiguous parameters"
                " only: make it by nn.Parameter(values.contiguous()), or name it in FSDPConfig(ignored=...)"
            )
    for part in parts:
        found = [each for each in part.parameters() if names.get(each) is not None and each.requires_grad]
        check_dtypes(
            part,
            {names.pop(each): each for each in found},
            lambda dtypes: len(dtypes) <= 1,
            "which 'fsdp' cannot gather at once: give them one dtype, keep all of one dtype whole by"
            " FSDPConfig(ignored=('name', ...)), freeze them, or use strategy 'ddp'",
        )


def _check(whole: frozenset[str], plan: Sequence[ParallelModule]) -> None:
    experts: dict[nn.Parameter, str] = {}
    for each in plan:
        check_dimensions(each.module)
        for name, parameter in each.module.named_parameters(each.name):
            if each.dimension == "shard" and (first := experts.setdefault(parameter, name)) != name:
                raise ConfigError(
                    f"{first!r} and {name!r} are one parameter in two modules of experts, which cannot be"
                    " divided among processes: use one module of experts in both places"
                )
            if name in whole:
                raise ConfigError(
                    f"{name!r} is both in FSDPConfig(ignored=...), which keeps it whole, and in the"
                    " parallel_plan, which splits it; remove it from one of them"
                )


def _check_recomputed(task: nn.Module, again: RecomputeOption, experts: Sequence[nn.Module]) -> None:
    if again and any(each in experts for each in chosen_blocks(task, again)):
        raise StrategyError(
            f"activation_checkpointing={again!r} names a module of experts, which expert_parallel cannot"
            " recompute alone, because tokens come from other processes; name the block around it"
        )


def _local_size(world_size: int, split: int, local: int | None = None) -> int:
    """Return the number of tensor groups on a machine; of all machines if they do not divide evenly."""
    if local is None:
        found = detect(os.environ)
        local = world_size if found is None else found.local_world_size
    return (local if world_size % local == 0 and local % split == 0 else world_size) // split
