"""DeepSpeed's own configuration, as a user has it: read, and checked for what the engine itself uses of it.

DeepSpeed checks the rest when the Trainer is made; see `deepspeed_refusals`.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError, nearest
from drivetrain.strategies.deepspeed_names import NAMES, REFUSED, REFUSED_PRECISION, REFUSED_ZERO

AUTO = "auto"
"""In DeepSpeed's configuration: to be filled in from the Trainer, or by DeepSpeed's own default."""

OPTIMIZERS = ("Adam", "AdamW", "SGD", "Lion")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

_SECTIONS = ("zero_optimization", "bf16", "fp16", "compile", "optimizer", "scheduler")
"""Those that are read here."""


def read(config: Any) -> dict[str, Any]:
    """A configuration; empty for None.

    Args:
        config: A JSON file's path, or a mapping.

    Raises:
        ConfigError: It is neither; a name is wrong, or asks for what the engine cannot honour.
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
    given = copy.deepcopy({key: value for key, value in config.items() if value is not None})
    for key, value in given.items():
        _check_name(key, value)
    for key in _SECTIONS:
        if not isinstance(given.get(key, {}), Mapping):
            raise ConfigError(f"DeepSpeed's configuration has {key}={given[key]!r}; it is a mapping")
    _check_honoured(given)
    _check_optimizer(given)
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
        if isinstance(value, str) and value.lower() in ("true", "false"):  # each is true to DeepSpeed
            raise ConfigError(f"DeepSpeed's configuration has {key}={value!r}; write {value.lower()}")
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


def _check_honoured(given: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed takes and the engine cannot honour."""
    for key, why in REFUSED.items():
        if not is_off(given.get(key)):
            raise ConfigError(f"DeepSpeed's configuration has {key!r}, which {why}")
    zero = given.get("zero_optimization", {})
    for key, why in REFUSED_ZERO.items():
        if not is_off(zero.get(key)):
            raise ConfigError(f"DeepSpeed's configuration has {key}={zero[key]!r}: {why}")
    for section in ("bf16", "fp16"):
        for key in REFUSED_PRECISION:
            if not is_off(given.get(section, {}).get(key)):
                raise ConfigError(
                    f"DeepSpeed's configuration has {section}.{key}, with which weights are nowhere kept in"
                    " float32, as updates and checkpoints need them. Take it out"
                )
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
