"""Assets: the files that a user stores beside the weights, such as a tokenizer's or a configuration's.

They are made once, kept in memory, and written to the folder `assets/` of each checkpoint. Nothing in them is
ever run or imported.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import nn

from drivetrain.checkpoint.format.asset_files import MAX_ASSET_BYTES, MAX_ASSETS, name_trouble
from drivetrain.checkpoint.storage.filesystem import os_errors
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.files import check_path


@runtime_checkable
class SavesPretrained(Protocol):
    """An object that writes its files to a folder, such as a tokenizer, a processor or a configuration."""

    def save_pretrained(self, save_directory: str, /) -> Any: ...


Asset: TypeAlias = str | os.PathLike[str] | SavesPretrained | Callable[[str], object]
"""A file or a folder by its path, an object with `save_pretrained(folder)`, or a function of the folder that
it writes to."""

Assets: TypeAlias = Sequence[Asset] | Mapping[str, Asset]
"""Assets, or assets by the name that each gets in the folder."""

_FORMS = (
    "the path of a file or a folder, an object with save_pretrained(folder), such as a tokenizer, or a"
    " function of the folder that it writes to"
)


def checked_assets(given: Any, what: str) -> Assets:
    """Return a copy of assets after a check; nothing is written yet."""
    if isinstance(given, Mapping):
        for name in given:
            trouble = name_trouble(name) if isinstance(name, str) else "it is not a text"
            if trouble:
                raise ConfigError(f"{what}: the name {name!r} cannot be a file or folder: {trouble}")
        return {name: _checked(each, f"{what}[{name!r}]") for name, each in given.items()}
    if isinstance(given, (str, os.PathLike, SavesPretrained)) or callable(given):
        raise ConfigError(f"{what} takes a list, or a mapping of names: put the asset into a list, [...]")
    if not isinstance(given, Sequence):
        raise ConfigError(
            f"{what} takes a list, or a mapping of names, not a {type(given).__name__}. Each asset is"
            f" {_FORMS}"
        )
    return tuple(_checked(each, f"{what}[{number}]") for number, each in enumerate(given))


def _checked(asset: Any, what: str) -> Asset:
    if isinstance(asset, (str, os.PathLike)):
        _check_path(asset, what)
    elif isinstance(asset, nn.Module):
        raise ConfigError(
            f"{what} is the module {type(asset).__name__}, whose weights a checkpoint holds already. Give"
            " what belongs to it, such as its configuration (model.config) or its tokenizer"
        )
    elif isinstance(asset, type) or not (isinstance(asset, SavesPretrained) or callable(asset)):
        given = f"the class {asset.__name__}" if isinstance(asset, type) else f"a {type(asset).__name__}"
        raise ConfigError(f"{what} is {given}; an asset is {_FORMS}")
    checked: Asset = asset
    return checked


def _check_path(given: str | os.PathLike[str], what: str) -> None:
    text = os.fspath(given)
    check_path(text)
    path = Path(text)
    if path.exists():
        return
    parent = path.absolute().parent
    near = nearest(path.name, os.listdir(parent) if parent.is_dir() else ()).partition("Allowed:")[0]
    raise ConfigError(f"{what}={text!r} does not exist; an asset is read from a local path. {near}".strip())


def make_assets(*given: tuple[str, Assets]) -> dict[str, bytes]:
    """Write all assets to memory.

    Args:
        given: Assets that `checked_assets` has returned, each with the argument or method that they come
            from. Later ones replace files of the same name of earlier ones.

    Returns:
        The content of each file by its path in the folder, with "/" between the parts.
    """
    files: dict[str, bytes] = {}
    for what, assets in given:
        made: dict[str, bytes] = {}
        named = assets.items() if isinstance(assets, Mapping) else enumerate(assets)
        for key, asset in named:
            here = f"{what}[{key!r}]"
            for name, content in _files_of(asset, key if isinstance(key, str) else None, here):
                if made.setdefault(name, content) != content:
                    raise ConfigError(
                        f"{here} writes {name!r}, which another of {what} has written with other content."
                        " Give the assets names, each for a folder of its own: {'name': asset}"
                    )
                _check_extent(made, files, here)
        files.update(made)
    return dict(sorted(files.items()))


def _check_extent(made: Mapping[str, bytes], before: Mapping[str, bytes], what: str) -> None:
    if len(made) + len(before) > MAX_ASSETS:
        raise ConfigError(f"{what}: a checkpoint holds at most {MAX_ASSETS} assets. Put them into an archive")
    _check_size(sum(map(len, made.values())) + sum(map(len, before.values())), what)


def _check_size(size: int, what: str) -> None:
    if size > MAX_ASSET_BYTES:
        raise ConfigError(
            f"{what}: the assets have {size} bytes, and every checkpoint would hold them; at most"
            f" {MAX_ASSET_BYTES} are allowed. Keep large files elsewhere, and store their paths"
        )


def _files_of(asset: Asset, name: str | None, what: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file of an asset.

    A file gets its own name and a folder a folder of its own name; all other assets write into the folder of
    all. With a name, that is the name of the file, or of the folder.
    """
    if isinstance(asset, (str, os.PathLike)):
        path = Path(os.path.abspath(asset))
        stored_name = path.name if name is None else name
        if path.is_dir():
            yield from _folder(path, f"{stored_name}/" if stored_name else "", what)
            return
        _check_name(stored_name, what)
        yield stored_name, _content(path, path, what)
        return
    with tempfile.TemporaryDirectory(prefix="drivetrain-asset-") as made:
        try:
            asset.save_pretrained(made) if isinstance(asset, SavesPretrained) else asset(made)
        except Exception as error:
            error.add_note(f"drivetrain: raised as {what} wrote its files")
            raise
        yield from _folder(Path(made), "" if name is None else f"{name}/", what)


def _folder(folder: Path, inside: str, what: str) -> Iterator[tuple[str, bytes]]:
    found = False
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for each in folders:
            path = Path(parent, each)
            if path.is_symlink():
                raise ConfigError(
                    f"{what}: {str(path)!r} is a link to a folder, which is not followed. Copy the folder"
                    " there"
                )
        for each in sorted(names):
            path = Path(parent, each)
            stored_name = inside + path.relative_to(folder).as_posix()
            _check_name(stored_name, what)
            found = True
            yield stored_name, _content(path, folder, what)
    if not found:
        raise ConfigError(f"{what} has no files: nothing would be stored")


def _check_name(stored_name: str, what: str) -> None:
    if trouble := name_trouble(stored_name):
        raise ConfigError(f"{what}: {stored_name!r} cannot be the name of a stored file: {trouble}")


def _content(path: Path, folder: Path, what: str) -> bytes:
    """Return a file's content; a link must stay in the asset's folder, unless it is the asset itself."""
    if path.is_symlink() and path != folder and not path.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"{what}: {str(path)!r} is a link that leads out of the asset's folder, to"
            f" {str(path.resolve())!r}. Copy the file there, or give the file itself as an asset"
        )
    with os_errors("read", str(path)):
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{what}: {str(path)!r} is neither a file nor a folder")
        _check_size(path.stat().st_size, what)  # before it fills the memory
        return path.read_bytes()
