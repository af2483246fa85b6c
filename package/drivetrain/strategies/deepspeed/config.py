"""The options of strategy "deepspeed", and their translation to DeepSpeed's own configuration."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.int_schedule import most
from drivetrain.core.validation import by_name
from drivetrain.strategies.base import SharedSettings
from drivetrain.strategies.checks import check_options
from drivetrain.strategies.deepspeed.ds_config import AUTO, REFUSED, read
from drivetrain.strategies.precision.base import Precision

PRECISIONS = {"32": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""The section of DeepSpeed's configuration for each precision."""


@by_name
@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Options of strategy "deepspeed", whose stages are also called "zero0" to "zero3".

    Attributes:
        stage: What is sharded over the processes (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
            Training Trillion Parameter Models", SC 2020): 0 nothing, 1 optimizer states, 2 also gradients,
            3 also parameters. None takes the stage of `config`, or 2.
        offload_optimizer: "cpu" keeps optimizer states in the host's memory, and makes steps there.
        offload_parameters: "cpu" keeps stage 3's parameters in the host's memory.
        config: DeepSpeed's own configuration: the path of a JSON file, or a mapping. Its "auto" values are
            filled in. A value that contradicts the Trainer is an error.
        timeout: Seconds that a collective may take; None uses torch's limit.
        gather_at_end: Gather the task's whole values in the host's memory of every process when a run has
            ended without an error. False leaves the shards of stage 3, for tasks that do not fit there.
    """

    stage: int | None = None
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None
    timeout: float | None = None
    gather_at_end: bool = True

    def __post_init__(self) -> None:
        """Check each option, and read the configuration.

        Raises:
            ConfigError: An option is invalid or contradicts the configuration; says what is allowed.
        """
        check_options(self, ("timeout",), ("gather_at_end",))
        given = read(self.config)
        object.__setattr__(self, "config", given)
        zero = given.get("zero_optimization", {})
        for name, value, there in (
            ("stage", self.stage, zero.get("stage")),
            ("offload_optimizer", self.offload_optimizer, _device(zero, "offload_optimizer")),
            ("offload_parameters", self.offload_parameters, _device(zero, "offload_param")),
        ):
            if value is not None and there not in (None, AUTO, value):
                raise ConfigError(
                    f"DeepSpeedConfig({name}={value!r}) differs from its configuration, which has {there!r}."
                    " Leave one of them out"
                )
            if value is None and there not in (None, AUTO, "none"):
                object.__setattr__(self, name, there)
        if self.stage is None:
            object.__setattr__(self, "stage", 2)
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"DeepSpeed's stage must be 0, 1, 2 or 3, not {self.stage!r}")
        self._check_offload()

    def _check_offload(self) -> None:
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) not in (None, "cpu"):
                raise ConfigError(
                    f"DeepSpeed's {name} must be None or 'cpu', not {getattr(self, name)!r}: checkpoints"
                    " cannot contain state on other devices"
                )
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(f"offload_parameters needs stage=3, not stage={self.stage}")
        if self.offload_optimizer and self.stage == 0:
            raise ConfigError("offload_optimizer needs stage 1, 2 or 3: stage 0 shards nothing")

    @property
    def mapping(self) -> Mapping[str, Any]:
        """The user's DeepSpeed configuration; empty without one."""
        assert isinstance(self.config, Mapping)
        return self.config

    @property
    def asked_precision(self) -> str | None:
        """The precision that the configuration asks for; None if it does not say."""
        for name, section in PRECISIONS.items():
            if section is not None and self.mapping.get(section, {}).get("enabled") is True:
                return name
        return None


def realise(config: DeepSpeedConfig, precision: Precision, asked: SharedSettings) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    Accumulation, clipping and the learning rate stay with our engine. It passes a window's last micro-batch,
    the norm to clip to and the rate to DeepSpeed at each step.

    Args:
        config: The options.
        precision: The run's precision.
        asked: The Trainer's settings.
    """
    made: dict[str, Any] = copy.deepcopy(dict(config.mapping))
    _fill(made)
    for path in REFUSED:  # these are off, and DeepSpeed may refuse even that
        name, _, key = path.rpartition(".")
        (made.get(name, {}) if name else made).pop(key, None)
    section = PRECISIONS[precision.name]
    for each in ("bf16", "fp16"):
        made.setdefault(each, {})["enabled"] = each == section
    reduced = str(precision.reduce_dtype).removeprefix("torch.float")
    if section is not None:
        made.setdefault("communication_data_type", {"32": "fp32", "16": "fp16"}.get(reduced, "bf16"))
    zero = made.setdefault("zero_optimization", {})
    zero["stage"] = config.stage
    for name, chosen in (
        ("offload_optimizer", config.offload_optimizer),
        ("offload_param", config.offload_parameters),
    ):
        if chosen is not None:
            zero[name] = {"device": chosen, "pin_memory": False, **(zero.get(name) or {})}
    return {
        "zero_force_ds_cpu_optimizer": False,
        **made,
        "zero_allow_untested_optimizer": True,  # `check_optimizer` refuses those that cannot be sharded
        "train_micro_batch_size_per_gpu": most(asked.batch_size or 1),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def check_contradictions(config: DeepSpeedConfig, precision: Precision) -> None:
    """Check that DeepSpeed's configuration does not contradict the Trainer's precision.

    Args:
        config: The options.
        precision: The run's precision.

    Raises:
        ConfigError: It does; the message gives the setting, both values, and what to write.
    """
    for name, section in PRECISIONS.items():
        if section is None:
            continue
        there = config.mapping.get(section, {}).get("enabled", AUTO)
        if there not in (AUTO, name == precision.name):
            raise ConfigError(
                f"DeepSpeed's configuration has {section}.enabled={there}, which contradicts"
                f' precision={precision.name!r}. Write "enabled": "auto" there, or give'
                f" precision={name!r}"
            )


def _fill(given: dict[str, Any]) -> None:
    """Remove "auto" values: the engine sets them, or DeepSpeed has a default."""
    for key in [key for key, value in given.items() if value == AUTO]:
        del given[key]
    for value in given.values():
        if isinstance(value, dict):
            _fill(value)


def _device(zero: Mapping[str, Any], name: str) -> Any:
    """Return the device that a section of "zero_optimization" offloads to; None if it does not say."""
    section = zero.get(name)
    return section.get("device") if isinstance(section, Mapping) else None
