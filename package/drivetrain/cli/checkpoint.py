"""`drivetrain checkpoint`: its actions and their options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.cli.printing import any_text, plain

_EPILOG = (
    "Each PATH may also be an address, such as s3://bucket/run. Only export, import and"
    " import-deepspeed write anything."
)
_ONE = "a checkpoint, or a run directory: its newest good checkpoint"


def run(words: Sequence[str]) -> int:
    """Run `drivetrain checkpoint` with the words behind it, and return the exit code.

    Raises:
        ConfigError: An unknown option.
        SystemExit: A usage message, or help, was printed.
        DrivetrainError: From whatever was to be done.
    """
    parsed = _parser().parse_args(words)
    # Imported here, so that --help and a wrong command line need not wait for torch.
    from drivetrain.cli.checkpoint_actions import ACTIONS

    with _plain_warnings(), any_text():
        return ACTIONS[parsed.action](parsed)


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain checkpoint",
        description="Look at checkpoints, check them, take weights out of them, compare two, import.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, purpose: str, about: str) -> Parser:
        description = f"{purpose[0].upper()}{purpose[1:]}. {about}"
        made = actions.add_parser(name, help=purpose, description=description, epilog=_EPILOG)
        made.add_common()
        return made

    each = action(
        "list",
        "list the checkpoints of a run, the newest last",
        "Shows order and purpose by the index, and what was set aside, lost or never finished. Reads no"
        " tensors.",
    )
    each.add_argument(
        "path", metavar="PATH", help="a run directory, a directory of checkpoints, or a checkpoint"
    )

    each = action(
        "show",
        "say what a checkpoint is",
        "Progress, metrics, the task's arguments, optimizer settings, files, and what the tensors are. Reads"
        " no tensors, but to find a run's newest good checkpoint.",
    )
    each.add_argument("path", metavar="PATH", help=_ONE)
    each.add_argument(
        "--tensors", action="store_true", help="list every tensor, with its dtype, shape and pieces"
    )

    each = action(
        "verify",
        "check every byte; exit code 1 if anything is damaged",
        "Compares each file and tensor with its hash and says which is wrong. Repairs nothing. What a run has"
        " set aside as damaged, and what is unfinished, is shown and not checked, unless its path is given.",
    )
    each.add_argument(
        "paths", metavar="PATH", nargs="+", help="a checkpoint, or a run directory: all of its checkpoints"
    )

    each = action(
        "export",
        "write weights to a plain file",
        "Writes safetensors, or a state dict that torch.load(..., weights_only=True) reads, and prints the"
        " files.",
    )
    each.add_argument("path", metavar="PATH", help=_ONE)
    each.add_argument("output", metavar="OUTPUT", help="the file, such as model.safetensors; also an address")
    each.add_argument(
        "--format",
        choices=("safetensors", "torch"),
        default="safetensors",
        help="the kind of file; default safetensors",
    )
    each.add_argument(
        "--dtype", metavar="DTYPE", help="convert floating-point tensors to it: float32, bf16, fp16..."
    )
    each.add_argument(
        "--max-shard-size", metavar="SIZE", help='split into files of at most this size, such as "5 GB"'
    )
    each.add_argument("--group", metavar="NAME", default="model", help="the group of tensors; default model")
    each.add_argument("--force", action="store_true", help="replace what is there")

    each = action(
        "diff",
        "say what differs between two checkpoints; exit code 1 if anything does",
        "Tensors by the hashes in the manifests, without reading those that are stored in the same pieces;"
        " and arguments, settings, metrics and counts. The time that a run took is left out.",
    )
    each.add_argument("first", metavar="A", help=_ONE)
    each.add_argument("second", metavar="B", help="another")
    each.add_argument(
        "--values", action="store_true", help="measure how far the tensors that differ are apart; reads these"
    )
    each.add_argument("--all", action="store_true", help="list every difference, not the first ones")

    each = action(
        "import",
        "make a checkpoint of weights that another program saved",
        "Takes the weights of a checkpoint of Lightning or Composer, or of a state dict, and Lightning's"
        " hyper-parameters that are plain values. Runs nothing that is in the file. Optimizer states are not"
        " read.",
    )
    each.add_argument(
        "source", metavar="FILE", help="the file, such as last.ckpt or model.pt; also an address"
    )
    _add_import_options(each)

    each = action(
        "import-deepspeed",
        "make a checkpoint of one that DeepSpeed's save_checkpoint wrote",
        "Takes the float32 weights, and the states of Adam or AdamW, of ZeRO 1, 2 and 3. Runs nothing that is"
        " in DeepSpeed's files, and needs no DeepSpeed.",
    )
    each.add_argument(
        "folder", metavar="FOLDER", help="the folder with the file 'latest', or one inside with the files"
    )
    _add_import_options(each)
    each.add_argument(
        "--tag", metavar="NAME", help="the folder inside, such as global_step100; default what 'latest' says"
    )
    each.add_argument("--weights-only", action="store_true", help="leave the optimizer's states out")
    return parser


def _add_import_options(parser: Parser) -> None:
    parser.add_argument(
        "output", metavar="OUTPUT", help="the checkpoint to write, a directory; also an address"
    )
    parser.add_argument(
        "--rename",
        metavar="PATTERN=NEW",
        action="append",
        help="turn names there into the task's: what matches the regular expression into NEW, such as"
        " '^=net.'; may be given again",
    )


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings of ours as messages, without the line of source code that Python adds."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        print(plain(f"drivetrain: {message}"), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
