"""The options of strategy "accelerate", and the settings that they ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from drivetrain.core.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.core.validation import by_name
from drivetrain.strategies.accelerate.launcher import Request, check_variables, fsdp_options, is_on
from drivetrain.strategies.base import installed
from drivetrain.strategies.checks import check_options
from drivetrain.strategies.precision.base import Precision

PRECISIONS = {"no": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Accelerate's names for mixed precision, and ours; "no" allows every precision that is not mixed."""

_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
"""The distributed types in a file that the launcher has a variable for, or needs none."""

_OPTIONS = {
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins"), "give Trainer(strategy=DeepSpeedConfig(config=...))"
    ),
    **dict.fromkeys(
        ("megatron_lm_plugin", "torch_tp_plugin"),
        "strategy 'fsdp' splits matrices with FSDPConfig(tensor_parallel=...)",
    ),
    "fsdp_plugin": "give Trainer(strategy=FSDPConfig(...)), or a file of `accelerate config` with the plugin",
    "parallelism_config": "strategy 'fsdp' has FSDPConfig(sharding='hybrid', tensor_parallel=...)",
    "dynamo_backend": "give Trainer(compile=True)",
    "dynamo_plugin": "give Trainer(compile={...})",
    **dict.fromkeys(
        ("gradient_accumulation_plugin", "gradient_accumulation_steps"),
        "give Trainer(gradient_accumulation_steps=...)",
    ),
}
"""Arguments of an Accelerator that the engine cannot honour, and what to do instead."""


@by_name
@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """Options of strategy "accelerate"; without any, the options of `accelerate launch` apply.

    If they ask for accelerate's FSDP plugin, our own strategy "fsdp" trains with the plugin's options.

    Attributes:
        config_file: A file of `accelerate config` for the Accelerator; its numbers of processes and machines
            are for the launcher.
        options: Arguments of the `accelerate.Accelerator`, such as `kwargs_handlers`.
        timeout: Seconds that a collective may take; None uses torch's limit.
    """

    config_file: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check each option."""
        check_options(self, ("timeout",), ())
        for name in self.options:
            if name in _OPTIONS:
                raise ConfigError(f"AccelerateConfig(options={{{name!r}: ...}}): {_OPTIONS[name]}")

    @property
    def asked_precision(self) -> str | None:
        """The precision of these options, without the environment; None means any."""
        if self.config_file is None and "mixed_precision" not in self.options:
            return None
        word = asked(self, {}).mixed_precision
        return None if word is None else PRECISIONS[word]


class Asked(NamedTuple):
    """The settings of an Accelerator.

    Attributes:
        mixed_precision: One of `PRECISIONS`; None if it is not set.
        device: "cpu", or None for the fastest.
        fsdp: The options of `FSDPConfig` that the FSDP plugin asks for; None without the plugin.
    """

    mixed_precision: str | None
    device: str | None
    fsdp: Mapping[str, Any] | None = None


def asked(config: AccelerateConfig, environment: Mapping[str, str]) -> Asked:
    """Return the settings that a configuration and a launcher's environment ask for.

    Args:
        environment: The variables, such as `os.environ`; used if there is no file.
    """
    found = variables(config, environment)
    check_variables(found)
    word = _word(config.options.get("mixed_precision", found.get("ACCELERATE_MIXED_PRECISION")))
    if found.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise StrategyError(f"accelerate is asked to compile the model: {_OPTIONS['dynamo_backend']} instead")
    fsdp = fsdp_options(found) if is_on(found, "ACCELERATE_USE_FSDP") else None
    if fsdp is not None and config.options.get("kwargs_handlers"):
        raise ConfigError(
            "AccelerateConfig(options={'kwargs_handlers': ...}) has no effect with the FSDP plugin, because"
            " our own strategy 'fsdp' trains. Leave it out"
        )
    cpu = config.options.get("cpu") or is_on(found, "ACCELERATE_USE_CPU")
    return Asked(word, "cpu" if cpu else None, fsdp)


def request_of(config: AccelerateConfig, environment: Mapping[str, str], precision: Precision) -> Request:
    """Return the strategy that a configuration asks for: our own "fsdp" for the FSDP plugin, else any.

    Raises:
        StrategyError: The configuration has another precision than the Trainer.
    """
    found = asked(config, environment)
    if found.fsdp is None:
        return Request(device=found.device)
    if reason := other_precision(config, precision):
        raise StrategyError(f"precision {precision.name!r} with accelerate's FSDP plugin: {reason}")
    return Request("fsdp", {**found.fsdp, "timeout": config.timeout}, found.device)


def other_precision(config: AccelerateConfig, precision: Precision) -> str:
    """Return why a precision contradicts the configuration's mixed precision; empty if it does not."""
    word = word_of(precision)
    wanted = config.asked_precision
    if word is None or wanted is None or PRECISIONS[word] == wanted:
        return ""
    given = next(each for each, name in PRECISIONS.items() if name == wanted)
    return f"the Accelerator has mixed_precision={given!r}; give precision='auto' or {wanted!r}"


def word_of(precision: Precision) -> str | None:
    """Return accelerate's name for a precision; None if it does not support the precision."""
    if type(precision).forward_context is not Precision.forward_context:
        return None
    stored, computed = precision.param_dtype or torch.float32, precision.compute_dtype
    return "no" if computed in (None, stored) else _WORDS.get(computed)


def variables(config: AccelerateConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a new Accelerator: the launcher's, or that of the configuration file."""
    if config.config_file is None:
        return dict(environment)
    kept = {
        name: value for name, value in environment.items() if not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    return {**kept, **_read(config.config_file)}


def _read(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a file as the variables that `accelerate launch` would set for it."""
    if not installed("accelerate", "accelerate"):
        raise MissingDependencyError("accelerate", "accelerate", "AccelerateConfig(config_file=...)")
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        config = load_config_from_file(str(path))
    except Exception as error:  # includes those of the YAML library
        raise ConfigError(f"AccelerateConfig(config_file={str(path)!r}) cannot be read: {error}") from error
    kind = str(getattr(config.distributed_type, "value", config.distributed_type))
    if kind not in _KINDS:
        raise StrategyError(f"strategy 'accelerate' does not support {kind}: use another strategy")
    found = {"ACCELERATE_USE_CPU": str(config.use_cpu), f"ACCELERATE_USE_{kind}": "true"}
    if config.mixed_precision is not None:
        # YAML reads an unquoted `no` as false.
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


def read_precision(environment: Mapping[str, str]) -> str | None:
    """Return the name of `accelerate launch`'s precision; None means any."""
    word = _word(environment.get("ACCELERATE_MIXED_PRECISION"))
    return PRECISIONS[word] if word and word != "no" else None


def _word(given: Any) -> str | None:
    if given is None:
        return None
    word = str(getattr(given, "value", given)).lower()
    if word not in PRECISIONS:
        raise StrategyError(
            f"accelerate is asked for mixed_precision={word!r}, which is not supported; allowed are"
            f" {', '.join(map(repr, PRECISIONS))}"
        )
    return word
