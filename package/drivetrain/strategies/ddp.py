"""Distributed data parallel: a copy of the model in every process, gradients averaged while backward runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.distributed.group import Member, join, leave, uncompared
from drivetrain.distributed.ranks import ALONE
from drivetrain.distributed.tensors import average_gradients, broadcast_module
from drivetrain.errors import ConfigError, StrategyError, nearest
from drivetrain.options import by_name
from drivetrain.precision import Precision
from drivetrain.strategies.base import (
    MakeOptimizers,
    Prepared,
    Strategy,
    Support,
    check_options,
    check_values,
)
from drivetrain.strategies.scaling import LossScale
from drivetrain.strategies.sparse import (
    average_sparse,
    clip_grad_norm,
    no_rows,
    refuse_sparse,
    trained_sparsely,
)
from drivetrain.task import StepModule

_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""What torch calls it; the second name is deprecated where there is the first."""

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
        find_unused_parameters: Whether a step may leave parameters out, which costs a walk of the graph.
        static_graph: Whether every step uses the same parameters in the same order.
        bucket_mb: Megabytes of gradients that are sent together.
        gradient_as_bucket_view: Keep gradients in the buckets, which saves a copy of them.
        broadcast_buffers: Give all ranks rank 0's buffers, such as running means, before each forward.
        sync_batchnorm: Take batch statistics over all ranks; on GPUs.
        communication: How gradients travel: None as they are, "fp16" or "bf16" compressed to those,
            "powersgd" by low rank, or a function `(state, bucket) -> Future`, whose state is None.
        timeout: Seconds that a collective may take; None for torch's limit.
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
        """Check each option.

        Raises:
            ConfigError: One is of no use; says what is allowed.
        """
        check_options(self, ("bucket_mb", "timeout"), _FLAGS)
        hook = self.communication
        if isinstance(hook, str) and hook not in _HOOKS:
            raise ConfigError(f"unknown communication {hook!r}. {nearest(hook, _HOOKS)}")
        if hook is not None and not isinstance(hook, str) and not callable(hook):
            raise ConfigError(f"DDPConfig(communication=...) is a name or a hook, not {hook!r}")
        if callable(hook) and not _takes_two(hook):
            raise ConfigError(
                f"DDPConfig(communication={hook!r}) cannot be called with (state, bucket), as a hook is; see"
                " torch's DistributedDataParallel.register_comm_hook"
            )


def _takes_two(hook: Callable[..., Any]) -> bool:
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a built-in function that does not tell
        return True
    return True


class DDP(Strategy):
    """One copy of the model per process, on a CPU or a GPU each.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.

    Raises:
        StrategyError: An option that cannot be had on this kind of device.
    """

    name = "ddp"
    config_type = DDPConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    no_recomputation = ""
    no_skipping = ""

    def __init__(self, config: DDPConfig | None = None, *, device: str = "cpu", world_size: int = 1) -> None:
        self.config = config or DDPConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._member: Member | None = None
        self._wrapped: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._sparse: list[nn.Parameter] = []
        self._names: list[str] = []
        self._synchronized = True
        self._unlearned = self.config.static_graph
        self.no_micro_batch = _why_whole(self.config)
        if device == "cpu" and self.config.sync_batchnorm:
            raise StrategyError("sync_batchnorm needs GPUs: torch has no synchronised batch norm for CPUs")
        if device == "cpu" and self.config.communication == "bf16":
            raise StrategyError("communication='bf16' needs GPUs: gloo cannot average bfloat16; use 'fp16'")

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
        # DDP's constructor imports it, which takes a second: better while the other processes still start.
        import torch._dynamo  # noqa: F401

        limit = None if self.config.timeout is None else timedelta(seconds=self.config.timeout)
        self._member = member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def teardown(self) -> None:
        """Leave the process group."""
        self._wrapped = None
        if self._member is not None:
            leave(self._member)
            self._member, self.ranks = None, ALONE

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
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name.removeprefix("task.") for name, _ in trained]
        self._parameters = [each for _, each in trained]
        self._sparse = trained_sparsely(module.task)
        if make_optimizers is None or not self._parameters:
            broadcast_module(module, self.world_size)
            return Prepared(module, make_optimizers(module) if make_optimizers else {})
        config = self.config
        if config.communication is not None:
            refuse_sparse(module.task, self.name, f"communication={config.communication!r} is of dense ones")
        if self.device.type == "cuda" and self.world_size > 1:
            refuse_sparse(module.task, self.name, "NCCL does not add them")
        buffers: dict[str, Any] = {_BUFFERS: config.broadcast_buffers}
        self._wrapped = wrapped = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=uncompared(),
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **buffers,
        )
        self._synchronized = True
        if self.world_size > 1 and not (config.static_graph or config.find_unused_parameters):
            settle_buckets(wrapped, self._parameters)
        self._register_hook(wrapped)  # after that: a hook that counts is given gradients of the training only
        return Prepared(wrapped, make_optimizers(module))

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
        """Average gradients in the window's last micro-batch only."""
        # A static graph is learned in the first backward of all, which must be synchronised; what it averages
        # is averaged once more, and stays the same.
        last = last or self._unlearned
        self._unlearned = False
        if last != self._synchronized:  # a module takes 3 us to have an attribute set
            self._synchronized = last
            if self._wrapped is not None:
                self._wrapped.require_backward_grad_sync = last

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient."""
        if self._scale is not None:
            loss = self._scale.scale(loss)
        root = None if share is None else torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        if inputs is None and self._synchronized and not self.config.find_unused_parameters:
            check_used(self._names, self._parameters, "DDPConfig(find_unused_parameters=True)")

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients that backward left alone: those of a generator step's optimizers."""
        if not self._sparse:
            average_gradients(parameters, self.world_size)
            return
        sparse = {id(each) for each in self._sparse}
        average_gradients([each for each in parameters if id(each) not in sparse], self.world_size)
        average_sparse([each for each in parameters if id(each) in sparse], self.world_size)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm, which is the same in every process."""
        return clip_grad_norm(parameters, max_norm, self._sparse)


def _why_whole(config: DDPConfig) -> str:
    """Why a step cannot be run past the wrapper, as parts of a batch are."""
    if config.sync_batchnorm:
        return "sync_batchnorm has each forward wait for that of the others, one of which may fail"
    if config.communication is not None:
        return f"communication={config.communication!r} is of the exchange that is made during backward"
    if not config.broadcast_buffers:
        return "with broadcast_buffers=False each rank has buffers of its own"
    return ""


def settle_buckets(wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Have the buckets of gradients as they stay, from the first update on.

    torch forms them anew after the first backward, in the order in which gradients became ready. With more
    than two processes the sums in an all-reduce depend on where a gradient lies, so a resumed run's first
    update would differ in its last bits from the uninterrupted run's. This is a backward of zeros in which
    gradients become ready in the reverse order of the parameters.

    Args:
        wrapped: The model; every step uses all of its parameters.
        parameters: Those that are trained.
    """
    sparse = {id(each) for each in trained_sparsely(wrapped)}
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        none = no_rows(parameter) if id(parameter) in sparse else parameter.reshape(-1)[:0].sum().float()
        total = total + none
    wrapped.reducer.prepare_for_backward([])
    total.backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None


def check_used(names: Sequence[str], parameters: Sequence[nn.Parameter], allow: str) -> None:
    """See that every parameter has a gradient after a synchronised backward.

    Without this the step would go wrong in silence: a bucket that lacks a gradient is never averaged, and
    torch says so only at the next forward, if there is one.

    Args:
        names: Of the parameters.
        parameters: Those that were trained when the run began.
        allow: What a user gives to leave parameters out.

    Raises:
        ConfigError: One has none; names it.
    """
    without = [index for index, each in enumerate(parameters) if each.grad is None]
    if not without:
        return
    frozen = [names[index] for index in without if not parameters[index].requires_grad]
    if frozen:
        raise ConfigError(
            f"parameters were frozen after the run had begun: {', '.join(frozen[:8])}. Freeze them before"
            f" it, or give {allow}"
        )
    listed = ", ".join(names[index] for index in without[:8])
    more = f" and {len(without) - 8} more" if len(without) > 8 else ""
    raise ConfigError(
        f"the step used {len(names) - len(without)} of {len(names)} trainable parameters; these got no"
        f" gradient: {listed}{more}. Freeze them, use them, or give {allow}"
    )
