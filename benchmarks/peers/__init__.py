"""The contestants, each a file; which of them are installed, and where each is run."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.metadata import version as torch_version
from pathlib import Path

from peers.base import Peer

__all__ = ["HAND", "OURS", "ROSTER", "Entry", "Peer", "installed", "load", "versions"]

HAND = "hand-written"
OURS = "drivetrain"


@dataclass(frozen=True)
class Entry:
    """A contestant before anything of it is imported.

    Attributes:
        module: The file here.
        package: The distribution that it needs; None for torch alone.
        apart: Whether it is run in a process of its own, since what it does on import is for all.
        folder: Where its packages are, in the virtual environment's folder; None for among all others.
    """

    module: str
    package: str | None
    apart: bool = False
    folder: str | None = None

    @property
    def version(self) -> str | None:
        """Of its package; None where it is not installed."""
        if self.package is None:
            return torch_version("torch")
        places = {} if self.folder is None else {"path": [str(Path(sys.prefix, self.folder))]}
        found = next(iter(distributions(name=self.package, **places)), None)
        return None if found is None else found.version


ROSTER = {
    HAND: Entry("hand", None),
    OURS: Entry("ours", "drivetrain"),
    "Ignite": Entry("ignite", "pytorch-ignite"),
    "Lightning Fabric": Entry("fabric", "lightning"),
    "Accelerate": Entry("accelerate", "accelerate"),
    "torchtnt": Entry("torchtnt", "torchtnt"),
    "transformers Trainer": Entry("transformers", "transformers"),
    "Lightning": Entry("lightning", "lightning"),
    # One back end for all of a process, chosen by an environment variable.
    "Keras": Entry("keras", "keras", apart=True),
    # Importing it replaces functions of torch, and needs packages that break the others.
    "Composer": Entry("composer", "mosaicml", apart=True, folder="composer"),
}
"""By name, in the tables' order."""


def installed(wanted: list[str] | None = None) -> list[str]:
    """The contestants that can be run here, of those wanted; the hand-written loop is always one.

    Raises:
        SystemExit: A name that there is not.
    """
    unknown = [name for name in wanted or () if name not in ROSTER]
    if unknown:
        raise SystemExit(f"no contestant is called {unknown[0]!r}; there are: {', '.join(ROSTER)}")
    return [
        name
        for name, entry in ROSTER.items()
        if entry.version is not None and (wanted is None or name in wanted or name == HAND)
    ]


def load(name: str) -> Peer:
    """Import a contestant."""
    entry = ROSTER[name]
    if entry.folder is not None:
        sys.path.append(str(Path(sys.prefix, entry.folder)))
    made: Peer = importlib.import_module(f"peers.{entry.module}").PEER
    return made


def versions() -> dict[str, str]:
    """The version of every contestant's package, and of torch; "not installed" where it is not."""
    return {entry.package or "torch": entry.version or "not installed" for entry in ROSTER.values()}
