"""The options of DeepSpeed, and how they become the configuration that DeepSpeed itself is given."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError
from drivetrain.precision import Precision
from drivetrain.strategies.base import Settings, check_options

AUTO = "auto"
"""In DeepSpeed's configuration: to be filled in from the Trainer, or by DeepSpeed's own default."""

STAGES = (0, 1, 2, 3)

PRECISIONS = {"32": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}
"""The section of DeepSpeed's configuration that realises a precision."""

_REFUSED = {
    "tensor_parallel": "splits layers over processes that must then get the same data; use strategy 'fsdp'"
    " with FSDPConfig(tensor_parallel=...)",
    "sequence_parallel_size": "splits sequences over processes, which the data's shares do not know",
    "elasticity": "chooses the batch size; give the Trainer's data the one that you want",
    "curriculum_learning": "changes the data behind the engine's back; do it in the data set",
    "data_efficiency": "changes the data behind the engine's back; do it in the data set",
    "compression_training": "replaces modules, so that checkpoints would fit no other strategy",
    "torch_autocast": "is the Trainer's: give precision='bf16-mixed'",
    "amp": "needs NVIDIA's apex; give precision='16-mixed'",
}
"""Sections that the engine cannot honour, each with the reason and what to do instead."""

_REFUSED_ZERO = {
    "round_robin_gradients": "DeepSpeed 0.19 then loses track of where in its pieces a parameter lies, so"
    " that weights would be mixed up in checkpoints, its own included",
    "mics_shard_size": "checkpoints could not be put together from shards of groups of processes; use"
    " strategy 'fsdp' with FSDPConfig(sharding='hybrid')",
    "zero_hpz_partition_size": "the second copy of the weights that it keeps would stay as it was when a"
    " checkpoint is read",
    "elastic_checkpoint": "it is about DeepSpeed's own checkpoints, which are not written",
    "zenflow": "it makes updates at other times than the engine",
    "super_offload": "it makes updates at other times than the engine",
}
"""The same within "zero_optimization"."""


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
        if self.stage is not None and (self.stage not in STAGES or isinstance(self.stage, bool)):
            raise ConfigError(f"DeepSpeedConfig(stage=...) is 0, 1, 2 or 3, not {self.stage!r}")
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) not in (None, "cpu"):
                raise ConfigError(
                    f"DeepSpeedConfig({name}=...) is None or 'cpu', not {getattr(self, name)!r}"
                )
        given = _read(self.config)
        object.__setattr__(self, "config", given)
        for key, why in _REFUSED.items():
            if key in given and not _is_off(given[key]):
                raise ConfigError(f"DeepSpeed's configuration has {key!r}, which {why}")
        zero = given.get("zero_optimization", {})
        for key, why in _REFUSED_ZERO.items():
            if not _is_off(zero.get(key)) and zero.get(key) != -1:
                raise ConfigError(f"DeepSpeed's configuration has {key}={zero[key]!r}: {why}")
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
            if value is None and there not in (None, AUTO):
                object.__setattr__(self, name, there)
        if self.stage is None:
            object.__setattr__(self, "stage", 2)
        self._check_offload()

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
    for key in ("train_batch_size", "optimizer", "scheduler"):
        made.pop(key, None)
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
            zero[name] = {"device": chosen, "pin_memory": False, **zero.get(name, {})}
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
            raise ConfigError(
                f"DeepSpeed's configuration has {key}={there}, which contradicts {source}. Write"
                f' "{key}": "auto" there, or give both alike'
            )
    for name, section in PRECISIONS.items():
        if section is None:
            continue
        there = given.get(section, {}).get("enabled", AUTO)
        if there != AUTO and bool(there) != (name == precision.name):
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


def _read(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        try:
            config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_once)
        except (OSError, ValueError) as error:
            raise ConfigError(f"DeepSpeed's configuration {str(path)!r} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(
            "DeepSpeedConfig(config=...) is the path of a JSON file or a mapping, not a"
            f" {type(config).__name__}"
        )
    for key, kind in _sections(config):
        raise ConfigError(f"DeepSpeed's configuration has {key!r} as a {kind}; it is a mapping")
    return copy.deepcopy(dict(config))


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler"):
        if key in config and not isinstance(config[key], Mapping):
            yield key, type(config[key]).__name__


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"it has {twice!r} twice")
    return dict(pairs)


def _device(zero: Mapping[str, Any], name: str) -> Any:
    section = zero.get(name)
    device = section.get("device", "cpu") if isinstance(section, Mapping) else section
    return None if device in ("none", None) else device


def _is_off(section: Any) -> bool:
    if isinstance(section, Mapping):
        return section.get("enabled") is False or (
            section.get("autotp_size", 1) in (0, 1) and ("autotp_size" in section)
        )
    return section is None or section is False or section == AUTO or (section == 1 and section is not True)
