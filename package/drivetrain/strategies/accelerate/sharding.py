"""Sharding by version 2 of accelerate's FSDP plugin, which uses torch's `fully_shard`."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.deepspeed.library import environment, quiet
from drivetrain.strategies.transforms.recompute import recompute
from drivetrain.strategies.wrapping import units
from drivetrain.task.task import StepModule


def shard(module: StepModule, accelerator: Any) -> None:
    """Shard a module by an Accelerator, in place.

    The plugin's layers are sharded here, before the Accelerator gets the module. Its own search could choose
    the task itself, which a step need not call.
    """
    state, task = accelerator.state, module.task
    before = state.fsdp_plugin
    plugin = state.fsdp_plugin = copy.copy(before)
    try:
        _shard_layers(task, plugin)
        # It requires an optimizer, to replace its parameters. Ours is built later, on the shards.
        nothing = torch.optim.SGD([torch.zeros(1)])
        nothing.param_groups[0]["params"].clear()
        # It imports DeepSpeed if that is installed, which prints and changes the environment.
        with quiet(), environment():
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
                " does not support activation_checkpointing_offload"
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
        # Models of the package transformers name their own layers.
        known = {each for m in task.modules() for each in getattr(m, "_no_split_modules", None) or ()}
        return units(task, tuple(plugin.transformer_cls_names_to_wrap or sorted(known)))
    if policy is size_based_auto_wrap_policy:
        return units(task, plugin.min_num_params) if plugin.min_num_params else []
    raise ConfigError(
        "the FSDP plugin's auto_wrap_policy must be 'transformer_based_wrap', 'size_based_wrap' or 'no_wrap':"
        " version 2 ignores a function. Strategy 'fsdp' takes one: FSDPConfig(wrap=...)"
    )
