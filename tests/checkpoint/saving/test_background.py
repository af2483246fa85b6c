"""Saving behind the loop: what is in the file, how many at a time, and what becomes of an error."""

import errno
import os
import threading
from functools import partial

import pytest
import torch
from tests.support.ranks import on_two_ranks

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.background import HostBuffers
from drivetrain.checkpoint.saving.sharding import plan_save
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks

ASYNC = CheckpointConfig(keep_last=2, best=0, asynchronous=True)


class Gate(LocalFileSystem):  # a disk on which no file is created before the gate is open
    def __init__(self):
        self.open_gate = threading.Event()
        self.asked = threading.Event()

    def create(self, path):
        self.asked.set()
        assert self.open_gate.wait(300)
        return super().create(path)


class Failing(LocalFileSystem):
    is_full = False

    def create(self, path):
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return super().create(path)


def snapshot(weights):
    return Snapshot({"model": weights}, {"state": {"some": "thing"}}, {"steps": 1, "epoch": 0})


def weights_of(path):
    return DirectoryCheckpointIO().load(str(path)).tensors["model"]


def steps(manager):
    return [entry.step for entry in manager.entries()]


def test_what_changes_during_the_write_is_not_in_the_file(tmp_path):
    files = Gate()
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)
    weight = torch.full((100, 3), 1.0)
    saved = manager.save(1, 0, {}, lambda: snapshot({"w": weight, "t": weight.t(), "tied": weight}))
    assert files.asked.wait(300)
    weight.fill_(2.0)  # the next step, while the first byte is yet to be written
    assert manager.is_writing
    assert manager.poll() is None
    files.open_gate.set()
    assert manager.wait() == saved.path
    assert not manager.is_writing
    stored = weights_of(saved.path)
    assert all(torch.equal(each, torch.ones_like(each)) for each in stored.values())
    assert stored["t"].shape == (3, 100)


def test_the_next_save_waits_for_the_one_before(tmp_path, monkeypatch):
    files, order, join = Gate(), [], threading.Thread.join
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)

    def joined(thread, timeout=None):
        order.append("waited")
        files.open_gate.set()
        join(thread, timeout)

    def copied():
        order.append("copied")
        return snapshot({"w": torch.ones(3)})

    manager.save(1, 0, {}, copied)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", joined)
        manager.save(2, 0, {}, copied)
    files.open_gate.set()
    assert order == ["copied", "waited", "copied"]
    manager.wait()
    assert steps(manager) == [1, 2]


def test_a_failed_write_is_told_once_and_leaves_what_was_there(tmp_path):
    files = Failing()
    manager = CheckpointManager(str(tmp_path), ASYNC, files=files)
    content = partial(snapshot, {"w": torch.ones(3)})
    manager.save(1, 0, {}, content)
    manager.wait()
    index = (tmp_path / "index.json").read_bytes()
    files.is_full = True
    manager.save(2, 0, {}, content)
    with pytest.raises(CheckpointError, match=r"step-00000002.*ENOSPC"):
        manager.wait()
    assert manager.poll() is None
    assert steps(manager) == [1]
    assert (tmp_path / "index.json").read_bytes() == index
    assert sorted(os.listdir(tmp_path)) == ["index.json", "step-00000001"]
    manager.save(3, 0, {}, content)
    with pytest.raises(CheckpointError, match="ENOSPC"):  # by the next save too, before it begins
        manager.save(4, 0, {}, lambda: pytest.fail("nothing is to be saved on top of a failure"))
    files.is_full = False
    manager.save(5, 0, {}, content)
    manager.wait()
    assert steps(manager) == [1, 5]


def test_the_copy_is_made_once_and_its_memory_used_again():
    buffers = HostBuffers()

    def copy(tensors):
        planned = snapshot(tensors)
        planned.plan = plan_save(planned.tensors, (), ALONE)
        return buffers.copy(planned).tensors["model"]

    weight, bias = torch.arange(64.0).reshape(8, 8), torch.ones(8)
    tensors = {"w": weight, "tied": weight, "w.t": weight.t(), "b": bias, "step": torch.tensor(3.0)}
    first = copy(tensors)
    assert all(first[name].tolist() == each.tolist() for name, each in tensors.items())
    assert first["w"].data_ptr() == first["tied"].data_ptr() != weight.data_ptr()
    addresses = {name: each.data_ptr() for name, each in first.items()}
    weight.fill_(2)
    second = copy(tensors)
    assert {name: each.data_ptr() for name, each in second.items()} == addresses
    assert second["w"][0, 0] == 2
    for other in (torch.ones(9), torch.ones(9).bfloat16()):
        found = copy({**tensors, "b": other})["b"]
        assert (found.shape, found.dtype) == (other.shape, other.dtype)
    apart = copy({**tensors, "tied": torch.zeros(8, 8)})  # they no longer share memory
    assert (apart["w"].unique().tolist(), apart["tied"].unique().tolist()) == ([2], [0])


gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@gloo
@pytest.mark.parametrize("is_full", [False, True])
def test_all_ranks_take_note_of_a_commit_or_a_failure_at_the_same_step(tmp_path, is_full):
    def poll(directory):
        ranks, may_delete = Ranks.of_job(), threading.Event()

        class Slow(Failing):  # one rank deletes only later, so that its work ends after the other's
            def delete(self, path):
                assert may_delete.wait(300)
                super().delete(path)

        files = Slow()
        config = CheckpointConfig(keep_last=1, by=None, asynchronous=True)
        manager = CheckpointManager(directory, config, files=files, ranks=ranks)
        content = partial(snapshot, {f"w{number}": torch.ones(3) for number in range(4)})
        manager.save(1, 0, {}, content)
        manager.wait()
        files.is_full = is_full and ranks.rank == 1
        manager.save(2, 0, {}, content)
        step, told = 0, None
        while told is None:
            step += 1
            if step == 30 or is_full or ranks.rank == 1:
                may_delete.set()
            ranks.all_gather(step)  # what the run exchanges meanwhile
            try:
                told = manager.poll()
            except CheckpointError as error:
                told = str(error)
        return step, os.path.basename(told), steps(manager)

    first, second = on_two_ranks(poll, str(tmp_path))
    assert first == second
    assert first[2] == ([1] if is_full else [2])
    assert ("ENOSPC" in first[1]) if is_full else (first[0] >= 30 and first[1] == "step-00000002")
