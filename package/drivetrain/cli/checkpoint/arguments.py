"""The arguments of `drivetrain checkpoint`: its actions and their options."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.core.errors import plain
from drivetrain.core.messages import handled_by

_EPILOG = (
    "Each PATH but push's may also be an address, such as s3://bucket/run. Only export, push and"
    " import write anything."
)
_ONE = "a checkpoint, or a run directory: its newest good checkpoint"

_ELSEWHERE = {
    "push": (
        "upload a checkpoint's model to the Hugging Face Hub",
        "drivetrain.integrations.hub.push_command",
    ),
    "import": (
        "make a checkpoint of weights that another program saved",
        "drivetrain.integrations.weight_files.import_command",
    ),
}
"""Actions of integrations: the purpose, and the module with ABOUT, add_arguments(add) and run(parsed)."""


def run(words: Sequence[str]) -> int:
    """Run `drivetrain checkpoint` with the words after it, and return the exit code."""
    parsed = _parser(words).parse_args(words)
    with handled_by(_Plain(logging.WARNING)):
        if parsed.action in _ELSEWHERE:
            return int(importlib.import_module(_ELSEWHERE[parsed.action][1]).run(parsed))
        # Imported here, so that --help and a wrong command line do not wait for torch.
        from drivetrain.cli.checkpoint.actions import ACTIONS

        return ACTIONS[parsed.action](parsed)


def _parser(words: Sequence[str]) -> Parser:
    parser = Parser(
        prog="drivetrain checkpoint",
        description="List, show, verify, export, push and import checkpoints.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, purpose: str, about: str) -> Callable[..., Any]:
        """Add an action, and return the function that adds its arguments."""
        description = f"{purpose[0].upper()}{purpose[1:]}. {about}"
        made = actions.add_parser(name, help=purpose, description=description, epilog=_EPILOG)
        made.add_common()
        return made.add_argument

    add = action(
        "list",
        "list the checkpoints of a run, the newest last",
        "Shows the order and purpose of each by the index, and checkpoints that were set aside, lost or never"
        " finished. Reads no tensors.",
    )
    add("path", metavar="PATH", help="a run directory, a directory of checkpoints, or a checkpoint")

    add = action(
        "show",
        "show what a checkpoint contains",
        "Progress, metrics, the task's arguments, optimizer settings, files, and a summary of the tensors."
        " Reads tensors only to find a run's newest good checkpoint.",
    )
    add("path", metavar="PATH", help=_ONE)

    add = action(
        "verify",
        "check every byte; exit code 1 if anything is damaged",
        "Compares each file and tensor with its hash and reports which is wrong. Repairs nothing. Checkpoints"
        " that a run has set aside as damaged, and unfinished ones, are shown and not checked, unless given"
        " by their paths.",
    )
    add("paths", metavar="PATH", nargs="+", help="a checkpoint, or a run directory: all of its checkpoints")

    add = action(
        "export",
        "write weights to a plain file, or a folder for transformers",
        "Writes safetensors, or a state dict that torch.load(..., weights_only=True) reads, or a folder that"
        " transformers' from_pretrained loads, and prints the files.",
    )
    add("path", metavar="PATH", help=_ONE)
    add(
        "output",
        metavar="OUTPUT",
        help="the file, such as model.safetensors, or the folder for transformers; also an address",
    )
    add(
        "--format",
        choices=("safetensors", "torch", "transformers"),
        default="safetensors",
        help="the kind of file; default safetensors. Only a task of a model of transformers, or with"
        " ModelInfo(export_names=...), has one for transformers",
    )
    add("--dtype", metavar="DTYPE", help="convert floating-point tensors to this: float32, bf16, fp16...")
    add("--merge", action="store_true", help="for transformers: add the adapters of a PeftModel to its base")
    add("--max-shard-size", metavar="SIZE", help='split into files of at most this size, such as "5 GB"')
    add("--force", action="store_true", help="replace existing files")

    for name, (purpose, path) in _ELSEWHERE.items():
        module = importlib.import_module(path) if words[:1] == [name] else None
        add = action(name, purpose, "" if module is None else module.ABOUT)
        if module is not None:
            module.add_arguments(add)
    return parser


class _Plain(logging.Handler):
    """Prints messages without characters that a terminal would act on."""

    def emit(self, record: logging.LogRecord) -> None:
        print(plain(f"drivetrain: {record.getMessage()}"), file=sys.stderr)
