"""Saving behind the loop: what is in the file, how many at a time, and what becomes of an error."""

import errno
import os
import threading
import time

import pytest
import torch

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.background import HostBuffers
from drivetrain.checkpoint.saving.sharding import plan_save
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.testing.distributed import run_distributed

ASYNC = CheckpointConfig(keep_last=2, best=0, asynchronous=True)


class Gate(LocalFileSystem):
    """A disk on which no file is created before the gate is open."""

    def __init__(self, opened=False):
        self.open_gate = threading.Event()
        self.asked = threading.Event()
        if opened:
            self.open_gate.set()

    def create(self, path):
        self.asked.set()
        assert self.open_gate.wait(20)
        return super().create(path)


def snapshot(weights):
    return Snapshot({"model": weights}, {"state": {"some": "thing"}}, {"updates": 1, "epoch": 0})


def test_what_changes_during_the_write_is_not_in_the_file(tmp_path):
    files = Gate()
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)
    weight = torch.full((100, 3), 1.0)
    saved = manager.save(1, 0, {}, lambda: snapshot({"w": weight, "t": weight.t(), "tied": weight}))
    assert files.asked.wait(20)
    weight.fill_(2.0)  # the next update, while the first byte is yet to be written
    assert manager.is_writing
    assert manager.poll() is None
    files.open_gate.set()
    assert manager.wait() == saved.path
    assert not manager.is_writing
    stored = DirectoryCheckpointIO().load(saved.path).tensors["model"]
    assert all(torch.equal(each, torch.ones_like(each)) for each in stored.values())
    assert stored["t"].shape == (3, 100)


def test_the_next_save_waits_for_the_one_before(tmp_path):
    files = Gate()
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)
    weight = torch.ones(3)
    manager.save(1, 0, {}, lambda: snapshot({"w": weight}))
    order = []

    def second():
        manager.save(2, 0, {}, lambda: order.append("copied") or snapshot({"w": weight}))

    thread = threading.Thread(target=second)
    thread.start()
    assert files.asked.wait(20)
    time.sleep(0.05)  # what must not happen has no sign of its own
    assert order == []
    order.append("opened")
    files.open_gate.set()
    thread.join(20)
    assert order == ["opened", "copied"]
    manager.wait()
    assert [entry.update for entry in manager.entries()] == [1, 2]


def test_a_failed_write_is_told_once_and_leaves_what_was_there(tmp_path):
    class Failing(LocalFileSystem):
        failing = False

        def create(self, path):
            if self.failing:
                raise OSError(28, "No space left on device")
            return super().create(path)

    files = Failing()
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)
    manager.save(1, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    manager.wait()
    index = (tmp_path / "index.json").read_bytes()
    files.failing = True
    manager.save(2, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"update-00000002.*ENOSPC"):
        manager.wait()
    assert manager.poll() is None
    assert [entry.update for entry in manager.entries()] == [1]
    assert (tmp_path / "index.json").read_bytes() == index
    assert sorted(os.listdir(tmp_path)) == ["index.json", "update-00000001"]
    manager.save(3, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    with pytest.raises(CheckpointError, match="ENOSPC"):  # by the next save too, before it begins
        manager.save(4, 0, {}, lambda: pytest.fail("nothing is to be saved on top of a failure"))
    files.failing = False
    manager.save(5, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    manager.wait()
    assert [entry.update for entry in manager.entries()] == [1, 5]


def test_the_policy_is_that_of_saving_in_the_foreground(tmp_path):
    ends = []
    for name, background in (("foreground", False), ("background", True)):
        config = CheckpointConfig(keep_last=2, best=2, by="loss", asynchronous=background)
        manager = CheckpointManager(str(tmp_path / name), config)
        weight = torch.zeros(3)
        for update, loss in enumerate([0.5, 0.1, float("nan"), 0.7, 0.3, 0.3], start=1):
            weight.fill_(update)
            keeper = manager.should_keep({"loss": loss})
            manager.save(
                update, 0, {"loss": loss}, lambda weight=weight: snapshot({"w": weight}), keeper=keeper
            )
        manager.wait()
        stored = {
            path: DirectoryCheckpointIO().load(str(tmp_path / name / path)).tensors["model"]["w"].tolist()
            for path in os.listdir(tmp_path / name)
            if path != "index.json"
        }
        ends.append(([repr(entry) for entry in manager.entries()], stored))
    assert ends[0] == ends[1]
    assert sorted(ends[0][1]) == ["update-00000002", "update-00000005", "update-00000006"]


def planned(tensors):
    found = snapshot(tensors)
    found.plan = plan_save(found.tensors, (), ALONE)
    return found


def test_the_copy_is_made_once_and_its_memory_used_again():
    weight, bias = torch.ones(64, 8), torch.ones(8)
    tensors = {"w": weight, "tied": weight, "w.t": weight.t(), "b": bias, "step": torch.tensor(3.0)}
    buffers = HostBuffers()
    first = buffers.copy(planned(tensors)).tensors["model"]
    assert {name: each.tolist() for name, each in first.items()} == {
        name: each.tolist() for name, each in tensors.items()
    }
    assert first["w"].data_ptr() == first["tied"].data_ptr() != weight.data_ptr()
    addresses = {name: each.data_ptr() for name, each in first.items()}
    weight.fill_(2)
    second = buffers.copy(planned(tensors)).tensors["model"]
    assert {name: each.data_ptr() for name, each in second.items()} == addresses
    assert second["w"][0, 0] == 2
    third = buffers.copy(planned({**tensors, "b": torch.ones(9)})).tensors["model"]
    assert third["b"].shape == (9,)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_several_processes_save_in_the_background_while_they_go_on_talking(tmp_path):
    def act(directory):
        manager = CheckpointManager(directory, ASYNC, ranks=Ranks.of_job())
        weight = torch.zeros(1000)
        for update in range(1, 6):
            weight.fill_(update)
            manager.save(update, 0, {}, lambda: snapshot({f"w{number}": weight for number in range(4)}))
            for _ in range(20):
                torch.distributed.all_reduce(weight.clone())
        manager.wait()
        return [entry.update for entry in manager.entries()]

    assert run_distributed(act, str(tmp_path / "c")) == [[4, 5], [4, 5]]
    stored = DirectoryCheckpointIO().load(str(tmp_path / "c" / "update-00000005")).tensors["model"]
    assert all(torch.equal(each, torch.full((1000,), 5.0)) for each in stored.values())


def test_weights_that_are_no_longer_tied_get_memory_of_their_own(tmp_path):
    manager = CheckpointManager(str(tmp_path), ASYNC)
    tied = torch.ones(4)
    manager.save(1, 0, {}, lambda: snapshot({"a": tied, "b": tied}))
    apart = {"a": torch.full((4,), 5.0), "b": torch.full((4,), 7.0)}
    manager.save(2, 0, {}, lambda: snapshot(apart))
    both = torch.full((4,), 9.0)
    saved = manager.save(3, 0, {}, lambda: snapshot({"a": both, "b": both}))
    manager.wait()
    stored = [DirectoryCheckpointIO().load(str(tmp_path / f"update-0000000{n}")).tensors for n in (2, 3)]
    assert [{name: each[0].item() for name, each in found["model"].items()} for found in stored] == [
        {"a": 5.0, "b": 7.0},
        {"a": 9.0, "b": 9.0},
    ]
    assert saved.path.endswith("update-00000003")


def test_a_thread_that_cannot_be_started_leaves_the_manager_as_it_was(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    manager = CheckpointManager(str(tmp_path), ASYNC)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CheckpointError, match="no thread can be started"):
            manager.save(1, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    assert manager.entries() == ()
    manager.save(2, 0, {}, lambda: snapshot({"w": torch.ones(3)}))
    manager.wait()
    assert [entry.update for entry in manager.entries()] == [2]


class Uneven(LocalFileSystem):
    """A disk on which one rank deletes slowly, so that its work ends later, and another may not write."""

    def __init__(self, seconds, is_full):
        self.seconds = seconds
        self.is_full = is_full

    def create(self, path):
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super().create(path)

    def delete(self, path):
        time.sleep(self.seconds)
        super().delete(path)


def poll_on_ranks(directory, is_full):
    ranks = Ranks.of_job()
    files = Uneven(0.3 if ranks.rank == 0 else 0.0, False)
    manager = CheckpointManager(
        directory, CheckpointConfig(keep_last=1, by=None, asynchronous=True), files=files, ranks=ranks
    )
    tensors = {f"w{number}": torch.ones(3) for number in range(4)}
    manager.save(1, 0, {}, lambda: snapshot(tensors))
    manager.wait()
    files.is_full = is_full and ranks.rank == 1
    manager.save(2, 0, {}, lambda: snapshot(tensors))
    for update in range(400):
        ranks.all_gather(update)  # what the run exchanges meanwhile
        try:
            committed = manager.poll()
        except CheckpointError as error:
            return update, str(error), [entry.update for entry in manager.entries()]
        if committed is not None:
            return update, os.path.basename(committed), [entry.update for entry in manager.entries()]
        time.sleep(0.01)
    return None


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_all_ranks_take_note_of_a_commit_at_the_same_update(tmp_path):
    first, second = run_distributed(poll_on_ranks, str(tmp_path), False)
    assert first == second
    assert first[1:] == ("update-00000002", [2])


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_all_ranks_raise_what_one_could_not_write_at_the_same_update(tmp_path):
    first, second = run_distributed(poll_on_ranks, str(tmp_path), True)
    assert first == second
    assert "ENOSPC" in first[1]
    assert first[2] == [1]
