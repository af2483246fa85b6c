"""The progress of a verification: shown on a terminal alone, and gone at the end."""

import os
import sys

import pytest
import torch

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.cli.main import main


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_a_terminal_shows_the_progress_and_then_the_result_alone(tmp_path, monkeypatch, capsys):
    checkpoint = tmp_path / "a"
    DirectoryCheckpointIO().save(str(checkpoint), Snapshot({"model": {"w": torch.zeros(1000)}}))
    ours, theirs = os.openpty()
    pytest.importorskip("termios").tcsetwinsize(theirs, (24, 300))  # tqdm draws nothing on one without rows
    with open(ours, "rb", buffering=0) as reader, open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["checkpoint", "verify", str(checkpoint)]) == 0
        terminal.write("the end")
        terminal.flush()
        shown = ""
        while not shown.endswith("the end"):  # a terminal hands over what was written bit by bit
            shown += reader.read(4096).decode()
    assert f"{checkpoint}: " in shown
    assert " 0.00/" in shown
    assert shown.endswith("\rthe end")
    size = sum(each.stat().st_size for each in checkpoint.iterdir())
    assert capsys.readouterr().out.endswith(f": good, {size / 1000:.1f} kB\n")


def test_elsewhere_there_is_none(tmp_path, capsys):
    checkpoint = tmp_path / "a"
    DirectoryCheckpointIO().save(str(checkpoint), Snapshot({"model": {"w": torch.zeros(1000)}}))
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    assert capsys.readouterr().err == ""
