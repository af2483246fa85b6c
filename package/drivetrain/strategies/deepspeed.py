"""DeepSpeed's ZeRO: optimizer states, gradients and parameters divided among the processes.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
The engine keeps weighting, accumulation, clipping and rates; DeepSpeed's own reduces, divides and updates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.distributed.group import Member, join, leave
from drivetrain.distributed.ranks import ALONE
from drivetrain.distributed.tensors import broadcast_module
from drivetrain.errors import StrategyError
from drivetrain.precision import Precision
from drivetrain.strategies.base import (
    MakeOptimizers,
    Prepared,
    Settings,
    Strategy,
    Support,
    check_dimensions,
    check_values,
    installed,
)
from drivetrain.strategies.deepspeed_config import PRECISIONS, DeepSpeedConfig, check_contradictions, realise
from drivetrain.strategies.deepspeed_library import check_optimizer, connect, float16, library, quiet
from drivetrain.strategies.deepspeed_norms import WideNorms
from drivetrain.strategies.deepspeed_optimizer import configured
from drivetrain.strategies.deepspeed_refusals import check_by_deepspeed, refusals
from drivetrain.strategies.deepspeed_scale import load_scaler_state, scaler_state
from drivetrain.strategies.deepspeed_state import ZeroState
from drivetrain.strategies.deepspeed_unused import Unused
from drivetrain.strategies.deepspeed_whole import Before, full_shapes
from drivetrain.strategies.fsdp_meta import Materialization, on_meta
from drivetrain.strategies.fsdp_wrapping import units
from drivetrain.task import StepModule, TaskModule


class DeepSpeed(Strategy):
    """One share of the training state per process, on a CPU or a GPU each.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """

    name = "deepspeed"
    config_type = DeepSpeedConfig
    needs = "the package deepspeed; several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    always_told = True
    no_skipping = (
        "DeepSpeed's engine reduces, divides and adds up gradients in memory of its own, of which nothing is"
        " dropped but by making the update"
    )
    no_generators = (
        "DeepSpeed's engine has one optimizer, and reduces the gradients of all parameters in every backward"
    )

    def __init__(
        self, config: DeepSpeedConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or DeepSpeedConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self.sharded = self.config.stage == 3
        if self.sharded:
            self.no_compile = "DeepSpeed gathers the parameters of each layer inside of a block"
        self._asked = Settings(None, 1, None, world_size)
        self._member: Member | None = None
        self._engine: Any = None
        self._zero: Any = None
        self._unused: Unused | None = None
        self._state: ZeroState | None = None
        self._before: Before | None = None
        self._norms: WideNorms | None = None
        self._plain = self.config.stage == 0
        self._norm: Tensor | None = None
        self._last = True
        self._named = False

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Whether the package is there, and torch can connect processes."""
        if not torch.distributed.is_available():
            return Support(False, "this build of torch has no torch.distributed")
        return installed("deepspeed", "deepspeed")

    @property
    def title(self) -> str:
        """With the stage of ZeRO, of which the name says nothing."""
        return f"{self.name}, ZeRO stage {self.config.stage}"

    def supports(self, precision: Precision) -> Support:
        """'32', and 'bf16-mixed' and '16-mixed' where something is divided."""
        if precision.name not in PRECISIONS or type(precision) is not Precision:
            return Support(
                False,
                f"DeepSpeed keeps weights in float32; allowed are {', '.join(map(repr, PRECISIONS))}",
            )
        if self._plain and precision.name != "32":
            return Support(False, "stage 0 divides nothing, and mixes no precisions; use 'ddp', or stage 1")
        if precision.name == "16-mixed":
            return float16(self.device.type)
        if (
            self.device.type == "cuda"
            and precision.name == "bf16-mixed"
            and not torch.cuda.is_bf16_supported()
        ):
            return Support(False, "this GPU has no bfloat16; use '16-mixed' or '32'")
        return Support(True)

    def check_settings(self, asked: Settings, precision: Precision) -> None:
        """Refuse what the configuration says otherwise than the Trainer, or DeepSpeed would not take."""
        check_contradictions(self.config, precision, asked)
        self._asked = asked
        if self.config.mapping:
            configured(self.config, nn.Module(), total_updates=sys.maxsize)  # the length comes later
            check_by_deepspeed(realise(self.config, precision, asked), self.device.type)

    def configured_optimizer(self, task: nn.Module, total_updates: int | None) -> Any:
        """The optimizer and schedule of DeepSpeed's configuration, if it has them."""
        return configured(self.config, task, total_updates)

    def setup(self) -> None:
        """Join the process group."""
        library(self.device.type)  # a second or more, while the other processes still start
        limit = None if self.config.timeout is None else timedelta(seconds=self.config.timeout)
        self._member = member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks
        if "LOCAL_RANK" not in os.environ:  # one process, of which DeepSpeed asks it all the same
            os.environ["LOCAL_RANK"] = "0"
            self._named = True

    def teardown(self) -> None:
        """Leave the process group."""
        self._let_go()
        if self._named:
            os.environ.pop("LOCAL_RANK", None)
            self._named = False
        if self._member is not None:
            leave(self._member)
            self._member, self.ranks = None, ALONE

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Have the optimizer made, and both taken over by DeepSpeed's engine."""
        task = module.task
        check_values(task, self.name, meta=self.sharded)
        settings = realise(self.config, precision, self._asked)
        if not isinstance(task, TaskModule):
            # A loop of one's own makes an update whenever it wants to.
            if self._plain and make_optimizers:
                raise StrategyError("stage 0 is for the Trainer; in a loop of your own use strategy 'ddp'")
            settings["managed_gradient_accumulation"] = False
        module.context = precision.forward_context(self.device)
        trained = any(each.requires_grad for each in task.parameters())
        if not (self.sharded or (make_optimizers and trained)):
            module.to(self.device)
            broadcast_module(module, self.world_size)
            return Prepared(module, make_optimizers(module) if make_optimizers else {})
        check_dimensions(task, otherwise="" if self.config.stage else ", or use strategy 'ddp'")
        deepspeed = library(self.device.type)
        connect(deepspeed)
        self._before = Before(module)
        stored: dict[nn.Parameter, torch.dtype] = {}
        exact: dict[nn.Parameter, Tensor] = {}
        if on_meta(module):
            self._materialize(module, deepspeed, settings, precision, stored, exact)
        module.to(self.device)
        broadcast_module(module, self.world_size)
        if not stored:
            stored = {each: each.dtype for each in task.parameters()}
            if precision.compute_dtype is not None:
                exact = {each: each.detach().clone() for each in stored if each.requires_grad}
        optimizers = self._optimizers(module, make_optimizers)  # where nothing is trained, that is its error
        optimizer = next(iter(optimizers.values()), None)
        members = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        with quiet(), refusals():
            self._engine, zero, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=settings, dist_init_required=False
            )
        self._zero = None if self._plain else zero
        if self._zero is not None:
            self._state = ZeroState(task, zero, optimizer, members, stored)
            self._state.put(exact)  # DeepSpeed has begun from rounded values
        self._unused = Unused(task) if optimizers else None
        self._norms = WideNorms(module)
        return Prepared(self._engine, optimizers)

    def _optimizers(self, module: StepModule, make_optimizers: MakeOptimizers | None) -> dict[str, Optimizer]:
        if make_optimizers is None:
            return {}
        with full_shapes(module):
            optimizers = make_optimizers(module)
        allowed = self.config.mapping.get("zero_allow_untested_optimizer") is True
        for each in optimizers.values():
            check_optimizer(each, allowed or self._plain)
        return optimizers

    def _materialize(
        self,
        module: StepModule,
        deepspeed: Any,
        settings: dict[str, Any],
        precision: Precision,
        stored: dict[nn.Parameter, torch.dtype],
        exact: dict[nn.Parameter, Tensor],
    ) -> None:
        """Give a task on the meta device its values, block by block, each divided at once.

        Args:
            module: The whole.
            deepspeed: The package.
            settings: Its configuration.
            precision: Of the run.
            stored: Gets the dtypes that the parameters had.
            exact: Gets this process's shares of the values, where they are rounded.
        """
        dtype = precision.compute_dtype

        def divide(part: nn.Module) -> None:
            for each in part.parameters():
                if hasattr(each, "ds_id"):
                    continue
                stored[each] = each.dtype
                if dtype is not None:
                    size = -(-each.numel() // self.world_size)
                    exact[each] = each.detach().reshape(-1)[size * self.rank :][:size].clone()
                    each.data = each.data.to(dtype)
            with quiet():
                deepspeed.zero.Init(module=part, config_dict_or_path=settings, dtype=dtype or torch.float32)

        blocks = units(module.task, "auto")
        Materialization(module).run([*blocks, module], self.device, self.world_size, divide)

    @contextmanager
    def exchanged(
        self, optimizers: Mapping[str, Optimizer], write: bool = False
    ) -> Iterator[Mapping[str, Optimizer]]:
        """Gather, or scatter, parameter by parameter; see `ZeroState`."""
        if self._state is None:
            yield optimizers
            return
        with self._state.exchanged(write) as given:
            taken = self._state.optimizer
            yield {name: given if given and each is taken else each for name, each in optimizers.items()}

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """All of a tensor; of a parameter that is divided, or kept in 16 bits, a copy of its exact values.

        To be called by all processes together.
        """
        if self._state is not None and self._state.holds_back(tensor):
            return self._state.gathered(tensor).to(tensor.device)
        return super().full_tensor(tensor)

    def restore(self) -> None:
        """Gather the whole values into the host's memory, unless `gather_at_end` is off."""
        before, state, self._before = self._before, self._state, None
        if before is None or (self.sharded and not self.config.gather_at_end):
            return
        before.restore(state.gathered if state is not None else Tensor.detach)

    def _let_go(self) -> None:
        engine, self._engine, self._zero, self._state, self._before = self._engine, None, None, None, None
        if self._norms is not None:
            self._norms.remove()
            self._norms = None
        if engine is not None:
            with quiet():
                engine.destroy()

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Reduce gradients in the window's last micro-batch, as far as the stage can wait for it."""
        self._last = last
        if self._engine is not None:
            self._engine.set_gradient_accumulation_boundary(last)

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward of the share of the loss, by DeepSpeed's engine."""
        if inputs is not None:
            raise StrategyError(f"backward to some parameters alone: {self.no_generators}")
        self._engine.backward(loss if share is None else loss * share, scale_wrt_gas=False)
        if self._unused is not None and self._last:
            self._unused.check()
            self._unused = None

    def scale_gradients(self, parameters: Sequence[Tensor], factor: float | Tensor) -> None:
        """Have DeepSpeed multiply them when the update is made, as it does with a loss scale."""
        self._zero.override_loss_scale(self._zero.loss_scale / float(factor))

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Have DeepSpeed clip by the global norm, which is known when the update is made."""
        if self._zero is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        self._zero.clip_grad = max_norm
        self._norm = torch.zeros((), device=self.device)
        return self._norm

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Have DeepSpeed make the update; False when a scaled gradient overflowed."""
        self._engine.step()
        if self._norm is not None:
            self._norm.fill_(self._zero._global_grad_norm)
            self._zero.clip_grad, self._norm = 0.0, None
        if self._zero is not None:
            self._zero.custom_loss_scaler = False
        applied: bool = self._engine.was_step_applied()
        return applied

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its growth counter."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return {"scaler": scaler_state(scaler)} if getattr(scaler, "dynamic", False) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a loss scale; one saved under another precision is left alone."""
        scaler = getattr(self._zero, "loss_scaler", None)
        if getattr(scaler, "dynamic", False) and "scaler" in state:
            load_scaler_state(scaler, state["scaler"])
