"""The command `drivetrain`: reads the command line, and reports an error in one message."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.cli.printing import any_text
from drivetrain.cli.references import importable_here
from drivetrain.core.errors import (
    ConfigError,
    DrivetrainError,
    MissingDependencyError,
    shown,
    without_secrets,
)
from drivetrain.core.registry import Registry
from drivetrain.core.version import __version__

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: a wrong command line or configuration, any other error, and Ctrl-C (as in shells)."""

_RUNS = {
    "fit": "train a task",
    "validate": "evaluate a task on validation data",
    "test": "evaluate a task on test data",
    "predict": "write or print a task's predictions",
    "plan": "say what a fit would do, without training",
    "summary": "show a task's parameters by module",
    "search": "search hyper-parameters; `search show DIR` shows the trials",
}
_COMMANDS: Registry[Any] = Registry(
    "command",
    {
        **{name: f"drivetrain.cli.commands:{name}" for name in _RUNS},
        "search": "drivetrain.integrations.optuna.command:search_command",
    },
)
_SMALL = {
    "env": "say what is installed and which devices there are",
    "completion": "print a script that makes a shell complete commands",
}
_OTHERS = {
    "new": "write a small project that trains",
    "launch": "start a program as several processes, on one machine or many",
    "check-resume": "kill and resume a program, and name the first difference",
    "checkpoint": "list, show, verify or export checkpoints",
    "runs": "list runs, and show where the time of a run went",
}
"""Commands with a module of their own, whose function `run` takes the words after the command."""

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""An option that the launcher `deepspeed` puts before a module's arguments; the environment has it too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    An error of drivetrain is printed to stderr as one message, with `--debug` as a traceback. An exception of
    the user's code propagates, so that its traceback is shown.

    Args:
        argv: The words after `drivetrain`; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and _LOCAL_RANK.fullmatch(words[0]) and "LOCAL_RANK" in os.environ:
        del words[0]
    try:
        with any_text():
            return _reported(words)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:  # with EPIPE, the reader, such as `head`, has read what it wanted
            print(f"drivetrain: the output cannot be written: {error.strerror}", file=sys.stderr)
        return FAILURE


def _reported(words: Sequence[str]) -> int:
    """Run a command, print its error, and return its exit code."""
    try:
        with importable_here():
            if "_ARGCOMPLETE" in os.environ:
                _complete()
            return _run(words)
    except SystemExit as stop:  # argparse, after --help, --version or a usage message
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else FAILURE
    except DrivetrainError as error:
        if "--debug" in words:
            traceback.print_exc()
        else:
            notes = getattr(error, "__notes__", ())
            print(shown("\n".join([f"drivetrain: {error}", *notes])), file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILURE
    except KeyboardInterrupt as error:
        print("\n".join(["drivetrain: interrupted", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    # Imports are late: help must not wait for torch.
    command = words[0] if words else ""
    if words[:2] == ["search", "show"]:
        return int(importlib.import_module("drivetrain.integrations.optuna.command").show(words[2:]))
    if command in _RUNS:
        return _run_task(command, words[1:])
    if command in _OTHERS:
        module = "checkpoint.arguments" if command == "checkpoint" else command.replace("-", "_")
        return int(importlib.import_module(f"drivetrain.cli.{module}").run(words[1:]))
    parsed = _parser().parse_args(words)
    if command == "completion":
        try:
            from argcomplete.shell_integration import shellcode
        except ImportError:
            raise MissingDependencyError("argcomplete", "completion", "drivetrain completion") from None
        print(shellcode(["drivetrain"], shell=parsed.shell))
        return 0
    from drivetrain.cli.environment import print_environment

    print_environment(parsed.json)
    return 0


def _run_task(command: str, words: Sequence[str]) -> int:
    from drivetrain.cli.settings import Settings
    from drivetrain.distributed.launch.environment import detect

    settings = Settings(command, _RUNS[command], words)
    job = detect(os.environ)
    with contextlib.ExitStack() as stack:
        if job is not None and job.rank > 0:  # rank 0 prints for all ranks
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if settings.option("print_config"):
            print(without_secrets(settings.as_file()), end="")
        else:
            _COMMANDS[command](settings, bool(settings.option("json")))
    return 0


def _complete() -> None:
    """Answer a shell's request for completions by argcomplete's protocol, and exit."""
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = shlex.split(line)[1:] if line.count('"') % 2 == line.count("'") % 2 == 0 else []
    if len(words) + line.endswith(" ") > 1 and words[0] in _RUNS:
        from drivetrain.cli.settings import complete

        complete(words[0], words[1:])
    argcomplete.autocomplete(_parser())


def _parser() -> Parser:
    parser = Parser(prog="drivetrain", description="Train PyTorch tasks. Each command has --help.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in (_RUNS | _SMALL | _OTHERS).items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        if name == "env":
            command.add_common()
        elif name == "completion":
            command.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser
