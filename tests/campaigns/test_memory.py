"""The disk and the object store in memory are what checkpoints expect, and a power cut takes what it may."""

import random

import pytest
from tests.support.faults import read_bytes, write_bytes
from tests.support.memory import MemoryDisk, MemoryObjects

from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.testing.storage import check_checkpoint_io, check_file_system


@pytest.mark.parametrize("kind", [MemoryDisk, MemoryObjects])
def test_both_pass_the_conformance_suites(kind):
    files = kind()
    check_file_system(files, "/files")
    check_checkpoint_io(DirectoryCheckpointIO(files), "/checkpoints", files.join)


def fates(act, look, cuts=200):
    """What is found after a power cut, over many of them; each on a disk of its own."""
    found = set()
    for seed in range(cuts):
        disk = MemoryDisk()
        disk.make_directory("/d")
        act(disk)
        disk.cut_power(random.Random(seed))
        found.add(look(disk))
    return found


def content(disk, path="/d/file"):
    return read_bytes(disk, path) if disk.kind(path) == "file" else None


def test_what_was_finished_and_synced_survives_a_power_cut():
    def act(disk):
        write_bytes(disk, "/d/file", b"content")
        disk.sync("/d")

    assert fates(act, content) == {b"content"}


def test_a_file_that_was_not_finished_may_be_empty_short_or_zeros():
    def act(disk):
        disk.create("/d/file").write(memoryview(b"content"))
        disk.sync("/d")

    found = fates(act, content)
    assert {b"", b"cont", b"content", bytes(7), b"con" + bytes(4)} <= found
    assert None not in found


def test_a_name_that_was_not_synced_may_be_gone():
    assert fates(lambda disk: write_bytes(disk, "/d/file", b"content"), content) == {b"content", None}


def test_a_renaming_that_was_not_synced_may_be_undone_but_never_half():
    def act(disk):
        for name, text in (("file", b"old"), ("new", b"new")):
            write_bytes(disk, f"/d/{name}", text)
        disk.sync("/d")
        disk.rename("/d/new", "/d/file")

    found = fates(act, lambda disk: (content(disk), content(disk, "/d/new")))
    assert found == {(b"old", b"new"), (b"new", None)}


def test_a_deleted_directory_may_come_back_with_a_part_of_what_was_in_it():
    def act(disk):
        disk.make_directory("/d/inner")
        for name in "ab":
            write_bytes(disk, f"/d/inner/{name}", b"content")
        disk.sync("/d/inner")
        disk.delete("/d/inner")

    found = fates(act, lambda disk: (disk.kind("/d/inner"), "".join(sorted(disk.entries("/d/inner")))))
    assert found == {(None, ""), *(("directory", names) for names in ("", "a", "b", "ab"))}


def test_an_object_appears_when_it_is_finished():
    objects = MemoryObjects()
    sink = objects.create("bucket/file")
    sink.write(memoryview(b"content"))
    assert objects.kind("bucket/file") is None
    sink.finish()
    assert read_bytes(objects, "bucket/file") == b"content"
