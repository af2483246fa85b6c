"""A user may point at a checkpoint, at a run, or at a run's checkpoints."""

import os

import pytest
from tests.support.held import in_files
from tests.support.messages import warned

from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DamagedCheckpointError,
    DirectoryCheckpointIO,
    resolve,
)
from drivetrain.core.errors import CheckpointError


@pytest.fixture
def run(tmp_path, helpers):
    directory = tmp_path / "runs" / "digits"
    manager = CheckpointManager(str(directory / "checkpoints"), CheckpointConfig(keep_last=3))
    for update in (9, 10, 11):
        manager.save(update, 0, {}, lambda: helpers.make_snapshot())
    return directory


def test_every_way_to_name_it_leads_to_the_newest(run, monkeypatch):
    newest = run / "checkpoints" / "update-00000011"
    for path in (newest, run / "checkpoints", run, str(run)):
        assert resolve(path) == str(newest)
    assert resolve(run / "checkpoints" / "update-00000009").endswith("update-00000009")
    monkeypatch.chdir(run)
    assert os.path.samefile(resolve("."), newest)


def test_the_newest_is_by_the_index_or_else_by_the_checkpoints_own_word(run, helpers):
    DirectoryCheckpointIO().save(str(run / "checkpoints" / "zzz"), helpers.make_snapshot(1000.0))
    assert resolve(run).endswith("update-00000011")
    (run / "checkpoints" / "index.json").write_text("damaged", encoding="utf-8")
    assert resolve(run).endswith("update-00000011")
    (run / "checkpoints" / "index.json").unlink()
    assert resolve(run).endswith("update-00000011")


def everything(directory):
    return sorted((path, path.stat().st_mtime_ns) for path in directory.rglob("*"))


def test_a_damaged_one_is_passed_over_and_nothing_is_touched(run):
    (in_files(run / "checkpoints" / "update-00000011") / "state.json").unlink()
    (run / "checkpoints" / "update-00000010" / "manifest.json").write_text("{}", encoding="utf-8")
    (run / "checkpoints" / ".saving-update-00000012-ab").mkdir()
    before = everything(run)
    with warned("is damaged and skipped") as caught:
        assert resolve(run).endswith("update-00000009")
    assert len(caught) == 2
    assert everything(run) == before


def test_only_damaged_ones_is_said_so(run):
    for name in ("09", "10", "11"):
        (run / "checkpoints" / f"update-000000{name}" / "model.safetensors").write_bytes(b"")
    with (
        warned("skipped"),
        pytest.raises(
            DamagedCheckpointError, match=r"no good checkpoint, only damaged ones.*model\.safetensors"
        ),
    ):
        resolve(run)


def test_a_wrong_path_is_answered_with_the_nearest_right_one(run):
    with pytest.raises(CheckpointError, match=r"Looked for manifest\.json .*Near it are: .*runs/digits'"):
        resolve(run.parent / "digit")
    with pytest.raises(CheckpointError, match=r"Near it are: .*update-00000010'"):
        resolve(run / "checkpoints" / "update-00000100")
    with pytest.raises(
        CheckpointError, match=r"Did you mean the checkpoint that it is in, .*update-00000010'"
    ):
        resolve(run / "checkpoints" / "update-00000010" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"There is no directory .*nowhere' either"):
        resolve(run / "nowhere" / "update-00000010")
