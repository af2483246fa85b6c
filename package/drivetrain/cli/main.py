"""The command `drivetrain`: reads the command line, and says in one message what is wrong with it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from drivetrain.cli.config import OBJECTS, TEXTS, Settings, merged, read_file, split_dotted
from drivetrain.cli.references import importable_here
from drivetrain.errors import ConfigError, DrivetrainError, nearest
from drivetrain.mps_fallback import enable_mps_fallback
from drivetrain.version import __version__

USAGE, FAILURE, INTERRUPTED = 2, 1, 130
"""Exit codes: a wrong command line or configuration, any other error, and Ctrl-C as shells count it."""

_COMMANDS = {
    "fit": "train a task",
    "validate": "evaluate a task on validation data",
    "test": "evaluate a task on test data",
    "predict": "write or print a task's predictions",
    "plan": "say what a fit would do, without training",
    "env": "say what is installed and which devices there are",
    "strategies": "list the strategies, what they need and which can run here",
    "launch": "start a program as several processes, on one machine or many",
    "check-resume": "kill and resume a program, and name what was not saved",
    "checkpoint": "list, show, verify, export, compare and import checkpoints",
    "runs": "list runs, and show what the time of one went to",
}
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""What the launcher `deepspeed` puts before a module's words; it is in the environment too."""

_RUNS = ("fit", "validate", "test", "predict", "plan")
_LISTS = ("env", "strategies")


class _Option(NamedTuple):
    """An option: what its value is called (None for a switch), its help, and the commands that have it."""

    value: str | None
    help: str
    commands: Sequence[str]


_OPTIONS = {
    "--task": _Option("NAME", "module.Class or path/to/file.py:Class", _RUNS),
    "--data": _Option(
        "NAME",
        "an object with train_data() and so on, a class of such, or a function that returns one",
        _RUNS,
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
        None,
        "on a Mac: have the CPU compute what MPS cannot",
        ("fit", "validate", "test", "predict"),
    ),
    "--config": _Option("FILE", "a JSON file with the same settings; the command line wins", _RUNS),
    "--print-config": _Option(None, "print the merged settings as JSON, and stop", _RUNS),
    "--json": _Option(None, "print JSON", (*_RUNS, *_LISTS)),
    "--debug": _Option(None, "show the traceback of every error", (*_RUNS, *_LISTS)),
}
_EPILOG = """\
--task.NAME VALUE, --data.NAME VALUE and --trainer.NAME VALUE set a constructor's argument:
  --task.hidden 256 --trainer.max_epochs 3 --trainer.strategy cpu --trainer.loggers csv,jsonl
  --trainer.checkpoint.every "100 steps" --trainer.progress_bar false
  --trainer.strategy ddp --trainer.strategy.bucket_mb 50
"""


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
    if words and words[0] == "checkpoint":  # it has words of its own behind it
        from drivetrain.cli.checkpoint_words import run

        return run(words[1:])
    if words and words[0] == "runs":
        from drivetrain.cli.runs import run as run_runs

        return run_runs(words[1:])
    if words and words[0] == "launch":  # behind the program's name, the words are the program's
        from drivetrain.cli.launch import run as run_launch

        return run_launch(words[1:])
    if words and words[0] == "check-resume":
        from drivetrain.cli.check_resume import run as run_check

        return run_check(words[1:])
    rest, dotted = split_dotted(words)
    parsed, unknown = _parser().parse_known_args(rest)
    if unknown:
        allowed = [name for name, option in _OPTIONS.items() if parsed.command in option.commands]
        raise ConfigError(
            f"drivetrain {parsed.command}: unknown argument {unknown[0]}. {nearest(unknown[0], allowed)}"
        )
    if parsed.command in _LISTS:
        _refuse_dotted(parsed.command, dotted)
        # Imported here and below, so that --help and a wrong command line need not wait for torch.
        from drivetrain.cli.environment import print_environment
        from drivetrain.cli.strategies import print_strategies

        (print_environment if parsed.command == "env" else print_strategies)(parsed.json)
        return 0
    settings = _settings(parsed, dotted)
    if getattr(parsed, "mps_fallback", False):
        enable_mps_fallback()
    from drivetrain.cli.commands import COMMANDS, print_config
    from drivetrain.distributed.environment import detect

    job = detect(os.environ)
    with contextlib.ExitStack() as stack:
        if job is not None and job.rank > 0:  # rank 0 tells what all of them found
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if parsed.print_config:
            print_config(settings)
        else:
            COMMANDS[parsed.command](settings, parsed.json)
    return 0


def _refuse_dotted(command: str, dotted: dict[str, dict[str, object]]) -> None:
    for section, values in dotted.items():
        for name in values:
            raise ConfigError(f"drivetrain {command} takes no --{section}.{name}")


def _settings(parsed: argparse.Namespace, dotted: dict[str, dict[str, object]]) -> Settings:
    given = {name: value for name, value in vars(parsed).items() if isinstance(value, str)}
    objects = {name: value for name, value in given.items() if name in OBJECTS}
    texts = {name: value for name, value in given.items() if name in TEXTS}
    line = Settings(objects, dotted, texts)
    return line if parsed.config is None else merged(read_file(parsed.config), line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain", description="Train PyTorch tasks.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=purpose.capitalize() + ".",
            epilog=_EPILOG if name in _RUNS else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for flag, option in _OPTIONS.items():
            if name not in option.commands:
                continue
            if option.value is None:
                command.add_argument(flag, action="store_true", help=option.help)
            else:
                command.add_argument(flag, metavar=option.value, help=option.help)
    return parser
