"""Load the Python objects that a command line or a configuration file names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.core.errors import ConfigError, nearest


@contextmanager
def importable_here() -> Iterator[None]:
    """Run the block with the current directory importable, as under `python` but not in a console script."""
    before = list(sys.path)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = before


def load(reference: str, option: str) -> Any:
    """Return the object that `module.attribute`, `module:attribute` or `path/to/file.py:attribute` names.

    Raises:
        ConfigError: No such file, module or attribute; names the nearest. An exception that the module raises
            while it is imported propagates unchanged.
    """
    found: Any
    names: Sequence[str]
    source, _, name = reference.rpartition(":")
    if reference.endswith(".py"):
        raise ConfigError(f"{option} {reference} names a file; say what to take from it: {reference}:Name")
    if source.endswith(".py"):
        found, names = _file(Path(source), option), name.split(".")
    else:
        found, names = _module(reference.replace(":", ".").split("."), reference, option)
    for each in names:
        if not hasattr(found, each):
            public = [name for name in dir(found) if not name.startswith("_")]
            where = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(f"{option} {reference}: {where} has no {each!r}. {nearest(each, public)}")
        found = getattr(found, each)
    return found


def _module(parts: Sequence[str], reference: str, option: str) -> tuple[Any, Sequence[str]]:
    """Import the longest prefix of a reference that is a module; return it and the parts after it."""
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{option} {reference} names no object. Write module.Name, or path/to/file.py:Name")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            # Only this module may be missing. A missing module that it imports is the user's error.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise ConfigError(
        f"{option} {reference}: there is no module {parts[0]!r}, neither installed nor in {os.getcwd()}. Run"
        f" the command in the directory of {parts[0]}.py, or write path/to/file.py:Name"
    )


def _file(path: Path, option: str) -> ModuleType:
    """Import a file as a module of the file's name, so that worker processes can import it too."""
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path} (looked in {os.getcwd()})")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    if Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise ConfigError(
            f"{option}: {path} cannot be imported: {path.stem!r} is already the name of"
            f" {getattr(module, '__file__', None) or 'a built-in module'}; rename the file"
        )
    return module
