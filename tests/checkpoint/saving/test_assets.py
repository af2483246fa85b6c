"""The files that a checkpoint holds beside the weights are read back verified, and nothing else is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from drivetrain import ConfigError
from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, copy_assets, read_manifest, verify
from drivetrain.checkpoint.format.strict_json import seal, unseal
from drivetrain.checkpoint.saving.assets import checked_assets, make_assets
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError

FILES = {"config.json": b'{"model": 1}', "empty": b"", "parts/de/x.bin": bytes(range(256)) * 5000}


def save(path: str, assets: dict[str, bytes] = FILES) -> str:
    progress = {"steps": 4, "epoch": 1}
    snapshot = Snapshot({"model": {"w": torch.ones(3)}}, {"state": {}}, progress, assets=assets)
    DirectoryCheckpointIO().save(path, snapshot)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_assets_are_stored_as_they_are_and_copied_verified(tmp_path: Path) -> None:
    path = save(str(tmp_path / "c"))
    assert contents(tmp_path / "c" / "assets") == FILES
    verify(path)
    data = read_manifest(path).files["assets.json"].content  # the manifest covers the list
    assert data is not None
    assert json.loads(data)["empty"] == {"bytes": 0, "xxh3_128": xxhash.xxh3_128_hexdigest(b"")}
    (tmp_path / "c" / "assets" / "tokenizer.py").write_text("import os", encoding="utf-8")  # is not listed
    written = copy_assets(path, tmp_path / "out")
    assert written == [str(tmp_path / "out" / name) for name in sorted(FILES)]
    assert contents(tmp_path / "out") == FILES
    assert DirectoryCheckpointIO().load(path).objects == {"state": {}}
    none = save(str(tmp_path / "none"), {})
    assert sorted(contents(Path(none))) == ["manifest.json", "model.safetensors"]
    assert copy_assets(none, tmp_path / "nothing") == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "empty").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"empty' exists already"):
        copy_assets(path, tmp_path / "full")
    assert contents(tmp_path / "full") == {"empty": b"mine"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "link", "folder link"])
def test_a_damaged_asset_is_found_by_all_who_read_it(damage: str, tmp_path: Path) -> None:
    path = save(str(tmp_path / "c"))
    file = tmp_path / "c" / "assets" / "parts" / "de" / "x.bin"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    else:  # to the right bytes, outside
        moved = file if damage == "link" else file.parent
        moved.rename(tmp_path / "moved")
        moved.symlink_to(tmp_path / "moved")
    for read in (verify, lambda path: copy_assets(path, tmp_path / "out")):
        with pytest.raises(DamagedCheckpointError, match=r"assets.parts.de"):
            read(path)
    assert "parts/de/x.bin" not in contents(tmp_path / "out")


def listing(path: str, change: Any) -> None:  # another list, with the right hashes throughout
    target = Path(path)
    body: Any = unseal((target / "manifest.json").read_bytes(), "it")
    text = json.dumps(change(json.loads(body["files"]["assets.json"]["content"])))
    digest = xxhash.xxh3_128_hexdigest(text.encode("ascii"))
    body["files"]["assets.json"] = {"bytes": len(text), "xxh3_128": digest, "content": text}
    (target / "manifest.json").write_bytes(seal(body, "it"))


RECORD = {"bytes": 6, "xxh3_128": xxhash.xxh3_128_hexdigest(b"secret")}
OUTSIDE = ("../../secret", "/secret", "a/../../../secret", "..\\secret", "C:secret", "", "a\0b", "\ud800")
MALFORMED: list[Any] = [{"a": {"bytes": 6}}, {"a": {**RECORD, "content": "secret"}}, {"a": "secret"}, []]
MALFORMED += [{"a": {**RECORD, "bytes": 1 << 31}}, {"a": RECORD, "a/b": RECORD}]


def test_a_list_of_assets_that_leads_out_or_is_malformed_is_damage(tmp_path: Path) -> None:
    path = save(str(tmp_path / "runs" / "c"))
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "runs" / "secret").write_bytes(b"secret")
    (tmp_path / "runs" / "c" / "assets" / "more").write_bytes(b"secret")
    listing(path, lambda listed: {**listed, "more": RECORD})
    copy_assets(path, tmp_path / "honest")
    assert contents(tmp_path / "honest") == {**FILES, "more": b"secret"}
    for case in [*({name: RECORD} for name in OUTSIDE), *MALFORMED]:
        listing(path, lambda _, case=case: case)
        for read in (verify, lambda path: copy_assets(path, tmp_path / "out")):
            with pytest.raises(DamagedCheckpointError):
                read(path)
        assert not (tmp_path / "out").exists()


class Tokenizer:  # writes its files as those of Hugging Face do, and can be called too, as they can
    def __call__(self, text: str) -> list[int]:
        raise AssertionError("a tokenizer is no function of a folder")

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "extra").mkdir()
        for name in ("tokenizer.json", "extra/merges.txt"):
            Path(save_directory, name).write_bytes(b"words")


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
    labels, words = contents(folder), dict.fromkeys(("tokenizer.json", "extra/merges.txt"), b"words")

    def under(place: str, files: dict[str, bytes]) -> dict[str, bytes]:
        return {f"{place}/{name}": content for name, content in files.items()}

    expected = {"en.json": b"{}", **under("labels", labels), **words, "note.txt": b"note"}
    assert made([folder / "en.json", str(folder), Tokenizer(), write_note]) == expected
    named = {"a.json": folder / "en.json", "all": folder, "text/first": Tokenizer(), "n": write_note}
    expected = {"a.json": b"{}", **under("all", labels), **under("text/first", words), "n/note.txt": b"note"}
    assert made(named) == expected


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
