"""The arguments of `fit`, `validate`, `test`, `predict` and `plan`, and the objects that they describe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import operator
import re
import types
from abc import ABC
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, Namespace, set_loader

from drivetrain.callbacks import HOOKS
from drivetrain.cli.references import load
from drivetrain.errors import ConfigError, DrivetrainError, nearest
from drivetrain.precision import as_precision
from drivetrain.strategies.table import config_type, configure
from drivetrain.synonyms import help_with
from drivetrain.trainer import Trainer
from drivetrain.types import Every

_ALL = ("fit", "validate", "test", "predict", "plan")
OBJECTS = ("task", "data", "train_data", "validation_data")
"""Options that name an object to import."""

TEXTS = ("resume", "checkpoint", "save_to")
"""Options that are passed to the Trainer's verbs as they are."""

_SECTIONS = ("task", "data", "trainer")
"""What has dotted options."""

_NAMED = ("strategy", "precision")
"""Arguments of the Trainer that are a name, with options beside it."""

_LISTS = ("callbacks", "loggers")
"""Arguments of the Trainer that are lists of objects."""


class _Option(NamedTuple):
    """An option: what its value is called (None for a switch), its help, and the commands that have it."""

    value: str | None
    help: str
    commands: Sequence[str] = _ALL


_OPTIONS = {
    "--task": _Option("NAME", "module.Class or path/to/file.py:Class"),
    "--data": _Option(
        "NAME", "an object with train_data() and so on, its class, or a function that returns one"
    ),
    "--train-data": _Option("NAME", "a loader, dataset or function, for training alone", ("fit", "plan")),
    "--validation-data": _Option("NAME", "the same, for validation alone", ("fit", "plan", "validate")),
    "--resume": _Option("auto|PATH", "go on from the newest checkpoint of run_dir, or from a path", ("fit",)),
    "--checkpoint": _Option(
        "PATH|best|last",
        "weights to load: a path, or run_dir's best or last",
        ("validate", "test", "predict"),
    ),
    "--save-to": _Option("DIR", "write the outputs to files in this directory", ("predict",)),
    "--mps-fallback": _Option(
        None, "on a Mac: have the CPU compute what MPS cannot", ("fit", "validate", "test", "predict")
    ),
    "--config": _Option("FILE", "a YAML or JSON file with the same settings; the command line wins"),
    "--print-config": _Option(None, "print the settings as such a file, and stop"),
    "--json": _Option(None, "print JSON"),
    "--debug": _Option(None, "show the traceback of every error"),
}


class _Callback(ABC):  # noqa: B024 - its subclasses are known by their methods
    """Any class with a hook."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return any(hasattr(other, hook) for hook in HOOKS)


class _Logger(ABC):  # noqa: B024
    """Any class with the method of a logger."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "log_metrics")


class Settings:
    """The arguments of one command, checked and typed, and what they describe.

    Args:
        command: "fit", "validate", "test", "predict" or "plan".
        purpose: What it does, for its help.
        words: The words behind it.

    Raises:
        ConfigError: An unknown name, or a value of another type; says what is allowed.
        SystemExit: Help was printed.
    """

    def __init__(self, command: str, purpose: str, words: Sequence[str]) -> None:
        words = _joined(words)
        paths = _values(words, "--config")
        if len(paths) > 1:
            raise ConfigError(f"--config is given {len(paths)} times; give one file")
        content = _without_replaced(_read(paths[0]), words) if paths else {}
        self._parser = _parser(command, purpose, words, content)
        self._given = self._parser.parsed(words, content, "".join(paths))

    def option(self, name: str) -> Any:
        """Return the value of an option without a dot; None when it is not given."""
        return self._given.get(name)

    def trainer(self) -> Trainer:
        """Make the Trainer.

        Raises:
            ConfigError: A value that is not allowed; says what is.
            StrategyError: A strategy that cannot run here.
        """
        made = self._parser.instantiate(self._given)
        arguments = _section(made, "trainer")
        for name in _configurations():
            parts = _section(made, f"trainer.{name}")
            if parts:
                arguments[name] = _configured(name, arguments, parts)
        return Trainer(**arguments)

    def make(self, option: str) -> Any:
        """Make the task, or the data of an option; return None when it is not given.

        Raises:
            ConfigError: An argument is missing.
        """
        found: Any = self._parser.found.get(option)
        if not _is_callable(found):
            return found
        given = _section(self._parser.instantiate(self._given), option)
        missing = [name for name, each in _parameters(found).items() if each is inspect.Parameter.empty]
        for name in missing:
            if name not in given:
                raise _missing(found.__name__, name, f"--{option}")
        return found(**given)

    def as_file(self) -> str:
        """Return what was given as a configuration file in YAML."""
        plain = yaml.safe_load(self._parser.dump(self._given, format="yaml", skip_unset=False)) or {}
        config: dict[str, Any] = {}
        for option in OBJECTS:
            if option in plain:
                given = plain.get(_root(option))
                config[option] = {"class_path": plain[option], "init_args": given} if given else plain[option]
        trainer = plain.get("trainer", {})
        for name in _configurations():
            parts = plain.get(_root(f"trainer.{name}"))
            if parts:
                trainer[name] = {**({"name": trainer[name]} if name in _NAMED else {}), **parts}
        config |= {"trainer": trainer} if trainer else {}
        config |= {name: plain[name] for name in TEXTS if name in plain}
        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def complete(command: str, words: Sequence[str]) -> None:
    """Answer a shell that asks how an unfinished line may go on, by argcomplete's protocol, and exit.

    Args:
        command: As for `Settings`.
        words: The words behind it. Only the Trainer's options are known while they name nothing that exists.
    """
    paths = _values(words, "--config")
    try:
        parser = _parser(command, "", words, _read(paths[-1]) if paths else {})
    except Exception:  # of the user's module too: an unfinished line is no place for messages
        parser = _parser(command, "", (), {})
    parser.answer_shell()


def _parser(command: str, purpose: str, words: Sequence[str], content: Mapping[str, Any]) -> _Parser:
    parser = _Parser(
        prog=f"drivetrain {command}",
        description=f"{purpose.capitalize()}.",
        usage=f"drivetrain {command} --task NAME --data NAME [--trainer.NAME VALUE] [OPTION]",
        allow_abbrev=False,
        parser_mode=_MODE,
        print_config=None,
    )
    parser.add_options(command, words, content)
    return parser


class _Parser(ArgumentParser):
    """A parser for one command line: it has the arguments of the objects that the line names."""

    found: dict[str, Any]
    """What the line names, by option."""

    _kinds: dict[str, Any]
    """What the options of a section are arguments of."""

    def add_options(self, command: str, words: Sequence[str], content: Mapping[str, Any]) -> None:
        """Add the options of a command, and those of what a line and a file name."""
        self.found, self._kinds = {}, {}
        for flag, option in _OPTIONS.items():
            if command not in option.commands:
                continue
            if option.value is None:
                self.add_argument(flag, action="store_true", default=SUPPRESS, help=option.help)
            else:
                self.add_argument(flag, type=str, default=SUPPRESS, metavar=option.value, help=option.help)
        for name in OBJECTS:
            reference = _chosen(words, content, name)
            if reference is not None:
                self.found[name] = load(reference, _flag(name))
                if name in _SECTIONS and _is_callable(self.found[name]):
                    self._add_signature(name, reference)
        self._add_fields("trainer", Trainer)
        for name, kind in _configurations().items():
            section = f"trainer.{name}"
            if name in _NAMED:
                chosen = _chosen(words, content.get("trainer", {}), name, f"--{section}")
                is_given = _root(section) in content or any(
                    each.startswith(f"--{section}.") for each in words
                )
                kind = _options_of(name, chosen, is_given)
            if kind is not None:
                self._add_fields(section, kind)

    def _add_signature(self, section: str, reference: str) -> None:
        """Add the arguments of a user's class or function."""
        found = self._kinds[section] = self.found[section]
        group = self.add_argument_group(f"arguments of {reference}")
        add = group.add_class_arguments if isinstance(found, type) else group.add_function_arguments
        if _parameters(found) is not None:
            add(found, _root(section), as_group=False, fail_untyped=False)
        self._rename(section)

    def _add_fields(self, section: str, kind: Any) -> None:
        """Add the arguments of a configuration of ours."""
        self._kinds[section] = kind
        group = self.add_argument_group(f"arguments of {kind.__name__}")
        hints, texts = get_type_hints(kind), _documented(kind)
        for field in dataclasses.fields(kind):
            if section == "trainer.precision" and field.name == "name":
                continue  # --trainer.precision itself
            if section == "trainer" and field.name in _LISTS:
                hint: Any = list[_Callback] if field.name == "callbacks" else list[_Logger | str]
            else:
                hint = _writable(hints[field.name])
            group.add_argument(
                f"--{_root(section)}.{field.name}",
                type=hint,
                default=_default(field),
                help=texts.get(field.name),
            )
        self._rename(section)

    def _rename(self, section: str) -> None:
        """Let the options of a section begin with its name: values and arguments are two namespaces."""
        long, short = f"--{_root(section)}.", f"--{section}."
        for action in self._actions:
            if action.dest.startswith(long[2:]):
                action.required = False
                names = [each.replace(long, short, 1) for each in action.option_strings]
                action.option_strings = names
                self._option_string_actions.update(dict.fromkeys(names, action))

    def parsed(self, words: Sequence[str], content: Mapping[str, Any], path: str) -> Namespace:
        """Return the values of a file and of a command line, which wins."""
        known = {action.dest for action in self._actions}
        try:
            for root, values in content.items():
                for name in values if isinstance(values, Mapping) else ():
                    if f"{root}.{name}" not in known:
                        self._refuse(f"--{root.removesuffix(_SUFFIX).replace('trainer_', 'trainer.')}.{name}")
            base = self.parse_object(content, defaults=False) if content else None
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from error
        return self.parse_args(words, namespace=base, defaults=False)

    def answer_shell(self) -> None:
        """Let argcomplete answer, and exit."""
        for action in self._actions:
            if hasattr(action, "completer"):
                action.completer = functools.partial(_candidates, action.completer, action.metavar)
        self.parse_args([])

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error that says what is allowed.

        Raises:
            ConfigError: Always.
        """
        if not self.exit_on_error:  # the parser of a class path
            super().error(message, ex)
        unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        if unknown:
            self._refuse(unknown[1])
        keys = re.findall(r'Parser key "([^"]+)"', message)
        names = [each.option_strings[0] for each in self._actions if each.dest in keys[:1]]
        option = ".".join([*names, *keys[1:]])
        within = re.findall(r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message)
        if within:
            path, name = within[-1]
            kind = load(path, option)
            raise _unknown(kind, name, _parameters(kind))
        missing = re.search(r"class_path '([\w.]+)':\s+the following arguments are required: (\w+)", message)
        if missing:
            raise _missing(missing[1], missing[2], option)
        nested = re.search(r"NestedArg\(key='([\w.]+)'", message)
        if nested:
            self._refuse(f"{option}.{nested[1]}")
        wanted = re.findall(
            r"Expected a (?:<class '([\w.]+)'>|(?:typing\.)?(.+?))(?:\. Got value|$)", message, re.M
        )
        given = re.search(r"(?:Got|Given) value: (.*)", message)
        if not option or not wanted or not given:
            text = re.sub(r'^Parser key "[^"]+"|Problem with given class_path', option, message, count=1)
            raise ConfigError(re.sub(r"\s*\n\s*", " ", text)) from ex
        words = dict.fromkeys(_WORDS.get(first, first) or _choices(last) for first, last in wanted)
        raise ConfigError(f"{option} must be {' or '.join(words)}, not {given[1]!r}") from ex

    def _refuse(self, option: str) -> NoReturn:
        """Raise the error for an option that does not exist, with the nearest one that does."""
        section, _, name = option.lstrip("-").rstrip("+").rpartition(".")
        first = section.partition(".")[0]
        prefix = f"--{section}."
        allowed = {
            each.removeprefix(prefix).rstrip("+")
            for each in self._option_string_actions
            if each.startswith(prefix)
        }
        if section in self._kinds:
            raise _unknown(self._kinds[section], name, allowed)
        if "." in section and allowed:
            raise ConfigError(f"--{section} has no argument {name!r}. {nearest(name, allowed)}")
        if "." in section and f"--{section}" in self._option_string_actions:
            raise ConfigError(f"--{section} has no parts such as {option}")
        if first in self.found:
            kind = type(self.found[first]).__name__
            raise ConfigError(f"--{first} names a finished {kind}, which takes no {option}; name its class")
        if first in ("task", "data"):
            raise ConfigError(f"{option} is given without --{first}")
        if section:
            raise ConfigError(
                f"unknown option {option}. {nearest(first, _SECTIONS)} Write --trainer.max_epochs 3"
            )
        flags = [each for each in _OPTIONS if each in self._option_string_actions]
        raise ConfigError(f"{self.prog}: unknown argument {option}. {nearest(option, flags)}")


# Values: what a text on the command line stands for.

_MODE = "drivetrain"
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
_WORDS |= {"NoneType": "none", "list": "a list (a,b,c)", "tuple": "a list (a,b,c)"}


def _candidates(completer: Any, metavar: Any, prefix: str, **rest: Any) -> list[str]:
    """The values that a type allows; jsonargparse has none for a `Literal`."""
    return completer(prefix, **rest) or re.findall(r"[^{},]+", metavar if "{" in str(metavar) else "")


def _choices(annotation: str) -> str:
    inside = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return inside[1].replace(", ", " or ") if inside else annotation


def _value(text: str) -> Any:
    """Read a text that is not a number: a list, a mapping, a truth value, none, or the text itself."""
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "yes", "on", "false", "no", "off"):
        return text.lower() in ("true", "yes", "on")
    if text[:1] in ("[", "{") or "\n" in text:
        try:
            return json.loads(text)
        except ValueError:
            return yaml.safe_load(text)
    if text in ("", "()"):
        return []
    if "," in text and " " not in text:
        return [each for each in text.strip("()").split(",") if each]
    return text


set_loader(_MODE, _value, (yaml.YAMLError,))


def _writable(hint: Any) -> Any:
    """The parts of an annotation that can be written, from the narrowest to `str`, which takes any text."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    ranks: dict[Any, int] = {}
    for each in members:
        kind = get_origin(each) or each
        if each in (bool, int, float, str, Any, types.NoneType):
            ranks[each] = (bool, int, float, None, str, Any, types.NoneType).index(each)
        elif kind is tuple or (isinstance(kind, type) and issubclass(kind, Mapping)):
            ranks[each] = 3
        elif isinstance(kind, type) and kind is not str and issubclass(kind, Iterable) and get_args(each):
            ranks[list[get_args(each)[0]]] = 3  # type: ignore[misc]
    return functools.reduce(operator.or_, sorted(ranks, key=ranks.__getitem__)) if ranks else Any


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


# What the Trainer's arguments and those of other objects are.


@functools.cache
def _configurations() -> Mapping[str, Any]:
    """Arguments of the Trainer that a configuration with options of its own may stand for."""
    found = {
        name: next((each for each in get_args(hint) if dataclasses.is_dataclass(each)), None)
        for name, hint in get_type_hints(Trainer).items()
    }
    return {name: each for name, each in found.items() if (each or name in _NAMED) and each is not Every}


def _options_of(argument: str, chosen: Any, is_given: bool) -> Any:
    """The class with the options of a strategy or a precision; None if it has none and none is given."""
    if chosen is None and is_given:
        raise ConfigError(f"which {argument}? An option of one is given: give --trainer.{argument} NAME too")
    if chosen is None:
        return None
    try:
        return config_type(chosen) if argument == "strategy" else type(as_precision(chosen))
    except DrivetrainError:
        if is_given:
            raise
        return None  # the Trainer says what is wrong, if anything is


def _configured(name: str, arguments: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    if name == "strategy":
        return configure(arguments[name], parts)
    if name == "precision":
        return dataclasses.replace(as_precision(arguments[name]), **parts)
    if name in arguments:
        raise ConfigError(
            f"--trainer.{name} is given both as a whole and by its parts, such as"
            f" --trainer.{name}.{next(iter(parts))}; give one of them"
        )
    return _configurations()[name](**parts)


def _documented(kind: type) -> dict[str, str]:
    """The text for each argument in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        for entry in docstring_parser.parse(each.__doc__ or "").params:
            text = " ".join((entry.description or "").split()).replace("%", "%%")
            found |= dict.fromkeys(entry.arg_name.split(", "), text)
    return found


def _is_callable(found: Any) -> bool:
    """Whether an object is made by calling what was named; otherwise it is the object itself."""
    return isinstance(found, type) or inspect.isroutine(found)


def _parameters(function: Any) -> dict[str, Any]:
    """The defaults of the parameters that have a name; `Parameter.empty` for one that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C that says nothing of its parameters
        return {}
    return {
        each.name: each.default
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }


def _unknown(kind: Any, name: str, allowed: Iterable[str]) -> ConfigError:
    """The error for an argument that a class or a function does not have."""
    is_ours = kind.__module__.startswith("drivetrain.")
    hint = help_with(name, allowed, owner=kind.__name__) if is_ours else nearest(name, allowed)
    return ConfigError(f"{kind.__name__} has no argument {name!r}. {hint}")


def _missing(owner: str, name: str, option: str) -> ConfigError:
    return ConfigError(f"{owner} needs a value for {name}: give {option}.{name} VALUE")


# The words of a command line, before it is parsed.

_SUFFIX = "_arguments"


def _root(section: str) -> str:
    """The namespace of a section's values: that of `task` is the name of the task itself."""
    return section if section == "trainer" else section.replace(".", "_") + _SUFFIX


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _section(made: Namespace, section: str) -> dict[str, Any]:
    return dict(vars(made.get(_root(section)) or types.SimpleNamespace()))


def _joined(words: Sequence[str]) -> list[str]:
    """Write dotted options in one spelling, `--trainer.max_epochs=3`.

    Raises:
        ConfigError: A dotted option without a value.
    """
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option.startswith("--") and "." in option:
            option = "--" + option[2:].replace("-", "_")
            if not equals:
                value = next(rest, "--")
                if value.startswith("--"):
                    raise ConfigError(f"{option} needs a value: {option} VALUE")
            if option.rstrip("+") in [f"--trainer.{each}" for each in _LISTS]:
                value = json.dumps(_listed(value))
            word = f"{option}={value}"
        joined.append(word)
    return joined


def _listed(value: Any) -> list[Any]:
    """Callbacks or loggers: names, or mappings with a class path."""
    found = _value(value) if isinstance(value, str) else value
    found = [] if found is None else found if isinstance(found, list) else [found]
    return [_class_path(each) if isinstance(each, Mapping) else each for each in found]


def _values(words: Sequence[str], option: str) -> list[Any]:
    """The values of an option."""
    values = [word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")]
    return values + [value for word, value in itertools.pairwise(words) if word == option]


def _chosen(words: Sequence[str], content: Mapping[str, Any], name: str, option: str = "") -> Any:
    """The name that the command line or else the file gives for a strategy, say."""
    return (_values(words, option or _flag(name)) or [content.get(name)])[-1]


# Configuration files.


def _read(path: str) -> dict[str, Any]:
    """Return a file's settings by namespace.

    Raises:
        ConfigError: No such file, no YAML or JSON, or an unknown name (lists the nearest).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            content = json.loads(text, object_pairs_hook=_unique)
        else:
            content = yaml.load(text, _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} is no YAML or JSON that can be read: {error}") from error
    try:
        return _by_namespace(content)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without objects, and without a name that is given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        _unique([(self.construct_object(key), None) for key, _ in node.value])
        return dict(super().construct_mapping(node, deep))


def _unique(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice")
    return dict(pairs)


def _by_namespace(content: Any) -> dict[str, Any]:
    allowed = (*OBJECTS, "trainer", *TEXTS)
    result: dict[str, Any] = {}
    for key, value in _mapping("the file", content).items():
        if key not in allowed:
            raise ConfigError(f"unknown name {key!r}. {nearest(str(key), allowed)}")
        if value is None:
            continue
        if key == "trainer":
            result["trainer"] = {}
            for name, each in _mapping(key, value).items():
                if name in _LISTS:
                    each = _listed(each)
                elif name in _configurations() and isinstance(each, Mapping):
                    parts = dict(each)
                    each = parts.pop("name", None) if name in _NAMED else None
                    result[_root(f"trainer.{name}")] = parts
                    if each is None:
                        continue
                result["trainer"][name] = each
            continue
        if key in ("task", "data") and isinstance(value, Mapping):
            value = _class_path(value)
            result[_root(key)] = _mapping(f"{key}.init_args", value.get("init_args", {}))
            value = value.get("class_path")
        if not isinstance(value, str):
            raise ConfigError(f"{key} must be a text, not {value!r}")
        result[key] = value
    return result


def _class_path(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping that names a class; "object" and "arguments" are older words for the same."""
    names = {"object": "class_path", "arguments": "init_args"}
    for each in value:
        if each not in ("class_path", "init_args", *names):
            raise ConfigError(f"unknown name {each!r}. {nearest(str(each), ('class_path', 'init_args'))}")
    return {names.get(name, name): each for name, each in value.items()}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping, not {value!r}")
    return value


def _without_replaced(content: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Leave out what a file says of objects in whose place the command line names others."""
    content = {**content, "trainer": dict(content.get("trainer", {}))}
    for name in ("task", "data"):
        if _values(words, f"--{name}") not in ([], [content.get(name)]):
            content.pop(_root(name), None)
    for name in _configurations():
        given = _values(words, f"--trainer.{name}")
        if given and (name not in _NAMED or content["trainer"].get(name) not in (None, given[-1])):
            content.pop(_root(f"trainer.{name}"), None)
        if name not in _NAMED and any(word.startswith(f"--trainer.{name}.") for word in words):
            content["trainer"].pop(name, None)
    return content
