"""A user may point at a checkpoint, at a run, or at a run's checkpoints."""

import os

import pytest
from tests.support.held import in_files
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback
from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    load_weights,
    resolve,
)
from drivetrain.checkpoint.saving.run_directory import RunDirectory
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.task.stored import read_task


@pytest.fixture
def run(tmp_path, helpers):
    directory = tmp_path / "runs" / "digits"
    manager = CheckpointManager(str(directory / "checkpoints"), CheckpointConfig(keep_last=3))
    for step in (9, 10, 11):
        manager.save(step, 0, {}, lambda: helpers.make_snapshot())
    return directory


def test_every_way_to_name_it_leads_to_the_newest(run, monkeypatch, helpers):
    newest = run / "checkpoints" / "step-00000011"
    for path in (newest, run / "checkpoints", run, str(run)):
        assert resolve(path) == str(newest)
    assert resolve(run / "checkpoints" / "step-00000009").endswith("step-00000009")
    monkeypatch.chdir(run)
    assert os.path.samefile(resolve("."), newest)
    # The newest is by the index, or else by the checkpoints' own word.
    DirectoryCheckpointIO().save(str(run / "checkpoints" / "zzz"), helpers.make_snapshot(1000.0))
    assert resolve(run) == str(newest)
    (run / "checkpoints" / "index.json").write_text("damaged", encoding="utf-8")
    assert resolve(run) == str(newest)
    (run / "checkpoints" / "index.json").unlink()
    assert resolve(run) == str(newest)


def test_a_word_names_a_checkpoint_of_a_run(run, helpers):
    best = CheckpointConfig(keep_last=3, by="validation/loss", best=1)
    manager = CheckpointManager(str(run / "checkpoints"), best)
    for step, loss in ((12, 0.1), (13, 0.2)):
        manager.save(step, 0, {"validation/loss": loss}, lambda: helpers.make_snapshot(), best=True)
    words = {"last": "step-00000013", "best": "step-00000012", "best:validation/loss": "step-00000012"}
    assert {word: RunDirectory(run).named(word) for word in words} == {
        word: str(run / "checkpoints" / name) for word, name in words.items()
    }
    with pytest.raises(ConfigError, match="Did you mean 'best:validation/loss'"):
        RunDirectory(run).named("best:validation/los")


def test_damaged_ones_are_passed_over_and_nothing_is_touched(run):
    def everything():
        return sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))

    (in_files(run / "checkpoints" / "step-00000011") / "state.json").unlink()
    (run / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}", encoding="utf-8")
    (run / "checkpoints" / ".saving-step-00000012-ab").mkdir()
    before = everything()
    with warned("is damaged and skipped") as caught:
        assert resolve(run).endswith("step-00000009")
    assert len(caught) == 2
    assert everything() == before
    (run / "checkpoints" / "step-00000009" / "model.safetensors").write_bytes(b"")
    with warned("skipped"), pytest.raises(DamagedCheckpointError, match="only damaged checkpoints"):
        resolve(run)
    with pytest.raises(CheckpointError, match=r"Looked for manifest.json.* Near it are: .*digits'"):
        resolve(run.parent / "digit")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the files of a POSIX system")
def test_what_is_neither_file_nor_directory_is_named_for_what_it_is(tmp_path):
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "round").symlink_to("round")
    os.mkfifo(tmp_path / "pipe.safetensors")
    words = {"gone": "link to nothing", "round": "link that leads to no file", "pipe.safetensors": "a pipe"}
    for name, word in words.items():
        for load in (resolve, load_weights, read_task):
            with pytest.raises(CheckpointError, match=rf"no (weights|checkpoint) at .*: it is .*{word}"):
                load(str(tmp_path / name))


def test_a_start_is_decided_once_and_before_loggers_begin(tmp_path):
    class Fetches(Callback):
        resume_name, asked = "elsewhere", 0

        def fetch_checkpoint(self, directory):
            self.asked += 1

    source = Fetches()
    options = {"max_epochs": 1, "checkpoint": True, "loggers": "csv"}
    quiet(run_dir=tmp_path / "a", callbacks=[source], **options).fit(
        Regression(), pairs(), resume="elsewhere"
    )
    assert source.asked == 1
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        quiet(run_dir=tmp_path / "b", **options).fit(Regression(), pairs(), resume=str(tmp_path / "nothing"))
    assert not list((tmp_path / "b").rglob("*.csv")) + list((tmp_path / "b").rglob("config*"))
