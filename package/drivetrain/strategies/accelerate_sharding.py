"""A model sharded by accelerate's FSDP plugin of version 2, which is torch's `fully_shard`."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigError
from drivetrain.strategies.accelerate_session import own_environment
from drivetrain.strategies.deepspeed_library import quiet
from drivetrain.strategies.fsdp_wrapping import units
from drivetrain.strategies.recomputation import recompute
from drivetrain.task import StepModule


def shard(module: StepModule, accelerator: Any) -> None:
    """Have an Accelerator shard a module, in place.

    The layers that its plugin names are sharded before it looks at the module: its own search would take the
    task for one of them, which a step need not call.

    Args:
        module: On its device.
        accelerator: With the plugin.

    Raises:
        ConfigError: The plugin names layers that there are not, or in a way that this version has not.
    """
    state, task = accelerator.state, module.task
    before = state.fsdp_plugin
    plugin = state.fsdp_plugin = copy.copy(before)
    try:
        _shard_layers(task, plugin)
        # It takes a model with an optimizer only, to exchange its parameters: ours are made on the shards.
        nothing = torch.optim.SGD([torch.zeros(1)])
        nothing.param_groups[0]["params"].clear()
        # It imports DeepSpeed where that is installed, which writes to the screen and to the environment.
        with quiet(), own_environment():
            accelerator.prepare(module, nothing)
    finally:
        state.fsdp_plugin = before


def _shard_layers(task: nn.Module, plugin: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    if isinstance(plugin.ignored_modules, str):
        named = task.named_modules()
        plugin.ignored_modules = [each for name, each in named if re.fullmatch(plugin.ignored_modules, name)]
    layers = _layers(plugin, task)
    plugin.auto_wrap_policy = None
    if plugin.activation_checkpointing:
        if getattr(plugin, "activation_checkpointing_offload", False) or not layers:
            raise ConfigError(
                "the FSDP plugin's activation_checkpointing needs an auto_wrap_policy that names layers, and"
                " works without activation_checkpointing_offload"
            )
        plugin.activation_checkpointing = False  # its wrapper would change the parameters' names
        recompute(layers, "full")
    for each in layers:
        fully_shard(
            each,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy,
            offload_policy=plugin.cpu_offload,
            ignored_params={each for m in plugin.ignored_modules or () for each in m.parameters()},
        )


def _layers(plugin: Any, task: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if policy is None:
        return []
    if policy is transformer_auto_wrap_policy:
        # Models of the package transformers say it themselves.
        known = {each for m in task.modules() for each in getattr(m, "_no_split_modules", None) or ()}
        return units(task, tuple(plugin.transformer_cls_names_to_wrap or sorted(known)))
    if policy is size_based_auto_wrap_policy:
        return units(task, plugin.min_num_params) if plugin.min_num_params else []
    raise ConfigError(
        "the FSDP plugin's auto_wrap_policy is 'transformer_based_wrap', 'size_based_wrap' or 'no_wrap':"
        " version 2 of it passes a function over. Strategy 'fsdp' takes one, FSDPConfig(wrap=...)"
    )
