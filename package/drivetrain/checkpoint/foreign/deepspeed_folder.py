"""The files of a DeepSpeed folder: find them, and check their content."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import check_path, read_text

_LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_ELSEWHERE = re.compile(r"layer_\d+.*\.pt|expp_rank_.*\.pt")
_FILES = "*_states.pt"


class Files(NamedTuple):
    """The files of one checkpoint.

    Attributes:
        folder: Their folder.
        model: The model's file of each process; below stage 3 only that of the first.
        optimizer: The optimizer's file of each process.
    """

    folder: Path
    model: list[str]
    optimizer: list[str]


def find_files(folder: str | os.PathLike[str], tag: str | None) -> Files:
    """Find the files of a checkpoint.

    Args:
        folder: The folder that was given to DeepSpeed's `save_checkpoint`, or the one inside with the files.
        tag: The name of the folder inside; None uses the one in `latest`.
    """
    inner = _inner(Path(folder), tag)
    names = _names(inner)
    model, optimizer = _by_rank(names, _MODEL), _by_rank(names, _OPTIMIZER)
    where = repr(str(inner))
    if not optimizer and "zero" in names:
        raise CheckpointError(
            f"{where} is one of DeepSpeed's universal checkpoints: give the folder that it was made from, as"
            " save_checkpoint wrote it"
        )
    if not model and not optimizer:
        raise CheckpointError(f"{where} has no {_FILES}, as DeepSpeed's save_checkpoint writes them")
    _refuse_other_parallelism(names, [*model, *optimizer], where)
    if not optimizer:
        raise CheckpointError(
            f"{where} has no *_optim_states.pt: it was saved without ZeRO (stage 0), and its weights are"
            f" torch.load({model[0, 0]!r}, weights_only=True)['module'], which export_weights takes; or only"
            " this one file was copied"
        )
    if not model:
        raise CheckpointError(f"{where} has no *_model_states.pt, which names the parameters")
    return Files(inner, _in_order(model, "model_states", where), _in_order(optimizer, "optim_states", where))


def _inner(folder: Path, tag: str | None) -> Path:
    check_path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {str(folder)!r}")
    if tag is None and not (folder / _LATEST).is_file():
        if any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in _names(folder)):
            return folder
        tags = _tags(folder)
        hint = f" Give one of {', '.join(map(repr, tags))} as the tag" if tags else ""
        raise CheckpointError(
            f"{str(folder)!r} is not a DeepSpeed checkpoint: it has neither a file {_LATEST!r}, which names"
            f" the folder inside, nor {_FILES}.{hint}"
        )
    if tag is None:
        try:
            tag = read_text(folder / _LATEST).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {str(folder / _LATEST)!r}: {error}") from error
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise CheckpointError(
            f"{str(folder)!r} has no folder {tag[:80]!r} inside. The folders with {_FILES} are:"
            f" {', '.join(_tags(folder)) or 'none'}"
        )
    return folder / tag


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"cannot list {str(folder)!r}: {error}") from error


def _tags(folder: Path) -> list[str]:
    return [
        name
        for name in _names(folder)
        if (folder / name).is_dir() and any(_MODEL.fullmatch(each) for each in _names(folder / name))
    ]


def _by_rank(names: list[str], pattern: re.Pattern[str]) -> dict[tuple[int, int], str]:
    """Return the files by the process's rank in data parallelism and in model parallelism."""
    matches = [match for match in map(pattern.fullmatch, names) if match]
    return {(int(match[1] or 0), int(match[2])): match[0] for match in matches}


def _refuse_other_parallelism(names: list[str], ranks: list[tuple[int, int]], where: str) -> None:
    elsewhere = [name for name in names if _ELSEWHERE.fullmatch(name)]
    divided = max(each for _, each in ranks)
    if elsewhere or divided:
        kind = (
            f"has files of pipeline stages or experts ({elsewhere[0]})"
            if elsewhere
            else (f"was saved with tensor parallelism over {divided + 1} processes")
        )
        raise CheckpointError(f"{where} {kind}. Only data parallelism (ZeRO 1, 2 and 3) is imported")


def _in_order(found: Mapping[tuple[int, int], str], kind: str, where: str) -> list[str]:
    missing = sorted(set(range(max(rank for rank, _ in found) + 1)) - {rank for rank, _ in found})
    if missing:
        raise CheckpointError(
            f"{where} lacks the *_{kind}.pt of the processes {', '.join(map(str, missing))}. Copy all files"
        )
    return [name for _, name in sorted(found.items())]


class TypedEntries:
    """A mapping in one of the files. Its entries must have the types that DeepSpeed writes."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} is not a mapping, as DeepSpeed's files are")
        self.values: dict[Any, Any] = values
        self.where = where

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return an entry; `default` if it is missing or None."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.where} has {key!r} as a {type(value).__name__}")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return an entry that must exist."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(
                f"{self.where} has no {key!r}{self.version()}: it is of an unknown kind, or from"
                " an unsupported version of DeepSpeed"
            )
        return value

    def table(self, key: str) -> TypedEntries:
        """Return an entry that must exist and be a mapping."""
        return TypedEntries(self.need(key, dict), f"{self.where}: {key!r}")

    def version(self) -> str:
        """Return the DeepSpeed version in brackets after a blank, or "" if it is unknown."""
        version = self.values.get("ds_version")
        return f" (saved by DeepSpeed {version})" if isinstance(version, str) else ""
