"""DeepSpeed's own configuration, as a user has it: read, and checked as far as it goes without DeepSpeed."""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError, nearest
from drivetrain.strategies.deepspeed_names import (
    FLAGS,
    NAMES,
    NUMBERS,
    REFUSED,
    REFUSED_PRECISION,
    REFUSED_ZERO,
    SECTIONS,
)

AUTO = "auto"
"""In DeepSpeed's configuration: to be filled in from the Trainer, or by DeepSpeed's own default."""

STAGES = (0, 1, 2, 3)

OPTIMIZERS = ("Adam", "AdamW", "SGD", "Lion")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

_DEVICES = ("none", "cpu", "nvme", AUTO)

_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""What DeepSpeed called sections of "zero_optimization" once, and still reads."""


def read(config: Any) -> dict[str, Any]:
    """A configuration in today's names; empty for None.

    Args:
        config: A JSON file's path, or a mapping.

    Raises:
        ConfigError: It is neither; a name or a value is wrong, or asks for what the engine cannot honour.
    """
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
    given = copy.deepcopy(dict(config))
    for key in [key for key, value in given.items() if value is None and key not in SECTIONS]:
        del given[key]
    for key, value in given.items():
        _check_name(key, value)
        _check_value(key, value)
    _rename(given)
    _check_zero(given.get("zero_optimization", {}))
    _check_precisions(given)
    _check_optimizer(given)
    for key, why in REFUSED.items():
        if key in given and not is_off(given[key]):
            raise ConfigError(f"DeepSpeed's configuration has {key!r}, which {why}")
    if given.get("compile", {}).get("deepcompile"):
        raise ConfigError(
            "DeepSpeed's configuration has compile.deepcompile, which makes the step itself; give"
            " Trainer(compile=True)"
        )
    if given.get("managed_gradient_accumulation") is False:
        raise ConfigError(
            "DeepSpeed's configuration has managed_gradient_accumulation=false, but DeepSpeed is told of each"
            " window's last micro-batch, and needs it. Take it out"
        )
    return given


def is_off(value: Any) -> bool:
    """Whether a section, or a setting, asks for nothing."""
    if isinstance(value, Mapping):
        if "autotp_size" in value:
            return value["autotp_size"] in (0, 1)
        return not value or value.get("enabled") is False
    return value is None or value in (False, AUTO, "mean") or (value == 1 and value is not True)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"it has {twice!r} twice")
    return dict(pairs)


def _check_name(key: Any, value: Any) -> None:
    """Refuse a name that DeepSpeed would pass over, unless it is a note of the user's."""
    if key in NAMES:
        return
    name = str(key)
    note = not name[:1].isalpha() or "comment" in name.lower()
    if note or (isinstance(value, str) and not difflib.get_close_matches(name, NAMES, n=1, cutoff=0.75)):
        return
    help_ = nearest(name, NAMES)
    raise ConfigError(
        f"DeepSpeed's configuration has {name!r}, which DeepSpeed does not know and would pass over."
        f" {help_.partition(' Allowed')[0] if help_.startswith('Did') else help_} A note of your own may"
        " begin with '_'"
    )


def _check_value(key: str, value: Any) -> None:
    if value == AUTO and key not in SECTIONS:
        return
    if key in SECTIONS and not isinstance(value, Mapping):
        raise ConfigError(
            f"DeepSpeed's configuration has {key!r} as a {type(value).__name__}; it is a mapping"
        )
    if key in FLAGS and value not in (True, False):
        raise ConfigError(f"DeepSpeed's configuration has {key}={value!r}; it is true, false or 'auto'")
    least = NUMBERS.get(key)
    if least is not None and not (_is_number(value) and value >= least):
        raise ConfigError(
            f"DeepSpeed's configuration has {key}={value!r}; it is a number of at least {least}, or 'auto'"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _rename(given: dict[str, Any]) -> None:
    """Bring names that DeepSpeed still reads, though they are old, to today's."""
    if "bfloat16" in given:
        old = given.pop("bfloat16")
        if given.setdefault("bf16", old) != old:
            raise ConfigError(
                "DeepSpeed's configuration has 'bf16' and, by its old name, another 'bfloat16'. Take out the"
                " second"
            )
    zero = given.get("zero_optimization", {})
    for old_name, name in _OLD_OFFLOAD.items():
        asked = zero.pop(old_name, None)
        if asked in (None, False, AUTO):
            continue
        if asked is not True:
            raise ConfigError(
                f"DeepSpeed's configuration has zero_optimization.{old_name}={asked!r}; it is true or false,"
                f' and today "{name}": {{"device": "cpu"}}'
            )
        if name in zero:
            raise ConfigError(
                f"DeepSpeed's configuration has zero_optimization.{name} and, by its old name, {old_name}."
                " Take out the second"
            )
        zero[name] = {"device": "cpu"}


def _check_zero(zero: Mapping[str, Any]) -> None:
    stage = zero.get("stage", AUTO)
    if stage != AUTO and (type(stage) is not int or stage not in STAGES):
        raise ConfigError(
            f"DeepSpeed's configuration has zero_optimization.stage={stage!r}; it is 0, 1, 2 or 3, or 'auto'"
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if section is not None and not isinstance(section, Mapping):
            raise ConfigError(
                f"DeepSpeed's configuration has zero_optimization.{name}={section!r}; it is a mapping:"
                ' {"device": "cpu"}'
            )
        device = (section or {}).get("device", "none")
        if device not in _DEVICES:
            raise ConfigError(
                f"DeepSpeed's configuration has zero_optimization.{name}.device={device!r}; it is 'none',"
                " 'cpu' or 'auto'"
            )
    for key, why in REFUSED_ZERO.items():
        if not is_off(zero.get(key)) and zero.get(key) != -1:
            raise ConfigError(f"DeepSpeed's configuration has {key}={zero[key]!r}: {why}")


def _check_precisions(given: Mapping[str, Any]) -> None:
    asked = []
    for section in ("bf16", "fp16"):
        enabled = given.get(section, {}).get("enabled", AUTO)
        if enabled not in (True, False, AUTO) or _is_number(enabled):
            raise ConfigError(
                f"DeepSpeed's configuration has {section}.enabled={enabled!r}; it is true, false or 'auto'"
            )
        if enabled is True:
            asked.append(section)
        for key in REFUSED_PRECISION:
            if not is_off(given.get(section, {}).get(key)):
                raise ConfigError(
                    f"DeepSpeed's configuration has {section}.{key}, with which weights are nowhere kept in"
                    " float32, as updates and checkpoints need them. Take it out"
                )
    if len(asked) > 1:
        raise ConfigError("DeepSpeed's configuration has bf16 and fp16 both enabled. Take out one of them")


def optimizer_type(section: Mapping[str, Any]) -> str:
    """The optimizer that a section asks for; DeepSpeed does not look at capitals."""
    given = str(section.get("type", "AdamW"))
    return next((each for each in OPTIMIZERS if each.lower() == given.lower()), given)


def _check_optimizer(given: Mapping[str, Any]) -> None:
    for section, kinds in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        if section not in given:
            continue
        kind = optimizer_type(given[section]) if section == "optimizer" else given[section].get("type")
        if kind not in kinds:
            raise ConfigError(
                f"DeepSpeed's configuration asks for the {section} {kind!r}. {nearest(str(kind), kinds)} For"
                f" another one take the section out, and let the task's configure_optimizers give it"
            )
        if not isinstance(given[section].get("params", {}), Mapping):
            params = given[section]["params"]
            raise ConfigError(
                f"DeepSpeed's configuration has {section}.params={params!r}; it is a mapping, or left out"
            )
    if "scheduler" in given and "optimizer" not in given:
        raise ConfigError(
            "DeepSpeed's configuration has a scheduler without an optimizer. Give the schedule by"
            " OptimizerConfig(schedule=...), or the optimizer there too"
        )
