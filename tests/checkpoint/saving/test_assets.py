"""Assets in all their forms, before they are in a checkpoint; what is refused is in `test_refusals.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigError
from drivetrain.checkpoint.saving.assets import checked_assets, make_assets


class Tokenizer:
    """Writes its files as those of Hugging Face do, and can be called too, as they can."""

    def __init__(self, text: str = "words") -> None:
        self.text = text

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("a tokenizer is no function of a folder")

    def save_pretrained(self, save_directory: str) -> tuple[str, ...]:
        path = Path(save_directory, "tokenizer.json")
        path.write_text(self.text, encoding="utf-8")
        Path(save_directory, "extra").mkdir()
        Path(save_directory, "extra", "merges.txt").write_text("m", encoding="utf-8")
        return (str(path),)


def write_note(folder: str) -> None:
    Path(folder, "note.txt").write_text("note", encoding="utf-8")


def made(assets: Any) -> dict[str, bytes]:
    return make_assets(("it", checked_assets(assets, "it")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "labels"
    (folder / "de").mkdir(parents=True)
    (folder / "en.json").write_bytes(b"{}")
    (folder / "de" / "größe.bin").write_bytes(b"\0\xff")
    return folder


def test_a_list_keeps_the_names_of_files_and_a_mapping_gives_them(folder: Path) -> None:
    assert made([folder / "en.json", str(folder), Tokenizer(), write_note]) == {
        "en.json": b"{}",
        "labels/en.json": b"{}",
        "labels/de/größe.bin": b"\0\xff",
        "tokenizer.json": b"words",
        "extra/merges.txt": b"m",
        "note.txt": b"note",
    }
    named = {"a.json": folder / "en.json", "all": folder, "text/first": Tokenizer("1"), "n": write_note}
    assert made(named) == {
        "a.json": b"{}",
        "all/en.json": b"{}",
        "all/de/größe.bin": b"\0\xff",
        "text/first/tokenizer.json": b"1",
        "text/first/extra/merges.txt": b"m",
        "n/note.txt": b"note",
    }


def test_a_link_is_followed_inside_its_asset_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "same.json").symlink_to("en.json")
    assert made([folder])["labels/same.json"] == b"{}"
    (tmp_path / "alone.json").symlink_to(folder / "en.json")
    assert made([tmp_path / "alone.json"]) == {"alone.json": b"{}"}  # the user has named this one
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (folder / "z.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"z\.json' is a link that leads out of .* folder, to .*secret"):
        made([folder])
    (folder / "z.json").unlink()
    (folder / "up").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"up' is a link to a folder, which is not followed"):
        made([folder])
