"""What checkpoints cost, counted: operations on files. Times and memory are in the benchmarks."""

import threading
from collections import Counter
from functools import partial

import torch

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.index import Entry, write_index
from drivetrain.checkpoint.saving.run_directory import newest_first
from drivetrain.checkpoint.storage import schemes
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem


class Counting(LocalFileSystem):  # operations by name and thread, and the bytes that are read
    def __init__(self):
        self.reset()

    def reset(self):
        self.order, self.bytes_read = [], 0

    def count(self, name):
        self.order.append((name, threading.get_ident()))

    @property
    def operations(self):
        return Counter(name for name, _ in self.order)

    def watched(self, file):
        for name in ("write", "finish", "readinto", "seek"):
            if hasattr(file, name):
                setattr(file, name, partial(self.within, name, getattr(file, name)))
        return file

    def within(self, name, act, *arguments):
        self.count({"readinto": "read"}.get(name, name))
        result = act(*arguments)
        self.bytes_read += result if name == "readinto" else 0
        return result


def counted(name):
    def operation(self, *arguments):
        self.count(name)
        result = getattr(LocalFileSystem, name)(self, *arguments)
        return self.watched(result) if name in ("create", "open") else result

    return operation


for each in ("kind", "entries", "create", "open", "make_directory", "sync", "rename", "delete"):
    setattr(Counting, each, counted(each))


def snapshot_of(count):
    return Snapshot({"model": {f"block.{number}.weight": torch.ones(2, 3) for number in range(count)}})


def test_small_tensors_are_written_together_and_nothing_but_the_reads_grows_with_their_number(tmp_path):
    files = Counting()
    io = DirectoryCheckpointIO(files)
    saving, loading = {}, {}
    for count in (100, 1_000):
        files.reset()
        io.save(str(tmp_path / str(count)), snapshot_of(count))
        saving[count] = files.operations
        # Written first and synced afterwards, they share a commit of the disk's journal.
        order = [name for name, _ in files.order if name in ("create", "finish")]
        assert order == ["create", "create", "finish", "finish"]
        files.reset()
        io.load(str(tmp_path / str(count)))
        loading[count] = files.operations
    assert saving[1_000] == saving[100]
    assert saving[100]["finish"] == saving[100]["create"] == 2  # the tensors, and the manifest
    assert saving[100]["write"] == 3  # of them the header and the tensors
    assert loading[1_000].pop("read") - loading[100].pop("read") == 900
    assert loading[1_000] == loading[100]
    assert files.bytes_read == sum(each.stat().st_size for each in (tmp_path / "1000").iterdir())  # once


def test_a_run_in_the_foreground_does_no_file_work_of_a_save_in_the_background(tmp_path):
    files = Counting()
    manager = CheckpointManager(str(tmp_path / "c"), CheckpointConfig(best=0, asynchronous=True), files=files)
    manager.save(1, 0, {}, lambda: snapshot_of(10))
    manager.wait()
    files.reset()
    manager.save(2, 0, {}, lambda: snapshot_of(10))
    manager.wait()
    mine = [name for name, thread in files.order if thread == threading.get_ident()]
    assert set(mine) == {"kind"}  # is the name free?
    assert mine.count("kind") == 1
    assert files.operations["write"] == 4  # header, tensors, manifest, index


def test_a_list_asks_one_question_of_each_checkpoint_and_opens_none(tmp_path, monkeypatch):
    monkeypatch.setattr(schemes, "LOCAL", files := Counting())
    questions = []
    for count in (2, 12):
        names = [f"step-{number:08d}" for number in range(count)]
        for name in names:
            DirectoryCheckpointIO().save(str(tmp_path / f"{count}" / name), snapshot_of(1))
        write_index(f"{tmp_path}/{count}", [Entry(name, n, n, 0) for n, name in enumerate(names)])
        files.reset()
        assert len(newest_first(f"{tmp_path}/{count}")) == count
        assert files.operations["open"] == 1  # the index
        questions.append(files.operations["kind"])
    assert questions[1] - questions[0] == 10
