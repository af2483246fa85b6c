"""A table from names to the things they stand for, filled lazily and open to other packages."""

from __future__ import annotations

import importlib
import importlib.util
import operator
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from drivetrain.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.synonyms import help_with

T = TypeVar("T")


class Registry(Generic[T]):
    """Names that a user may write, each resolved to an object when it is first asked for.

    Values are objects, or strings of the form ``"module:attribute"`` that are imported on first use, so that
    a table may name modules with heavy imports at no cost. Installed packages add rows through the entry
    point group ``drivetrain.<kind>``; a row of ours cannot be replaced by them.

    Args:
        kind: What the names stand for, in the singular; used in error messages, for the entry point group,
            and to find other libraries' names for them.
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
        """The object registered under `name`.

        Raises:
            ConfigError: No such row, listing the nearest and all names; or a row that cannot be loaded.
            MissingDependencyError: What the row's module says it needs.
        """
        self.check(name)
        value = self._rows[name]
        if isinstance(value, str):
            loaded = self._load(name, value)
            self._rows[name] = loaded
            return loaded
        return value

    def _load(self, name: str, place: str) -> T:
        module, _, attribute = place.partition(":")
        try:
            loaded: T = operator.attrgetter(attribute)(importlib.import_module(module))
        except MissingDependencyError:  # says already what to install
            raise
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the {self.kind} {name!r} is registered as {place!r}, which cannot be loaded: {error}. The"
                " package that registered it is broken, or was installed without something that it needs"
            ) from error
        return loaded

    def check(self, name: str) -> None:
        """Refuse a name without a row, loading nothing.

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
    """Whether there is a package of a name, which is not loaded for it."""
    return importlib.util.find_spec(package) is not None
