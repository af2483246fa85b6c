"""The line that tells how far a verification has come: on a terminal alone, and gone at the end."""

import os
import sys

import pytest
import torch

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.filesystem import LOCAL
from drivetrain.checkpoint.reading import Reader
from drivetrain.cli.main import main
from drivetrain.cli.watching import WatchedFileSystem
from drivetrain.testing.storage import check_file_system


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "a"
    DirectoryCheckpointIO().save(str(path), Snapshot({"model": {"w": torch.zeros(1000)}}))
    return path


def test_it_is_a_file_system_like_the_one_inside(tmp_path):
    check_file_system(WatchedFileSystem(LOCAL, lambda count: None), str(tmp_path))


def test_every_byte_that_is_read_is_told(checkpoint):
    counts = []
    Reader(WatchedFileSystem(LOCAL, counts.append), str(checkpoint)).verify()
    assert sum(counts) == sum(path.stat().st_size for path in checkpoint.iterdir())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_a_terminal_shows_the_progress_and_then_the_result_alone(checkpoint, monkeypatch, capsys):
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as reader, open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["checkpoint", "verify", str(checkpoint)]) == 0
        terminal.write("the end")
        terminal.flush()
        shown = ""
        while not shown.endswith("the end"):  # a terminal hands over what was written bit by bit
            shown += reader.read(4096).decode()
    assert " of 4.1 kB: " in shown
    assert shown.endswith("\r\x1b[Kthe end")
    assert capsys.readouterr().out.endswith(": good, 4.1 kB\n")
