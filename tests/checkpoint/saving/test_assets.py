"""Assets in all their forms, before they are in a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

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


def test_a_list_keeps_the_names_of_files_and_folders_and_merges_the_rest(folder: Path) -> None:
    assert made([folder / "en.json", str(folder), Tokenizer(), write_note]) == {
        "en.json": b"{}",
        "labels/en.json": b"{}",
        "labels/de/größe.bin": b"\0\xff",
        "tokenizer.json": b"words",
        "extra/merges.txt": b"m",
        "note.txt": b"note",
    }


def test_a_mapping_names_the_file_or_the_folder(folder: Path) -> None:
    assert made(
        {"a.json": folder / "en.json", "all": folder, "text/first": Tokenizer("1"), "n": write_note}
    ) == {
        "a.json": b"{}",
        "all/en.json": b"{}",
        "all/de/größe.bin": b"\0\xff",
        "text/first/tokenizer.json": b"1",
        "text/first/extra/merges.txt": b"m",
        "n/note.txt": b"note",
    }


def test_two_assets_may_write_the_same_file_only_with_the_same_content() -> None:
    assert made([Tokenizer(), Tokenizer()])["tokenizer.json"] == b"words"
    with pytest.raises(
        ConfigError, match=r"it\[1\] writes 'tokenizer.json'.*other content\. Give the assets names"
    ):
        made([Tokenizer("1"), Tokenizer("2")])
    later = make_assets(("task", [Tokenizer("1")]), ("Trainer", [Tokenizer("2")]))
    assert later["tokenizer.json"] == b"2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("vocabulary.txt", r"put the asset into a list"),
        (Tokenizer(), r"put the asset into a list"),
        (write_note, r"put the asset into a list"),
        (3, r"a list, or a mapping of names, not a int.*save_pretrained"),
        ([3], r"it\[0\] is a int; an asset is the path.*save_pretrained\(folder\).*function of the folder"),
        ([Tokenizer], r"it\[0\] is the class Tokenizer"),
        ([nn.Linear(1, 1)], r"the module Linear, whose weights a checkpoint holds already.*model\.config"),
        (["s3://bucket/vocabulary"], r"is an address"),
        ({"../out": write_note}, r"'\.\./out' cannot be a file or folder: it leads out"),
        ({"a\\b": write_note}, r"some systems do not allow"),
        ({"aux.txt": write_note}, r"a device on Windows"),
        ({3: write_note}, r"the name 3 .*not a text"),
    ],
)
def test_what_is_no_asset_is_refused_with_what_is(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_assets(given, "it")


def test_a_path_that_does_not_exist_is_refused_with_the_nearest_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\. Did you mean 'en\.json'\?"):
        checked_assets([folder / "en.jsn"], "it")
    with pytest.raises(ConfigError, match=r"nor does the folder"):
        checked_assets([folder / "no" / "en.json"], "it")


def test_a_link_is_followed_inside_its_asset_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "same.json").symlink_to("en.json")
    assert made([folder])["labels/same.json"] == b"{}"
    (tmp_path / "alone.json").symlink_to(folder / "en.json")
    assert made([tmp_path / "alone.json"]) == {"alone.json": b"{}"}  # the user has named this one
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    (folder / "z.json").symlink_to(secret)
    with pytest.raises(
        ConfigError, match=r"z\.json' is a link that leads out of the asset's folder, to .*secret"
    ):
        made([folder])
    (folder / "z.json").unlink()
    (folder / "up").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"up' is a link to a folder, which is not followed"):
        made([folder])


def test_a_function_cannot_link_to_elsewhere_either(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret", encoding="utf-8")
    with pytest.raises(ConfigError, match="leads out of the asset's folder"):
        made([lambda folder: os.symlink(secret, Path(folder, "x"))])


def test_an_asset_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"it\[0\] has no files"):
        made([lambda folder: None])


def test_names_that_some_disks_take_for_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=r"'A' and 'a' differ only in case"):
        made({"A": tmp_path / "x", "a": tmp_path / "x"})
    with pytest.raises(ConfigError, match=r"'a' is a file, and the folder of 'a/x'"):
        made({"a": tmp_path / "x", "a/x": tmp_path / "x"})


def test_assets_that_are_too_large_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(ConfigError, match=r"have 1073741825 bytes, .*at most 1073741824"):
        made([tmp_path / "x"])


def test_an_error_of_an_asset_says_whose_it_is() -> None:
    def fail(folder: str) -> None:
        raise RuntimeError("no vocabulary")

    with pytest.raises(RuntimeError, match="no vocabulary") as caught:
        made({"words": fail})
    assert caught.value.__notes__ == ["drivetrain: raised as it['words'] wrote its files"]
