"""Distributed data parallel: a copy of the model in every process, gradients averaged while backward runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import ConfigError, StrategyError, nearest
from drivetrain.core.validation import by_name
from drivetrain.distributed.group import uncompared
from drivetrain.distributed.tensors import average_gradients, broadcast_module
from drivetrain.strategies.base import (
    Held,
    MakeOptimizers,
    Prepared,
    Strategy,
    Support,
    has_bfloat16,
    has_collectives,
)
from drivetrain.strategies.checks import check_options, check_values
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.sparse import (
    average_sparse,
    clip_grad_norm,
    no_rows,
    refuse_sparse,
    trained_sparsely,
)
from drivetrain.strategies.unused import check_used, gradients_now
from drivetrain.task.task import StepModule

_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""torch's name for the option; where the first name exists, the second is deprecated."""

_HOOKS = ("fp16", "bf16", "powersgd")
_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "sync_batchnorm",
)


@by_name
@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Options of strategy "ddp"; see `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        find_unused_parameters: Allow steps that leave parameters out, at the cost of a walk of the graph.
        static_graph: Whether every step uses the same parameters in the same order.
        bucket_mb: Megabytes of gradients that are sent together.
        gradient_as_bucket_view: Store gradients in the buckets, which saves a copy.
        broadcast_buffers: Copy rank 0's buffers, such as running means, to all ranks before each forward.
        sync_batchnorm: Compute batch statistics over all ranks; GPUs only.
        communication: How gradients are sent: None uncompressed, "fp16" or "bf16" cast to that dtype,
            "powersgd" by low rank, or a function `(state, bucket) -> Future`, whose state is None.
        timeout: Seconds that a collective may take; None uses torch's limit.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    communication: str | Callable[[Any, Any], Any] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_options(self, ("bucket_mb", "timeout"), _FLAGS)
        hook = self.communication
        if isinstance(hook, str) and hook not in _HOOKS:
            raise ConfigError(f"unknown communication {hook!r}. {nearest(hook, _HOOKS)}")
        if hook is not None and not isinstance(hook, str) and not callable(hook):
            raise ConfigError(f"DDPConfig(communication=...) must be a name or a hook, not {hook!r}")
        if callable(hook) and not _takes_two_arguments(hook):
            raise ConfigError(
                f"DDPConfig(communication={hook!r}) must take (state, bucket); see"
                " torch's DistributedDataParallel.register_comm_hook"
            )


def _takes_two_arguments(hook: Callable[..., Any]) -> bool:
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        return True
    return True


class DDP(Strategy):
    """One copy of the model per process, each on a CPU or a GPU.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        StrategyError: An option is not supported on this kind of device.
    """

    name = "ddp"
    config_type = DDPConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals = dict.fromkeys(
        (
            "recomputation",
            "skipping",
            "evaluation_precision",
            "value_clipping",
            "unfreezing",
            "choice_of_gpus",
        ),
        "",
    )

    def __init__(self, config: DDPConfig | None = None, *, device: str = "cpu", world_size: int = 1) -> None:
        self.config = config or DDPConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._sparse: list[nn.Parameter] = []
        self._wrapped_parts: list[tuple[list[str], list[nn.Parameter]]] = []  # of each wrapped module
        self._names: list[str] = []
        self._synchronized = True
        self._has_earlier = False  # whether the window has had another micro-batch
        self._unlearned = self.config.static_graph
        self.refusals = {"micro_batch": _why_whole(self.config)}
        if device == "cpu" and self.config.sync_batchnorm:
            raise StrategyError("sync_batchnorm needs GPUs: torch has no synchronised batch norm for CPUs")
        if device == "cpu" and self.config.communication == "bf16":
            raise StrategyError("communication='bf16' needs GPUs: gloo cannot average bfloat16; use 'fp16'")

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Return whether a machine can run it; each can, with processes on the CPU."""
        return has_collectives()

    def supports(self, precision: Precision) -> Support:
        """Support all built-in precisions; bfloat16 needs a GPU with bfloat16."""
        return has_bfloat16(self.device, precision)

    def setup(self) -> None:
        """Join the process group."""
        # DDP's constructor imports it, which takes a second: do it now, while other processes still start.
        import torch._dynamo  # noqa: F401

        self._join(self.config.timeout)
        self._wrapped_parts, self._sparse = [], []

    def teardown(self) -> None:
        """Leave the process group."""
        self._wrapped = None
        self._leave()

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, wrap, then make the optimizers."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        if self.config.sync_batchnorm:
            module.task = nn.SyncBatchNorm.convert_sync_batchnorm(module.task)  # type: ignore[no-untyped-call]
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        self._scale = LossScale(self.device) if precision.loss_scaling else None
        self._note(module)
        if make_optimizers is None or not self._parameters:
            broadcast_module(module, self.world_size)
            return Prepared(module, make_optimizers(module) if make_optimizers else {})
        config = self.config
        if config.communication is not None:
            reason = f"communication={config.communication!r} only takes dense ones"
            refuse_sparse(module.task, self.name, reason)
        if self.device.type == "cuda" and self.world_size > 1:
            refuse_sparse(module.task, self.name, "NCCL cannot reduce them")
        return Prepared(self._wrap(module), make_optimizers(module))

    def held(self, task: nn.Module, precision: Precision, accumulates: bool, local_size: int) -> Held:
        """Return the whole task, and DDP's buckets if gradients are not kept in them."""
        if self.config.gradient_as_bucket_view or self.world_size == 1:
            return Held()
        return Held(gathered=sum(each.nbytes for each in task.parameters() if each.requires_grad))

    def retrain(self, model: nn.Module) -> nn.Module:
        """Wrap the module again: the wrapper waits for the gradients of those that were trained before.

        Nothing is sent: all processes have the same parameters by now.
        """
        wrapped = self._wrapped
        if wrapped is None:
            return model
        wrapped.reducer._remove_autograd_hooks()  # else a second wrapper's gradients would go to it too
        self._wrapped_parts, self._sparse = [], []
        self._note(wrapped.module)
        self._unlearned = self.config.static_graph
        return self._wrap(wrapped.module, init_sync=False)

    def _note(self, module: StepModule) -> None:
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name.removeprefix("task.") for name, _ in trained]
        self._parameters = [each for _, each in trained]
        self._sparse += trained_sparsely(module.task)

    def _wrap(self, module: StepModule, init_sync: bool = True) -> DistributedDataParallel:
        config = self.config
        buffers: dict[str, Any] = {_BUFFERS: config.broadcast_buffers}
        self._wrapped = wrapped = DistributedDataParallel(
            module,
            init_sync=init_sync,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=uncompared(),
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **buffers,
        )
        self._wrapped_parts.append((self._names, self._parameters))
        self._synchronized = True
        if self.world_size > 1 and not (config.static_graph or config.find_unused_parameters):
            fix_buckets(wrapped, self._parameters)
        self._register_hook(wrapped)  # last, so that a hook with state only gets the training's gradients
        return wrapped

    def _register_hook(self, wrapped: DistributedDataParallel) -> None:
        hook = self.config.communication
        if hook is None:
            return
        if not isinstance(hook, str):
            # torch looks at the names and annotations of a hook's parameters, which may be anything.
            wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            compress = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            wrapped.register_comm_hook(None, compress[hook])

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Average gradients only in the window's last micro-batch."""
        # torch learns a static graph in the very first backward, which must be synchronised. Its gradients
        # are averaged a second time, which does not change them.
        last = last or self._unlearned
        self._unlearned = False
        self._has_earlier = self._has_earlier or not last
        if last != self._synchronized:  # setting an attribute of a module takes 3 us
            self._synchronized = last
            if self._wrapped is not None:
                self._wrapped.require_backward_grad_sync = last

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the factor as the gradient of the loss."""
        root = None
        if factor is not None or self._scale is not None:
            loss, root = self._root(loss, factor)
        checks = inputs is None and self._synchronized and not self.config.find_unused_parameters
        before = gradients_now(self._parameters) if checks and self._has_earlier else None
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        if checks:
            only = len(self._wrapped_parts) == 1  # of several modules a loss may leave out some
            for names, parameters in self._wrapped_parts:
                check_used(names, parameters, "DDPConfig(find_unused_parameters=True)", before, only)
        if self._synchronized:
            self._has_earlier = False

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that backward did not: those of a generator step's optimizers."""
        if not self._sparse:
            average_gradients(parameters, self.world_size)
            return
        sparse = {id(each) for each in self._sparse}
        average_gradients([each for each in parameters if id(each) not in sparse], self.world_size)
        average_sparse([each for each in parameters if id(each) in sparse], self.world_size)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm, which is the same on every rank."""
        return clip_grad_norm(parameters, max_norm, self._sparse)


def _why_whole(config: DDPConfig) -> str:
    """Return why a step cannot bypass DDP's wrapper, as the parts of a batch do; empty if it can."""
    if config.sync_batchnorm:
        return "with sync_batchnorm each forward waits for those of all other ranks, and one may fail"
    if config.communication is not None:
        return f"communication={config.communication!r} applies to the exchange during backward"
    if not config.broadcast_buffers:
        return "with broadcast_buffers=False each rank has different buffers"
    return ""


def fix_buckets(wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Fix the buckets of gradients before the first step.

    torch rebuilds the buckets after the first backward, ordered by when gradients became ready. With more
    than two processes the sums of an all-reduce depend on a gradient's position in its bucket, so the first
    step after a resume would differ in its last bits from the uninterrupted run's. Here a backward of zeros
    triggers the rebuild: its gradients become ready in the reverse order of the parameters.
    """
    sparse = {id(each) for each in trained_sparsely(wrapped)}
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        none = no_rows(parameter) if id(parameter) in sparse else parameter.reshape(-1)[:0].sum()
        total = total + (none.real if none.is_complex() else none).float()
    wrapped.reducer.prepare_for_backward([])
    total.backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None
