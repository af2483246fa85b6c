"""Hugging Face's accelerate: an Accelerator places and wraps the model, and the engine makes the step.

Gugger et al., "Accelerate: Training and inference at scale made simple, efficient and adaptable", 2022,
https://github.com/huggingface/accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.distributed.group import Member
from drivetrain.distributed.tensors import (
    average_gradients,
    broadcast_buffers,
    broadcast_module,
    largest_of_all,
)
from drivetrain.strategies.accelerate.options import PRECISIONS, AccelerateConfig, asked, own_fsdp
from drivetrain.strategies.accelerate.session import Session
from drivetrain.strategies.accelerate.sharding import shard
from drivetrain.strategies.base import (
    MakeOptimizers,
    Prepared,
    SharedSettings,
    Strategy,
    Support,
    gradients_of,
    has_collectives,
    installed,
)
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.replicated import fix_buckets
from drivetrain.strategies.fsdp.clipping import clip_by_global_norm
from drivetrain.strategies.fsdp.unshard import OriginalModules, forget_meshes, renew_dtypes, reshard
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.sparse import refuse_sparse
from drivetrain.strategies.unused import ShardOrder, check_used, gradients_now
from drivetrain.task.task import StepModule

_UNUSED = (
    "AccelerateConfig(options={'kwargs_handlers':"
    " [DistributedDataParallelKwargs(find_unused_parameters=True)]})"
)


class Accelerate(Strategy):
    """An Accelerator that places and wraps the model, on a CPU or a GPU per process.

    Each process has a copy of the model, or a shard of it by version 2 of accelerate's FSDP plugin. Our
    engine handles the weights of micro-batches, the loss scale, clipping and the data.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        StrategyError: An option is not supported, or the Accelerator has another number of processes.
    """

    name = "accelerate"
    config_type = AccelerateConfig
    needs = "the package accelerate; processes on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals: Mapping[str, str] = {
        **dict.fromkeys(("skipping", "value_clipping", "unfreezing"), ""),
        "choice_of_gpus": "Accelerate takes the GPU of each process's local rank",
    }

    def __init__(
        self, config: AccelerateConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or AccelerateConfig()
        if own_fsdp(self.config) is not None:
            raise StrategyError(
                "version 1 of accelerate's FSDP plugin: give its file by Trainer(strategy=...)"
            )
        self._asked = asked(self.config, os.environ)
        self.sharded = self._asked.sharded
        self.device = torch.device(self._asked.device or device)
        self.world_size = world_size
        self._session: Session | None = None
        self._wrapped: Any = None
        self._parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._whole: list[nn.Parameter] = []
        self._before: list[OriginalModules] = []
        self._order: ShardOrder | None = None
        self._synchronized = True
        self._has_earlier = False  # whether the window has had another micro-batch
        self._unlearned = False
        self._may_leave_out = False
        self._has_buffers = self._has_run = False
        if self.sharded and self.device.type == "cpu" and torch.accelerator.is_available():
            raise StrategyError(
                "accelerate's FSDP plugin shards over this machine's accelerators, not over its CPUs; use"
                " strategy 'fsdp', which can"
            )
        given = self.config.accelerator
        if given is not None and given.num_processes != world_size:
            raise StrategyError(
                f"the Accelerator has {given.num_processes} process(es), and the run {world_size}. Start the"
                " processes first, with `accelerate launch` or torchrun, or give"
                " AccelerateConfig(options=...) instead of the Accelerator"
            )

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
        word = _word(precision)
        if word is None:
            names = "', '".join(PRECISIONS.values())
            return Support(False, f"accelerate supports '{names}' and precisions that are not mixed")
        wanted = self.asked_precision
        if wanted is not None and PRECISIONS[word] != wanted:
            given = next(each for each, name in PRECISIONS.items() if name == wanted)
            return Support(
                False, f"the Accelerator has mixed_precision={given!r}; give precision='auto' or {wanted!r}"
            )
        if word == "fp16" and self.device.type == "cpu":
            return Support(False, "accelerate has no fp16 on CPUs, and would ignore it; use 'bf16-mixed'")
        return Support(True)

    def check_settings(self, asked: SharedSettings, precision: Precision) -> None:
        """Check that accelerate has the Trainer's accumulation, or 1.

        Raises:
            ConfigError: It has another one.
        """
        steps = self._asked.accumulation
        if steps not in (1, asked.gradient_accumulation_steps):
            raise ConfigError(
                f"accelerate is asked for gradient_accumulation_steps={steps}, but the Trainer for"
                f" {asked.gradient_accumulation_steps}: give Trainer(gradient_accumulation_steps={steps})"
            )

    def setup(self) -> None:
        """Join the process group; a single process only needs one for shards."""
        if self.sharded:
            forget_meshes()
        elif self.world_size == 1:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", torch.cuda.current_device())
            return
        self._join(self.config.timeout)

    def teardown(self) -> None:
        """Leave the process group, and restore accelerate's global state."""
        self._wrapped, self._before = None, []
        if self._order is not None:
            self._order.close()
            self._order = None
        if self._session is not None:
            self._session.close()
            self._session = None
        if self.sharded:
            forget_meshes()
        self._leave()

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert and move the module, let the Accelerator wrap or shard it, then build the optimizers."""
        check_values(module.task, self.name)
        if make_optimizers is not None and self.world_size > 1:
            refuse_sparse(module.task, self.name, "its gradients are exchanged whole")
        if self._session is None:
            word = _word(precision)
            assert word is not None
            member = Member(self.rank, self.world_size, self.device, self.ranks)
            self._session = Session(self.config, word, precision, self.sharded, member)
        accelerator = self._session.accelerator
        before = OriginalModules(module) if self.sharded else None
        precision.convert_module(module)
        module.to(self.device)
        broadcast_module(module, self.world_size)
        module.context = self._session.autocast() or precision.forward_context(self.device)
        self._scale = self._loss_scale(accelerator) if precision.loss_scaling else None
        self._synchronized, self._has_run = True, False
        model: nn.Module = module
        if before is not None:
            shard(module, accelerator)
            self._before.append(before)
            if self.world_size > 1:
                self._order = self._order or ShardOrder(self.ranks.order)
                self._order.add(module)
            self._has_buffers = any(True for _ in module.buffers())
        self._note(module)
        if make_optimizers is not None and self._parameters and not self.sharded:
            model = self._replicate(module, accelerator)
        return Prepared(model, make_optimizers(module) if make_optimizers else {})

    def retrain(self, model: nn.Module) -> nn.Module:
        """Let the Accelerator wrap the module again; a sharded one only has its trained parameters noted."""
        if self._wrapped is None:
            if self.sharded and self._has_run:
                renew_dtypes(model)
            self._note(model)
            return model
        assert self._session is not None
        self._wrapped.reducer._remove_autograd_hooks()
        module = self._wrapped.module
        self._note(module)
        return self._replicate(module, self._session.accelerator)

    def _note(self, module: nn.Module) -> None:
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name.removeprefix("task.") for name, _ in trained]
        self._parameters = [each for _, each in trained]
        self._whole = [each for each in self._parameters if not hasattr(each, "to_local")]

    def _loss_scale(self, accelerator: Any) -> LossScale:
        scale = LossScale(self.device, largest_of_all if self.sharded else None)
        if accelerator.scaler is not None:  # the user may have set its initial scale and growth
            scale.load_state_dict(accelerator.scaler.state_dict())
        return scale

    def _replicate(self, module: StepModule, accelerator: Any) -> nn.Module:
        prepared: nn.Module = accelerator.prepare(module)
        # The module's context has its autocast already, without the cast of outputs.
        for name in ("forward", "_original_forward"):
            vars(module).pop(name, None)
        if prepared is not module:
            self._wrapped = wrapped = prepared
            self._unlearned = bool(wrapped.static_graph)
            self._may_leave_out = bool(wrapped.find_unused_parameters)
            if not (self._unlearned or self._may_leave_out):
                fix_buckets(wrapped, self._parameters)  # type: ignore[arg-type]
        return prepared

    def reshard(self, model: nn.Module) -> None:
        """Free parameters that a forward without a backward, or a callback, has gathered."""
        if self.sharded:
            reshard(model)

    def restore(self) -> None:
        """Gather the whole values of shards in the host's memory."""
        sharded, self._before = self._before, []
        for before in sharded:
            before.restore()

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Exchange gradients only in the window's last micro-batch."""
        if self._has_buffers:
            broadcast_buffers(model, self.world_size)
        # torch learns a static graph in the very first backward, which must be synchronised.
        last = last or self._unlearned
        self._unlearned = False
        self._has_earlier = self._has_earlier or not last
        if last == self._synchronized:
            return
        self._synchronized = last
        if self.sharded:
            sharded: Any = model
            sharded.set_requires_gradient_sync(last)
            sharded.set_is_last_backward(last)
        elif self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = last

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the share as the gradient of the loss, without accelerate's division by the
        number of micro-batches.
        """
        root = None
        if factor is not None or self._scale is not None:
            loss, root = self._root(loss, factor)
        if self.sharded:
            self._backward_to_shards(loss, root, inputs)
            return
        checks = inputs is None and self._synchronized and self._wrapped is not None
        checks = checks and not self._may_leave_out
        before = gradients_now(self._parameters) if checks and self._has_earlier else None
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        if checks:
            check_used(self._names, self._parameters, _UNUSED, before)
        if self._synchronized:
            self._has_earlier = False

    def _backward_to_shards(self, loss: Tensor, root: Tensor | None, inputs: Sequence[Tensor] | None) -> None:
        self._has_run = True
        if self._order is not None:
            self._order.begin_backward()
        with gradients_of(inputs, self._parameters):
            loss.backward(root)  # type: ignore[no-untyped-call]
        if self._order is not None and self._synchronized:
            self._order.end_backward(inputs)
        if inputs is None and self._synchronized and self._whole:
            average_gradients(self._whole, self.world_size)

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average a generator step's gradients; torch reduces those of shards."""
        mine = {id(each) for each in parameters}
        average_gradients(
            [each for each in self._whole if id(each) in mine] if self.sharded else parameters,
            self.world_size,
        )

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded gradient."""
        if self.sharded:
            return clip_by_global_norm(parameters, max_norm, self.device, self.world_size)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _word(precision: Precision) -> str | None:
    """Return accelerate's name for a precision; None if it does not support the precision."""
    if type(precision).forward_context is not Precision.forward_context:
        return None
    stored, computed = precision.param_dtype or torch.float32, precision.compute_dtype
    if computed in (None, stored):
        return "no"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computed)
