"""The words behind `drivetrain checkpoint`: its actions and their options."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from drivetrain.cli.printing import any_text, plain
from drivetrain.errors import ConfigError, nearest


class _Argument(NamedTuple):
    """An option or a positional argument: its name, its help, and what else argparse is to know of it."""

    name: str
    help: str
    settings: dict[str, Any]


class _Action(NamedTuple):
    """What can be done: in a few words, what there is to know of it, and its arguments."""

    purpose: str
    about: str
    arguments: Sequence[_Argument]


def _switch(name: str, text: str) -> _Argument:
    return _Argument(name, text, {"action": "store_true"})


def _value(name: str, metavar: str, text: str, **settings: Any) -> _Argument:
    return _Argument(name, text, {"metavar": metavar, **settings})


_PATH = _value("path", "PATH", "a checkpoint, or a run directory: its newest good checkpoint")
_RENAME = _value(
    "--rename",
    "PATTERN=NEW",
    "turn names there into the task's: what matches the regular expression into NEW, such as '^=net.'; may be"
    " given again",
    action="append",
)
_EVERYWHERE = (
    _switch("--json", "print one JSON object"),
    _switch("--debug", "show the traceback of every error"),
)
_ACTIONS = {
    "list": _Action(
        "list the checkpoints of a run, the newest last",
        "Tells order and purpose by the index, and what was set aside, lost or never finished. Reads no"
        " tensors.",
        (_value("path", "PATH", "a run directory, a directory of checkpoints, or a checkpoint"),),
    ),
    "show": _Action(
        "say what a checkpoint is",
        "Progress, metrics, the task's arguments, optimizer settings, files, and what the tensors are. Reads"
        " no tensors, but to find a run's newest good checkpoint.",
        (_PATH, _switch("--tensors", "list every tensor, with its dtype, shape and pieces")),
    ),
    "verify": _Action(
        "check every byte; exit code 1 if anything is damaged",
        "Compares each file and tensor with its hash and says which is wrong. Repairs nothing. What a run has"
        " set aside as damaged, and what is unfinished, is told and not checked, unless its path is given.",
        (_value("paths", "PATH", "a checkpoint, or a run directory: all of its checkpoints", nargs="+"),),
    ),
    "export": _Action(
        "write weights to a plain file",
        "Writes safetensors, or a state dict that torch.load(..., weights_only=True) reads, and prints the"
        " files.",
        (
            _PATH,
            _value("output", "OUTPUT", "the file, such as model.safetensors; also an address"),
            _Argument(
                "--format",
                "the kind of file; default safetensors",
                {"choices": ("safetensors", "torch"), "default": "safetensors"},
            ),
            _value("--dtype", "DTYPE", "convert floating-point tensors to it: float32, bf16, fp16..."),
            _value("--max-shard-size", "SIZE", 'split into files of at most this size, such as "5 GB"'),
            _value("--group", "NAME", "the group of tensors; default model", default="model"),
            _switch("--force", "replace what is there"),
        ),
    ),
    "diff": _Action(
        "say what differs between two checkpoints; exit code 1 if anything does",
        "Tensors by the hashes in the manifests, without reading those that are stored in the same pieces;"
        " and arguments, settings, metrics and counts. The time that a run took is left out.",
        (
            _value("first", "A", "a checkpoint, or a run directory: its newest good checkpoint"),
            _value("second", "B", "another"),
            _switch("--values", "measure how far the tensors that differ are apart; reads these"),
            _switch("--all", "list every difference, not the first ones"),
        ),
    ),
    "import": _Action(
        "make a checkpoint of weights that another program saved",
        "Takes the weights of a checkpoint of Lightning or Composer, or of a state dict, and Lightning's"
        " hyper-parameters that are plain values. Runs nothing that is in the file. Optimizer states are not"
        " read.",
        (
            _value("source", "FILE", "the file, such as last.ckpt or model.pt; also an address"),
            _value("output", "OUTPUT", "the checkpoint to write, a directory; also an address"),
            _RENAME,
        ),
    ),
    "import-deepspeed": _Action(
        "make a checkpoint of one that DeepSpeed's save_checkpoint wrote",
        "Takes the float32 weights, and the states of Adam or AdamW, of ZeRO 1, 2 and 3. Runs nothing that is"
        " in DeepSpeed's files, and needs no DeepSpeed.",
        (
            _value("folder", "FOLDER", "the folder with the file 'latest', or one inside with the files"),
            _value("output", "OUTPUT", "the checkpoint to write, a directory; also an address"),
            _value("--tag", "NAME", "the folder inside, such as global_step100; default what 'latest' says"),
            _RENAME,
            _switch("--weights-only", "leave the optimizer's states out"),
        ),
    ),
}
_EPILOG = (
    "Each PATH may also be an address, such as s3://bucket/run. Only export, import and"
    " import-deepspeed write anything."
)


def run(words: Sequence[str]) -> int:
    """Run `drivetrain checkpoint` with the words behind it.

    Returns:
        The exit code.

    Raises:
        ConfigError: An unknown option.
        SystemExit: A usage message, or help, was printed.
        DrivetrainError: From whatever was to be done.
    """
    parsed, unknown = _parser().parse_known_args(words)
    if unknown:
        arguments = (*_ACTIONS[parsed.action].arguments, *_EVERYWHERE)
        allowed = [each.name for each in arguments if each.name.startswith("-")]
        raise ConfigError(
            f"drivetrain checkpoint {parsed.action}: unknown argument {unknown[0]}. "
            f"{nearest(unknown[0], allowed)}"
        )
    # Imported here, so that --help and a wrong command line need not wait for torch.
    from drivetrain.cli.checkpoint import ACTIONS

    with _plain_warnings(), any_text():
        return ACTIONS[parsed.action](parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain checkpoint",
        description="Look at checkpoints, check them, take weights out of them, compare two, import.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in _ACTIONS.items():
        description = f"{action.purpose[0].upper()}{action.purpose[1:]}. {action.about}"
        command = commands.add_parser(
            name, help=action.purpose, description=description, epilog=_EPILOG, allow_abbrev=False
        )
        for argument in (*action.arguments, *_EVERYWHERE):
            command.add_argument(argument.name, help=argument.help, **argument.settings)
    return parser


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings of ours as messages, without the line of source code that Python adds."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        print(plain(f"drivetrain: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
