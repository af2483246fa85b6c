"""What a command is told: a configuration file, and the command line, which wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigError, nearest

SECTIONS = ("task", "data", "trainer")
"""What has dotted options: ``--trainer.max_epochs 3``."""

OBJECTS = ("task", "data", "train_data", "validation_data")
"""What names an object to import."""

TEXTS = ("resume", "checkpoint", "save_to")
"""What is passed to the trainer's verbs as it is."""


NAMED = ("strategy", "precision")
"""Arguments of the trainer that are a name, beside which options of what it names may stand."""


@dataclass
class Settings:
    """What was asked for, before anything is imported.

    Attributes:
        objects: The references of "task" and "data" and the data given one by one, by option.
        arguments: By section, names and values: texts as they stand on the command line, or what the file
            has.
        texts: "resume", "checkpoint" and "save_to", as far as given.
    """

    objects: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=lambda: {each: {} for each in SECTIONS})
    texts: dict[str, str] = field(default_factory=dict)


def split_dotted(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take the dotted options out of a command line.

    Returns:
        The rest, and the values by section and name; ``--trainer.checkpoint.every 5`` nests.

    Raises:
        ConfigError: An unknown section, or an option without a value.
    """
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {each: {} for each in SECTIONS}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if not option.startswith("--") or "." not in option:
            rest.append(word)
            continue
        section, *path = option[2:].replace("-", "_").split(".")
        if section not in SECTIONS or not all(path):
            raise ConfigError(
                f"unknown option {option}. {nearest(section, SECTIONS)} Write --trainer.max_epochs 3"
            )
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"{option} needs a value: {option} VALUE")
            value = following
        if section == "trainer" and len(path) == 1 and path[0] in NAMED:
            path = [path[0], "name"]  # its options stand beside it: --trainer.strategy.sharding hybrid
        _put(found[section], path, value, option)
    return rest, found


def _put(values: dict[str, Any], path: Sequence[str], value: str, option: str) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{option}: {name} is given both as a whole and by its parts; give one of them")
    if isinstance(values.get(path[-1]), dict):
        raise ConfigError(f"{option}: {path[-1]} is given both as a whole and by its parts; give one of them")
    values[path[-1]] = value


def read_file(path: str) -> Settings:
    """The settings of a JSON file: what ``--print-config`` prints, or any part of it.

    Raises:
        ConfigError: No such file, no JSON, or an unknown name (lists the nearest).
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must be a JSON object with {', '.join(SECTIONS)}")
    settings = Settings()
    allowed = (*OBJECTS, "trainer", *TEXTS)
    for key, value in content.items():
        if key not in allowed:
            raise ConfigError(f"--config {path} has an unknown name {key!r}. {nearest(key, allowed)}")
        if value is None:
            continue
        if key in ("task", "data"):
            _take_object(settings, path, key, value)
        elif key == "trainer":
            settings.arguments[key] = _with_parts(_mapping(path, key, value))
        else:
            _check_text(path, key, value)
            (settings.objects if key in OBJECTS else settings.texts)[key] = value
    return settings


def _take_object(settings: Settings, path: str, key: str, value: Any) -> None:
    if isinstance(value, str):
        value = {"object": value}
    for each in _mapping(path, key, value):
        if each not in ("object", "arguments"):
            raise ConfigError(
                f"--config {path}: {key} has {each!r}. {nearest(each, ('object', 'arguments'))}"
            )
    if "object" in value:
        _check_text(path, f"{key}.object", value["object"])
        settings.objects[key] = value["object"]
    settings.arguments[key] = _mapping(path, f"{key}.arguments", value.get("arguments", {}))


def _with_parts(trainer: dict[str, Any]) -> dict[str, Any]:
    """What is named as the command line has it: the name as a part, beside which its options may stand."""
    named = {key: {"name": trainer[key]} for key in NAMED if isinstance(trainer.get(key), str)}
    return {**trainer, **named}


def _mapping(path: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: {key} must be a JSON object, not {value!r}")
    return value


def _check_text(path: str, key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"--config {path}: {key} must be a text, not {value!r}")


def merged(base: Settings, over: Settings) -> Settings:
    """`base` with everything that `over` says in its place; mappings are merged name by name.

    Another object, strategy or precision than the base's comes without the base's arguments, which were meant
    for that.
    """
    result = Settings({**base.objects, **over.objects}, {}, {**base.texts, **over.texts})
    for section in SECTIONS:
        replaced = section in over.objects and over.objects[section] != base.objects.get(section)
        kept = {} if replaced else base.arguments[section]
        if section == "trainer":
            named = over.arguments[section]
            others = [each for each in NAMED if _is_another(kept.get(each), named.get(each))]
            kept = {name: value for name, value in kept.items() if name not in others}
        result.arguments[section] = _merge(kept, over.arguments[section])
    return result


def _is_another(before: Any, after: Any) -> bool:
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return False
    return None not in (before.get("name"), after.get("name")) and before["name"] != after["name"]


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        before = result.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[name] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return result
