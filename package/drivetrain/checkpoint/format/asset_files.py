"""The list of the files stored beside the weights: `assets.json`, with the size and hash of each.

The manifest has the hash of this list, so that it covers the files in the folder `assets/` too. Their names
are relative paths, with "/" between the parts on every system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.types import Json

if TYPE_CHECKING:
    from drivetrain.checkpoint.format.records import FileRecord

ASSETS = "assets"
"""The folder of the files, and the name of the object that lists them."""

MAX_ASSETS = 10_000
"""The largest number of files."""

MAX_ASSET_BYTES = 1 << 30
"""The largest total size: a fit keeps the files in memory, and a copy reads one of them at a time."""

_LISTED = "asset.json"
"""Gives the records of all files one form, whatever their endings."""

_FORBIDDEN = re.compile(r'[\\:*?"<>|]')
"""Characters that Windows does not allow in a name."""

DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
"""Names of devices on Windows, whatever follows the first dot."""


def name_trouble(name: str) -> str:
    """Return why a relative path cannot be stored on every system, or ""."""
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return "it leads out of the folder, or has an empty part"
        if len(part.encode("utf-8", "replace")) > 255:
            return "a part is longer than 255 bytes"
        if not part.isprintable() or _FORBIDDEN.search(part) or part[-1] in " .":
            return "it has a character that some systems do not allow in a name, or ends with a blank or '.'"
        if DEVICE.fullmatch(part):
            return f"{part!r} is a device on Windows"
    return ""


def dump_assets(records: Mapping[str, FileRecord]) -> Json:
    from drivetrain.checkpoint.format.records import dump_file

    return {name: dump_file(_LISTED, record) for name, record in records.items()}


def load_assets(value: Json, what: str) -> dict[str, FileRecord]:
    """Parse the result of `dump_assets`."""
    from drivetrain.checkpoint.format.records import load_file
    from drivetrain.checkpoint.format.strict_json import as_object

    records = {}
    for name, each in as_object(value, what).items():
        if trouble := name_trouble(name):
            raise DamagedCheckpointError(f"{what} lists {name[:80]!r}, which no checkpoint has: {trouble}")
        records[name] = load_file(_LISTED, each, f"{what}: {name[:80]!r}")
        if records[name].content is not None:
            raise DamagedCheckpointError(f"{what}: {name[:80]!r} must be a file, and has its content here")
    size = sum(each.bytes for each in records.values())
    if len(records) > MAX_ASSETS or size > MAX_ASSET_BYTES:
        raise DamagedCheckpointError(
            f"{what} lists {len(records)} files of {size} bytes; at most {MAX_ASSETS} files of"
            f" {MAX_ASSET_BYTES} bytes together are allowed"
        )
    return records
