"""A table of objects by name, loaded lazily and open to other packages."""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.synonyms import help_with

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects by the name that a user writes, each loaded on first use.

    Values are objects, or strings of the form ``"module:attribute"`` that are imported on first use, so that
    a table may name modules with heavy imports at no cost. Installed packages add rows through the entry
    point group ``drivetrain.<kind>``; they cannot replace our rows.

    Args:
        kind: The kind of object, in the singular; used in error messages, for the entry point group,
            and to look up other libraries' names.
        rows: The built-in rows.
    """

    def __init__(self, kind: str, rows: dict[str, T | str] | None = None) -> None:
        self.kind = kind
        self._rows: dict[str, T | str] = dict(rows or {})
        self._discovered = False

    def register(self, name: str, value: T | str) -> None:
        """Add a row.

        Raises:
            ConfigError: The name is taken.
        """
        if name in self._rows:
            raise ConfigError(f"the {self.kind} {name!r} is already registered; choose another name")
        self._rows[name] = value

    def __getitem__(self, name: str) -> T:
        """Return the object registered under `name`.

        Raises:
            ConfigError: No such row (lists the nearest and all names), or a row that cannot be loaded.
            MissingDependencyError: The row's module needs a package that is not installed.
        """
        self.check(name)
        value = self._rows[name]
        if isinstance(value, str):
            loaded = self._load(name, value)
            self._rows[name] = loaded
            return loaded
        return value

    def _load(self, name: str, path: str) -> T:
        module, _, attribute = path.partition(":")
        try:
            loaded: T = operator.attrgetter(attribute)(importlib.import_module(module))
        except MissingDependencyError:  # already says what to install
            raise
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the {self.kind} {name!r} is registered as {path!r}, which cannot be loaded: {error}. The"
                " package that registered it is broken, or was installed without something that it needs"
            ) from error
        return loaded

    def check(self, name: str) -> None:
        """Raise if there is no row of this name; loads nothing.

        Raises:
            ConfigError: No such row; lists the nearest and all names.
        """
        if not isinstance(name, str):
            raise ConfigError(f"a {self.kind} is given by its name, not as {name!r}. {nearest('', self)}")
        if name not in self._rows:
            self._discover()
        if name not in self._rows:
            raise ConfigError(f"unknown {self.kind} {name!r}. {help_with(name, self, self.kind)}")

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._rows))

    def __len__(self) -> int:
        self._discover()
        return len(self._rows)

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        for entry in entry_points(group=f"drivetrain.{self.kind.replace(' ', '_')}"):
            self._rows.setdefault(entry.name, f"{entry.module}:{entry.attr}")


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None
