"""The suites pass on a real disk, and find what is wrong with a bad one."""

import io
import os

import pytest

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.storage.filesystem import LOCAL, LocalFileSystem
from drivetrain.core.errors import CheckpointError
from drivetrain.testing.storage import check_checkpoint_io, check_file_system


def test_a_local_disk_passes(tmp_path):
    check_file_system(LOCAL, str(tmp_path / "files"))
    check_checkpoint_io(DirectoryCheckpointIO(), str(tmp_path / "checkpoints"), os.path.join)


class Forgetful(LocalFileSystem):
    def delete(self, path):
        pass


class Careless(LocalFileSystem):
    def entries(self, directory):
        return dict.fromkeys(os.listdir(directory), "file")


class Short(LocalFileSystem):
    def open(self, path):
        with super().open(path) as source:
            return io.BytesIO(source.read()[:-1])


class Unseekable(LocalFileSystem):
    def open(self, path):
        source = super().open(path)
        seek = source.seek
        source.seek = lambda position, whence=0: (
            seek(position, whence) if whence or not position else position
        )
        return source


class Clinging(LocalFileSystem):
    def rename(self, old, new):
        os.link(old, new)


class Overwriting(DirectoryCheckpointIO):
    def save(self, path, snapshot):
        if self.exists(path):
            self.remove(path)
        super().save(path, snapshot)


class Lossy(DirectoryCheckpointIO):
    def save(self, path, snapshot):
        tensors = {
            group: {name: each.clone().zero_() if name == "nan" else each for name, each in named.items()}
            for group, named in snapshot.tensors.items()
        }
        super().save(path, Snapshot(tensors, snapshot.objects, snapshot.progress, snapshot.metrics))


class Greedy(DirectoryCheckpointIO):
    def load(self, path, groups=None, *, like=None):
        return super().load(path)


class Deaf(DirectoryCheckpointIO):
    def remove(self, path):
        pass


def test_a_bad_disk_and_a_bad_storage_are_found_out(tmp_path):
    files = {
        Forgetful: "a deleted file is gone",
        Careless: "entries is empty|No such file",
        Short: "the size of a file",
        Unseekable: "read from a position",
        Clinging: "replaced|renamed|leaves no other file|File exists",
    }
    for kind, message in files.items():
        with pytest.raises((AssertionError, OSError, CheckpointError), match=message):
            check_file_system(kind(), str(tmp_path / kind.__name__))
    storages = {
        Overwriting: "save refuses to overwrite",
        Lossy: "load returns the saved snapshot: model/nan",
        Greedy: "only the requested groups",
        Deaf: "a removed checkpoint is gone",
    }
    for kind, message in storages.items():
        with pytest.raises(AssertionError, match=message):
            check_checkpoint_io(kind(), str(tmp_path / kind.__name__), os.path.join)
