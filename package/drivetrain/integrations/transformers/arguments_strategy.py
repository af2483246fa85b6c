"""The strategy that transformers' arguments ask for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.files import read_json
from drivetrain.distributed.launch.environment import detect
from drivetrain.integrations.transformers.arguments_values import Values
from drivetrain.strategies.ddp import DDPConfig
from drivetrain.strategies.deepspeed.config import DeepSpeedConfig
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.xla.fsdp import XLAFSDPConfig

_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_mb",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_static_graph": "static_graph",
}

_TIMEOUT = 1800

_SHARDINGS = {
    "true": "full_shard",
    "false": "shard_grad_op",
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid",
}

_FSDP_WITHOUT_EFFECT = (
    "version",
    "state_dict_type",
    "use_orig_params",
    "limit_all_gathers",
    "sharding_strategy",
)
"""Keys of `fsdp_config` that change no number and no memory here, or are read elsewhere."""

_LOADING = ("cpu_ram_efficient_loading", "sync_module_states")
"""Keys of `fsdp_config` that let processes begin without the model's weights."""

_FSDP_KEYS = (
    *_FSDP_WITHOUT_EFFECT,
    *_LOADING,
    "reshard_after_forward",
    "cpu_offload",
    "activation_checkpointing",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "forward_prefetch",
    "backward_prefetch",
    "xla",
    "xla_fsdp_v2",
    "xla_fsdp_settings",
    "xla_fsdp_grad_ckpt",
)

_DEEPSPEED_OPTIMIZER = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "eps": "adam_epsilon",
}


def strategy_options(values: Values) -> dict[str, Any]:
    """Return the Trainer's `strategy`.

    Raises:
        ConfigError: Options that exclude one another, or that cannot be honoured here.
    """
    _check_accelerator(values)
    asked = [name for name in ("deepspeed", "fsdp", "parallelism_config") if values[name]]
    asked += ["tp_size"] * ((values["tp_size"] or 1) > 1)
    if len(asked) > 1 and "deepspeed" in asked:
        raise ConfigError(f"{' and '.join(asked)} exclude one another: give one of them")
    chosen: Any = "auto"
    if values["deepspeed"]:
        chosen = _deepspeed(values)
    elif values["fsdp"] or values["parallelism_config"] or "tp_size" in asked:
        chosen = _fsdp(values)
    else:
        chosen = _ddp(values)
    if values["fsdp_config"] and not values["fsdp"]:
        values.notes["fsdp_config"] = "not used, because fsdp is off"
    if values["use_cpu"]:
        if not isinstance(chosen, str) and Hardware.here().cuda:
            raise ConfigError(
                f"use_cpu=True with {type(chosen).__name__} on a machine with GPUs: hide them from the"
                " program with CUDA_VISIBLE_DEVICES=''"
            )
        chosen = "cpu" if isinstance(chosen, str) else chosen
    elif values["use_mps_device"]:
        chosen = "mps"
    return {"strategy": chosen}


def _check_accelerator(values: Values) -> None:
    if values.accelerator("use_configured_state"):
        raise ConfigError(
            "accelerator_config={'use_configured_state': True}: an Accelerator is made for each run. Give the"
            " arguments of yours, from_training_arguments(args, strategy=AccelerateConfig(options=...))"
        )


def _timeout(values: Values) -> float | None:
    return float(values["ddp_timeout"]) if values["ddp_timeout"] != _TIMEOUT else None


def _ddp(values: Values) -> Any:
    options = {ours: values[name] for name, ours in _DDP.items() if values[name] is not None}
    timeout = _timeout(values)
    if timeout is not None:
        options["timeout"] = timeout
    if not options:
        return "auto"
    found = detect(os.environ)
    several = Hardware.here().cuda > 1 if found is None else found.world_size > 1
    if several:
        return DDPConfig(**options)
    for name in (*_DDP, "ddp_timeout"):
        values.notes[name] = "not used: there is one process"
    return "auto"


def _fsdp(values: Values) -> Any:
    given = {
        name.removeprefix("fsdp_"): each for name, each in (_mapping(values, "fsdp_config") or {}).items()
    }
    given = {**_words(values["fsdp"]), **given}
    for name in given:
        if name not in _FSDP_KEYS:
            raise ConfigError(f"fsdp_config has {name!r}. {nearest(name, _FSDP_KEYS)}")
    wrap = _wrap(given)
    recompute: bool | str = _is_on(given.get("activation_checkpointing", False))
    if _is_on(given.get("xla", False)):
        recompute = "full" if _is_on(given.get("xla_fsdp_grad_ckpt", False)) else False
        if given.get("xla_fsdp_settings"):
            raise ConfigError(
                "fsdp_config has 'xla_fsdp_settings', the options of torch_xla's first FSDP. Here its second"
                " FSDP runs, 'xla_fsdp_v2', without these options: leave them out"
            )
        return XLAFSDPConfig(wrap=wrap, activation_checkpointing=recompute)
    sharding = str(given.get("reshard_after_forward", True)).lower()
    if sharding not in _SHARDINGS:
        raise ConfigError(
            f"fsdp_config={{'reshard_after_forward': {sharding!r}}}. {nearest(sharding, _SHARDINGS)}"
        )
    before = str(given.get("backward_prefetch") or "").lower()
    made = FSDPConfig(
        sharding=_SHARDINGS[sharding],
        wrap=wrap,
        cpu_offload=_is_on(given.get("cpu_offload", False)),
        activation_checkpointing=recompute,
        forward_prefetch=int(_is_on(given.get("forward_prefetch", False))),
        backward_prefetch=int(before == "backward_pre"),
        timeout=_timeout(values),
    )
    if any(_is_on(given.get(name, False)) for name in _LOADING):
        values.notes["fsdp_config"] = (
            "every process gets the weights of rank 0, part by part; of a model that was loaded with"
            " device_map='meta', it reads only its rows from the files"
        )
    return _divided(made, values["parallelism_config"], values["tp_size"] or 1)


def _words(spec: Any) -> dict[str, Any]:
    """Return the entries of `fsdp_config` that the words of version 4 stand for."""
    if not isinstance(spec, (str, list, tuple)):
        return {}
    made: dict[str, Any] = {}
    for each in spec.split() if isinstance(spec, str) else [getattr(word, "value", word) for word in spec]:
        if each == "offload":
            made["cpu_offload"] = True
        elif each in _SHARDINGS:
            made["reshard_after_forward"] = each
        elif each != "auto_wrap":
            allowed = [*_SHARDINGS, "offload", "auto_wrap"]
            raise ConfigError(f"fsdp has {each!r}. {nearest(str(each), allowed)}")
    return made


def _wrap(given: Mapping[str, Any]) -> Any:
    policy = str(given.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP")).upper()
    allowed = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    if policy not in allowed:
        raise ConfigError(f"fsdp_config={{'auto_wrap_policy': {policy!r}}}. {nearest(policy, allowed)}")
    if policy == "NO_WRAP":
        return ()
    least = int(given.get("min_num_params") or 0)
    if policy == "SIZE_BASED_WRAP" and least:
        return least
    classes = given.get("transformer_layer_cls_to_wrap")
    if not classes:
        return "auto"
    return tuple(each.strip() for each in classes.split(",")) if isinstance(classes, str) else tuple(classes)


def _divided(config: FSDPConfig, parallelism: Any, split: int) -> FSDPConfig:
    """Return the configuration with accelerate's sizes of groups, and the processes that split matrices."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    given = [
        parallelism.get(name) if isinstance(parallelism, Mapping) else getattr(parallelism, name, None)
        for name in names
    ]
    sizes = {name: each or 1 for name, each in zip(names, given, strict=True)}
    if 1 < sizes["tp_size"] != split > 1:
        raise ConfigError(f"tp_size={split}, and parallelism_config has tp_size={sizes['tp_size']}")
    config = dataclasses.replace(config, tensor_parallel=max(split, sizes["tp_size"]))
    if not parallelism:
        return config
    for name in ("cp_size", "sp_size"):
        if sizes[name] != 1:
            raise ConfigError(
                f"parallelism_config has {name}={sizes[name]}, and TransformersTask cannot split sequences."
                " Give tp_size, which splits matrices, or dp_shard_size, which shards parameters; or write a"
                " task with ModelInfo(attention_modules=...), for FSDPConfig(context_parallel=...)"
            )
    replicates = sizes["dp_replicate_size"]
    if sizes["dp_shard_size"] == 1 and config.tensor_parallel == 1:
        raise ConfigError(
            f"parallelism_config has dp_replicate_size={replicates} and no dp_shard_size: this is DDP, which"
            " needs no configuration. Leave parallelism_config out"
        )
    if replicates == 1:
        return config
    if sizes["dp_shard_size"] == 1:
        return dataclasses.replace(config, sharding="no_shard")
    return dataclasses.replace(config, sharding="hybrid", shard_size=sizes["dp_shard_size"])


def _deepspeed(values: Values) -> DeepSpeedConfig:
    given = dict(_mapping(values, "deepspeed") or {})
    if "scheduler" in given:
        raise ConfigError(
            "the section 'scheduler' of DeepSpeed's configuration: remove it, and give lr_scheduler_type,"
            " warmup_steps and lr_scheduler_kwargs"
        )
    section = given.pop("optimizer", None)
    if section is not None:
        _check_section(section, values)
        values.notes["deepspeed"] = "its section 'optimizer' equals the arguments, which make the optimizer"
    return DeepSpeedConfig(config=given, timeout=_timeout(values))


def _check_section(section: Mapping[str, Any], values: Values) -> None:
    """Check that the section "optimizer" asks for nothing else than the arguments.

    Raises:
        ConfigError: It does; names it.
    """
    if section.get("type") not in ("Adam", "AdamW"):
        raise ConfigError(
            f"DeepSpeed's configuration has the optimizer {section.get('type')!r}. Remove the section"
            " 'optimizer', and give optim"
        )
    known = {name: values[option] for name, option in _DEEPSPEED_OPTIMIZER.items()}
    known["betas"] = [values["adam_beta1"], values["adam_beta2"]]
    for name, value in dict(section.get("params", {})).items():
        value = list(value) if isinstance(value, (list, tuple)) else value
        if value != "auto" and (name not in known or value != known[name]):
            raise ConfigError(
                f"DeepSpeed's configuration has the optimizer's {name}={value!r}, and the arguments"
                f" {known.get(name)!r}. Remove the section 'optimizer': the arguments make it"
            )


def _mapping(values: Values, name: str) -> dict[str, Any] | None:
    """Return an option that may be the path of a JSON file."""
    spec = values[name]
    if not isinstance(spec, (str, os.PathLike)):
        return None if spec is None else dict(spec)
    try:
        read = read_json(spec)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}={os.fspath(spec)!r} is no JSON file that can be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{name}={os.fspath(spec)!r} holds a {type(read).__name__}, not a mapping")
    return read


def _is_on(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "yes", "on")
