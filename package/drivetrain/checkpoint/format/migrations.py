"""The steps that convert files of an older drivetrain to the present format, one for each version.

Every version stays readable. When the format changes, increase `FORMAT_VERSION` by one, add the step from the
version before to `STEPS`, and add small checkpoints of that version to the tests' corpus. No other code knows
of older versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from drivetrain.checkpoint.format.records import TENSORS, as_object, as_text, check_keys
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json

Fields: TypeAlias = dict[str, Json]


def _unchanged(fields: Fields) -> Fields:
    return fields


def _object_unchanged(name: str, value: Json) -> Json:
    return value


@dataclass(frozen=True, slots=True)
class Step:
    """The conversion from one format version to the next.

    The input comes from a file whose hash is right, and may be changed in place. It may be malformed: a
    step's result is checked like any file of the newest version, and a step that cannot interpret its input
    raises `DamagedCheckpointError`.

    Attributes:
        manifest: Converts the fields of a manifest, without "format_version".
        index: Converts the fields of the index of a directory of checkpoints.
        object: Converts an object of a checkpoint, such as "state", given its name.
    """

    manifest: Callable[[Fields], Fields] = _unchanged
    index: Callable[[Fields], Fields] = _unchanged
    object: Callable[[str, Json], Json] = _object_unchanged


_FILE_OF_MANY = re.compile(r".+-(\d{5,7})-of-(\d{5,7})" + re.escape(TENSORS))


def _manifest_to_2(fields: Fields) -> Fields:
    """Convert version 1, which wrote out the grid of every tensor, and had all hashes in the manifest."""
    what = "a manifest of format 1"
    files = as_object(fields.get("files"), f"{what}: files")
    layouts: list[Json] = []
    numbers: dict[str, int] = {}
    tensors: dict[str, Json] = {}
    hashes: dict[str, dict[str, Json]] = {}
    processes = 1
    for group, content in as_object(fields.get("tensors"), f"{what}: tensors").items():
        where = f"{what}: tensors: {group!r}"
        check_keys(as_object(content, where), {"files", "tensors"}, where)
        listed = as_object(content, where)["files"]
        names = [as_text(each, where) for each in (listed if isinstance(listed, list) else [listed])]
        of_many = [_FILE_OF_MANY.fullmatch(name) for name in names]
        processes = max([processes, *(int(each[2]) for each in of_many if each is not None)])
        writers = [0 if each is None else int(each[1]) - 1 for each in of_many]
        records: dict[str, Json] = {}
        for name, record in as_object(as_object(content, where)["tensors"], where).items():
            old = as_object(record, f"{where}: {name!r}")
            check_keys(old, {"shape", "dtype", "cuts", "files", "xxh3_128"}, f"{where}: {name!r}")
            places, digests = old["files"], old["xxh3_128"]
            if not isinstance(places, list) or not isinstance(digests, list) or len(places) != len(digests):
                raise DamagedCheckpointError(
                    f"{where}: {name!r} must have one file and one hash for each piece"
                )
            writer = []
            for place, digest in zip(places, digests, strict=True):
                if type(place) is not int or not 0 <= place < len(names):
                    raise DamagedCheckpointError(
                        f"{where}: {name!r}: {str(place)[:40]!r} is not a file's number"
                    )
                writer.append(writers[place])
                hashes.setdefault(names[place], {})[name] = digest
            layout: dict[str, Json] = {"dtype": old["dtype"], "shape": old["shape"]}
            cuts, first = old["cuts"], 0
            if isinstance(cuts, list) and len(writer) == 1 and all(each == [0] for each in cuts):
                layout["grid"], first = [[] for _ in cuts], writer[0]
            else:
                layout.update(cuts=cuts, files=list(writer))
            records[name] = [numbers.setdefault(repr(layout), len(numbers)), first]
            if len(layouts) < len(numbers):
                layouts.append(layout)
        tensors[group] = records
    for name, named in hashes.items():
        if name not in files:
            raise DamagedCheckpointError(f"{what}: a piece is in {name[:80]!r}, which it does not list")
        files[name] = {**as_object(files[name], f"{what}: files: {name[:80]!r}"), "tensors_xxh3_128": named}
    return {**fields, "processes": processes, "files": files, "layouts": layouts, "tensors": tensors}


def _entry_to_3(entry: Json) -> Json:
    """Convert an entry of version 2, whose run had one policy: two flags, and the one metric that ranks."""
    if not isinstance(entry, dict):
        return entry
    resume, keeper, metrics = (entry.get(name) for name in ("resume", "keeper", "metrics"))
    if not (isinstance(resume, bool) and isinstance(keeper, bool) and isinstance(metrics, dict)):
        return entry  # no entry, or a malformed one, which its reader refuses
    return {**entry, "resume": [""] if resume else [], "keeper": dict.fromkeys(metrics if keeper else (), "")}


def _index_to_3(fields: Fields) -> Fields:
    listed = fields.get("checkpoints")
    return {**fields, "checkpoints": [*map(_entry_to_3, listed)] if isinstance(listed, list) else listed}


def _object_to_3(name: str, value: Json) -> Json:
    return _entry_to_3(value) if name == "checkpoint" else value


STEPS: dict[int, Step] = {
    1: Step(manifest=_manifest_to_2),
    2: Step(index=_index_to_3, object=_object_to_3),
    3: Step(),  # had every object in a file of its own, as large ones still are
}
"""The steps, by the version that they start from."""


def steps_from(version: int, newest: int, what: str, steps: Mapping[int, Step] | None = None) -> list[Step]:
    """Return the steps from a version to the newest.

    Args:
        version: The version of a file.
        newest: The version that this drivetrain reads; not below `version`.
        what: The name of the file for the message.
        steps: The table; None uses `STEPS`.

    Raises:
        CheckpointError: A step is missing.
    """
    table = STEPS if steps is None else steps
    missing = [each for each in range(version, newest) if each not in table]
    if missing:
        raise CheckpointError(
            f"{what} has format {version}, and this drivetrain cannot convert format {missing[0]} to"
            f" {missing[0] + 1}. Convert it with the release that wrote it, or report this as a bug"
        )
    return [table[each] for each in range(version, newest)]
