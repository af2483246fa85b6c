"""`drivetrain checkpoint push`: upload a checkpoint's model to the Hugging Face Hub."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from drivetrain.cli.printing import line, print_json

ABOUT = (
    "Uploads the weights, the files beside them, TensorBoard's files and a model card in one commit, and"
    " prints its address. The token is that of HF_TOKEN, or of `hf auth login`. Needs the extra 'hub'."
)


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the arguments by a parser's `add_argument`."""
    path = "a checkpoint, or a run directory: its newest good checkpoint; on a local disk"
    add("path", metavar="PATH", help=path)
    add("repository", metavar="REPOSITORY", help="such as organisation/name; made if missing")
    add("--revision", metavar="BRANCH", help="the branch; made if missing")
    add("--private", action="store_true", default=None, help="make a missing repository a private one")
    add("--checkpoint", action="store_true", help="upload the whole checkpoint too, as last-checkpoint")
    add("--license", metavar="NAME", help="the licence in the model card, such as apache-2.0")
    for option, field, about in (
        ("--tag", "tags", "a tag in the model card"),
        ("--base-model", "base_model", "the repository of weights that training started from"),
        ("--dataset", "datasets", "a data set on the Hub"),
    ):
        add(option, dest=field, metavar="NAME", action="append", default=[], help=f"{about}; may be repeated")


def run(parsed: argparse.Namespace) -> int:
    """Upload, print the address of the commit, and return the exit code."""
    from drivetrain.integrations.hub import CardData, push  # late: --help must not wait for torch

    card = CardData(
        license=parsed.license,
        tags=parsed.tags,
        base_model=parsed.base_model or None,
        datasets=parsed.datasets,
    )
    address = push(
        parsed.path,
        parsed.repository,
        revision=parsed.revision,
        private=parsed.private,
        checkpoint=parsed.checkpoint,
        card=card,
    )
    if parsed.json:
        print_json({"repository": parsed.repository, "commit": address})
    else:
        line(address)
    return 0
