"""DeepSpeed's ZeRO: optimizer states, gradients and parameters are sharded over the processes.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
Our engine does weighting, accumulation, clipping and learning rates; DeepSpeed's reduces, shards and updates.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.weights.stored_rows import stored_weights
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.distributed.tensors import broadcast_module
from drivetrain.strategies.base import (
    MakeOptimizers,
    Memory,
    Prepared,
    SharedSettings,
    Strategy,
    Support,
    has_bfloat16,
    has_collectives,
    installed,
)
from drivetrain.strategies.checks import check_dimensions, check_dtypes, check_gathering, check_values
from drivetrain.strategies.deepspeed.config import PRECISIONS, DeepSpeedConfig, check_contradictions, realise
from drivetrain.strategies.deepspeed.library import check_optimizer, connect, float16, library, quiet
from drivetrain.strategies.deepspeed.norms import WideNorms
from drivetrain.strategies.deepspeed.state import ZeroState, load_scaler_state, scaler_state
from drivetrain.strategies.deepspeed.unshard import ModulesBeforeZero, full_shapes
from drivetrain.strategies.meta_device import (
    Materialization,
    check_alike,
    deferred_weights,
    on_meta,
    read_each,
    read_stored,
)
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.unused import UsedParameters, note_forwards
from drivetrain.strategies.wrapping import units
from drivetrain.task.task import StepModule, TaskModule


@dataclass
class _Preparation:
    """The values that the parts of `DeepSpeed.prepare` pass on.

    Attributes:
        deepspeed: The package.
        settings: DeepSpeed's configuration.
        stored: The dtype that each parameter has in checkpoints.
        exact: The values of trained parameters that DeepSpeed would round: whole, or this process's shards.
    """

    deepspeed: Any
    settings: dict[str, Any]
    stored: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    exact: dict[nn.Parameter, Tensor] = field(default_factory=dict)


class DeepSpeed(Strategy):
    """One shard of the training state per process, each on a CPU or a GPU.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """

    name = "deepspeed"
    config_type = DeepSpeedConfig
    needs = "the package deepspeed; several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals: Mapping[str, str] = {
        "skipping": (
            "DeepSpeed's engine reduces, shards and accumulates gradients in its own memory, and only a"
            " step clears that memory"
        ),
        "value_clipping": "DeepSpeed's optimizers read their own gradients, which are clipped by the norm",
        "averages": "DeepSpeed's optimizers update weights of their own",
        "generators": (
            "DeepSpeed's engine has one optimizer, and reduces the gradients of all parameters in every"
            " backward"
        ),
    }

    def __init__(
        self, config: DeepSpeedConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or DeepSpeedConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self.sharded = self.config.stage == 3
        if self.config.stage:
            unfreezing = (
                "DeepSpeed updates the parameters of a group in one flat tensor, so that weight decay moves"
                " those without a gradient, and Adam counts their steps"
            )
        else:
            unfreezing = ""
        gathers = "DeepSpeed gathers the parameters of each layer inside a block" if self.sharded else ""
        self.refusals = {"unfreezing": unfreezing, "compile": gathers}
        self._asked = SharedSettings(None, 1, None, world_size)
        self._engine: Any = None
        self._zero: Any = None
        self._used: UsedParameters | None = None
        self._handles: list[Any] = []
        self._state: ZeroState | None = None
        self._before: ModulesBeforeZero | None = None
        self._norms: WideNorms | None = None
        self._plain = self.config.stage == 0
        self._norm: Tensor | None = None
        self._last = True
        self._named = False

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Return whether DeepSpeed and torch.distributed are available."""
        return has_collectives() and installed("deepspeed", "deepspeed")

    def __str__(self) -> str:
        """Return the name, with the stage of ZeRO."""
        return f"{self.name}, ZeRO stage {self.config.stage}"

    def supports(self, precision: Precision) -> Support:
        """Support '32'; with a stage above 0 also 'bf16-mixed' and '16-mixed'."""
        if precision.name not in PRECISIONS or type(precision) is not Precision:
            return Support(
                False, f"DeepSpeed keeps weights in float32; allowed are {', '.join(map(repr, PRECISIONS))}"
            )
        if self._plain and precision.name != "32":
            return Support(False, "stage 0 divides nothing, and mixes no precisions; use 'ddp', or stage 1")
        if precision.name == "16-mixed":
            return float16(self.device.type)
        return has_bfloat16(self.device, precision)

    def check_settings(self, asked: SharedSettings, precision: Precision) -> None:
        """Check that DeepSpeed accepts the configuration, and that it does not contradict the Trainer."""
        check_contradictions(self.config, precision)
        self._asked = asked
        if self.config.mapping:
            check_by_deepspeed(realise(self.config, precision, asked), self.device.type)

    def memory(self, task: nn.Module, precision: Precision, local_size: int) -> Memory:
        """Return what ZeRO's stage divides, with DeepSpeed's buckets and gathered weights at their limits."""
        parts = ("optimizer", "gradients", "parameters")[: self.config.stage]
        zero = self.config.mapping.get("zero_optimization", {})
        elements = sum(each.numel() for each in task.parameters())
        width = (precision.compute_dtype or torch.float32).itemsize
        live = zero.get("stage3_max_live_parameters", 10**9) if self.sharded else 0
        bucket = zero.get("reduce_bucket_size", 5 * 10**8) if self.config.stage else 0
        live, bucket = (each if isinstance(each, (int, float)) else elements for each in (live, bucket))
        offloaded = ["optimizer", "gradients"] if self.config.offload_optimizer else []
        return Memory(
            1 / self.world_size,
            frozenset(parts),
            gathered=int(min(live, elements) + bucket) * width,  # the bucket is made in its full size
            offloaded=frozenset(offloaded + ["parameters"] * bool(self.config.offload_parameters)),
            forward_dtype=precision.compute_dtype,
            copies=precision.compute_dtype is not None,
        )

    def setup(self) -> None:
        """Join the process group."""
        library(self.device.type)  # takes a second or more, while other processes still start
        self._join(self.config.timeout)
        if "LOCAL_RANK" not in os.environ:  # DeepSpeed needs it with one process too
            os.environ["LOCAL_RANK"] = "0"
            self._named = True

    def teardown(self) -> None:
        """Leave the process group."""
        self._destroy_engine()
        if self._named:
            os.environ.pop("LOCAL_RANK", None)
            self._named = False
        self._leave()

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Build the optimizer, and pass it and the module to DeepSpeed's engine."""
        task = module.task
        settings = self._checked_settings(task, precision, has_optimizers=make_optimizers is not None)
        module.context = precision.forward_context(self.device)
        trained = any(each.requires_grad for each in task.parameters())
        if not (self.sharded or (make_optimizers and trained)):
            module.to(self.device)
            broadcast_module(module, self.world_size)
            return Prepared(module, make_optimizers(module) if make_optimizers else {})
        check_dimensions(task, otherwise="" if self.config.stage else ", or use strategy 'ddp'")
        if self.config.stage:
            check_flat(task, self.config.stage, precision)
        prepared = _Preparation(library(self.device.type), settings)
        connect(prepared.deepspeed)
        self._before = ModulesBeforeZero(module)
        self._place(module, precision, prepared)
        optimizers = self._optimizers(module, make_optimizers)  # raises if nothing is trained
        self._start_engine(module, optimizers, prepared)
        return Prepared(self._engine, optimizers)

    def _start_engine(
        self, module: StepModule, optimizers: dict[str, Optimizer], prepared: _Preparation
    ) -> None:
        """Start DeepSpeed's engine, with the order of its calls and the state of its optimizer."""
        task = module.task
        optimizer = next(iter(optimizers.values()), None)
        members = [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        if optimizers:
            stage, order = self.config.stage or 0, self.ranks.order
            in_order = stage > 1 and bool(prepared.settings.get("managed_gradient_accumulation", True))
            self._used = UsedParameters(task, order, stage, in_order)
        with quiet():
            self._engine, zero, *_ = prepared.deepspeed.initialize(
                model=module, optimizer=optimizer, config=prepared.settings, dist_init_required=False
            )
        self._zero = None if self._plain else zero
        if self._zero is not None:
            self._state = ZeroState(task, zero, optimizer, members, prepared.stored)
            self._state.put(prepared.exact)  # DeepSpeed has started from rounded values
        if self.sharded:
            self._watch_forwards(task)
        self._norms = WideNorms(module)

    def _checked_settings(
        self, task: nn.Module, precision: Precision, has_optimizers: bool
    ) -> dict[str, Any]:
        """Return DeepSpeed's settings for a task that ZeRO can train."""
        check_values(task, self.name, meta=self.sharded)
        if self.sharded and self.config.gather_at_end:
            check_gathering(task)
        settings = realise(self.config, precision, self._asked)
        if not isinstance(task, TaskModule):
            # A user's own loop may make a step at any time.
            if self._plain and has_optimizers:
                raise StrategyError("stage 0 is for the Trainer; in your own loop use strategy 'ddp'")
            settings["managed_gradient_accumulation"] = False
        return settings

    def _place(self, module: StepModule, precision: Precision, prepared: _Preparation) -> None:
        """Place the weights on the device, the same on all ranks; note dtypes and values in `prepared`."""
        task = module.task
        if self.sharded:
            check_alike(module, task, self.ranks)
        if on_meta(module):
            self._materialize(module, precision, prepared)
        else:
            read_stored(module, task, self.device, self.device)
        module.to(self.device)
        broadcast_module(module, self.world_size)
        if not prepared.stored:
            prepared.stored |= {each: each.dtype for each in task.parameters()}
            if precision.compute_dtype is not None:
                prepared.exact |= {
                    each: each.detach().clone() for each in prepared.stored if each.requires_grad
                }

    def _watch_forwards(self, task: nn.Module) -> None:
        """Note the order of the modules whose weights stage 3 gathers, once DeepSpeed has hooked them."""
        from deepspeed.utils import z3_leaf_module

        parts: dict[str, nn.Module] = {}
        inside: set[nn.Module] = set()
        for name, each in task.named_modules():
            if each in inside:
                continue
            if z3_leaf_module(each):  # gathered and reduced as a whole, whatever it uses
                inside.update(each.modules())
                if self._used is not None:
                    self._used.whole.update(each.parameters())
            elif next(each.parameters(recurse=False), None) is None:
                continue
            parts[name or "task"] = each
        self._handles = note_forwards(self.ranks.order, parts)

    def _optimizers(self, module: StepModule, make_optimizers: MakeOptimizers) -> dict[str, Optimizer]:
        if make_optimizers is None:
            return {}
        with full_shapes(module):
            optimizers = make_optimizers(module)
        allowed = self.config.mapping.get("zero_allow_untested_optimizer") is True
        for each in optimizers.values():
            check_optimizer(each, allowed or self._plain)
        return optimizers

    def _materialize(self, module: StepModule, precision: Precision, prepared: _Preparation) -> None:
        """Initialise a task on the meta device block by block, and shard each block at once.

        Stored weights are read by each process, one whole parameter at a time: `zero.Init` takes whole ones,
        and gives all processes those of rank 0.
        """
        dtype, task = precision.compute_dtype, module.task
        deferred = deferred_weights(task)
        stored_values = None if deferred is not None else stored_weights(task)

        def divide(part: nn.Module) -> None:
            new = {each for each in part.parameters() if not hasattr(each, "ds_id")}
            if stored_values is not None:
                named = task.named_parameters(remove_duplicate=False)
                stored_values.fill([(name, each) for name, each in named if each in new])
            for each in new:
                prepared.stored[each] = each.dtype
                if dtype is not None:
                    size = -(-each.numel() // self.world_size)
                    prepared.exact[each] = each.detach().reshape(-1)[size * self.rank :][:size].clone()
                    each.data = each.data.to(dtype)
            with quiet():
                prepared.deepspeed.zero.Init(
                    module=part, config_dict_or_path=prepared.settings, dtype=dtype or torch.float32
                )

        if deferred is None:
            blocks = units(task, "auto")
            Materialization(module).run([*blocks, module], self.device, self.world_size, divide)
        else:
            for each in read_each(task, self.device):
                divide(nn.ParameterList([each]))
        read_stored(module, task, self.device, self.device)

    def retrain(self, model: nn.Module) -> nn.Module:
        """Expect, in the first step, gradients of the parameters that are trained now."""
        if self._used is not None:
            self._used.watch(self._engine.module.task)
        return model

    @contextmanager
    def checkpoint_layout(
        self, optimizers: Mapping[str, Optimizer], write: bool = False
    ) -> Iterator[Mapping[str, Optimizer]]:
        """Gather or scatter one parameter at a time; see `ZeroState`."""
        if self._state is None:
            yield optimizers
            return
        with self._state.checkpoint_layout(write) as given:
            taken = self._state.optimizer
            yield {name: given if given and each is taken else each for name, each in optimizers.items()}

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a tensor; for a parameter that is sharded or kept in 16 bits, return its exact values.

        All processes must call it together.
        """
        if self._state is not None and self._state.is_incomplete(tensor):
            return self._state.gathered(tensor).to(tensor.device)
        return super().full_tensor(tensor)

    def local_part(self, tensor: Tensor) -> tuple[Tensor, float]:
        """Return this process's part of a parameter's exact values; no other process has that part."""
        if self._state is not None and self._state.knows(tensor):
            return self._state.part(tensor), 1.0
        return super().local_part(tensor)

    def restore(self) -> None:
        """Gather the whole values in the host's memory, unless `gather_at_end` is off."""
        before, state, self._before = self._before, self._state, None
        if before is None or (self.sharded and not self.config.gather_at_end):
            return
        before.restore(state.gathered if state is not None else Tensor.detach)

    def _destroy_engine(self) -> None:
        engine, self._engine, self._zero, self._state, self._before = self._engine, None, None, None, None
        if self._norms is not None:
            self._norms.remove()
            self._norms = None
        if self._used is not None:
            self._used.stop()
            self._used = None
        while self._handles:
            self._handles.pop().remove()
        if engine is not None:
            with quiet():
                engine.destroy()

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Tell DeepSpeed whether this is the window's last micro-batch; some stages reduce only then."""
        self._last = last
        if self._engine is not None:
            self._engine.set_gradient_accumulation_boundary(last)

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward of the factor times the loss by DeepSpeed's engine."""
        if inputs is not None:
            raise StrategyError(
                f"backward to only some parameters is not supported: {self.refuses('generators')}"
            )
        self.ranks.order.note("begins a backward")
        self._engine.backward(loss if factor is None else loss * factor, scale_wrt_gas=False)
        if self._plain and self._used is not None and self._last:
            self._used.check()

    def scale_gradients(self, parameters: Sequence[Tensor], factor: float | Tensor) -> None:
        """Let DeepSpeed multiply the gradients at the step, as it does with a loss scale."""
        self._zero.override_loss_scale(self._zero.loss_scale / float(factor))

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Let DeepSpeed clip by the global norm, which is known at the step."""
        if self._zero is None:
            return super().clip_grad_norm(parameters, max_norm)
        self._zero.clip_grad = max_norm
        self._norm = torch.zeros((), device=self.device)
        return self._norm

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Let DeepSpeed make the step; return False if a scaled gradient overflowed."""
        if not self._plain and self._used is not None:
            self._used.check()
        self._engine.step()
        if self._norm is not None:
            self._norm.fill_(self._zero._global_grad_norm)
            self._zero.clip_grad, self._norm = 0.0, None
        if self._zero is not None:
            self._zero.custom_loss_scaler = False
        applied: bool = self._engine.was_step_applied()
        return applied

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its growth counter."""
        scaler = getattr(self._zero, "loss_scaler", None)
        return {"scaler": scaler_state(scaler)} if getattr(scaler, "dynamic", False) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a loss scale; without one here, a saved one is ignored."""
        scaler = getattr(self._zero, "loss_scaler", None)
        if getattr(scaler, "dynamic", False) and "scaler" in state:
            load_scaler_state(scaler, state["scaler"])


def check_flat(task: nn.Module, stage: int, precision: Precision) -> None:
    """Check that DeepSpeed can concatenate the trained parameters.

    If one is float64 or complex, the flat tensor is, and all parameters become parts of it. Stage 3 takes one
    dtype. A precision of 16 bits converts all but complex ones first.

    Raises:
        StrategyError: It cannot; names one parameter of each dtype.
    """

    def allowed(dtypes: Collection[torch.dtype]) -> bool:
        mixed = len(dtypes) > 1 and precision.compute_dtype is None
        unlike = mixed and (stage == 3 or torch.float64 in dtypes)
        return not unlike and not any(each.is_complex for each in dtypes)

    check_dtypes(
        task,
        {name: each for name, each in task.named_parameters() if each.requires_grad},
        allowed,
        "which DeepSpeed would concatenate to one tensor of one dtype. Give all of them float32, freeze the"
        " others, or use strategy 'ddp'",
    )


def check_by_deepspeed(settings: Mapping[str, Any], device: str) -> None:
    """Check a configuration with DeepSpeed's own parser.

    Args:
        settings: DeepSpeed's configuration.
        device: The kind of device of the run.

    Raises:
        ConfigError: DeepSpeed refuses a name or a value; the message is DeepSpeed's.
    """
    library(device)
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        with quiet():
            DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (error.title, *first["loc"])))
        raise ConfigError(f"DeepSpeed refuses {name}={first['input']!r}: {first['msg']}") from error
    # DeepSpeed's own error is a bare Exception.
    except Exception as error:
        raise ConfigError(f"DeepSpeed refuses its configuration: {error!r}") from error
