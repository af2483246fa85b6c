"""A checkpoint is safetensors and JSON, never pickle: to load one runs no code, whoever has written it."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.promises.example import QUIET, Line, batches

from drivetrain import CheckpointError, Trainer
from drivetrain.checkpoint import DirectoryCheckpointIO


class Evil:  # makes a file in whatever process unpickles it
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def test_every_file_is_safetensors_or_json(tmp_path: Path) -> None:
    Trainer(max_epochs=1, strategy="cpu", run_dir=tmp_path, **QUIET).fit(Line(), batches(4, 2))
    (newest,) = (tmp_path / "checkpoints").glob("step-*")
    files = [*newest.iterdir(), tmp_path / "model.safetensors", tmp_path / "checkpoints" / "index.json"]
    assert len(files) > 4
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        else:
            with safe_open(path, "pt") as opened:
                assert opened.keys()


@pytest.mark.parametrize("saved", ["torch.save", "pickle"])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_never_run(saved: str, tmp_path: Path) -> None:
    Trainer(max_epochs=1, strategy="cpu", run_dir=tmp_path, **QUIET).fit(Line(), batches(4, 2))
    (newest,) = (tmp_path / "checkpoints").glob("step-*")
    made = tmp_path / "made"
    for path in (*newest.iterdir(), tmp_path / "model.safetensors"):
        before = path.read_bytes()
        if saved == "pickle":
            path.write_bytes(pickle.dumps(Evil(made)))
        else:
            torch.save({"net.0.weight": Evil(made)}, path)
        io = DirectoryCheckpointIO()
        with pytest.raises(CheckpointError):
            io.load(str(newest)) if path.parent == newest else Line.from_checkpoint(path)
        path.write_bytes(before)
    assert not made.exists()
    pickle.loads(pickle.dumps(Evil(made)))  # what it would have done
    assert made.exists()
