"""The files of a repository on the Hub, made from a checkpoint and a run directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.assets import copy_assets
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.formats import FORMAT, FORMATS, export_folder, origin_of
from drivetrain.checkpoint.inspection.description import describe, mapping
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import MODEL
from drivetrain.checkpoint.weights.frozen import frozen_of
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import read_json
from drivetrain.integrations.hub.card import CardData, model_card
from drivetrain.integrations.hub.client import REPOSITORY

EVENTS = "events.out.tfevents.*"
"""TensorBoard's files."""

LOGS = "runs"
"""The folder of TensorBoard's files in a repository; the Hub draws the curves of all that it finds."""

_SHARD = "5 GB"
"""The most that a file of weights holds, as for transformers."""


def format_of(reader: Reader) -> str:
    """Return the format in which other programs load the model of a checkpoint; "" for plain safetensors."""
    stored = mapping(reader.object("hparams")) if "hparams" in reader.manifest.objects() else {}
    named = stored.get(FORMAT)
    return named if isinstance(named, str) and named in FORMATS else ""


def write_model(folder: Path, checkpoint: str, run_dir: Path | None) -> None:
    """Write the weights of a checkpoint, its assets, and TensorBoard's files.

    A task that other programs load, such as those of transformers, has the folder of that program.

    Args:
        folder: An empty folder.
        checkpoint: A committed checkpoint; every byte that is used is verified.
        run_dir: The run directory, or None.

    Raises:
        CheckpointError: The checkpoint is damaged, or a file cannot be written.
    """
    reader = open_checkpoint(checkpoint)
    form = format_of(reader)
    if form:
        export_folder(form, checkpoint, str(folder), max_shard_size=_SHARD)
    else:
        copy_assets(checkpoint, folder)
        weights = reader.snapshot(("model",), None).tensors["model"]
        export_weights(weights, str(folder / MODEL), max_shard_size=_SHARD, frozen=frozen_of(reader))
    for path, name in _event_files(run_dir):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)  # a copy: the run may be appending to it


def make_card(
    folder: Path, checkpoint: str, repository: str, settings: Mapping[str, Any], data: CardData
) -> str:
    """Return the model card of a checkpoint whose model is in a folder.

    Args:
        folder: The folder.
        checkpoint: The checkpoint.
        repository: The repository's name.
        settings: The Trainer's arguments, or an empty mapping.
        data: The parts that the user gives.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    files = {path.name for path in folder.iterdir()}
    reader = open_checkpoint(checkpoint)
    adapter, config = _json(folder / "adapter_config.json"), _json(folder / "config.json")
    if data.base_model is None:
        stored = reader.object("hparams") if "hparams" in reader.manifest.objects() else None
        base = adapter.get("base_model_name_or_path") or origin_of(stored).get("name")
        data = replace(data, base_model=base if base and _is_on_hub(base) else None)
    classes = config.get("architectures")
    kind = str(classes[0]) if format_of(reader) == "transformers" and isinstance(classes, list) else ""
    return model_card(repository, describe(reader), settings, files, data, kind)


def _is_on_hub(name: object) -> bool:
    """Return whether a base model has a name on the Hub, and not that of a folder on this machine."""
    return isinstance(name, str) and bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()


def settings_of(run_dir: Path | None) -> Mapping[str, Any]:
    """Return the Trainer's arguments in the configuration that loggers have written; empty if none has."""
    found = None if run_dir is None else _json(run_dir / "config.json").get("trainer")
    return found if isinstance(found, dict) else {}


def run_dir_of(checkpoint: str) -> Path | None:
    """Return the run directory that a checkpoint is in, or None."""
    directory = Path(checkpoint).absolute().parent
    return directory.parent if directory.name == CHECKPOINTS else None


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by their names in it, the manifest last."""
    found = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
    manifest = found.pop(MANIFEST)
    return {**found, MANIFEST: manifest}


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _event_files(run_dir: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield TensorBoard's files, also those of earlier runs in the directory, with their names on the Hub."""
    for path in sorted(run_dir.rglob(EVENTS)) if run_dir is not None else ():
        assert run_dir is not None
        yield path, f"{LOGS}/{run_dir.name}/{path.relative_to(run_dir).as_posix()}"


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}
