"""What a checkpoint's manifest holds, moved into files of its own, as large objects are stored."""

import base64
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.format.records import TENSORS
from drivetrain.checkpoint.format.strict_json import seal, unseal


def in_files(checkpoint: Path) -> Path:  # move each small file out of the manifest, and return the checkpoint
    manifest = checkpoint / MANIFEST
    body: Any = unseal(manifest.read_bytes(), "it")
    for name, record in body["files"].items():
        if "content" in record:
            text = record.pop("content")
            content = base64.b64decode(text) if name.endswith(TENSORS) else text.encode("ascii")
            (checkpoint / name).write_bytes(content)
    manifest.write_bytes(seal(body, "it"))
    return checkpoint
