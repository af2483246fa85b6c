"""The command `drivetrain`: reads the command line, and says in one message what is wrong with it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence

from drivetrain.cli.parser import Parser
from drivetrain.cli.references import importable_here
from drivetrain.errors import ConfigError, DrivetrainError
from drivetrain.mps_fallback import enable_mps_fallback
from drivetrain.version import __version__

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: a wrong command line or configuration, any other error, and Ctrl-C as shells count it."""

_RUNS = {
    "fit": "train a task",
    "validate": "evaluate a task on validation data",
    "test": "evaluate a task on test data",
    "predict": "write or print a task's predictions",
    "plan": "say what a fit would do, without training",
}
_LISTS = {
    "env": "say what is installed and which devices there are",
    "strategies": "list the strategies, what they need and which can run here",
}
_OTHERS = {
    "launch": "start a program as several processes, on one machine or many",
    "check-resume": "kill and resume a program, and name what was not saved",
    "checkpoint": "list, show, verify, export, compare and import checkpoints",
    "runs": "list runs, and show what the time of one went to",
}
"""Commands that read their own words: each has a module with a function `run`."""

_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""What the launcher `deepspeed` puts before a module's words; it is in the environment too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The words after `drivetrain`; None takes the process's.

    An error of drivetrain's is one message on stderr, and with `--debug` a traceback; an exception of the
    user's code is passed on, so that it shows where it came from.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and _LOCAL_RANK.fullmatch(words[0]) and "LOCAL_RANK" in os.environ:
        del words[0]
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
            print("\n".join([f"drivetrain: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILURE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:
        print("drivetrain: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(words: Sequence[str]) -> int:
    # Imported where they are used: help must not wait for torch.
    command = words[0] if words else ""
    if command in _RUNS:
        return _run_task(command, words[1:])
    if command in _OTHERS:
        module = importlib.import_module(f"drivetrain.cli.{command.replace('-', '_')}")
        return int(module.run(words[1:]))
    parsed = _parser().parse_args(words)
    from drivetrain.cli.environment import print_environment
    from drivetrain.cli.strategies import print_strategies

    (print_environment if command == "env" else print_strategies)(parsed.json)
    return 0


def _run_task(command: str, words: Sequence[str]) -> int:
    if "--mps-fallback" in words:  # before torch is imported
        enable_mps_fallback()
    from drivetrain.cli.arguments import Settings
    from drivetrain.cli.commands import COMMANDS
    from drivetrain.distributed.environment import detect

    settings = Settings(command, _RUNS[command], words)
    job = detect(os.environ)
    with contextlib.ExitStack() as stack:
        if job is not None and job.rank > 0:  # rank 0 tells what all of them found
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if settings.option("print_config"):
            print(settings.as_file(), end="")
        else:
            COMMANDS[command](settings, bool(settings.option("json")))
    return 0


def _complete() -> None:
    """Answer a shell that asks for completions by argcomplete's protocol, and exit."""
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = shlex.split(line)[1:] if line.count('"') % 2 == line.count("'") % 2 == 0 else []
    if len(words) + line.endswith(" ") > 1 and words[0] in _RUNS:
        from drivetrain.cli.arguments import complete

        os.environ["_ARGCOMPLETE"] = "2"  # the parser's own words begin behind the command
        complete(words[0], words[1:])
    argcomplete.autocomplete(_parser())


def _parser() -> Parser:
    parser = Parser(prog="drivetrain", description="Train PyTorch tasks.")
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in (_RUNS | _LISTS | _OTHERS).items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose.capitalize()}.")
        if name in _LISTS:
            command.add_common()
    return parser
