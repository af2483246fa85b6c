"""Hugging Face's accelerate: an Accelerator places and wraps the model, and the engine makes the step.

Gugger et al., "Accelerate: Training and inference at scale made simple, efficient and adaptable", 2022,
https://github.com/huggingface/accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.distributed.group import Member, join, leave
from drivetrain.distributed.ranks import ALONE
from drivetrain.distributed.tensors import average_gradients, broadcast_buffers, broadcast_module
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.precision import Precision
from drivetrain.strategies.accelerate_config import PRECISIONS, AccelerateConfig, asked
from drivetrain.strategies.accelerate_session import Session
from drivetrain.strategies.accelerate_sharding import shard
from drivetrain.strategies.base import (
    MakeOptimizers,
    Prepared,
    Settings,
    Strategy,
    Support,
    check_values,
    gradients_of,
    installed,
)
from drivetrain.strategies.ddp import check_used, settle_buckets
from drivetrain.strategies.fsdp_meshes import forget_meshes
from drivetrain.strategies.fsdp_norms import clip_by_global_norm
from drivetrain.strategies.fsdp_whole import Before
from drivetrain.strategies.scaling import LossScale
from drivetrain.strategies.sparse import refuse_sparse
from drivetrain.task import StepModule

_UNUSED = (
    "AccelerateConfig(options={'kwargs_handlers':"
    " [DistributedDataParallelKwargs(find_unused_parameters=True)]})"
)


class Accelerate(Strategy):
    """An Accelerator's preparation, on a CPU or a GPU per process.

    A copy of the model in each process, or shards of it by accelerate's FSDP plugin of version 2. The weights
    of micro-batches, the loss scale, clipping and the data stay the engine's.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.

    Raises:
        StrategyError: The options ask for what is not handed over, or for another number of processes.
    """

    name = "accelerate"
    config_type = AccelerateConfig
    needs = "the package accelerate; processes on CPUs (gloo) or CUDA GPUs (NCCL)"
    no_skipping = ""

    def __init__(
        self, config: AccelerateConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or AccelerateConfig()
        self._asked = asked(self.config, os.environ)
        self.sharded = self._asked.sharded
        self.device = torch.device(self._asked.device or device)
        self.world_size = world_size
        self._member: Member | None = None
        self._session: Session | None = None
        self._wrapped: Any = None
        self._parameters: list[nn.Parameter] = []
        self._names: list[str] = []
        self._whole: list[nn.Parameter] = []
        self._before: list[Before] = []
        self._synchronized = True
        self._unlearned = False
        self._may_leave_out = False
        self._has_buffers = False
        if self.sharded and self.device.type == "cpu" and torch.accelerator.is_available():
            raise StrategyError(
                "accelerate's FSDP plugin shards over this machine's accelerators and not over its CPUs, as"
                " strategy 'fsdp' can"
            )
        given = self.config.accelerator
        if given is not None and given.num_processes != world_size:
            raise StrategyError(
                f"the Accelerator has {given.num_processes} process(es), and the run {world_size}. Start the"
                " processes before it is made, with `accelerate launch` or torchrun, or give"
                " AccelerateConfig(options=...), from which each process makes its own"
            )

    @property
    def asked_precision(self) -> str | None:
        """The precision that its configuration asks for; None for any."""
        return self.config.asked_precision

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Whether the package is here; every machine can run processes on its CPU."""
        found = installed("accelerate", "accelerate")
        if not found:
            return found
        if not torch.distributed.is_available():
            return Support(False, "this build of torch has no torch.distributed")
        return Support(True)

    def supports(self, precision: Precision) -> Support:
        """What accelerate can realise, unless it was asked for another mixed precision."""
        word = _word(precision)
        if word is None:
            names = "', '".join(PRECISIONS.values())
            return Support(False, f"accelerate realises '{names}' and precisions that are not mixed")
        wanted = self.asked_precision
        if wanted is not None and PRECISIONS[word] != wanted:
            given = next(each for each, name in PRECISIONS.items() if name == wanted)
            return Support(
                False, f"the Accelerator has mixed_precision={given!r}; give precision='auto' or {wanted!r}"
            )
        if word == "fp16" and self.device.type == "cpu":
            return Support(False, "accelerate has no fp16 on CPUs, and would run without; use 'bf16-mixed'")
        return Support(True)

    def check_settings(self, asked: Settings, precision: Precision) -> None:
        """See that accelerate was not asked for another accumulation.

        Raises:
            ConfigError: It was; a 1 leaves it open.
        """
        steps = self._asked.accumulation
        if steps not in (1, asked.gradient_accumulation_steps):
            raise ConfigError(
                f"accelerate is asked for gradient_accumulation_steps={steps}, and the Trainer for"
                f" {asked.gradient_accumulation_steps}, which counts: give"
                f" Trainer(gradient_accumulation_steps={steps})"
            )

    def setup(self) -> None:
        """Join the process group, which a process that is alone needs for shards only."""
        if self.sharded:
            forget_meshes()
        elif self.world_size == 1:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._member = Member(0, 1, self.device, ALONE)
            return
        limit = None if self.config.timeout is None else timedelta(seconds=self.config.timeout)
        self._member = member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def teardown(self) -> None:
        """Leave the process group, and accelerate's state as it was."""
        self._wrapped, self._before = None, []
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._member is not None:
            if self.sharded:
                forget_meshes()
            leave(self._member)
            self._member, self.ranks = None, ALONE

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, have the Accelerator wrap or shard, then make the optimizers."""
        check_values(module.task, self.name)
        assert self._member is not None
        if make_optimizers is not None and self.world_size > 1:
            refuse_sparse(module.task, self.name, "its gradients are exchanged whole")
        if self._session is None:
            word = _word(precision)
            assert word is not None
            self._session = Session(self.config, word, precision, self.sharded, self._member)
        accelerator = self._session.accelerator
        before = Before(module) if self.sharded else None
        precision.convert_module(module)
        module.to(self.device)
        broadcast_module(module, self.world_size)
        module.context = self._session.autocast() or precision.forward_context(self.device)
        self._scale = self._loss_scale(accelerator) if precision.loss_scaling else None
        self._synchronized = True
        model: nn.Module = module
        if before is not None:
            shard(module, accelerator)
            self._before.append(before)
            self._has_buffers = any(True for _ in module.buffers())
        self._note(module)
        if make_optimizers is not None and self._parameters and not self.sharded:
            model = self._replicate(module, accelerator)
        return Prepared(model, make_optimizers(module) if make_optimizers else {})

    def _note(self, module: StepModule) -> None:
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name.removeprefix("task.") for name, _ in trained]
        self._parameters = [each for _, each in trained]
        self._whole = [each for each in self._parameters if not hasattr(each, "to_local")]

    def _loss_scale(self, accelerator: Any) -> LossScale:
        scale = LossScale(self.device, self._agree if self.sharded else None)
        if accelerator.scaler is not None:  # it may have been told how to begin and to grow
            scale.load_state_dict(accelerator.scaler.state_dict())
        return scale

    def _replicate(self, module: StepModule, accelerator: Any) -> nn.Module:
        prepared: nn.Module = accelerator.prepare(module)
        # Its autocast is the module's context already, which does not change what the step returns.
        for name in ("forward", "_original_forward"):
            vars(module).pop(name, None)
        if prepared is not module:
            self._wrapped = wrapped = prepared
            self._unlearned = bool(wrapped.static_graph)
            self._may_leave_out = bool(wrapped.find_unused_parameters)
            if not (self._unlearned or self._may_leave_out):
                settle_buckets(wrapped, self._parameters)  # type: ignore[arg-type]
        return prepared

    def _agree(self, found: Tensor) -> None:
        # Each process looks at its own shards only.
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)

    def settle(self, model: nn.Module) -> None:
        """Free what a forward without a backward, or a callback, has gathered."""
        if self.sharded:
            from torch.distributed.fsdp import FSDPModule

            for each in model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()

    def restore(self) -> None:
        """Gather the whole values of shards into the host's memory."""
        sharded, self._before = self._before, []
        for before in sharded:
            before.restore()

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Exchange gradients in the window's last micro-batch only."""
        if self._has_buffers:
            broadcast_buffers(model, self.world_size)
        # A static graph is learned in the first backward of all, which must be synchronised.
        last = last or self._unlearned
        self._unlearned = False
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
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient, without accelerate's own division by a number
        of micro-batches.
        """
        if self._scale is not None:
            loss = self._scale.scale(loss)
        root = None if share is None else torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        if self.sharded:
            self._backward_to_shards(loss, root, inputs)
            return
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        if inputs is None and self._synchronized and self._wrapped is not None and not self._may_leave_out:
            check_used(self._names, self._parameters, _UNUSED)

    def _backward_to_shards(self, loss: Tensor, root: Tensor | None, inputs: Sequence[Tensor] | None) -> None:
        with gradients_of(inputs, self._parameters):
            loss.backward(root)  # type: ignore[no-untyped-call]
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
    """Accelerate's word for a precision; None for one that it cannot realise."""
    if type(precision).forward_context is not Precision.forward_context:
        return None
    stored, computed = precision.param_dtype or torch.float32, precision.compute_dtype
    if computed in (None, stored):
        return "no"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computed)
