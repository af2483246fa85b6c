"""How what an older drivetrain has written becomes what this one reads: one step for each format version.

Every version is read for ever. When the format changes, `FORMAT_VERSION` rises by one, the step from the
version before is entered in `STEPS`, and small checkpoints of that version are put into the tests' corpus. No
other code knows of older versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from drivetrain.errors import CheckpointError
from drivetrain.types import Json

Fields: TypeAlias = dict[str, Json]


def _unchanged(fields: Fields) -> Fields:
    return fields


def _object_unchanged(name: str, value: Json) -> Json:
    return value


@dataclass(frozen=True, slots=True)
class Step:
    """From one format version to the next.

    What it is given comes from a file whose hash was right, and may be changed in place. It need not be
    well-formed: what a step gives is checked like any file of the newest version, and a step that cannot make
    sense of its input raises `DamagedCheckpointError`.

    Attributes:
        manifest: Turns the fields of a manifest, without "format_version", into those of the next version.
        index: Likewise for the index of a directory of checkpoints.
        object: Likewise for an object of a checkpoint, such as "state", given its name.
    """

    manifest: Callable[[Fields], Fields] = _unchanged
    index: Callable[[Fields], Fields] = _unchanged
    object: Callable[[str, Json], Json] = _object_unchanged


STEPS: dict[int, Step] = {}
"""The steps by the version that they start from; empty, as the first version is the newest."""


def steps_from(version: int, newest: int, what: str, steps: Mapping[int, Step] | None = None) -> list[Step]:
    """The steps from a version to the newest.

    Args:
        version: What was found in a file.
        newest: What this drivetrain reads; not below `version`.
        what: What to call the file in the message.
        steps: The table; None for `STEPS`.

    Raises:
        CheckpointError: A step is missing.
    """
    table = STEPS if steps is None else steps
    missing = [each for each in range(version, newest) if each not in table]
    if missing:
        raise CheckpointError(
            f"{what} is of format {version}, and this drivetrain has no way from format {missing[0]} to"
            f" {missing[0] + 1}. Convert it with the release that wrote it, or report this as a bug"
        )
    return [table[each] for each in range(version, newest)]
