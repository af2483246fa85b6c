"""What checkpoints cost, counted: memory, operations on files, calls. Times are in the benchmark."""

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.locate import newest_first
from drivetrain.checkpoint.saving.background import HostBuffers
from drivetrain.checkpoint.saving.index import Entry, write_index
from drivetrain.checkpoint.saving.io import SMALL
from drivetrain.checkpoint.saving.sharding import plan_save
from drivetrain.checkpoint.storage import schemes
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.distributed.ranks import ALONE

MIB = 1 << 20
MANY, LARGE = 48 * 4 * MIB, 96 * MIB
"""Bytes of all the program's small tensors, and of one that must be copied to be written."""


@pytest.mark.extended
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system does not tell such peaks")
def test_saves_and_loads_take_no_more_memory_than_they_need(tmp_path):
    # A fixed threshold, so that glibc gives back what is freed and a peak is not hidden by an earlier one.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, Path(__file__).parent / "programs" / "measure_memory.py", tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peaks = json.loads(done.stdout)
    assert peaks["save"] <= 24 * MIB  # nothing for tensors that lie ready
    assert peaks["verify"] <= 24 * MIB
    assert LARGE / 2 <= peaks["save transposed"] <= 2 * LARGE  # one tensor at a time
    assert MANY / 2 <= peaks["save behind"] <= 2 * MANY  # one copy, also when repeated
    assert MANY / 2 <= peaks["load"] <= 2 * MANY


class Counting(LocalFileSystem):
    """The local disk, with every operation counted by name and thread, and the bytes that are read."""

    def __init__(self):
        self.operations = Counter()
        self.threads = Counter()
        self.bytes_read = 0

    def count(self, name):
        self.operations[name] += 1
        self.threads[threading.get_ident(), name] += 1

    def reset(self):
        self.operations.clear()
        self.threads.clear()
        self.bytes_read = 0

    def create(self, path):
        self.count("create")
        return self.watched(super().create(path))

    def open(self, path):
        self.count("open")
        return self.watched(super().open(path))

    def watched(self, file):
        """A sink or a source that counts as well."""
        for name in ("write", "finish", "read_into", "seek"):
            if hasattr(file, name):
                setattr(file, name, partial(self.within, name, getattr(file, name)))
        return file

    def within(self, name, act, *arguments):
        self.count({"read_into": "read"}.get(name, name))
        result = act(*arguments)
        self.bytes_read += result if name == "read_into" else 0
        return result


def counted(name):
    def operation(self, *arguments):
        self.count(name)
        return getattr(LocalFileSystem, name)(self, *arguments)

    return operation


for each in ("kind", "entries", "make_directory", "sync", "rename", "delete"):
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
        saving[count] = Counter(files.operations)
        files.reset()
        io.load(str(tmp_path / str(count)))
        loading[count] = Counter(files.operations)
    assert saving[1_000] == saving[100]
    assert saving[100]["finish"] == saving[100]["create"] == 2  # the tensors, and the manifest
    assert saving[100]["write"] == 3  # of them the header and the tensors
    assert loading[1_000].pop("read") - loading[100].pop("read") == 900
    assert loading[1_000] == loading[100]
    assert files.bytes_read == sum(each.stat().st_size for each in (tmp_path / "1000").iterdir())  # once


def test_small_files_are_all_written_before_the_first_is_synced(tmp_path):
    order = []

    class Ordered(Counting):
        def count(self, name):
            order.append(name)

    tensors = {group: {"weight": torch.ones(3)} for group in ("model", "optimizer", "state")}
    assets = {"config.json": b"{}", "words/vocabulary.txt": b"a b"}
    objects = {"state": {}, "hparams": {}, "large": "x" * SMALL}
    snapshot = Snapshot(tensors, objects=objects, assets=assets)
    DirectoryCheckpointIO(Ordered()).save(str(tmp_path / "c"), snapshot)
    files = "".join({"write": "w", "finish": "s"}[each] for each in order if each in ("write", "finish"))
    # two groups, two assets, a large object and the manifest, which holds the rest
    assert re.sub("w+", "w", files) == "wssssss"


def calls(act):
    """How many calls of Python and of C functions it makes."""
    found = 0

    def note(frame, event, argument):
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def test_the_work_grows_no_faster_than_the_number_of_tensors(tmp_path):
    io = DirectoryCheckpointIO()

    def copy(count):
        snapshot = snapshot_of(count)
        snapshot.plan = plan_save(snapshot.tensors, (), ALONE)
        HostBuffers().copy(snapshot)

    for act in (
        lambda count: io.save(str(tmp_path / f"{count}"), snapshot_of(count)),
        lambda count: io.load(str(tmp_path / f"{count}")),
        copy,
    ):
        few, many = (calls(partial(act, count)) for count in (200, 2_000))
        assert many <= 10 * few


@pytest.fixture
def crowd(tmp_path, monkeypatch):
    """Makes a directory of so many checkpoints and their index, on a disk that counts."""
    files = Counting()
    monkeypatch.setattr(schemes, "LOCAL", files)
    DirectoryCheckpointIO().save(str(tmp_path / "one"), snapshot_of(1))

    def make(count):
        directory = tmp_path / str(count)
        names = [f"update-{number:08d}" for number in range(count)]
        for name in names:
            os.makedirs(directory / name)
            for file in Path(tmp_path, "one").iterdir():
                os.link(file, directory / name / file.name)
        write_index(str(directory), [Entry(name, number, number, 0) for number, name in enumerate(names)])
        files.reset()
        return str(directory), files

    return make


LISTINGS = {
    "list": (lambda directory: DirectoryCheckpointIO().list(directory), 0),
    "entries": (lambda directory: CheckpointManager(directory, CheckpointConfig(best=0)).entries(), 2),
    "newest first": (newest_first, 1),
}
"""What lists checkpoints, and how many files it opens: the index, and a lock."""


@pytest.mark.parametrize("name", LISTINGS)
def test_a_list_asks_one_question_of_each_checkpoint_and_reads_none(crowd, name):
    act, opened = LISTINGS[name]
    questions, others, work = [], [], []
    for count in (20, 200):
        directory, files = crowd(count)
        assert len(act(directory)) == count
        operations = Counter(files.operations)
        questions.append(operations.pop("kind"))
        operations.pop("read", None)  # of the index, which is larger
        others.append(operations)
        work.append(calls(partial(act, directory)))
    assert questions[1] - questions[0] == 180
    assert others[1] == others[0]
    assert others[1]["open"] == opened
    assert work[1] <= 10 * work[0]


def test_a_run_in_the_foreground_does_no_file_work_of_a_save_in_the_background(tmp_path):
    files = Counting()
    manager = CheckpointManager(str(tmp_path / "c"), CheckpointConfig(best=0, asynchronous=True), files=files)
    manager.save(1, 0, {}, lambda: snapshot_of(10))
    manager.wait()
    files.reset()
    manager.save(2, 0, {}, lambda: snapshot_of(10))
    manager.wait()
    mine = {name for thread, name in files.threads if thread == threading.get_ident()}
    assert mine == {"kind", "entries"}  # is the name free, and what was saved still there?
    assert files.threads[threading.get_ident(), "kind"] == 1
    assert files.operations["write"] == 4  # header, tensors, manifest, index
