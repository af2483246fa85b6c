"""Which checkpoints are kept, and which one a run resumes from."""

import os
import shutil

import pytest
from tests.support.held import in_files
from tests.support.messages import warned
from tests.support.refusals import assert_refused

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.core.errors import CheckpointError, ConfigError

LOSS = "validation/loss"


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def save(helpers):
    def save(manager, step, loss=None, **purpose):
        metrics = {} if loss is None else {LOSS: loss}
        return manager.save(step, 0, metrics, lambda: helpers.make_snapshot(float(step)), **purpose)

    return save


def open_manager(directory, **config):
    return CheckpointManager(str(directory), CheckpointConfig(**config))


def steps(manager):
    return [entry.step for entry in manager.entries()]


def purposes(manager):
    return [(entry.step, bool(entry.resume), bool(entry.best)) for entry in manager.entries()]


def on_disk(directory):
    return sorted(name for name in os.listdir(directory) if name != "index.json")


def test_keep_last_rolls_the_newest_resume_points(directory, save, helpers):
    manager = open_manager(directory, keep_last=2)
    for step in (10, 20, 30):
        saved = save(manager, step)
        assert saved.path == str(directory / f"step-{step:08d}")
        assert not saved.is_best
    assert on_disk(directory) == ["step-00000020", "step-00000030"]
    path, snapshot = open_manager(directory).load_latest()
    assert path == str(directory / "step-00000030")
    weight = helpers.make_snapshot(30.0).tensors["model"]["weight"]
    assert helpers.same_bits(snapshot.tensors["model"]["weight"], weight)
    assert snapshot.progress["steps"] == 30


def test_keep_last_none_keeps_all_and_0_the_newest_until_the_next_is_committed(directory, save, tmp_path):
    manager = open_manager(tmp_path / "all", keep_last=None, best=1)
    for step in range(1, 6):
        save(manager, step, step / 10, best=True)
    assert steps(manager) == steps(open_manager(tmp_path / "all", keep_last=None)) == [1, 2, 3, 4, 5]
    manager = open_manager(directory, keep_last=0, best=0)
    for step in (1, 2):
        assert os.path.isdir(save(manager, step).path)
    assert on_disk(directory) == ["step-00000002"]


def test_the_best_are_kept_apart_from_the_newest(directory, save, tmp_path):
    manager = open_manager(directory, keep_last=1, best=2)
    losses = enumerate((0.5, 0.3, 0.4, 0.9, 0.8))
    saved = [save(manager, step, loss, best=True) for step, loss in losses]
    assert [each.is_best for each in saved] == [True, True, True, False, False]
    assert manager.best() == saved[1].path
    assert purposes(manager) == [(1, False, True), (2, False, True), (4, True, False)]
    # a best checkpoint need not be a resume point.
    manager = open_manager(tmp_path / "other", keep_last=1)
    save(manager, 1)
    newest = save(manager, 2, 0.5, resume=False, best=True)
    assert purposes(manager) == [(1, True, False), (2, False, True)]
    assert manager.load_latest()[0] == newest.path


def test_a_metric_or_an_interval_that_no_policy_has_is_refused(directory, save):
    manager = open_manager(directory, by="validation/accurracy")
    metrics = {"validation/accuracy": 0.9, "train/loss": 0.1}
    policies = [CheckpointConfig(every="5 steps", best=0), CheckpointConfig(every=None, best=1, by=LOSS)]
    several = CheckpointManager(str(directory), policies)
    assert_refused(
        ConfigError,
        {
            "ranked": (lambda: manager.should_keep(metrics), "Did you mean 'validation/accuracy'?"),
            "saved": (lambda: manager.save(1, 0, metrics, Snapshot, best=True), "has not logged so far"),
            "interval": (lambda: several.save(1, 0, {}, Snapshot, resume=["5 step"]), "'5 steps'"),
            "best": (lambda: several.save(1, 0, {"los": 1.0}, Snapshot, best=["los"]), "best by 'los'"),
            "no policy": (lambda: CheckpointManager(str(directory), []), "one CheckpointConfig or more"),
            "no purpose": (lambda: save(open_manager(directory), 1, resume=False), "needs a purpose"),
        },
    )
    assert not directory.exists()
    assert not open_manager(directory, by=None).should_keep(metrics)


def test_a_second_save_at_a_step_adds_its_purpose_and_writes_nothing(directory, save):
    manager = open_manager(directory)
    first = save(manager, 5)
    before = os.stat(os.path.join(first.path, "manifest.json"))
    second = manager.save(5, 1, {LOSS: 0.5}, pytest.fail, resume=False, best=True)
    assert (second.path, second.is_best) == (first.path, True)
    assert os.stat(os.path.join(first.path, "manifest.json")).st_mtime_ns == before.st_mtime_ns
    (entry,) = open_manager(directory).entries()
    assert (entry.resume, entry.best, entry.metrics) == (("",), {LOSS: "min"}, {LOSS: 0.5})
    again = open_manager(directory)
    again.load_latest()
    again.save(5, 0, {}, pytest.fail)  # a run that resumed and had nothing to do
    assert on_disk(directory) == ["step-00000005"]


def test_a_run_that_went_back_does_not_take_the_old_future_for_its_own(directory, save, helpers):
    first = open_manager(directory, keep_last=3)
    for step in (10, 20, 30):
        save(first, step)
    # Resumed from 10 by its path, with another learning rate: 20 comes again, and means something else.
    second = open_manager(directory, keep_last=3)
    new = second.save(20, 0, {}, lambda: helpers.make_snapshot(21.0))
    assert new.path == str(directory / "step-00000020-2")
    path, snapshot = open_manager(directory).load_latest()
    assert path == new.path
    assert snapshot.progress["steps"] == 21


def test_a_moved_run_directory_stays_valid(directory, save, tmp_path):
    manager = open_manager(directory)
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)):
        save(manager, step, loss, best=True)
    moved = tmp_path / "elsewhere"
    shutil.move(directory.parent, moved)
    again = open_manager(moved / "checkpoints")
    assert again.entries() == manager.entries()
    assert again.best() == str(moved / "checkpoints" / "step-00000001")
    assert again.load_latest()[0] == str(moved / "checkpoints" / "step-00000004")
    assert str(tmp_path) not in (moved / "checkpoints" / "index.json").read_text(encoding="utf-8")


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(directory, save, helpers):
    manager = open_manager(directory, keep_last=3)
    for step in (1, 2, 3):
        save(manager, step)
    damage(directory / "step-00000003" / "optimizer.safetensors")
    (in_files(directory / "step-00000002") / "state.json").unlink()
    with warned("was set aside as") as texts:
        path, snapshot = open_manager(directory).load_latest()
    assert path == str(directory / "step-00000001")
    bias = helpers.make_snapshot(1.0).tensors["model"]["bias"]
    assert helpers.same_bits(snapshot.tensors["model"]["bias"], bias)
    assert "optimizer.safetensors' is not what was written" in texts[0]
    assert "step-00000003.bad" in texts[0]
    assert "state.json' is missing" in texts[1]
    assert on_disk(directory) == ["step-00000001", "step-00000002.bad", "step-00000003.bad"]
    assert steps(open_manager(directory)) == [1]


def test_a_checkpoint_that_vanished_is_forgotten_with_a_warning(directory, save):
    manager = open_manager(directory)
    for step in (1, 2):
        save(manager, step)
    shutil.rmtree(directory / "step-00000002")
    with warned(r"step-00000002' is in the index, but not on the disk"):
        assert open_manager(directory).load_latest()[0] == str(directory / "step-00000001")
    assert steps(open_manager(directory)) == [1]


def test_what_was_committed_but_not_yet_indexed_is_adopted_and_other_leftovers_go(directory, save, helpers):
    hand = directory.parent / "hand"  # one that was put there by hand is older than the run's own
    DirectoryCheckpointIO().save(str(hand / "mine"), helpers.make_snapshot(99.0))
    manager = open_manager(hand)
    save(manager, 1)
    assert [entry.name for entry in manager.entries()] == ["mine", "step-00000001"]
    manager = open_manager(directory)
    save(manager, 1, 0.5, best=True)
    index = (directory / "index.json").read_bytes()
    save(manager, 2, 0.4, best=True)
    entries = manager.entries()
    (directory / "index.json").write_bytes(index)
    for name in (".saving-step-00000002-0a1b", ".removing-step-00000000-0a1b"):
        shutil.copytree(directory / "step-00000002", directory / name)
    (directory / ".saving-index.json-0a1b").write_text("half", encoding="utf-8")
    again = open_manager(directory)
    assert again.entries()[-1] == entries[-1]
    assert again.best() == str(directory / "step-00000002")
    assert not [name for name in on_disk(directory) if name.startswith(".")]


@pytest.mark.parametrize("loss", ["flip", "cut", "empty", "gone"])
def test_a_lost_index_is_made_anew(directory, save, loss):
    manager = open_manager(directory, keep_last=2, best=1)
    for step, value in ((1, 0.1), (2, 0.4), (3, 0.3)):
        save(manager, step, value, best=manager.should_keep({LOSS: value}))
    path = directory / "index.json"
    content = path.read_bytes()
    again = open_manager(directory)
    if loss == "gone":
        path.unlink()
        again.entries()
    else:
        flipped = content.replace(b'"step":3', b'"step":7')
        path.write_bytes({"flip": flipped, "cut": content[:-9], "empty": b""}[loss])
        with warned(r"index\.json\.bad"):
            again.entries()
        assert (directory / "index.json.bad").exists()
    found, expected = ([(e.step, e.best, e.metrics) for e in each.entries()] for each in (again, manager))
    assert found == expected
    assert (again.best(), again.load_latest()[0]) == (manager.best(), manager.load_latest()[0])


def test_any_flipped_bit_in_the_index_is_found(directory, save):
    manager = open_manager(directory)
    save(manager, 1, 0.5, best=True)
    entries = manager.entries()
    path = directory / "index.json"
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 7
        path.write_bytes(damaged)
        with warned(r"index\.json\.bad"):
            assert open_manager(directory).entries() == entries


def test_a_failing_save_leaves_everything_as_it_was(directory, save):
    class Full(DirectoryCheckpointIO):
        def save(self, path, snapshot):
            raise CheckpointError("cannot write: No space left on device (ENOSPC)")

    first = open_manager(directory, keep_last=1)
    save(first, 1, 0.5, best=True)
    index = (directory / "index.json").read_bytes()
    manager = CheckpointManager(str(directory), CheckpointConfig(keep_last=1), Full())
    with pytest.raises(CheckpointError, match="ENOSPC"):
        save(manager, 2, 0.1, best=True)
    assert (directory / "index.json").read_bytes() == index
    assert on_disk(directory) == ["step-00000001"]
    assert manager.entries() == first.entries()


def test_an_index_that_cannot_be_written_removes_nothing(directory, save, monkeypatch):
    def refuse_index(source, target, replace=os.replace):
        if target.endswith("index.json"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    manager = open_manager(directory, keep_last=1)
    save(manager, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse_index)
        with pytest.raises(CheckpointError, match=r"cannot write .*index\.json"):
            save(manager, 2)
    assert on_disk(directory) == ["step-00000001", "step-00000002"]
    assert steps(open_manager(directory)) == [1, 2]
    save(manager, 3)
    assert steps(manager) == steps(open_manager(directory)) == [3]
