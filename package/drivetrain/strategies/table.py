"""The strategies by name, their configurations, and what one of another package must have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.registry import Registry
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.single import SingleDevice

PRESETS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"stage": stage} for stage in range(4)},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
"""Names of strategy "deepspeed" with some of its options."""

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "single": SingleDevice,
        # Words for one process, and for "ddp" where there are several; see `choose`.
        "auto": SingleDevice,
        "cpu": SingleDevice,
        "cuda": SingleDevice,
        "mps": SingleDevice,
        "ddp": "drivetrain.strategies.ddp:DDP",
        "fsdp": "drivetrain.strategies.fsdp:FSDP",
        "deepspeed": "drivetrain.strategies.deepspeed:DeepSpeed",
        **dict.fromkeys(PRESETS, "drivetrain.strategies.deepspeed:DeepSpeed"),
        "accelerate": "drivetrain.strategies.accelerate:Accelerate",
        "xla": "drivetrain.strategies.xla:XLA",
        "xla_fsdp": "drivetrain.strategies.xla_fsdp:XLAFSDP",
        "xla_fsdp_v2": "drivetrain.strategies.xla_fsdp_v2:XLAFSDPv2",
    },
)
"""The classes by name. One for several processes is made with `(config, device=..., world_size=...)` and has
the attributes of `ATTRIBUTES`; other packages add theirs by the entry point group "drivetrain.strategy".
"""

ATTRIBUTES = ("name", "config_type", "needs", "available")
"""What a class in the table has: its name, the class of its configuration, one line on what it needs, and
`available(hardware)`, which gives a `Support`."""

XLA = ("xla", "xla_fsdp", "xla_fsdp_v2")
"""Names of strategies that compute by torch_xla, in one process."""

BUILT_IN = ("auto", "single", "ddp", "fsdp", "accelerate", *XLA)
"""Names of strategies of this package that are no devices."""

DEVICES = ("cpu", "cuda", "mps")
"""Names of strategies that are kinds of devices."""


def strategy_class(name: str) -> Any:
    """The class of a strategy for several processes.

    Raises:
        ConfigError: An unknown name, or a row of another package that is no such class.
        MissingDependencyError: What its module says it needs.
    """
    found: Any = STRATEGIES[name]
    missing = [each for each in ATTRIBUTES if not hasattr(found, each)]
    if missing:
        raise ConfigError(
            f"the strategy {name!r} is registered as {found!r}, which has no {', '.join(missing)}; a strategy"
            f" is a class with {', '.join(ATTRIBUTES)}"
        )
    return found


def configure(name: str, options: Mapping[str, Any]) -> Any:
    """The configuration of a strategy with some of its options given; None without any.

    Raises:
        ConfigError: An unknown strategy, one without options, or options that do not fit.
    """
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
    try:
        return config_type(name)(**options)
    except TypeError as error:
        raise ConfigError(f"strategy {name!r} cannot take {dict(options)}: {error}") from error


def config_type(name: str) -> type[Any]:
    """The class of a strategy's configuration.

    Raises:
        ConfigError: An unknown strategy, or one without options.
    """
    if STRATEGIES[name] is SingleDevice:
        raise ConfigError(f"strategy {name!r} has no options; 'ddp' and 'fsdp' have")
    found: type[Any] = strategy_class(name).config_type
    return found


def named(spec: Any) -> tuple[str, Any]:
    """The name and the configuration that a user's word stands for; None for the defaults.

    Raises:
        ConfigError: An unknown name, or a configuration of no strategy.
    """
    if not _is_configuration(spec):
        _check_name(spec)
        return spec, configure(spec, {}) if spec in PRESETS else None
    broken: list[str] = []
    # Ours come first: for them no other package need be loaded.
    for name in sorted(STRATEGIES, key=lambda each: (each not in BUILT_IN, each)):
        try:
            kind = STRATEGIES[name]
        except (ConfigError, MissingDependencyError) as error:  # another row may be the one
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
    kind = type(spec).__name__
    if isinstance(spec, type):
        hint = f"Write {spec.__name__}(...), with its parentheses"
    elif isinstance(spec, Mapping):
        hint = "For options give a configuration: DeepSpeedConfig(config=...) for DeepSpeed's"
    elif kind == "Accelerator":
        hint = "Write AccelerateConfig(accelerator=...)"
    else:
        hint = nearest("", STRATEGIES)
    raise ConfigError(
        "a strategy is given by its name, a configuration such as FSDPConfig(), or an instance, not as"
        f" {spec!r}. {hint}"
    )


def _is_configuration(spec: Any) -> bool:
    return dataclasses.is_dataclass(spec) and not isinstance(spec, type)
