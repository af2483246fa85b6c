"""The strategies by name, and their configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.registry import Registry
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.single import SingleDevice

PRESETS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
"""Names that stand for strategy "deepspeed" with some options set."""

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "single": SingleDevice,
        # These names mean one process, and "ddp" if there are several; see `choose`.
        "auto": SingleDevice,
        "cpu": SingleDevice,
        "cuda": SingleDevice,
        "mps": SingleDevice,
        "xpu": SingleDevice,
        "ddp": "drivetrain.strategies.ddp:DDP",
        "fsdp": "drivetrain.strategies.fsdp.strategy:FSDP",
        "deepspeed": "drivetrain.strategies.deepspeed.strategy:DeepSpeed",
        **dict.fromkeys(PRESETS, "drivetrain.strategies.deepspeed.strategy:DeepSpeed"),
        "accelerate": "drivetrain.strategies.accelerate.accelerate:Accelerate",
        "xla": "drivetrain.strategies.xla.single:XLA",
        **dict.fromkeys(("xla_fsdp", "xla_fsdp_v2"), "drivetrain.strategies.xla.fsdp:XLAFSDP"),
    },
)
"""The classes by name. A class for several processes takes `(config, device=..., world_size=...)`, and has
the attributes `name`, `config_type` (the class of its configuration), `needs` (one line on what it needs) and
`available(hardware)`, which returns a `Support`. Other packages add theirs by the entry point group
"drivetrain.strategy".
"""

XLA = ("xla", "xla_fsdp", "xla_fsdp_v2")
"""Names of strategies that run on torch_xla, in one process."""

BUILT_IN = ("auto", "single", "ddp", "fsdp", "accelerate", *XLA)
"""Names of strategies of this package, without the names of devices."""

DEVICES = ("cpu", "cuda", "mps", "xpu")
"""Names of strategies that are kinds of devices."""


def configure(name: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a strategy with some options set; None if there are no options."""
    preset = PRESETS.get(name, {})
    for option, value in preset.items():
        if options.get(option, value) != value:
            raise ConfigError(
                f"strategy {name!r} stands for {option}={value!r}, but {option}={options[option]!r} was"
                f" given. Use strategy 'deepspeed' with {option}={options[option]!r}"
            )
    options = {**preset, **options}
    if not options:
        return None
    return config_type(name)(**options)


def config_type(name: str) -> type[Any]:
    if STRATEGIES[name] is SingleDevice:
        raise ConfigError(f"strategy {name!r} has no options; 'ddp' and 'fsdp' have some")
    kind: Any = STRATEGIES[name]
    found: type[Any] = kind.config_type
    return found


def named(spec: Any) -> tuple[str, Any]:
    """Return the name and the configuration of a user's `strategy`; None stands for the defaults."""
    if not _is_configuration(spec):
        _check_name(spec)
        return spec, configure(spec, {}) if spec in PRESETS else None
    broken: list[str] = []
    # Ours come first, so that no other package is loaded for them.
    for name in sorted(STRATEGIES, key=lambda each: (each not in BUILT_IN, each)):
        try:
            kind = STRATEGIES[name]
        except (ConfigError, MissingDependencyError) as error:  # another strategy may match
            broken.append(f"{name!r}: {error}")
            continue
        if getattr(kind, "config_type", None) is type(spec):
            return name, spec
    because = f". Could not be loaded: {'; '.join(broken)}" if broken else ""
    raise ConfigError(f"no strategy takes a {type(spec).__name__} as its configuration{because}")


def _check_name(spec: Any) -> None:
    if isinstance(spec, str):
        STRATEGIES.check(spec)
        return
    raise ConfigError(
        "strategy must be a name, a configuration such as FSDPConfig(...), DeepSpeedConfig(config=...) or"
        f" AccelerateConfig(options=...), or an instance, not {spec!r}. 'auto' chooses by the hardware."
        f" {nearest('', STRATEGIES)}"
    )


def _is_configuration(spec: Any) -> bool:
    return dataclasses.is_dataclass(spec) and not isinstance(spec, type)
