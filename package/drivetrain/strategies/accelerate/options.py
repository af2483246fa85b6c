"""The options of strategy "accelerate", and the settings that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.validation import by_name, check_names, keywords
from drivetrain.strategies.base import installed
from drivetrain.strategies.checks import check_options
from drivetrain.strategies.precision.base import Precision

PRECISIONS = {"no": "32", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Accelerate's names for mixed precision, and ours; "no" allows every precision that is not mixed."""

_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")
"""The distributed types that this strategy supports."""

_INSTEAD = {
    "DEEPSPEED": "use our own strategy for it: 'zero0' to 'zero3', or DeepSpeedConfig(config=...)",
    "FSDP": "give FSDPConfig(...), or strategy='auto', which takes the FSDP settings of `accelerate launch`",
    "MEGATRON_LM": "strategy 'fsdp' splits matrices with FSDPConfig(tensor_parallel=...)",
    "XLA": "use strategy 'xla'",
}

_OPTIONS = {
    "deepspeed_plugin": _INSTEAD["DEEPSPEED"],
    "deepspeed_plugins": _INSTEAD["DEEPSPEED"],
    "fsdp_plugin": _INSTEAD["FSDP"],
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
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
    "ACCELERATE_USE_FSDP": "FSDP",
}


@by_name
@dataclass(frozen=True, kw_only=True)
class AccelerateConfig:
    """Options of strategy "accelerate"; without any, those of `accelerate launch` apply.

    Each process has a copy of the model: accelerate's FSDP plugin is refused, and `FSDPConfig` shards.

    Attributes:
        accelerator: An existing `accelerate.Accelerator`; it must have as many processes as the run.
        options: Arguments of a new `accelerate.Accelerator`, such as handlers of keywords.
        timeout: Seconds that a collective may take; None uses torch's limit.
    """

    accelerator: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check each option."""
        check_options(self, ("timeout",), ())
        if not isinstance(self.options, Mapping):
            raise ConfigError(
                "AccelerateConfig(options=...) must be a mapping of arguments of accelerate.Accelerator, not"
                f" {self.options!r}"
            )
        if self.accelerator is not None:
            if not hasattr(self.accelerator, "prepare_model"):
                raise ConfigError(
                    "AccelerateConfig(accelerator=...) must be an accelerate.Accelerator, not a"
                    f" {type(self.accelerator).__name__}"
                )
            if self.options:
                raise ConfigError(
                    "AccelerateConfig takes an existing accelerator, or options for a new one, not both"
                )
        for name in self.options:
            if name in _OPTIONS:
                raise ConfigError(f"AccelerateConfig(options={{{name!r}: ...}}): {_OPTIONS[name]}")
        _check_arguments(self.options)

    @property
    def asked_precision(self) -> str | None:
        """The precision of these options, without the environment; None means any."""
        if self.accelerator is None and "mixed_precision" not in self.options:
            return None
        word = asked(self, {}).mixed_precision
        return None if word is None else PRECISIONS[word]


def _check_arguments(options: Mapping[str, Any]) -> None:
    """Check the arguments of an Accelerator, as far as possible before it is constructed."""
    if options and installed("accelerate", "accelerate"):
        from accelerate import Accelerator

        check_names("AccelerateConfig(options=...)", options, keywords(Accelerator))


class Asked(NamedTuple):
    """The settings of an Accelerator, existing or new.

    Attributes:
        mixed_precision: One of `PRECISIONS`; None if it is not set.
        device: "cpu", or None for the fastest.
        accumulation: Micro-batches in a step; 1, the default, if it is not set.
    """

    mixed_precision: str | None
    device: str | None
    accumulation: int = 1


def asked(config: AccelerateConfig, environment: Mapping[str, str]) -> Asked:
    """Return the settings that a configuration and a launcher's environment ask for.

    Args:
        environment: The variables, such as `os.environ`.

    Raises:
        StrategyError: They ask for what this strategy does not do; says what to use.
    """
    kind = next(
        (kind for name, kind in _VARIABLES.items() if environment.get(name, "").lower() == "true"), "NO"
    )
    _check_kind(kind)
    if config.accelerator is not None:
        return _of(config.accelerator)
    word = _word(config.options.get("mixed_precision", environment.get("ACCELERATE_MIXED_PRECISION")))
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise StrategyError(f"accelerate is asked to compile the model: {_OPTIONS['dynamo_backend']} instead")
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        raise StrategyError(f"accelerate's parallelism_config: {_OPTIONS['parallelism_config']}")
    cpu = config.options.get("cpu") or environment.get("ACCELERATE_USE_CPU", "").lower() in (
        "true",
        "1",
        "yes",
    )
    steps = config.options.get("gradient_accumulation_steps", environment.get(_STEPS, 1))
    return Asked(word, "cpu" if cpu else None, _count(steps))


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


def _of(accelerator: Any) -> Asked:
    """Return the settings of an existing Accelerator."""
    _check_kind(str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type)))
    device = accelerator.device.type
    if device not in ("cpu", "cuda"):
        raise StrategyError(
            f"the Accelerator is on {device!r}; strategy 'accelerate' runs on CPUs and CUDA GPUs"
        )
    plugin = accelerator.state.dynamo_plugin
    if plugin is not None and str(plugin.backend.value).lower() != "no":
        raise StrategyError(f"the Accelerator compiles the model: {_OPTIONS['dynamo_backend']} instead")
    if accelerator.parallelism_config is not None:
        raise StrategyError(f"the Accelerator has a parallelism_config: {_OPTIONS['parallelism_config']}")
    word, steps = _word(accelerator.mixed_precision), accelerator.gradient_accumulation_steps
    return Asked(word, "cpu" if device == "cpu" else None, steps)


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        instead = _INSTEAD.get(kind, "use another strategy")
        raise StrategyError(f"strategy 'accelerate' does not support {kind}: {instead}")


def _count(given: Any) -> int:
    if not str(given).isdigit() or int(given) < 1:
        raise StrategyError(
            f"accelerate's gradient_accumulation_steps={given!r} must be a positive number of micro-batches"
        )
    return int(given)


def _word(given: Any) -> str | None:
    if given is None:
        return None
    word = str(getattr(given, "value", given)).lower()
    if word not in PRECISIONS:
        raise StrategyError(
            f"strategy 'accelerate' does not support mixed_precision={word!r}; allowed are"
            f" {', '.join(map(repr, PRECISIONS))}"
        )
    return word
