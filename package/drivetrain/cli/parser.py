"""The argument parser that all commands share."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NoReturn

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.synonyms import help_with, row


class Parser(argparse.ArgumentParser):
    """A parser that takes only full option names, and suggests the nearest for an unknown one.

    Its help ends with examples. Where a command is missing, the help is printed.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)
        self.epilog = "\n\n".join(filter(None, (_examples(self.prog), self.epilog)))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [
                each for each in self._option_string_actions if each.startswith("--") and each != "--help"
            ]
            name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
            if row(name, "option") is not None:
                hint = help_with(name, options, "option")
            else:
                of_trainer = _of_trainer(name) if "--task" in options else None
                hint = of_trainer or nearest(unknown[0], options)
            raise ConfigError(f"{self.prog}: unknown argument {unknown[0]}. {hint}")
        return found, []

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
            raise ConfigError(f"{self.prog}: there is no {choice[1]!r}. {hint}")
        if self._subparsers is not None and "are required" in message:
            self.print_help()
            self.exit(2)
        super().error(message)

    def add_common(self, json: bool = True) -> None:
        """Add the options of all commands, and that of those that print results."""
        if json:
            self.add_argument("--json", action="store_true", help="print JSON")
        self.add_argument("--debug", action="store_true", help="show the traceback of every error")

    def add_program(self) -> None:
        """Add the program that a command runs, and its arguments; see `program_words`."""
        add = self.add_argument
        add("-m", "--module", action="store_true", help="the program is a module, as for python -m")
        add("program", help="a file")
        add("arguments", nargs=argparse.REMAINDER, help="the program's arguments")


class _Formatter(argparse.HelpFormatter):
    """Wraps each line of a text but indented ones, which can be copied."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n".join(
            each if each.startswith(" ") else fill(each, width, indent) for each in text.split("\n")
        )


def _examples(command: str) -> str:
    """Return the first three of `examples.txt` that call a command."""
    text = resources.files(__package__).joinpath("examples.txt").read_text(encoding="utf-8")
    found = re.findall(r"^\S.*\n(?:  .*\n)+", text, re.M)
    called = [each for each in found if re.search(rf"\n  {command}\s", each)]
    return "".join([*{each.partition("\n")[2]: each for each in called}.values()][:3])  # each line once


def program_words(parsed: argparse.Namespace) -> list[str]:
    """Return the words after `python` that run the program of `Parser.add_program`."""
    return [*(["-m"] if parsed.module else []), parsed.program, *parsed.arguments]


def _of_trainer(name: str) -> str | None:
    """Return how to write an argument of the Trainer, ours or another library's; None for any other name."""
    from drivetrain.trainer.trainer import Trainer  # torch too: for this error alone

    arguments = inspect.signature(Trainer).parameters
    if name in arguments:
        return f"It is an argument of the Trainer: write --trainer.{name}."
    if row(name, "argument", "Trainer") is None:
        return None
    told = help_with(name, arguments, owner="Trainer").partition(" Allowed: ")[0]
    return f"{told} The Trainer's arguments are written --trainer.NAME."
