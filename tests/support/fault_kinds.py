"""What can go wrong with an operation on a file."""

import errno
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

# What is counted; "look" is `FileSystem.kind` and `FileSystem.entries`.
Operation: TypeAlias = Literal[
    "look", "open", "read", "create", "write", "finish", "make directory", "sync", "rename", "delete"
]
FaultKind: TypeAlias = Literal[
    "kill", "power cut", "ENOSPC", "EACCES", "EIO", "full disk",
    "lost answer", "short write", "lying write", "flip", "drop", "truncate",
]  # fmt: skip
_CHANGES: frozenset[Operation] = frozenset(
    ("create", "write", "finish", "make directory", "sync", "rename", "delete")
)
OPERATIONS: dict[FaultKind, frozenset[Operation]] = {
    "kill": _CHANGES | {"open", "read"},
    "power cut": _CHANGES,
    "ENOSPC": _CHANGES - {"delete"},
    "EACCES": frozenset(("look", "open", "create", "make directory", "rename", "delete")),
    "EIO": _CHANGES | {"look", "open", "read"},
    "full disk": frozenset(("create", "write", "finish", "make directory")),
    "lost answer": _CHANGES - {"create", "write"},
    "short write": frozenset(("write",)),
    "lying write": frozenset(("write",)),
    "flip": frozenset(("write", "read")),
    "drop": frozenset(("finish",)),
    "truncate": frozenset(("finish",)),
}
"""The kinds of faults, and the operations that each can happen at.

- "kill": the process is gone, half-way through the operation, before it or after it.
- "power cut": likewise, and what was not made durable may be lost or torn.
- "ENOSPC", "EACCES", "EIO": the operation fails with that error. A directory may be half deleted then.
- "full disk": ENOSPC from here on, until `FaultyFileSystem.heal`; the write that meets it is done in part.
- "lost answer": the operation is done, and fails with EIO all the same.
- "short write": only a part is taken, which is reported and allowed.
- "lying write": only a part is stored, and all of it reported.
- "flip": one bit of what is written, or of what is read, is not what it was.
- "drop": a finished file is gone.
- "truncate": a finished file is cut short.
"""


class Killed(BaseException):
    """The process has ended here. No `Exception`, because nothing may handle it."""


@dataclass(frozen=True, slots=True)
class Fault:  # what is to go wrong, and where
    operation: int  # its number, from 1; the fault happens at the first from there on that it suits
    kind: FaultKind
    seed: int = 0  # decides which bit, how many bytes, and what a power cut keeps


@dataclass(frozen=True, slots=True)
class Step:  # one operation that was asked for
    operation: Operation
    path: str  # of a renaming the old name
    fault: FaultKind | None = None  # None also for what fails because an earlier fault lasts


def suits(kind: FaultKind, operation: Operation, renames: bool) -> bool:
    # An object store knows neither directories nor power cuts of ours.
    if not renames and (kind == "power cut" or operation in ("sync", "make directory")):
        return False
    return operation in OPERATIONS[kind]


def failure(kind: FaultKind, path: str) -> OSError:  # the error that a fault of this kind looks like
    code = {"ENOSPC": errno.ENOSPC, "full disk": errno.ENOSPC, "EACCES": errno.EACCES}.get(kind, errno.EIO)
    return OSError(code, os.strerror(code), path)
