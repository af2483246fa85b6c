"""The options of strategy "accelerate", and what they ask for before there is an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.options import by_name, check_names, keywords
from drivetrain.strategies.base import check_options, installed

PRECISIONS = {"no": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Accelerate's words for mixed precision, and ours; "no" goes with every precision that is not mixed."""

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
"""The kinds of distribution that are handed over."""

_INSTEAD = {
    "DEEPSPEED": "use our own strategy for it: 'zero0' to 'zero3', or DeepSpeedConfig(config=...)",
    "MEGATRON_LM": "strategy 'fsdp' splits matrices with FSDPConfig(tensor_parallel=...)",
    "XLA": "use strategy 'xla'",
}

_OPTIONS = {
    "deepspeed_plugin": _INSTEAD["DEEPSPEED"],
    "deepspeed_plugins": _INSTEAD["DEEPSPEED"],
    "megatron_lm_plugin": _INSTEAD["MEGATRON_LM"],
    "torch_tp_plugin": _INSTEAD["MEGATRON_LM"],
    "parallelism_config": "strategy 'fsdp' has FSDPConfig(sharding='hybrid', tensor_parallel=...)",
    "dynamo_backend": "give Trainer(compile=True)",
    "dynamo_plugin": "give Trainer(compile={...})",
    "gradient_accumulation_plugin": "give Trainer(gradient_accumulation_steps=...)",
}
"""Arguments of an Accelerator that the engine cannot honour, and what to do instead."""

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": ("DEEPSPEED", "true"),
    "ACCELERATE_USE_MEGATRON_LM": ("MEGATRON_LM", "true"),
    "ACCELERATE_USE_FSDP": ("FSDP", "true"),
}


@by_name
@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """Options of strategy "accelerate". Without any, an Accelerator is made from what `accelerate launch` has
    set.

    Attributes:
        accelerator: An `accelerate.Accelerator` that is there already; it must have as many processes as the
            run.
        config_file: A file that `accelerate config` has written, to make one from; its numbers of processes
            and machines are for the launcher.
        options: Arguments of `accelerate.Accelerator`, such as plugins, to make one with.
        timeout: Seconds that a collective may take; None for torch's limit.
    """

    accelerator: Any = None
    config_file: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check each option.

        Raises:
            ConfigError: One is of no use, or says what another says too.
        """
        check_options(self, ("timeout",), ())
        if not isinstance(self.options, Mapping):
            raise ConfigError(
                "AccelerateConfig(options=...) is a mapping of arguments of accelerate.Accelerator, not"
                f" {self.options!r}"
            )
        if self.accelerator is not None:
            if not hasattr(self.accelerator, "prepare_model"):
                raise ConfigError(
                    "AccelerateConfig(accelerator=...) is an accelerate.Accelerator, not a"
                    f" {type(self.accelerator).__name__}"
                )
            if self.config_file is not None or self.options:
                raise ConfigError(
                    "AccelerateConfig takes an accelerator that is made, or config_file and options to make"
                    " one, not both"
                )
        for name in self.options:
            if name in _OPTIONS:
                raise ConfigError(f"AccelerateConfig(options={{{name!r}: ...}}): {_OPTIONS[name]}")
        _check_arguments(self.options)

    @property
    def asked_precision(self) -> str | None:
        """The precision that is asked for here, without that of the environment; None for any."""
        if self.accelerator is None and self.config_file is None and "mixed_precision" not in self.options:
            return None
        word = asked(self, {}).mixed_precision
        return None if word is None else PRECISIONS[word]


def _check_arguments(options: Mapping[str, Any]) -> None:
    """See that an Accelerator takes them, as far as that can be told before it is made."""
    if options and installed("accelerate", "accelerate"):
        from accelerate import Accelerator

        check_names("AccelerateConfig(options=...)", options, keywords(Accelerator))
    plugin = options.get("fsdp_plugin")
    if plugin is not None and not hasattr(plugin, "fsdp_version"):
        raise ConfigError(
            "AccelerateConfig(options={'fsdp_plugin': ...}) is an accelerate.FullyShardedDataParallelPlugin,"
            f" not {plugin!r}"
        )


class Asked(NamedTuple):
    """What an Accelerator will be, or is.

    Attributes:
        mixed_precision: One of `PRECISIONS`; None where it is open.
        device: "cpu" where it is to be that; None for the fastest.
        sharded: Whether its FSDP plugin shards the model.
        accumulation: Micro-batches of an update; 1, which is its default, where that is open.
    """

    mixed_precision: str | None
    device: str | None
    sharded: bool
    accumulation: int = 1


def asked(config: AccelerateConfig, environment: Mapping[str, str]) -> Asked:
    """What a configuration asks for, in the environment of a launcher.

    Args:
        config: The options.
        environment: Such as `os.environ`; it counts where there is no accelerator and no file.

    Raises:
        ConfigError: The file cannot be read.
        StrategyError: It asks for what is not handed over to accelerate, or not known.
    """
    if config.accelerator is not None:
        return _of(config.accelerator, environment)
    found = variables(config, environment)
    kind = next((kind for name, (kind, on) in _VARIABLES.items() if found.get(name, "").lower() == on), "NO")
    plugin = config.options.get("fsdp_plugin")
    if plugin is not None:
        kind = "FSDP"
    _check_kind(kind)
    word = config.options.get("mixed_precision", found.get("ACCELERATE_MIXED_PRECISION"))
    if found.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise StrategyError(f"accelerate is asked to compile the model: {_OPTIONS['dynamo_backend']} instead")
    if found.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        raise StrategyError(f"accelerate's parallelism_config: {_OPTIONS['parallelism_config']}")
    if kind == "FSDP":
        _check_version(found.get("FSDP_VERSION", "1") if plugin is None else plugin.fsdp_version)
    cpu = config.options.get("cpu") or found.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    steps = config.options.get("gradient_accumulation_steps", found.get(_STEPS, 1))
    return Asked(_word(word), "cpu" if cpu else None, kind == "FSDP", _count(steps))


def variables(config: AccelerateConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which an Accelerator is made: a launcher's, or what the file would have made it."""
    if config.config_file is None:
        return dict(environment)
    kept = {
        name: value for name, value in environment.items() if not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    return {**kept, **_read(config.config_file)}


def _read(path: str | os.PathLike[str]) -> dict[str, str]:
    """A file as the variables that `accelerate launch` would set for it."""
    if not installed("accelerate", "accelerate"):
        raise MissingDependencyError("accelerate", "accelerate", "AccelerateConfig(config_file=...)")
    from accelerate.commands.config.config_args import load_config_from_file

    if not Path(path).is_file():
        raise ConfigError(f"AccelerateConfig(config_file={str(path)!r}): there is no such file")
    try:
        config = load_config_from_file(str(path))
    except Exception as error:  # also those of the library that it reads YAML with
        raise ConfigError(f"AccelerateConfig(config_file={str(path)!r}) cannot be read: {error}") from error
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    _check_kind(kind)
    found = {"ACCELERATE_USE_CPU": str(config.use_cpu), "ACCELERATE_USE_FSDP": str(kind == "FSDP").lower()}
    if config.mixed_precision is not None:
        # Without quotes YAML takes `no` for false.
        word = "no" if config.mixed_precision is False else str(config.mixed_precision)
        found["ACCELERATE_MIXED_PRECISION"] = word
    if getattr(config, "parallelism_config", None):
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for key, value in config.dynamo_config.items():
        found[f"ACCELERATE_{key.upper()}"] = str(value)
    for key, value in getattr(config, "fsdp_config", {}).items():
        name = key.upper().replace("TRANSFORMER_LAYER_CLS", "TRANSFORMER_CLS")
        found[name] = str(value)
    return found


def _of(accelerator: Any, environment: Mapping[str, str]) -> Asked:
    """What an Accelerator that is there is."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    device = accelerator.device.type
    _check_kind(kind)
    if device not in ("cpu", "cuda"):
        raise StrategyError(
            f"the Accelerator is on {device!r}; strategy 'accelerate' runs on CPUs and CUDA GPUs"
        )
    state = accelerator.state
    if kind == "FSDP":
        _check_version(state.fsdp_plugin.fsdp_version)
    elif environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise StrategyError(
            "this Accelerator was given an FSDP plugin and does not use it, because it is on a CPU or alone."
            " Give AccelerateConfig(options={'fsdp_plugin': ...}), or leave the accelerator out"
        )
    if state.dynamo_plugin is not None and str(state.dynamo_plugin.backend.value).lower() != "no":
        raise StrategyError(f"the Accelerator compiles the model: {_OPTIONS['dynamo_backend']} instead")
    if accelerator.parallelism_config is not None:
        raise StrategyError(f"the Accelerator has a parallelism_config: {_OPTIONS['parallelism_config']}")
    word, steps = _word(accelerator.mixed_precision), accelerator.gradient_accumulation_steps
    return Asked(word, "cpu" if device == "cpu" else None, kind == "FSDP", steps)


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        instead = _INSTEAD.get(kind, "use a strategy of ours")
        raise StrategyError(f"accelerate's {kind} is not handed over to it: {instead}")


def _check_version(version: Any) -> None:
    if str(version) != "2":
        raise StrategyError(
            "accelerate's FSDP plugin of version 1 flattens parameters, so that no checkpoint could have them"
            " by name: set fsdp_version to 2, or use strategy 'fsdp'"
        )


def _count(given: Any) -> int:
    if not str(given).isdigit() or int(given) < 1:
        raise StrategyError(
            f"accelerate's gradient_accumulation_steps={given!r} is no number of micro-batches, from 1"
        )
    return int(given)


def _word(given: Any) -> str | None:
    if given is None:
        return None
    word = str(getattr(given, "value", given)).lower()
    if word not in PRECISIONS:
        raise StrategyError(
            f"accelerate's mixed_precision={word!r} is not handed over to it; allowed are"
            f" {', '.join(map(repr, PRECISIONS))}"
        )
    return word
