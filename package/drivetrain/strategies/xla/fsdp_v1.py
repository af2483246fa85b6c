"""Fully sharded data parallel by torch_xla's XlaFullyShardedDataParallel ("FSDP v1"), on one device.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, in FairScale's
form. torch_xla's wrappers do not appear in names: shards have the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.types import StepOutput
from drivetrain.core.validation import by_name
from drivetrain.strategies.base import MakeOptimizers, Prepared, Support, gradients_of
from drivetrain.strategies.checks import check_dimensions, check_values
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.wrapping import Wrap, units
from drivetrain.strategies.xla.blocks import (
    RecomputeOption,
    check_blocks,
    checkpoint_blocks,
    forget_checkpointing,
)
from drivetrain.strategies.xla.device import OnXLA, check_run_after, move, open_device
from drivetrain.strategies.xla.norms import forget_corrections
from drivetrain.task.task import StepModule

_OURS = {
    "module": "the task is the module",
    "auto_wrap_policy": "give XLAFSDPConfig(wrap=...)",
    "auto_wrapper_callable": "give XLAFSDPConfig(activation_checkpointing=...)",
    "param_init_fn": "a task is initialised before it is sharded",
    "flatten_parameters": "checkpoints have parameters by name",
    "shard_param_on_dim_0": "checkpoints have parameters in their shapes",
    "sharding_groups": "it shards over all devices",
    "sharding_rank": "it shards over all devices",
    "sharding_world_size": "it shards over all devices",
}
"""torch_xla's settings that this strategy decides, and why."""


@by_name
@dataclass(frozen=True, kw_only=True)
class XLAFSDPConfig:
    """Options of strategy "xla_fsdp".

    Attributes:
        wrap: The modules whose parameters are gathered together: "auto" for each of the model's repeated
            blocks, the names of classes, a minimum number of parameters, a function of a module, or () for
            the whole model at once.
        activation_checkpointing: False; "full" to recompute each repeated block's activations in backward; or
            the names of the classes to recompute.
        xla_fsdp_settings: Further arguments of torch_xla's XlaFullyShardedDataParallel; a dtype may be given
            by name, as in `{"compute_dtype": "bfloat16"}`.
        run_after: When XLA runs traced operations: after each "micro_batch", or once after the "step".
            "step" compiles all micro-batches of a window as one program, and a short window as another.
    """

    wrap: Wrap = "auto"
    activation_checkpointing: RecomputeOption = False
    xla_fsdp_settings: Mapping[str, Any] = field(default_factory=dict)
    run_after: str = "micro_batch"

    def __post_init__(self) -> None:
        """Check each option."""
        kind = type(self).__name__
        check_blocks(kind, self.wrap, self.activation_checkpointing)
        check_run_after(kind, self.run_after)
        settings = self.xla_fsdp_settings
        if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
            raise ConfigError(
                f"{kind}(xla_fsdp_settings=...) must be a mapping of names to values, not {settings!r}"
            )
        for name, reason in _OURS.items():
            if name in settings:
                raise ConfigError(f"{kind}(xla_fsdp_settings=...) must not contain {name!r}: {reason}")
        for name, value in settings.items():
            named = name.endswith("_dtype") and isinstance(value, str)
            if named and not isinstance(getattr(torch, value, None), torch.dtype):
                raise ConfigError(
                    f"{kind}(xla_fsdp_settings={{{name!r}: {value!r}}}): torch has no such dtype"
                )


class XLAFSDP(OnXLA):
    """torch_xla's FSDP on the device of one process; see `OnXLA` for the arguments."""

    name = "xla_fsdp"
    config: XLAFSDPConfig
    config_type = XLAFSDPConfig
    needs = "torch_xla, and a TPU or a CPU; one process that has one device"
    sharded = True
    refusals: Mapping[str, str] = {
        "local_parts": "its shards do not tell which part of a tensor they are; those of 'xla_fsdp_v2' do",
        "averages": "torch_xla keeps the weights in shards of its own",
        "unfreezing": (
            "torch_xla's gathered parameters keep the requires_grad that they had when it sharded them"
        ),
    }

    def supports(self, precision: Precision) -> Support:
        """Support parameters in float32, with compute in float32 or bfloat16."""
        if precision.param_dtype not in (None, torch.float32):
            return Support(
                False, "torch_xla's FSDP takes parameters in float32 only; use '32' or 'bf16-mixed'"
            )
        return super().supports(precision)

    def setup(self) -> None:
        self.device = open_device(self.name)
        import torch_xla.runtime as runtime

        count = runtime.global_runtime_device_count()
        if count > 1:
            raise StrategyError(
                f"there are {count} XLA devices, but strategy 'xla_fsdp' takes one: torch_xla needs a process"
                " for each device, and its collectives on a CPU deadlock. Use 'xla_fsdp_v2', which uses all"
                " devices of one process, or leave one device (CPU_NUM_DEVICES=1)"
            )

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Move and shard the module, then build the optimizers on the shards."""
        check_values(module.task, self.name)
        check_dimensions(module.task)
        self.move_to_device(module, precision)
        sharded = _Sharded(module, self.config, mixed=precision.compute_dtype is not None)
        self._prepared.append(sharded)
        return Prepared(sharded, make_optimizers(module) if make_optimizers else {})

    def reshard(self, model: nn.Module) -> None:
        """Free the gathered parameters, so that the next forward gathers the current shards."""
        for sharded in self._prepared:
            sharded.free()

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a tensor; a parameter that forward has gathered and freed is replaced by its shard."""
        return super().full_tensor(getattr(tensor, "_sharded_param", tensor))

    def restore(self) -> None:
        """Revert the task to an ordinary module in the host's memory."""
        for sharded in self._prepared:
            sharded.restore()
        self._prepared = []

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the share as the gradient of the loss."""
        with gradients_of(inputs, self._parameters()):
            for sharded in self._prepared:
                sharded.before_backward()
            self._trace.backward(loss, factor)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for each in self._prepared for parameter in each.parameters()]


class _MappingResult(nn.Module):
    """A wrapper that returns a step's result as a mapping: torch_xla hooks backward on its tensors."""

    def __init__(self, step: StepModule) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.step(*args, **kwargs)
        return {StepOutput: output._asdict()} if isinstance(output, StepOutput) else output


class _Sharded(nn.Module):
    """A step module sharded by torch_xla: each block separately, and the rest together."""

    def __init__(self, module: StepModule, config: XLAFSDPConfig, mixed: bool) -> None:
        super().__init__()
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        self._module = [module]  # in a list, so that it is not registered: the wrapper contains it already
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        self._led_back = False
        options: dict[str, Any] = {
            "buffer_dtype": torch.float32,
            # torch_xla's linear layer ignores autocast.
            "_use_xla_patched_linear": not mixed,
            **{name: _value(name, value) for name, value in config.xla_fsdp_settings.items()},
            # In one process a shard is then the whole parameter in its shape.
            "shard_param_on_dim_0": True,
        }
        self._again = checkpoint_blocks(module.task, config.activation_checkpointing)
        blocks = units(module.task, config.wrap)
        try:
            for block in blocks:
                self._replace(module, block, XlaFullyShardedDataParallel(block, **options))
            self.whole = XlaFullyShardedDataParallel(_MappingResult(module), **options)
        except TypeError as error:
            raise ConfigError(f"torch_xla refuses XLAFSDPConfig(xla_fsdp_settings=...): {error}") from error
        self._wrappers = [
            each for each in self.whole.modules() if isinstance(each, XlaFullyShardedDataParallel)
        ]
        for wrapper in self._wrappers:
            _show_shards(wrapper)
            wrapper._register_state_dict_hook(_remove_prefix)
            wrapper._register_load_state_dict_pre_hook(_add_prefix)

    def _replace(self, module: nn.Module, block: nn.Module, wrapper: nn.Module) -> None:
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child is block:
                    parent._modules[name] = wrapper
                    self._places.append((parent, name, block))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        self._led_back = False
        output = self.whole(*args, **kwargs)
        if isinstance(output, dict) and StepOutput in output:
            return StepOutput(**output[StepOutput])
        return output

    @property
    def module(self) -> StepModule:
        return self._module[0]

    def before_backward(self) -> None:
        """Gather parameters and register hooks again for a second backward after one forward.

        torch_xla only prepares for one backward per forward.
        """
        if self._led_back:
            for wrapper in self._wrappers:
                wrapper._rebuild_full_params()
                wrapper._register_post_backward_hooks()
        self._led_back = True

    def free(self) -> None:
        for wrapper in self._wrappers:
            if wrapper.has_full_params:
                wrapper._free_full_params()

    def restore(self) -> None:
        """Remove what torch_xla has added, and move the module to the host's memory."""
        for wrapper in self._wrappers:
            for _, module, name, *_ in (*wrapper.full_param_infos, *_aliases(wrapper)):
                vars(module).pop(name)
        for parent, name, block in self._places:
            parent._modules[name] = block
        forget_checkpointing(self._again)
        forget_corrections(self.module)
        for each in self.module.modules():
            if vars(each).pop("_nn_linear_forward_original", None) is not None:
                vars(each).pop("forward", None)
        move(self.module, "cpu")


def _value(name: str, value: Any) -> Any:
    return getattr(torch, value) if name.endswith("_dtype") and isinstance(value, str) else value


def _aliases(wrapper: Any) -> list[tuple[Any, ...]]:
    """Return the further uses of tied parameters: module and name, and the owner and name of the shard."""
    return [(None, *rest) for _, _, *rest in wrapper.shared_full_param_infos]


def _show_shards(wrapper: Any) -> None:
    """Register a wrapper's shards in the modules, under the names of their parameters.

    Forward uses the gathered parameters, which are attributes of the same names: attribute lookup finds those
    first.
    """
    for (_, module, name), shard in zip(wrapper.full_param_infos, wrapper.sharded_params, strict=True):
        module._parameters[name] = shard
    for _, module, name, owner, own in _aliases(wrapper):
        module._parameters[name] = owner._parameters[own]
    wrapper._parameters.clear()


_INSIDE = "_fsdp_wrapped_module."
"""The prefix that a wrapper adds to the names of its module."""


def _remove_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove the wrapper's prefix from the names in a state dict."""
    inside = prefix + _INSIDE
    for key in [each for each in state if each.startswith(inside)]:
        state[prefix + key.removeprefix(inside)] = state.pop(key)


def _add_prefix(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the wrapper's prefix to the names in a state dict."""
    for key in [each for each in state if each.startswith(prefix)]:
        state[prefix + _INSIDE + key.removeprefix(prefix)] = state.pop(key)
