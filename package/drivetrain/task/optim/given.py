"""The settings of an optimizer and its schedule as the user gave them, and their change in a resume."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.state import is_setting, restored_setting

if TYPE_CHECKING:
    from drivetrain.task.optim.torch_schedule import TorchSchedule

_OF_SCHEDULE = ("schedule", "schedule_options", "schedules", "warmup_steps", "warmup_ratio", "warmup_power")
_OF_TIMES = ("scheduler every", "scheduler metric")
_RATE = "initial_lr"

SETTINGS_OF = ("program", "checkpoint")
"""Whose settings an optimizer has after a resume; values of `optimizer_settings`."""


def given_settings(
    optimizer: Optimizer, config: OptimizerConfig | None, timed: TorchSchedule | None
) -> dict[str, str]:
    """Return the settings of an optimizer that was just made, and of its schedule, as texts to compare.

    The settings of groups are under "0 lr", "0 weight_decay", "1 lr", ...
    """
    found = {name: _text(value) for name, value in fresh_values(optimizer, timed).items()}
    if config is not None:
        found |= {name: _text(getattr(config, name)) for name in _OF_SCHEDULE}
    if timed is not None:
        found |= {"scheduler every": str(timed.every), "scheduler metric": str(timed.metric)}
    return found


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what both have and differs: the values before and now, by name."""
    return {name: (before[name], now[name]) for name in now if before.get(name, now[name]) != now[name]}


def is_restored(name: str) -> bool:
    """Return whether a setting is part of the state of an optimizer or a torch scheduler."""
    return name not in (*_OF_SCHEDULE, *_OF_TIMES)


def _set_within(inner: Any, way: Sequence[str], value: Any) -> None:
    """Set a value inside nested mappings and lists, at the keys and indices of `way`."""
    for each in way[:-1]:
        inner = inner[int(each) if isinstance(inner, (list, tuple)) else each]
    inner[int(way[-1]) if isinstance(inner, list) else way[-1]] = value


def apply_changes(
    changed: Mapping[str, tuple[str, str]],
    fresh: Mapping[str, Any],
    optimizer: Optimizer,
    timed: TorchSchedule | None,
) -> None:
    """Set what has changed, after an optimizer and its schedule have taken over a checkpoint's state.

    A new base rate changes the rate now in proportion, so that a schedule goes on from where it is.
    """
    stored = [name for name in changed if name.startswith("scheduler ") and name not in _OF_TIMES]
    state = copy.deepcopy(timed.scheduler.state_dict()) if timed is not None and stored else None
    for name, (before, _) in changed.items():
        first, _, setting = name.partition(" ")
        value: Any = fresh.get(name)
        if name in stored:
            _set_within(state, setting.split("."), value)
        elif first.isdigit():
            _change(optimizer.param_groups[int(first)], setting, before, value)
    if timed is not None and stored:
        timed.scheduler.load_state_dict(state)


def _change(group: dict[str, Any], setting: str, before: str, value: Any) -> None:
    """Set a setting of a group and its base value."""
    if setting == "lr":
        old, rate = 0.0 if before == "None" else float(before), group["lr"]
        now = value if not (old and value) or float(rate) == old else float(rate) * value / old
        group["lr"] = restored_setting(rate, now)
    else:
        group[setting] = restored_setting(group.get(setting), value)
    base = f"initial_{setting}"
    if base in group:
        group[base] = restored_setting(group[base], value)


def return_to_base(changed: Iterable[str], optimizer: Optimizer) -> None:
    """Set what a schedule has set to its base value, if the schedule has changed: there may be none now."""
    for group in optimizer.param_groups if any(name in _OF_SCHEDULE for name in changed) else ():
        for name in [each for each in group if each.startswith("initial_")]:
            setting = name.removeprefix("initial_")
            group[setting] = restored_setting(group[setting], group[name])


def fresh_values(optimizer: Optimizer, timed: TorchSchedule | None) -> dict[str, Any]:
    """Return the values behind `given_settings`, under the same names."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if is_setting(name) and name != "lr" and (name == _RATE or not name.startswith("initial_")):
                if isinstance(value, Tensor):
                    value = value.item() if value.numel() == 1 else value.tolist()
                found[f"{number} {'lr' if name == _RATE else name}"] = value
    if timed is not None:
        found |= {f"scheduler {name}": value for name, value in _settings_in(timed.scheduler.state_dict())}
    return found


def described(changed: Mapping[str, tuple[str, str]]) -> str:
    """Return changes as a text: "lr was 0.1 and is 0.01"; of groups with the same change, one."""
    parts = {
        f"{name.partition(' ')[2] if name[0].isdigit() else name} was {before} and is now {now}"
        for name, (before, now) in changed.items()
        if not name.endswith("base_lrs")
    }
    return "; ".join(sorted(parts))


def _settings_in(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers in a scheduler's state by path, such as "gamma" or "_schedulers.1.gamma".

    They are its arguments, or follow from them, as long as it has not stepped.
    """
    for name, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        if _is_plain(value):
            if name != "_last_lr":
                yield f"{path}{name}", value
        elif isinstance(value, (list, tuple)) or (isinstance(value, Mapping) and _has_words(value)):
            yield from _settings_in(value, f"{path}{name}.")


def _has_words(names: Iterable[Any]) -> bool:
    return all(isinstance(each, str) and "." not in each for each in names)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, Counter))


def _text(value: Any) -> str:
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(each)}' for key, each in value.items())}}}"
    return repr(list(value) if isinstance(value, tuple) else value)
