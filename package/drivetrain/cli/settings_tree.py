"""The settings of a run as a tree of names and values: a configuration file, overridden by the command line.

A task, data, a strategy and a precision are mappings with a name, `class_path`, and arguments, `init_args`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.files import loads, read_text
from drivetrain.core.validation import flag

OBJECTS = ("task", "data", "train_data", "validation_data")
"""Settings that name an object to import."""

TEXTS = ("resume", "optimizer_settings", "skip", "checkpoint", "save_to", "depth")
"""Settings that are texts, of the Trainer's verbs and of single commands; a number in a file is one too."""

SWITCHES = ("joined", "metrics", "new_data")
"""Settings that are true or false."""

SEARCH = ("space", "trials", "objective", "direction", "storage", "sampler", "pruner", "parallel")
"""Settings of `drivetrain search` alone."""

NAMED = ("strategy", "precision")
"""The Trainer's arguments that are a name with options."""

LISTS = ("callbacks", "loggers")
"""The Trainer's arguments that are lists of objects."""

Tree = dict[str, Any]


class AddedItems(list[Any]):
    """The items that `+=` appends to an argument's default, where nothing else is given."""


class ChangedEntries(dict[str, Any]):
    """The entries that dotted options change in an argument's default, where nothing else is given."""


_LARGEST = 4 << 20
"""The largest file of settings, in bytes."""

_OBJECT_PATHS = (*OBJECTS, *(f"trainer.{name}" for name in NAMED))
"""Settings that describe an object."""

_ITEMS = {"trainer.callbacks": "EarlyStopping", "trainer.loggers": "CSVLogger"}
"""Settings that are lists of objects, with a class of each."""


def expanded(value: Any) -> Any:
    """Return settings with the home directory for `~/` at the beginning of a text; `${...}` is refused."""
    if isinstance(value, dict):
        return type(value)({name: expanded(each) for name, each in value.items()})
    if isinstance(value, list):
        return type(value)(map(expanded, value))
    if not isinstance(value, str):
        return value
    if found := re.search(r"\$\{[\w.:]+[^}]*\}", value):
        raise ConfigError(
            f"{value!r}: settings have no variables such as {found[0]}. Write the value, or give it on the"
            ' command line, where the shell fills in "$NAME"'
        )
    return os.path.expanduser(value) if value.startswith("~/") else value


def dotted(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate a command line's dotted options and their values from its other words."""
    options: list[tuple[str, str]] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if not option.startswith("--") or "." not in option:
            others.append(word)
            continue
        if not equals:
            value = next(rest, "--")
        if value.startswith("--") or option.endswith("."):
            raise ConfigError(f"{option} needs a value: {option} VALUE")
        options.append((option[2:].replace("-", "_"), value))
    names = [option for option, _ in options]
    for option in names:
        whole, _, _ = option.rpartition(".")
        if (
            whole in names
            and whole.startswith("trainer.")
            and whole.partition(".")[2] not in (*NAMED, *LISTS)
        ):
            raise ConfigError(
                f"--{whole} is given whole and by parts, such as --{option}; give one of the two"
            )
    return options, others


def lay_over(tree: Tree, option: str, value: str) -> None:
    """Set a dotted option in a tree; an option that ends in "+" appends to a list.

    Args:
        tree: The tree to change.
        option: Such as "task", "trainer.max_epochs" or "trainer.callbacks+". A part of an object is an
            argument of its class; a part of a list belongs to its last item.
        value: The user's text.
    """
    name = option.rstrip("+")
    *above, last = name.split(".")
    if above and above[0] not in (*OBJECTS, "trainer"):
        raise ConfigError(
            f"unknown option --{option}. {nearest(above[0], (*OBJECTS, 'trainer'))}"
            " Write --trainer.max_epochs 3"
        )
    node = tree
    for index, each in enumerate(above):
        node = _parts(node, each, ".".join(above[: index + 1]))
    before: Any = node.get(last)
    if name in _OBJECT_PATHS:  # another object drops the options of the one before
        is_other = before is None or before.get("class_path", value) not in (None, value)
        node[last] = {**({} if is_other else before), "class_path": value}
    elif option.endswith("+"):
        kind = list if last in node and type(before) is not AddedItems else AddedItems
        node[last] = kind([*_listed(before), *_listed(value, name)])
    else:
        node[last] = _listed(value, name) if above == ["trainer"] and last in LISTS else value


def _parts(node: Tree, name: str, path: str) -> Tree:
    """Return the mapping with a value's parts; a value without parts is replaced by one with them."""
    value = node.get(name)
    items = value if isinstance(value, list) and value else None
    part = value if items is None else items[-1]
    if isinstance(part, str) and part.startswith("{"):
        part = read_value(part)
    if path in _ITEMS and not isinstance(part, dict) and "." not in str(part):
        raise ConfigError(
            f"--{path}: an option belongs to the item before it, which must be the path of a class, such as"
            f" drivetrain.{_ITEMS[path]}, not {part!r}"
        )
    if not isinstance(part, dict):
        part = {"class_path": part} if isinstance(part, str) and "." in part else ChangedEntries()
    node[name] = part if items is None else type(items)([*items[:-1], part])
    found: Tree = part
    if path in _OBJECT_PATHS or "class_path" in part:
        found = part.setdefault("init_args", {})
    return found


def read_value(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """Parse a text that is not a number: a list, a mapping, a truth value, none, or the text itself.

    Args:
        loader: Reads a list or mapping in brackets; `yaml.BaseLoader` leaves its values as texts.
    """
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "yes", "on", "false", "no", "off"):
        return text.lower() in ("true", "yes", "on")
    if text.lower().lstrip("+-.") in ("inf", "infinity", "nan"):
        return float(text.replace(".", ""))
    if text[:1] in ("[", "{") or "\n" in text:  # jsonargparse parses the YAML that it has written
        return yaml.load(text, loader)
    if text in ("", "()"):
        return []
    if "," in text and " " not in text:
        return [each for each in text.strip("()").split(",") if each]
    return text


def _listed(value: Any, name: str = "") -> list[Any]:
    found = read_value(value) if isinstance(value, str) else value
    found = [] if found is None else found if isinstance(found, list) else [found]
    for each in found if name == "trainer.callbacks" else ():
        if isinstance(each, str) and "." not in each:
            raise ConfigError(f"--{name}: {each!r} names no class. Write drivetrain.{each} or module.{each}")
    return [_object("an item", each) if isinstance(each, Mapping) else each for each in found]


# Files.


def read_file(path: str, also: Sequence[str] = ()) -> Tree:
    """Return a file's settings.

    Args:
        also: Settings of one command alone, which are returned as they are.
    """
    try:
        # A shell writes to a pipe of /dev/fd, as in --config <(make_settings); any other may have no writer.
        is_shells = path == "/dev/stdin" or path.startswith(("/dev/fd/", "/proc/self/fd/"))
        text = Path(path).read_text(encoding="utf-8") if is_shells else read_text(path, _LARGEST)
        if text.lstrip().startswith("{"):
            content = loads(text, object_pairs_hook=_unique)
        else:
            content = yaml.load(text, _Loader)
        return _tree(content, also)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} is not valid YAML or JSON: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that makes no Python objects and rejects duplicate names."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before "<<" brings names of another mapping
        _unique([(str(key.value), None) for key, _ in node.value])
        return node


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")
    return dict(pairs)


def _tree(content: Any, also: Sequence[str]) -> Tree:
    if isinstance(content, dict):  # ".shared: &shared {...}" is a template for what "<<: *shared" merges
        content = {name: value for name, value in content.items() if not str(name).startswith(".")}
    _check_names("the file", content, (*OBJECTS, "trainer", *TEXTS, *SWITCHES, *also))
    tree = {name: value for name, value in content.items() if value is not None}
    for name, value in tree.items():
        tree[name] = _object(name, value) if name in OBJECTS else _checked(name, value)
    trainer = tree.setdefault("trainer", {})
    _check_names("trainer", trainer)
    for name in {*NAMED, *LISTS} & trainer.keys():
        value = trainer[name]
        if name in LISTS:
            trainer[name] = _listed(value, f"trainer.{name}")
        elif value is None:
            del trainer[name]
        elif isinstance(value, Mapping):
            options = dict(value)
            trainer[name] = {"class_path": options.pop("name", None), "init_args": options}
        else:
            trainer[name] = {"class_path": value}
    return tree


def _checked(name: str, value: Any) -> Any:
    if name in SWITCHES:
        return flag(name, value)
    if name not in TEXTS:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, not {value!r}")
    return value


def _object(name: str, value: Any) -> Tree:
    if isinstance(value, str):
        return {"class_path": value}
    _check_names(name, value, ("class_path", "init_args"))
    _check_names(f"{name}.init_args", value.get("init_args", {}))
    return dict(value)


def _check_names(name: str, value: Any, allowed: Sequence[str] = ()) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping, not {value!r}")
    for each in value:
        if allowed and each not in allowed:
            raise ConfigError(f"unknown name {each!r} in {name}. {nearest(str(each), allowed)}")
