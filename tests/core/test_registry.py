"""Registries: names resolved lazily, helpfully refused, and added to by other packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.core.registry import Registry


def plugin(root: Path, rows: str, code: str) -> None:
    """An installed package with entry points of the kind "colour", and one module."""
    information = root / "plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[drivetrain.new_colour]\n{rows}\n")
    (root / "plugin_module.py").write_text(code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path to install plug-ins into."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("plugin_module", None)


def test_a_name_gives_its_object() -> None:
    registry = Registry("colour", {"red": 1, "blue": 2})
    assert registry["red"] == 1
    assert list(registry) == ["blue", "red"]
    assert len(registry) == 2
    assert "red" in registry
    assert "green" not in registry


def test_a_row_is_imported_when_it_is_asked_for_and_not_before(site: Path) -> None:
    (site / "plugin_module.py").write_text("class Shades:\n    green = 'a green'\n")
    registry: Registry[object] = Registry("colour", {"late": "plugin_module:Shades.green"})
    registry.check("late")
    assert (list(registry), "late" in registry, "plugin_module" in sys.modules) == (["late"], True, False)
    assert registry["late"] == "a green"


def test_registries_do_not_share_rows() -> None:
    rows: dict[str, int | str] = {"red": 1}
    first, second = Registry[int]("colour", rows), Registry[int]("colour", rows)
    first.register("green", 2)
    assert first["green"] == 2
    assert "green" not in second
    assert rows == {"red": 1}


def test_an_installed_package_adds_rows(site: Path) -> None:
    plugin(site, "green = plugin_module:Shades.green", "class Shades:\n    green = 'a green'\n")
    registry: Registry[object] = Registry("new colour", {"red": 1})
    assert list(registry) == ["green", "red"]
    assert registry["green"] == "a green"
    with pytest.raises(ConfigError, match=r"Did you mean 'green'\?"):
        Registry[object]("new colour")["gren"]


def test_an_installed_package_cannot_replace_a_row_of_ours(site: Path) -> None:
    plugin(site, "red = plugin_module:other", "other = 2\n")
    registry: Registry[object] = Registry("new colour", {"red": 1})
    assert len(registry) == 1
    assert registry["red"] == 1


def test_what_an_installed_package_lacks_is_said_by_name(site: Path) -> None:
    code = (
        "from drivetrain.core.errors import MissingDependencyError\n"
        "raise MissingDependencyError('dye', 'dye', 'the colour green')\n"
    )
    plugin(site, "green = plugin_module:green", code)
    with pytest.raises(MissingDependencyError, match=r"pip install 'drivetrain\[dye\]'"):
        Registry[object]("new colour")["green"]
