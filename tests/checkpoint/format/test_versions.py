"""What a newer drivetrain wrote is not guessed at."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.strict_json import seal, unseal
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError

NAME = "step-00000004"


@pytest.fixture
def saved(tmp_path: Path) -> Path:  # a directory with a checkpoint and an index
    manager = CheckpointManager(str(tmp_path), CheckpointConfig(best=0, by=None))
    snapshot = Snapshot({"model": {"w": torch.ones(3)}}, {"state": {"rate": 0.1}}, {"steps": 4, "epoch": 1})
    manager.save(4, 1, {}, lambda: snapshot)
    return tmp_path


def rewrite(path: Path, **changes: Any) -> None:
    path.write_bytes(seal({**unseal(path.read_bytes(), "it"), **changes}, "it"))


@pytest.mark.parametrize("file", ["index.json", f"{NAME}/manifest.json"])
def test_a_newer_format_is_refused_with_the_way_out(saved: Path, file: str) -> None:
    rewrite(saved / file, format_version=2)
    with pytest.raises(CheckpointError, match=r"newer drivetrain: format 2.* reads 1.*pip install") as caught:
        CheckpointManager(str(saved), CheckpointConfig()).load_latest()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert (saved / file).exists()  # not set aside: it is intact


def test_what_is_no_version_is_damage(saved: Path) -> None:
    for version in (0, -1, True, "1", None, 1.0, [1]):
        rewrite(saved / NAME / "manifest.json", format_version=version)
        with pytest.raises(DamagedCheckpointError, match="format_version is"):
            DirectoryCheckpointIO().load(str(saved / NAME))
