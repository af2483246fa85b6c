"""The settings of the commands that make a task, and the objects that they describe.

The command line overrides the configuration file; together they are one tree of names and texts. For each
class in the tree, jsonargparse converts the texts to the types in its signature, and prints the help.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import os
import re
import shutil
import textwrap
from abc import ABC
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import docstring_parser
import jsonargparse
import yaml
from jsonargparse import set_loader

from drivetrain.callbacks import HOOKS
from drivetrain.cli.arguments import Arguments
from drivetrain.cli.parser import Parser
from drivetrain.cli.references import load
from drivetrain.cli.settings_tree import (
    NAMED,
    OBJECTS,
    SEARCH,
    SWITCHES,
    TEXTS,
    Tree,
    dotted,
    expanded,
    lay_over,
    read_file,
    read_value,
)
from drivetrain.core.errors import ConfigError, DrivetrainError, nearest
from drivetrain.core.intervals import Every
from drivetrain.core.synonyms import help_with
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import config_type, configure
from drivetrain.trainer.trainer import Trainer

_WITH_DATA = ("fit", "validate", "test", "predict", "plan", "search")
_ALL = (*_WITH_DATA, "summary")


class _Option(NamedTuple):
    """An option: its value's name (None for a switch), its help and the commands that have it."""

    value: str | None
    help: str
    commands: Sequence[str] = _ALL


PLAN_RATES = {
    "steps_per_second": "of the job, for its hours",
    "tokens_per_second": "of the job, for its hours",
    "flops_per_second": "of a process, for the job's hours",
    "disk_bytes_per_second": "for the seconds of a save",
}
"""Rates by which a plan answers how long a run takes, with their help."""

_OPTIONS = {
    "--task": _Option("NAME", "module.Class or path/to/file.py:Class"),
    "--data": _Option("NAME", "an object, or its class, with train_data()...", _WITH_DATA),
    "--train-data": _Option("NAME", "a loader, dataset or function to train on", ("fit", "plan", "search")),
    "--validation-data": _Option(
        "NAME", "the same, for validation alone", ("fit", "plan", "validate", "search")
    ),
    "--resume": _Option("auto|PATH", "run_dir's newest checkpoint, or one at a path", ("fit",)),
    "--optimizer-settings": _Option("FROM", "whose settings to resume with: program, checkpoint", ("fit",)),
    "--new-data": _Option(None, "a resume begins the training data at its start", ("fit",)),
    "--skip": _Option("INTERVAL", "data that a resume leaves out: '2_000 steps'", ("fit",)),
    "--checkpoint": _Option(
        "PATH|best|best:METRIC|last",
        "weights to load: a path, or run_dir's best or last",
        ("validate", "test", "predict"),
    ),
    "--save-to": _Option("DIR", "write the outputs to files in this directory", ("predict",)),
    "--joined": _Option(None, "join the outputs of all batches to one", ("predict",)),
    "--metrics": _Option(None, "the values of a validation too; needs targets", ("predict",)),
    "--depth": _Option("NUMBER", "the levels of modules to show, 1 by default", ("summary",)),
    "--run": _Option(None, "list a step's collectives in order", ("plan",)),
    "--world-size": _Option("NUMBER", "plan for as many processes", ("plan",)),
    **{f"--{each.replace('_', '-')}": _Option("RATE", text, ("plan",)) for each, text in PLAN_RATES.items()},
    "--trials": _Option("NUMBER", "trials in all, those of earlier starts too", ("search",)),
    "--objective": _Option("NAMES", "logged names to optimise; default: validation/loss", ("search",)),
    "--direction": _Option("NAMES", "minimize or maximize, for each objective", ("search",)),
    "--storage": _Option("URL|PATH", "sqlite:///FILE or a journal; default: in run_dir", ("search",)),
    "--sampler": _Option("NAME", "tpe, random, grid, gp or nsga2; default: tpe", ("search",)),
    "--pruner": _Option("NAME", "median, halving or hyperband; default: none", ("search",)),
    "--parallel": _Option("NUMBER", "trials that run at a time; default: 1", ("search",)),
    "--config": _Option("FILE", "a YAML or JSON file; the command line wins"),
    "--print-config": _Option(None, "print the settings as such a file, and stop"),
    "--json": _Option(None, "print JSON"),
    "--debug": _Option(None, "show the traceback of every error"),
}


class _CallbackOption(ABC):  # noqa: B024 - its subclasses are known by their methods
    """Any class with a hook."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return any(hasattr(other, hook) for hook in HOOKS)


class _LoggerOption(ABC):  # noqa: B024
    """Any class with the method `log_metrics`."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "log_metrics")


def _check_version() -> None:
    # setup.cfg allows older ones: libraries such as anomalib hold it back, and only commands need this.
    if tuple(map(int, jsonargparse.__version__.split(".")[:2])) < (4, 53):
        raise ConfigError(
            f"the command line needs jsonargparse 4.53 or newer, and {jsonargparse.__version__} is installed,"
            " perhaps because another package holds it back. Give the command line an environment of its own,"
            " or train from Python with Trainer(...).fit(...)"
        )


class Settings:
    """The settings of one command, checked and typed, and the objects that they describe."""

    def __init__(self, command: str, purpose: str, words: Sequence[str]) -> None:
        _check_version()
        self._options, self._tree = _read(command, words)
        self._build(command, purpose)

    def changed(self, values: Mapping[str, str]) -> Settings:
        """Return these settings with other values, as texts of a command line: {"task.width": "64"}."""
        changed = copy.copy(self)
        changed._tree = copy.deepcopy(self._tree)
        for option, value in values.items():
            lay_over(changed._tree, option, value)
        Settings._build(changed, "", "")
        return changed

    def _build(self, command: str, purpose: str) -> None:
        self._found = _objects(self._tree)
        if "help" in self._options:
            _print_help(command, purpose, self._tree, self._found, self._options["help"] == "all")
            raise SystemExit(0)
        self._kinds = _given_kinds(self._tree["trainer"])
        self._parser = Arguments(exit_on_error=False, parser_mode=_MODE, print_config=None)
        _add_arguments(self._parser, self._tree, self._found, self._kinds, leave_out=self._kinds)
        try:
            self._given = self._parser.parse_object(_values(self._tree, self._found), defaults=False)
        except ArgumentError as error:
            explained = self._explained(error.message)
            sources = [f"--config {self._options['config']}"] if "config" in self._options else []
            if sources := [*sources, *_variables(command)]:
                explained = ConfigError(f"{explained} (with {', '.join(sources)})")
            raise explained from None
        self._made = self._parser.instantiate(self._given)

    def option(self, name: str) -> Any:
        """Return the value of an option without a dot; None if it is not given."""
        return self._options.get(name)

    def trainer(self) -> Trainer:
        arguments = self._section("trainer")
        for name, kind in self._kinds.items():
            given, options = self._tree["trainer"][name], dict(vars(arguments[name]))
            if name == "strategy":
                arguments[name] = configure(given["class_path"], options)
            elif name == "precision":
                arguments[name] = dataclasses.replace(as_precision(given["class_path"]), **options)
            else:
                arguments[name] = kind(**options)
        return Trainer(**arguments)

    def make(self, option: str) -> Any:
        """Make the task, or the data of an option; return None if the option is not given."""
        found: Any = self._found.get(option)
        return found(**self._section(option)) if _is_callable(found) else found

    def as_file(self) -> str:
        """Return the given settings as a configuration file in YAML."""
        plain = yaml.safe_load(self._parser.dump(self._given, format="yaml", skip_unset=False)) or {}
        config: dict[str, Any] = {}
        for option in self._found:
            path = self._tree[option]["class_path"]
            config[option] = {"class_path": path, "init_args": plain[option]} if option in plain else path
        trainer = plain.get("trainer", {})
        for name in {*NAMED} & {*self._kinds}:
            trainer[name] = {"name": self._tree["trainer"][name]["class_path"], **trainer[name]}
        config |= {"trainer": trainer} if trainer else {}
        others = (*TEXTS, *SWITCHES, *SEARCH)
        config |= {name: self._options[name] for name in others if name in self._options}
        return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def _section(self, name: str) -> dict[str, Any]:
        made = self._made.get(name)
        return {} if made is None else dict(vars(made))

    def _explained(self, message: str) -> ConfigError:
        """Return our error for one of jsonargparse: the option as the user writes it, and what is allowed."""
        keys = re.findall(r'Parser key "([^"]+)"', message)
        option = f"--{'.'.join(keys)}"
        inside = re.findall(r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message)
        if inside:
            kind = load(inside[-1][0], option)
            return _unknown(kind, inside[-1][1], _parameters(kind))
        missing = re.search(r"the following arguments are required: ([\w.]+)", message)
        if missing:
            return ConfigError(f"a value is missing: give --{'.'.join([*keys, missing[1]])} VALUE")
        unknown = re.search(r"(?:Group '([\w.]+)' does not accept o|O)ption '([\w.]+)'", message)
        if unknown:
            section, _, name = ".".join(filter(None, unknown.groups())).rpartition(".")
            names = [each.dest for each in self._parser._actions if not each.dest.endswith(".help")]
            while section and not any(each.startswith(f"{section}.") for each in names):
                section, _, name = section.rpartition(".")  # a part of an argument that does not exist
            allowed = {each[len(section) + 1 :] for each in names if each.startswith(f"{section}.")}
            kinds = {"trainer": Trainer, **{f"trainer.{key}": kind for key, kind in self._kinds.items()}}
            kind = {**kinds, **self._found}.get(section)
            if kind is not None:
                return _unknown(kind, name, allowed)
            return ConfigError(f"--{section} has no argument {name!r}. {nearest(name, allowed)}")
        wanted = re.findall(
            r"Expected a (?:<class '([\w.]+)'>|(?:typing\.)?(.+?))(?:\. Got value|$)", message, re.M
        )
        given = re.search(r"(?:Got|Given) value: (.*)", message)
        if not wanted or not given:
            message = re.sub(r"Import path (\S+) .* subclass of _(.*)", r"\1 is no \2", message)
            text = re.sub(r'^Parser key "[^"]+"|Problem with given class_path', option, message, count=1)
            return ConfigError(re.sub(r"\s*\n\s*", " ", text))
        words = dict.fromkeys(_WORDS.get(first, first) or _choices(last) for first, last in wanted)
        return ConfigError(f"{option} must be {' or '.join(words)}, not {given[1]!r}")


def complete(command: str, words: Sequence[str]) -> None:
    """Answer a shell's request to complete an unfinished line, by argcomplete's protocol, and exit.

    Args:
        words: The words after the command. The longest readable part of them decides which options there are.
    """
    for end in range(len(words), -1, -1):
        try:
            _, tree = _read(command, words[:end])
            parser = _full_parser(command, "", tree, _objects(tree))
            break
        except Exception:  # also from the user's module: an unfinished line must not print messages
            continue
    for index, action in enumerate(parser._actions):
        action.dest = f"option{index}"  # an object and its arguments would share a destination
        if hasattr(action, "completer"):
            action.completer = functools.partial(_candidates, action.completer, action.metavar)
    parser.parse_args([])


def _candidates(completer: Any, metavar: Any, prefix: str, **rest: Any) -> list[str]:
    """Return the values that a type allows; a `Literal` has them in its metavar."""
    return completer(prefix, **rest) or re.findall(r"[^{},]+", metavar if "{" in str(metavar) else "")


# From words to objects with their arguments.


def _read(command: str, words: Sequence[str]) -> tuple[dict[str, Any], Tree]:
    """Return the options without a dot, and the tree of the file with all other options applied."""
    pairs, others = dotted([*_variables(command).values(), *words])
    parser = _short_parser(command)
    try:
        options = expanded(dict(vars(parser.parse_args(others))))
    except ArgumentError as error:
        raise ConfigError(f"drivetrain {command}: {error}") from error
    files = [word for word in words if word.partition("=")[0] == "--config"]
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times; give one file")
    is_search = command == "search"
    also = SEARCH if is_search else ()
    tree = read_file(options["config"], also) if "config" in options else {"trainer": {}}
    for name in OBJECTS:
        if name in options:
            lay_over(tree, name, options[name])
    for option, value in pairs:
        if is_search and option.startswith("space."):
            tree["space"] = {**tree.get("space", {}), option.removeprefix("space."): value}
        else:
            lay_over(tree, option, value)
    tree = expanded(tree)
    return {**tree, **options}, tree


def _variables(command: str) -> dict[str, str]:
    """Return the options in variables such as DRIVETRAIN_FIT__TRAINER__MAX_STEPS: the words by the names."""
    found = {}
    for name, value in sorted(os.environ.items()):
        begin, _, rest = name.partition("__")
        if begin == f"DRIVETRAIN_{command.upper()}":
            parts = [each.lower() if each.isupper() else each for each in rest.split("__")]
            option = f"--{'.'.join(parts).replace('_', '-')}"
            is_switch = option in _OPTIONS and _OPTIONS[option].value is None
            found[name] = option if is_switch and read_value(value) is True else f"{option}={value}"
    return found


def _objects(tree: Tree) -> dict[str, Any]:
    """Load the task and the data that a tree names."""
    found = {}
    for name in OBJECTS:
        if name in tree:
            option, reference = f"--{name.replace('_', '-')}", tree[name].get("class_path")
            if reference is None:
                raise ConfigError(f"an argument for {option} is given without {option} NAME")
            found[name] = load(reference, option)
    return found


def _values(tree: Tree, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of every object in a tree, in the form that jsonargparse takes."""
    values: dict[str, Any] = {"trainer": dict(tree["trainer"])}
    for name, each in found.items():
        arguments = tree[name].get("init_args")
        if arguments and not _is_callable(each):
            raise ConfigError(
                f"--{name} names a finished {type(each).__name__}, so --{name}.{next(iter(arguments))} has no"
                " effect; name its class"
            )
        values |= {name: dict(arguments)} if arguments else {}
    for name in NAMED:
        if name in tree["trainer"]:
            named = tree["trainer"][name]
            values["trainer"][name] = named.get("init_args") or named["class_path"]
    return values


@functools.cache
def _configurations() -> Mapping[str, Any]:
    """Return the Trainer's arguments that have options, with their dataclass; None for `NAMED` ones."""
    found = {
        name: next((each for each in get_args(hint) if dataclasses.is_dataclass(each)), None)
        for name, hint in get_type_hints(Trainer).items()
    }
    return {name: each for name, each in found.items() if (each or name in NAMED) and each is not Every}


def _given_kinds(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return the class of each Trainer argument that is given by its options."""
    kinds = {}
    for name, kind in _configurations().items():
        if isinstance(given := trainer.get(name), str) and given.startswith("{"):
            trainer[name] = read_value(given)  # the same as its parts
        if name in NAMED and trainer.get(name, {}).get("init_args"):
            kinds[name] = _options_of(name, trainer[name])
        elif name not in NAMED and isinstance(trainer.get(name), Mapping):
            kinds[name] = kind
    return kinds


def _options_of(argument: str, given: Mapping[str, Any]) -> Any:
    """Return the configuration class of the chosen strategy or precision."""
    chosen = given.get("class_path")
    if chosen is None:
        raise ConfigError(f"an option of a {argument} lacks its name: give --trainer.{argument} NAME too")
    return config_type(chosen) if argument == "strategy" else type(as_precision(chosen))


# The parsers of jsonargparse.


def _full_parser(command: str, purpose: str, tree: Tree, found: Mapping[str, Any]) -> Arguments:
    """Return a parser with every possible option, for help and completion."""
    parser = Arguments(
        prog=f"drivetrain {command}",
        description=f"{purpose.capitalize()}.",
        usage=_usage(command),
        allow_abbrev=False,
        parser_mode=_MODE,
        print_config=None,
    )
    _add_options(parser, command)
    kinds = {name: kind for name, kind in _configurations().items() if name not in NAMED}
    for name in {*NAMED} & {*tree["trainer"]}:
        with contextlib.suppress(DrivetrainError):  # unknown, or without options
            kinds[name] = _options_of(name, tree["trainer"][name])
    _add_arguments(parser, tree, found, kinds)
    return parser


def _short_parser(command: str) -> Parser:
    """Return a parser of the options without a dot."""
    usage = _usage(command)
    parser = Parser(prog=f"drivetrain {command}", usage=usage, add_help=False, exit_on_error=False)
    shown = "print this; with `all`, explain every argument"
    add = parser.add_argument
    add("-h", "--help", nargs="?", const=False, choices=("all",), metavar="all", default=SUPPRESS, help=shown)
    _add_options(parser, command)
    return parser


def _usage(command: str) -> str:
    data = " --data NAME" if command in _WITH_DATA else ""
    return f"drivetrain {command} --task NAME{data} [--trainer.NAME VALUE] ..."


def _print_help(command: str, purpose: str, tree: Tree, found: Mapping[str, Any], is_all: bool) -> None:
    """Print the help: of all arguments, or the options and the other arguments' names with their defaults."""
    if is_all:
        _full_parser(command, purpose, tree, found).print_help()
        return
    arguments = Arguments(exit_on_error=False, parser_mode=_MODE, print_config=None)
    _add_arguments(arguments, tree, found, {})
    lines = ["Arguments as --trainer.NAME VALUE, with defaults other than none and false:"]
    if command != "fit":
        lines = ["Arguments of the Trainer, as --trainer.NAME VALUE: see `drivetrain fit --help`"]
    shown = [each for each in arguments._actions if command == "fit" or not each.dest.startswith("trainer.")]
    for group, actions in itertools.groupby(shown, key=operator.attrgetter("container")):
        names = [each for each in actions if not each.dest.endswith("help")]
        if names:
            title = str(group.title).partition(": ")[2] or f"--{names[0].dest.partition('.')[0]}.NAME"
            text = f"{title}: {', '.join(map(_with_default, names))}"
            room = shutil.get_terminal_size((80, 24)).columns
            lines.append(textwrap.fill(text, room, initial_indent="  ", subsequent_indent="    "))
    short = _short_parser(command)
    short.description = f"{purpose[0].upper()}{purpose[1:]}."
    short.epilog = "\n".join([*str(short.epilog).splitlines(), *lines])
    short.print_help()


def _with_default(action: Any) -> str:
    name, default = action.dest.rpartition(".")[2], action.default
    shown = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
    return str(name) if shown in ("None", "False", SUPPRESS, "") else f"{name}={shown}"


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    for flag, option in _OPTIONS.items():
        if command not in option.commands:
            continue
        if option.value is None:
            parser.add_argument(flag, action="store_true", default=SUPPRESS, help=option.help)
        else:
            parser.add_argument(flag, type=str, default=SUPPRESS, metavar=option.value, help=option.help)


def _add_arguments(
    parser: Arguments,
    tree: Tree,
    found: Mapping[str, Any],
    kinds: Mapping[str, Any],
    leave_out: Collection[str] = (),
) -> None:
    """Add the arguments of the task, of the data, of the Trainer and of its configurations."""
    for name, each in found.items():
        if _is_callable(each) and _parameters(each):
            group = parser.add_argument_group(f"arguments of {tree[name]['class_path']}")
            add = group.add_class_arguments if isinstance(each, type) else group.add_function_arguments
            add(each, name, as_group=False, fail_untyped=False)
    _add_fields(parser, "trainer", Trainer, leave_out)
    for name, kind in kinds.items():
        _add_fields(parser, f"trainer.{name}", kind, ("name",) if name == "precision" else ())
    parser.take_types_of_defaults()


def _add_fields(parser: Arguments, section: str, kind: Any, leave_out: Collection[str]) -> None:
    """Add the arguments of the Trainer, or of a configuration."""
    types = {name: _writable(hint) for name, hint in get_type_hints(kind).items()}
    if kind is Trainer:
        types |= {"callbacks": list[_CallbackOption], "loggers": list[_LoggerOption | str]}
    fields = {each.name: each for each in dataclasses.fields(kind) if each.name not in leave_out}
    documented = _documented(kind)
    others = fields.keys() - {name for texts in documented.values() for name in texts}
    rest: dict[str, str | None] = dict.fromkeys(sorted(others))
    groups: list[tuple[str, Mapping[str, str | None]]] = [*documented.items(), ("", rest)]
    for title, texts in groups:
        group = parser.add_argument_group(f"arguments of {kind.__name__}{title and f': {title.lower()}'}")
        for name in [each for each in texts if each in fields]:
            default = _default(fields[name])
            group.add_argument(f"--{section}.{name}", type=types[name], default=default, help=texts[name])


_NARROWEST_FIRST = (bool, int, float, None, str, Any, NoneType)  # containers are between float and str


def _writable(hint: Any) -> Any:
    """Return the types in an annotation that text can express, narrowest first; `str` takes any text."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    ranks: dict[Any, int] = {}
    for each in members:
        kind = get_origin(each) or each
        is_class = isinstance(kind, type)
        if each in _NARROWEST_FIRST:
            ranks[each] = _NARROWEST_FIRST.index(each)
        elif kind is Callable:
            if str not in members:  # a text would be read as the path of a function
                ranks[each] = 3
        elif kind is tuple or (is_class and issubclass(kind, Mapping)):
            ranks[each] = 3
        elif is_class and issubclass(kind, Iterable) and get_args(each):
            ranks[list[get_args(each)[0]]] = 3  # type: ignore[misc]
    return functools.reduce(operator.or_, sorted(ranks, key=ranks.__getitem__)) if ranks else Any


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _documented(kind: type) -> dict[str, dict[str, str]]:
    """Return the text for each argument in the docstrings of a class and its bases, by the group's title.

    A section "Attributes: Length" is a group of its own. Defaults are left out, because the parser adds them.
    """
    found: dict[str, dict[str, str]] = {}
    google = docstring_parser.DocstringStyle.GOOGLE
    for each in reversed(kind.__mro__):
        for part in re.split(r"(?m)^(?=(?:Attributes|Args):)", inspect.cleandoc(vars(each)["__doc__"] or "")):
            head, _, rest = part.partition("\n")
            word, _, title = head.partition(":")
            if word not in ("Attributes", "Args"):
                continue
            # The parser wants a summary before the section.
            for entry in docstring_parser.parse(f"_\n\n{word}:\n{rest}", google).params:
                text = " ".join((entry.description or "").split()).replace("%", "%%")
                text = re.sub(r" Default: .*?\. (?=Example: )", " ", text)
                found.setdefault(title.strip(), {}).update(dict.fromkeys(entry.arg_name.split(", "), text))
    return found


def _is_callable(found: Any) -> bool:
    """Return whether the named thing makes the object when called; otherwise it is the object."""
    return isinstance(found, type) or inspect.isroutine(found)


def _parameters(function: Any) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a function in C without a signature
        return ()


# Messages.

_MODE = "drivetrain"
_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
_WORDS |= {"collections.abc.Mapping": "a mapping ({a: 1, b: 2})"}
_WORDS |= {"NoneType": "none", "list": "a list (a,b,c)", "tuple": "a list (a,b,c)"}

set_loader(_MODE, read_value, (yaml.YAMLError,))


def _choices(annotation: str) -> str:
    inside = re.fullmatch(r"Literal\[(.*)\]", annotation)
    return inside[1].replace(", ", " or ") if inside else annotation


def _unknown(kind: Any, name: str, allowed: Iterable[str]) -> ConfigError:
    """Return the error for an argument that a class or a function does not have."""
    option = f"--{name.replace('_', '-')}"
    if kind is Trainer and option in _OPTIONS:
        return ConfigError(f"Trainer has no argument {name!r}. Write {option} in place of --trainer.{name}")
    is_ours = kind.__module__.startswith("drivetrain.")
    hint = help_with(name, allowed, owner=kind.__name__) if is_ours else nearest(name, allowed)
    return ConfigError(f"{kind.__name__} has no argument {name!r}. {hint}")
