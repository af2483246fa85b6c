"""The settings of `accelerate launch`, read from the environment variables that it sets.

https://huggingface.co/docs/accelerate/package_reference/cli and `accelerate/utils/launch.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.errors import StrategyError

_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("", "0", "false", "f", "no", "n", "off", "none")

_SHARDINGS = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid",
}

_NAME = re.compile(r"\w+(\.\w+)*")
"""A module's name, which as a regular expression matches itself."""

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "its strategies are 'zero0' to 'zero3', or DeepSpeedConfig(config=...)",
    "ACCELERATE_USE_MEGATRON_LM": "strategy 'fsdp' splits matrices with FSDPConfig(tensor_parallel=...)",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "strategy 'fsdp' has FSDPConfig(sharding='hybrid',"
    " tensor_parallel=...)",
}
"""Variables of other plugins, and what to use instead."""


@dataclass(frozen=True)
class Request:
    """A launcher's settings for the run.

    Attributes:
        strategy: The strategy's name; None means any.
        options: Options of the strategy's configuration.
        device: The kind of device; None means the fastest.
    """

    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None


def check_variables(environment: Mapping[str, str]) -> None:
    """Check that the settings ask for no other plugin than FSDP's, and leave accumulation to the Trainer."""
    for name, instead in _REFUSED.items():
        if is_on(environment, name):
            raise _refused(name, environment[name], instead)
    steps = environment.get(_STEPS, "1")
    if steps.lower() not in ("1", "auto", "none"):
        raise _refused(
            _STEPS, steps, f"leave it out there, and give Trainer(gradient_accumulation_steps={steps})"
        )


def fsdp_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of `FSDPConfig` that the variables of either version of the FSDP plugin ask for.

    The sharding and the wrapping are always among them; of the others only what differs from a default.
    Variables that do not change results are ignored: backward prefetching, the type of state dict, original
    parameters, and loading on one rank.
    """
    if is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        name = "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
        raise _refused(name, environment[name], "activations cannot be kept on the host")
    options: dict[str, Any] = {"sharding": _sharding(environment), "wrap": _wrapping(environment)}
    ignored = environment.get("FSDP_IGNORED_MODULES", "")
    if ignored.lower() not in _FALSE and _NAME.fullmatch(ignored):
        options["ignored"] = (ignored,)
    elif ignored.lower() not in _FALSE:
        why = "give names of modules or parameters, or globs: strategy=FSDPConfig(ignored=(...))"
        raise _refused("FSDP_IGNORED_MODULES", ignored, why)
    if is_on(environment, "FSDP_OFFLOAD_PARAMS"):
        options["cpu_offload"] = True
    if is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        options["activation_checkpointing"] = "full"
    if is_on(environment, "FSDP_FORWARD_PREFETCH"):
        options["forward_prefetch"] = 1
    return options


def _sharding(environment: Mapping[str, str]) -> str:
    version, old = environment.get("FSDP_VERSION", "1"), "FSDP_SHARDING_STRATEGY"
    # Version 2 has a flag instead of the old strategies, but sets those too. Version 1 falls back to the
    # flag's variable, with the old names in it.
    name = old if version == "1" and old in environment else "FSDP_RESHARD_AFTER_FORWARD"
    given = environment.get(name, "true")
    if name != old and given.lower() in (*_TRUE, *_FALSE):
        return "full_shard" if given.lower() in _TRUE else "shard_grad_op"
    word = given.upper()
    if word not in _SHARDINGS:
        raise _refused(name, given, f"allowed are {', '.join(_SHARDINGS)}")
    return _SHARDINGS[word]


def _wrapping(environment: Mapping[str, str]) -> str | int | tuple[str, ...]:
    name = "FSDP_AUTO_WRAP_POLICY"
    policy = environment.get(name, "NO_WRAP").upper()
    if policy == "NO_WRAP":
        return ()
    if policy == "TRANSFORMER_BASED_WRAP":
        classes = environment.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")
        return tuple(each.strip() for each in classes if each.strip()) or "auto"
    if policy == "SIZE_BASED_WRAP":
        return max(int(float(environment.get("FSDP_MIN_NUM_PARAMS", "0"))), 1)  # YAML has 1e8 as a text
    raise _refused(name, policy, "allowed are TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP and NO_WRAP")


def is_on(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable that is true or false is true."""
    given = environment.get(name, "").strip().lower()
    if given not in (*_TRUE, *_FALSE):
        raise _refused(name, environment[name], "it must be true or false")
    return given in _TRUE


def _refused(name: str, value: str, why: str) -> StrategyError:
    return StrategyError(
        f"accelerate is asked for {name}={value}, which is not supported: {why}. Change its"
        " configuration, or give Trainer(strategy=...), which takes precedence"
    )
