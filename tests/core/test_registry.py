"""Registries: names resolved lazily, helpfully refused, and added to by other packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.core.registry import Registry


def plugin(root: Path, rows: str, code: str) -> None:
    information = root / "plugin-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[drivetrain.new_colour]\n{rows}\n")
    (root / "plugin_module.py").write_text(code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("plugin_module", None)


def test_a_row_is_imported_when_it_is_asked_for_and_not_before(site: Path) -> None:
    (site / "plugin_module.py").write_text("class Shades:\n    green = 'a green'\n")
    registry: Registry[object] = Registry("colour", {"late": "plugin_module:Shades.green"})
    registry.check("late")
    assert (list(registry), "late" in registry, "plugin_module" in sys.modules) == (["late"], True, False)
    assert registry["late"] == "a green"


def test_an_installed_package_adds_rows(site: Path) -> None:
    plugin(site, "green = plugin_module:Shades.green", "class Shades:\n    green = 'a green'\n")
    registry: Registry[object] = Registry("new colour", {"red": 1})
    assert list(registry) == ["green", "red"]
    assert registry["green"] == "a green"
    with pytest.raises(ConfigError, match=r"Did you mean 'green'\?"):
        Registry[object]("new colour")["gren"]


def test_an_installed_package_replaces_no_row_and_what_it_lacks_is_named(site: Path) -> None:
    code = (
        "import drivetrain.core.errors as e; raise e.MissingDependencyError('dye', 'dye', 'the colour green')"
    )
    plugin(site, "red = plugin_module:other\ngreen = plugin_module:green", code)
    registry: Registry[object] = Registry("new colour", {"red": 1})
    assert (sorted(registry), registry["red"]) == (["green", "red"], 1)
    with pytest.raises(MissingDependencyError, match=r"pip install 'drivetrain\[dye\]'"):
        registry["green"]
