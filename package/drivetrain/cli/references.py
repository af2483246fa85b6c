"""Names on the command line, and the Python objects that they stand for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from drivetrain.errors import ConfigError, nearest


@contextmanager
def importable_here() -> Iterator[None]:
    """Make modules of the current directory importable, as `python` does and a console script does not."""
    before = list(sys.path)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path[:] = before


def load(reference: str, option: str) -> Any:
    """The object that `module.attribute`, `module:attribute` or `path/to/file.py:attribute` names.

    Args:
        reference: What the user wrote.
        option: Where it was written, for messages: "--task".

    Raises:
        ConfigError: No such file, module or attribute; names the nearest. An exception that the module itself
            raises while it is imported is passed on as it is.
    """
    place, colon, attributes = reference.rpartition(":")
    if colon and place.endswith(".py"):
        return _attribute(_file(Path(place), option), attributes, reference, option)
    if colon:
        module = _module(place)
        if module is None:
            raise ConfigError(f"{option} {reference}: {_no_module(place)}")
        return _attribute(module, attributes, reference, option)
    if reference.endswith(".py"):
        raise ConfigError(f"{option} {reference} names a file; say what to take from it: {reference}:Name")
    parts = reference.split(".")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(
            f"{option} {reference} is no name of an object. Write module.Name, or path/to/file.py:Name"
        )
    for cut in range(len(parts) - 1, 0, -1):
        module = _module(".".join(parts[:cut]))
        if module is not None:
            return _attribute(module, ".".join(parts[cut:]), reference, option)
    raise ConfigError(f"{option} {reference}: {_no_module(parts[0])}")


def _no_module(name: str) -> str:
    return (
        f"there is no module {name!r}, neither installed nor in {os.getcwd()}. Run the command in the "
        f"directory of {name.partition('.')[0]}.py, or write path/to/file.py:Name"
    )


def _module(name: str) -> ModuleType | None:
    """The module of that name, or None when there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only that this very module is missing is an answer; one that it needs itself is the user's to see.
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _file(path: Path, option: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path} (looked in {os.getcwd()})")
    path = path.resolve()
    for module in list(sys.modules.values()):
        known = getattr(module, "__file__", None)
        if known is not None and module.__name__ != "__main__" and Path(known) == path:
            return module  # the task and the data of one file must share its classes
    # Under its own name where that is free, so that what it defines can be pickled for worker processes.
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_at_{abs(hash(path)):x}"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _attribute(module: ModuleType, attributes: str, reference: str, option: str) -> Any:
    found: Any = module
    for name in attributes.split("."):
        if not hasattr(found, name):
            public = [each for each in dir(found) if not each.startswith("_")]
            where = getattr(found, "__name__", type(found).__name__)
            raise ConfigError(f"{option} {reference}: {where} has no {name!r}. {nearest(name, public)}")
        found = getattr(found, name)
    return found
