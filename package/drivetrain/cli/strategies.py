"""`drivetrain strategies`: every strategy with its requirements, and whether it can run here."""

from __future__ import annotations

import dataclasses
from typing import Any

from drivetrain.cli.printing import line, print_json, section
from drivetrain.strategies import STRATEGIES, Hardware, SingleDevice, choose
from drivetrain.strategies.registry import DEVICES, PRESETS, strategy_class

_ONE_PROCESS = {
    "auto": "any device: the fastest, in one process, or 'ddp' in several and on several GPUs",
    "single": "any device: the fastest, in one process",
    "cpu": "a CPU; several processes are 'ddp'",
    "cuda": "a CUDA GPU; several processes are 'ddp', on one each",
    "mps": "a Mac with Metal, which serves one process",
    "xpu": "an Intel GPU, in one process",
}


@dataclasses.dataclass(frozen=True)
class ListedStrategy:
    """A listed strategy."""

    name: str
    needs: str
    available: bool
    reason: str
    options: dict[str, str]


def list_strategies(hardware: Hardware) -> list[ListedStrategy]:
    """Return every registered strategy, those of other packages included."""
    return [_listed(name, hardware) for name in STRATEGIES]


def print_strategies(as_json: bool) -> None:
    """Print this machine's hardware, and all strategies."""
    hardware = Hardware.here()
    found = list_strategies(hardware)
    if as_json:
        print_json({"hardware": hardware, "strategies": found})
        return
    line(f"This machine has {hardware}.")
    section("can run here", [(each.name, f"needs {each.needs}") for each in found if each.available])
    section("cannot run here", [(each.name, _why_not(each)) for each in found if not each.available])
    options = [
        (each.name, ", ".join(f"{key}={value}" for key, value in each.options.items())) for each in found
    ]
    section("options, as --trainer.strategy.NAME VALUE", [row for row in options if row[1]])


def _why_not(listed: ListedStrategy) -> str:
    return f"{listed.reason}; needs {listed.needs}" if listed.needs else listed.reason


def _listed(name: str, hardware: Hardware) -> ListedStrategy:
    needs = reason = ""
    options: dict[str, str] = {}
    try:
        if STRATEGIES[name] is SingleDevice:
            needs = _ONE_PROCESS[name]
            if name in DEVICES and not hardware.has(name):
                reason = f"this machine has {hardware}"
        else:
            kind = strategy_class(name)
            needs = str(kind.needs)
            options = {} if name in PRESETS else _options(kind.config_type)
            reason = _trouble(kind, hardware)
        chosen = name if reason else choose(name, hardware).name
        if chosen not in (name, "single"):  # the choice of "auto"
            reason = _trouble(strategy_class(chosen), hardware)
    except Exception as error:  # code of another package may raise anything; list the others all the same
        reason = str(error) or type(error).__name__
    return ListedStrategy(name, needs, not reason, reason, options)


def _trouble(kind: Any, hardware: Hardware) -> str:
    support = kind.available(hardware)
    return "" if support else str(support.reason)


def _options(config_type: Any) -> dict[str, str]:
    """Return the defaults by name; empty if the configuration is not a dataclass."""
    if not dataclasses.is_dataclass(config_type):
        return {}
    return {each.name: _default(each) for each in dataclasses.fields(config_type)}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
