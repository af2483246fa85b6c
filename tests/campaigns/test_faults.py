"""A faulty file system is a sound one but for its faults, and each of these is what it is called."""

import errno
import os

import pytest
from tests.support.fault_kinds import OPERATIONS, Fault, Killed, Step, suits
from tests.support.faults import FaultyFileSystem, read_bytes, write_bytes
from tests.support.memory import MemoryObjects

from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.checkpoint.storage.files import write_file
from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.testing.storage import check_checkpoint_io, check_file_system


def test_without_faults_it_passes_the_conformance_suites(tmp_path):
    files = FaultyFileSystem(LOCAL)
    check_file_system(files, str(tmp_path / "files"))
    check_checkpoint_io(DirectoryCheckpointIO(files), str(tmp_path / "checkpoints"), os.path.join)
    assert {step.operation for step in files.steps} == set().union(*OPERATIONS.values())
    assert files.struck() == []


@pytest.fixture
def faulty(tmp_path):
    """Gives a file system with a fault, and the path of a file there."""

    def make(operation, kind, seed=0):
        return FaultyFileSystem(LOCAL, Fault(operation, kind, seed), root=str(tmp_path)), str(tmp_path / "f")

    return make


CONTENT = bytes(range(200))
# The operations of writing a file: to create it, to write, to finish.
CREATE, WRITE, FINISH = 1, 2, 3


@pytest.mark.parametrize("kind", ["ENOSPC", "EACCES", "EIO"])
def test_an_error_is_the_systems_own(faulty, kind):
    files, path = faulty(CREATE, kind)
    with pytest.raises(OSError) as caught:
        write_file(path, [CONTENT], files)
    assert caught.value.errno == getattr(errno, kind)
    assert caught.value.filename == path
    assert files.struck() == [Step("create", path, kind)]
    write_file(path, [CONTENT], files)  # it happens once
    assert read_bytes(files, path) == CONTENT


def test_a_full_disk_stays_full_until_it_is_freed(faulty):
    files, path = faulty(WRITE, "full disk", seed=1)
    with pytest.raises(OSError, match="No space"):
        write_file(path, [CONTENT], files)
    assert 0 < len(read_bytes(files, path)) < len(CONTENT)
    files.delete(path)
    with pytest.raises(OSError, match="No space"):
        write_file(path, [CONTENT], files)
    files.heal()
    write_file(path, [CONTENT], files)
    assert read_bytes(files, path) == CONTENT


def test_a_short_write_says_so(faulty):
    files, path = faulty(WRITE, "short write")
    sink = files.create(path)
    taken = sink.write(memoryview(CONTENT))
    sink.finish()
    assert 0 < taken < len(CONTENT)
    assert read_bytes(files, path) == CONTENT[:taken]


@pytest.mark.parametrize(("operation", "kind"), [(WRITE, "lying write"), (FINISH, "truncate")])
def test_what_is_cut_short_is_said_to_be_whole(faulty, operation, kind):
    files, path = faulty(operation, kind)
    write_bytes(files, path, CONTENT)
    assert CONTENT.startswith(read_bytes(files, path))
    assert len(read_bytes(files, path)) < len(CONTENT)


def test_a_dropped_file_is_gone(faulty):
    files, path = faulty(FINISH, "drop")
    write_bytes(files, path, CONTENT)
    assert files.kind(path) is None


def differing_bits(left, right):
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("operation", "lasts"), [(WRITE, True), (5, False)])
def test_a_flip_is_of_one_bit_of_what_is_written_or_read(faulty, operation, lasts):
    files, path = faulty(operation, "flip")
    write_bytes(files, path, CONTENT)
    assert differing_bits(read_bytes(files, path), CONTENT) == 1
    assert differing_bits(read_bytes(LOCAL, path), CONTENT) == (1 if lasts else 0)


def test_a_lost_answer_is_an_error_of_what_was_done(faulty):
    files, path = faulty(4, "lost answer")
    write_bytes(files, path, CONTENT)
    with pytest.raises(OSError, match="Input/output"):
        files.rename(path, f"{path}2")
    assert read_bytes(LOCAL, f"{path}2") == CONTENT


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("operation", [CREATE, WRITE, FINISH])
def test_the_killed_do_nothing_more_and_leave_nothing_open(faulty, operation, seed):
    files, path = faulty(operation, "kill", seed)
    with pytest.raises(Killed):
        write_file(path, [CONTENT], files)
    left = read_bytes(LOCAL, path) if LOCAL.kind(path) else b""
    assert CONTENT.startswith(left)
    for act in (files.kind, files.entries, files.create, files.open, files.delete, files.sync):
        with pytest.raises(Killed):
            act(path)


def test_a_directory_may_be_half_deleted_when_the_fault_comes(tmp_path):
    left = set()
    for seed in range(20):
        place = tmp_path / str(seed)
        place.mkdir()
        for name in "abcd":
            (place / name).touch()
        with pytest.raises(OSError):
            FaultyFileSystem(LOCAL, Fault(1, "EIO", seed)).delete(str(place))
        left.add(len(list(place.iterdir())))
    assert left == {0, 1, 2, 3, 4}


def test_a_power_cut_leaves_the_disk_as_a_machine_could_find_it(tmp_path):
    found = set()
    for seed in range(30):
        place = tmp_path / str(seed)
        place.mkdir()
        (place / "before").write_bytes(CONTENT)
        files = FaultyFileSystem(LOCAL, Fault(7, "power cut", seed), root=str(place))
        write_bytes(files, str(place / "safe"), CONTENT)
        files.sync(str(place))
        files.rename(str(place / "before"), str(place / "after"))
        with pytest.raises(Killed):
            write_file(str(place / "torn"), [CONTENT], files)
        assert (place / "safe").read_bytes() == CONTENT
        found.add(tuple(sorted(each.name for each in place.iterdir())))
    # Neither the renaming nor the new name was synced: each may have reached the disk, or not.
    assert found == {(name, "safe", *new) for name in ("after", "before") for new in ((), ("torn",))}


def test_a_fault_waits_for_an_operation_that_it_suits(tmp_path):
    files = FaultyFileSystem(LOCAL, Fault(1, "flip"))
    write_bytes(files, str(tmp_path / "f"), CONTENT)
    assert [step.operation for step in files.struck()] == ["write"]


def test_an_object_store_has_no_power_cuts_of_ours_and_nothing_to_sync():
    assert not any(suits("power cut", operation, renames=False) for operation in OPERATIONS["power cut"])
    assert not suits("EIO", "sync", renames=False)
    files = FaultyFileSystem(MemoryObjects(), Fault(1, "kill", seed=3))
    with pytest.raises(Killed):
        write_bytes(files, "bucket/f", CONTENT)
    assert files.inner.entries("bucket") == {}
