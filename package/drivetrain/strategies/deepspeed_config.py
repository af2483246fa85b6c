"""The options of DeepSpeed, and how they become the configuration that DeepSpeed itself is given."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.options import by_name
from drivetrain.precision import Precision
from drivetrain.strategies.base import Settings, check_options
from drivetrain.strategies.deepspeed_file import AUTO, read
from drivetrain.strategies.deepspeed_names import REFUSED, REFUSED_ZERO

PRECISIONS = {"32": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""The section of DeepSpeed's configuration that realises a precision."""


@by_name
@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Options of strategy "deepspeed", whose stages are also called "zero0" to "zero3".

    Attributes:
        stage: What of optimizer states, gradients and parameters is divided among the processes (Rajbhandari
            et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020): 0 none,
            1 the optimizer states, 2 the gradients too, 3 the parameters too. None for that of `config`,
            and 2 without one.
        offload_optimizer: "cpu" to keep optimizer states, and make updates, in the host's memory.
        offload_parameters: "cpu" to keep stage 3's parameters in the host's memory.
        config: DeepSpeed's own configuration: the path of a JSON file, or a mapping. Its "auto" values are
            filled in; what it says otherwise than the Trainer is an error.
        timeout: Seconds that a collective may take; None for torch's limit.
        gather_at_end: Give the task its whole values again when a run has ended well, in the host's memory of
            every process. False leaves the shards of stage 3, where the whole has no room.
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
            ConfigError: One is of no use, or differs from the configuration; says what is allowed.
        """
        check_options(self, ("timeout",), ("gather_at_end",))
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) not in (None, "cpu"):
                raise ConfigError(
                    f"DeepSpeedConfig({name}=...) is None or 'cpu', not {getattr(self, name)!r}"
                )
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
            raise ConfigError(f"DeepSpeed's stage is 0, 1, 2 or 3, not {self.stage!r}")
        self._check_offload()
        self._check_scaling()

    def _check_offload(self) -> None:
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) not in (None, "cpu"):
                raise ConfigError(
                    f"DeepSpeed's configuration has {name} on {getattr(self, name)!r}: only 'cpu' is"
                    " supported, because state on other devices cannot be put into checkpoints"
                )
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(f"offload_parameters needs stage=3, not stage={self.stage}")
        if self.offload_optimizer and self.stage == 0:
            raise ConfigError("offload_optimizer needs stage 1, 2 or 3: stage 0 divides nothing")

    def _check_scaling(self) -> None:
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            value = self.mapping.get(key, AUTO)
            if value not in (AUTO, plain) and self.stage != 0:
                raise ConfigError(
                    f"DeepSpeed's configuration has {key}={value!r}, which DeepSpeed does with stage 0 alone,"
                    f" not with stage={self.stage}. Take it out: gradients are reduced in float32"
                )

    @property
    def mapping(self) -> Mapping[str, Any]:
        """DeepSpeed's configuration as it was given; empty without one."""
        assert isinstance(self.config, Mapping)
        return self.config

    @property
    def asked_precision(self) -> str | None:
        """The precision that the configuration asks for; None where it leaves that open."""
        for name, section in PRECISIONS.items():
            if section is not None and self.mapping.get(section, {}).get("enabled") is True:
                return name
        return None


def realise(config: DeepSpeedConfig, precision: Precision, asked: Settings) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Accumulation, clipping and the learning rate stay the engine's: DeepSpeed is told of a window's last
    micro-batch, of the norm to clip to and of the rate as they come.

    Args:
        config: The options.
        precision: Of the run.
        asked: What the Trainer asks for.
    """
    made: dict[str, Any] = copy.deepcopy(dict(config.mapping))
    _fill(made)
    for key in (
        "train_batch_size",
        "optimizer",
        "scheduler",
        *REFUSED,
    ):  # those were off, which it may refuse
        made.pop(key, None)
    section = PRECISIONS[precision.name]
    for each in ("bf16", "fp16"):
        made.setdefault(each, {})["enabled"] = each == section
    reduced = str(precision.reduce_dtype).removeprefix("torch.float")
    if section is not None:
        made.setdefault("communication_data_type", {"32": "fp32", "16": "fp16"}.get(reduced, "bf16"))
    zero = made.setdefault("zero_optimization", {})
    for key in REFUSED_ZERO:
        zero.pop(key, None)
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
        "zero_allow_untested_optimizer": True,  # those that cannot be divided were refused before
        "train_micro_batch_size_per_gpu": asked.batch_size or 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }


def check_contradictions(config: DeepSpeedConfig, precision: Precision, asked: Settings) -> None:
    """Hold the configuration against what the Trainer asks for.

    Args:
        config: The options.
        precision: Of the run.
        asked: What the Trainer asks for.

    Raises:
        ConfigError: It says otherwise; names the setting, both values, and what to write.
    """
    given = config.mapping
    size, steps = asked.batch_size, asked.gradient_accumulation_steps
    norm = asked.max_grad_norm or 0.0
    total = None if size is None else size * steps * asked.world_size
    wanted: list[tuple[str, Any, str]] = [
        ("gradient_accumulation_steps", steps, f"Trainer(gradient_accumulation_steps={steps})"),
        ("gradient_clipping", norm, f"Trainer(max_grad_norm={asked.max_grad_norm})"),
    ]
    if size is not None:
        wanted += [
            ("train_micro_batch_size_per_gpu", size, f"the data's batch size {size}"),
            ("train_batch_size", total, f"{size} x {steps} x {asked.world_size} processes"),
        ]
    for key, value, source in wanted:
        there = given.get(key, AUTO)
        if there != AUTO and there != value:
            told = f"ACCELERATE_{key.upper()}"
            whose = f" (accelerate launch was told it, by {told})" if told in os.environ else ""
            raise ConfigError(
                f"DeepSpeed's configuration has {key}={there!r}{whose}, which contradicts {source}. Write"
                f' "{key}": "auto" there, or give both alike'
            )
    if norm and given.get("zero_optimization", {}).get("compute_grad_norm") is False:
        raise ConfigError(
            "DeepSpeed's configuration has zero_optimization.compute_grad_norm=false, which contradicts"
            f" Trainer(max_grad_norm={asked.max_grad_norm}). Take it out, or leave max_grad_norm out"
        )
    for name, section in PRECISIONS.items():
        if section is None:
            continue
        there = given.get(section, {}).get("enabled", AUTO)
        if there not in (AUTO, name == precision.name):
            raise ConfigError(
                f"DeepSpeed's configuration has {section}.enabled={there}, which contradicts"
                f' precision={precision.name!r}. Write "enabled": "auto" there, or give'
                f" precision={name!r}"
            )


def _fill(given: dict[str, Any]) -> None:
    """Take out what is left to be filled in: the engine sets it, or DeepSpeed has a default."""
    for key in [key for key, value in given.items() if value == AUTO]:
        del given[key]
    for value in given.values():
        if isinstance(value, dict):
            _fill(value)


def _device(zero: Mapping[str, Any], name: str) -> Any:
    """Where a section of "zero_optimization" offloads to; None where it does not say."""
    section = zero.get(name)
    return section.get("device") if isinstance(section, Mapping) else None
