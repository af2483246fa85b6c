"""Paths that lead to no file, or to one that nobody can have meant, are refused at once and by name."""

import json
import os
import socket
from pathlib import Path

import pytest

from drivetrain.core import files
from drivetrain.core.files import NotAFileError, check_path, lines_of, make_directory, open_file, read_json

KINDS = {
    "pipe": (os.mkfifo, "is a pipe"),
    "directory": (os.mkdir, "is a directory"),
    "nothing": (lambda path: path.symlink_to("gone/away"), "is a symbolic link to nothing"),
    "itself": (lambda path: path.symlink_to(path), "is a symbolic link that leads to no file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "n" * 300: (lambda path: None, "a name that is longer than the system allows"),
    "a\0b": (lambda path: None, "has a character that no path can have"),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the files of a POSIX system")
def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(tmp_path / "socket"))
    for name, (make, words) in {**KINDS, "socket": (lambda path: None, "is a .*socket")}.items():
        make(tmp_path / name)
        for mode in ("rb", "ab"):
            words = "not written through links" if mode == "ab" and os.path.islink(tmp_path / name) else words
            with pytest.raises(NotAFileError, match=words):
                open_file(tmp_path / name, mode)
    for name in ("n" * 300, "a\0b"):
        for act in (check_path, make_directory):
            with pytest.raises(NotAFileError):
                act(tmp_path / name)
    (tmp_path / "file").touch()
    for name in ("file", "file/inside", "endless"):
        with pytest.raises(NotAFileError, match="is no directory"):
            make_directory(tmp_path / name)
    make_directory(tmp_path / "made" / "inside")
    make_directory(tmp_path / "made" / "inside")
    check_path(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "new", "rb")


def test_files_and_lines_and_nesting_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST", 6)
    path = tmp_path / "file"
    path.write_bytes(b"12345\n123")
    assert list(lines_of(path)) == [b"12345\n", b"123"]
    path.write_bytes(b"1234567")
    for act in (lambda: list(lines_of(path)), lambda: files.read_file(path, 6)):
        with pytest.raises(NotAFileError, match="more than"):
            act()
    path.write_text("[" * 60_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(path)
    path.write_text(json.dumps({"a": [1]}))
    assert read_json(path) == {"a": [1]}
