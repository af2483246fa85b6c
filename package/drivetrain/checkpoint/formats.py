"""Other programs' folders, made from checkpoints: each format, and the integration that writes it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from drivetrain.checkpoint.inspection.description import mapping
from drivetrain.core.types import Json

FORMAT = "format"
"""The entry of the object "hparams" that names the format of the task's model."""

NAMES = "names"
"""The entry of the object "hparams" with the names of the weights in that format, for a model of another
library."""

ORIGIN = "origin"
"""The entry of the object "hparams" with the name and the revision of the first weights."""

FORMATS: Mapping[str, str] = {"transformers": "drivetrain.integrations.transformers"}
"""The module with the function `export_pretrained` for each format. A checkpoint gives a key of this table;
nothing is imported by a name from a file."""


def origin_of(hparams: Json) -> dict[str, str]:
    """Return the origin in the object "hparams" of a checkpoint; empty if it has none."""
    return {name: str(each) for name, each in mapping(mapping(hparams).get(ORIGIN)).items()}


def export_folder(form: str, path: str | os.PathLike[str], folder: str, **options: Any) -> list[str]:
    """Write a checkpoint's model as the folder of a format, and return the paths of the files with weights.

    Args:
        path: A checkpoint, or a run directory: its newest good checkpoint.
        options: What the integration's `export_pretrained` takes, such as `dtype`.
    """
    written: list[str] = importlib.import_module(FORMATS[form]).export_pretrained(path, folder, **options)
    return written
