"""Registries: names resolved lazily, helpfully refused, and added to by other packages."""

from __future__ import annotations

import subprocess
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


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names() -> None:
    registry = Registry("colour", {"red": 1, "blue": 2})
    with pytest.raises(
        ConfigError, match=r"unknown colour 'rad'. Did you mean 'red'\? Allowed: 'blue', 'red'"
    ):
        registry["rad"]
    with pytest.raises(ConfigError, match="unknown colour 'rad'"):
        registry.check("rad")


@pytest.mark.parametrize("given", [None, 3, ["red"], b"red"])
def test_what_is_no_text_is_refused_with_all_names(given: object) -> None:
    with pytest.raises(ConfigError, match=r"a colour is given by its name.*Allowed: 'red'"):
        Registry("colour", {"red": 1})[given]  # type: ignore[index]


def test_a_row_is_imported_when_it_is_asked_for_and_not_before() -> None:
    code = (
        "import sys\n"
        "from drivetrain.core.registry import Registry\n"
        "registry = Registry('module', {'late': 'colorsys:rgb_to_hsv'})\n"
        "registry.check('late'), list(registry), 'late' in registry\n"
        "assert 'colorsys' not in sys.modules\n"
        "function = registry['late']\n"
        "import colorsys\n"
        "assert function is registry['late'] is colorsys.rgb_to_hsv\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_may_name_an_attribute_of_an_attribute() -> None:
    registry: Registry[object] = Registry("module", {"join": "os:path.join"})
    assert registry["join"] is __import__("os").path.join


@pytest.mark.parametrize("place", ["no_such_module:thing", "math:no_such_thing", "math", ":thing", "math:"])
def test_a_row_that_cannot_be_loaded_is_named_with_its_place(place: str) -> None:
    registry: Registry[object] = Registry("colour", {"red": place})
    with pytest.raises(ConfigError, match=f"the colour 'red' is registered as '{place}', which cannot be"):
        registry["red"]


def test_a_taken_name_is_refused_and_a_free_one_is_added() -> None:
    registry: Registry[int] = Registry("colour", {"red": 1})
    registry.register("green", 3)
    assert registry["green"] == 3
    with pytest.raises(ConfigError, match="the colour 'red' is already registered"):
        registry.register("red", 4)
    assert registry["red"] == 1


def test_registries_do_not_share_rows() -> None:
    rows: dict[str, int | str] = {"red": 1}
    first, second = Registry[int]("colour", rows), Registry[int]("colour", rows)
    first.register("green", 2)
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
