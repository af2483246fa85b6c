"""Checkpoints at addresses: the whole life of a run's, and what comes of a service that fails for a while."""

import errno
import logging
import os
import random
import sys
from typing import ClassVar

import aiohttp
import botocore.exceptions
import fsspec
import fsspec.config
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from tests.support.faults import read_bytes
from tests.support.outcome import weights
from tests.support.storage import check_checkpoint_io, check_file_system
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, DamagedCheckpointError, DirectoryCheckpointIO
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.saving.io import UNFINISHED, discard
from drivetrain.checkpoint.storage.files import write_file
from drivetrain.checkpoint.storage.remote import RemoteFileSystem
from drivetrain.checkpoint.storage.retries import Retry, as_os_error, is_transient
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError, MissingDependencyError

QUICK = Retry(tries=4, pause=0.001)
MEMORY = RemoteFileSystem("memory", part=1000)


class Flaky(MemoryFileSystem):  # next requests fail: `plan` has, by method, what they raise or lack
    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    plan: ClassVar[dict] = {}
    counts: ClassVar[dict] = {}

    def _met(self, method):
        self.counts[method] = self.counts.get(method, 0) + 1
        planned = self.plan.get(method, [])
        fault = planned.pop(0) if planned else None
        if isinstance(fault, Exception):
            raise fault
        return fault

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start, end, **options)
        return content[: len(content) // 2] if self._met("cat_file") == "cut" else content

    def info(self, path, **options):
        self._met("info")
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        self._met("ls")
        found = super().ls(path, detail=detail, **options)
        return sorted(found, key=lambda each: each["name"] if detail else each)  # as a service lists them

    def pipe_file(self, path, value, **options):
        self._met("pipe_file")
        super().pipe_file(path, value, **options)

    def rm_file(self, path):
        if self._met("rm_file") == "lost answer":
            super().rm_file(path)
            raise ConnectionResetError
        super().rm_file(path)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def flaky():
    for each in (Flaky.store, Flaky.plan, Flaky.counts):
        each.clear()
    return RemoteFileSystem("flaky", retry=QUICK, block=1000, part=1 << 20)


@pytest.fixture
def memory():
    MemoryFileSystem.store.clear()
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()


@pytest.fixture
def place(memory):
    return f"{memory}s/a run"


def test_every_operation_is_what_checkpoints_need(place):
    files = file_system(place)
    check_file_system(files, f"{place}/files")
    check_checkpoint_io(DirectoryCheckpointIO(), f"{place}/checkpoints", files.join)


def test_a_fit_resumes_from_an_address_bit_for_bit(place, tmp_path):
    policy = CheckpointConfig(every="3 steps", by=None, directory=place)
    whole, half = Regression(dropout=0.5), Regression(dropout=0.5)
    quiet(max_epochs=2, run_dir=tmp_path / "whole").fit(whole, pairs(shuffle=True))
    quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path / "half").fit(half, pairs(shuffle=True))
    trainer = quiet(max_epochs=2, checkpoint=policy, run_dir=tmp_path / "half")
    result = trainer.fit(half := Regression(dropout=0.5), pairs(shuffle=True), resume="auto")
    assert weights(half) == weights(whole)
    assert weights(Regression.from_checkpoint(result.last_checkpoint)) == weights(whole)
    assert weights(Regression.from_checkpoint(place)) == weights(whole)
    assert not list((tmp_path / "half").rglob("*.safetensors"))


def test_what_an_address_needs_is_named(monkeypatch):
    with pytest.raises(CheckpointError, match=r"unknown kind of address 's3n://'\. Did you mean 's3'\?"):
        file_system("s3n://bucket/run")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for registered in ("s3", "s3a"):
        monkeypatch.delitem(_registry, registered, raising=False)
    with pytest.raises(MissingDependencyError, match=r"drivetrain\[s3\]"):
        RemoteFileSystem("s3")
    with pytest.raises(CheckpointError, match="gcsfs"):
        RemoteFileSystem("gs")


def test_whatever_stops_a_deletion_no_half_is_a_checkpoint(flaky, helpers):
    io, path = DirectoryCheckpointIO(flaky), "flaky://bucket/one"
    io.save(path, helpers.make_snapshot())
    objects = len(flaky.entries(path))
    for done in range(objects):
        if not io.exists(path):
            flaky.delete(path)
            io.save(path, helpers.make_snapshot())
        write_file(f"{path}/{UNFINISHED}", [], flaky)
        Flaky.plan["rm_file"] = [None] * done + [PermissionError()]
        with pytest.raises(PermissionError):
            discard(path, flaky)
        left = flaky.entries(path)
        assert len(left) == objects + 1 - done
        assert UNFINISHED in left
        assert (MANIFEST in left) == (done == 0)


TRANSIENT = [ConnectionResetError(), TimeoutError(), aiohttp.ClientPayloadError("cut")]


def test_a_failure_that_passes_is_tried_again_and_told_of(flaky, caplog):
    Flaky.plan.update(pipe_file=TRANSIENT[:2], cat_file=[*TRANSIENT, None, "cut"])
    content = random.Random(0).randbytes(3500)
    with caplog.at_level(logging.WARNING, "drivetrain"):
        write_file("flaky://bucket/object", [content], flaky)
        Flaky.plan.update(info=TRANSIENT[:1], ls=TRANSIENT[:1])  # an earlier fsspec writes with info, too
        assert read_bytes(flaky, "flaky://bucket/object") == content
        assert flaky.entries("flaky://bucket") == {"object": "file"}
    assert len(caplog.records) == 8
    text = caplog.messages[0]
    assert "writing 'flaky://bucket/object'" in text
    assert "ConnectionResetError" in text
    assert "(2 of 4)" in text


def test_a_failure_that_stays_is_given_up_after_so_many_tries_or_so_long(flaky):
    Flaky.plan["pipe_file"] = [TimeoutError() for _ in range(9)]
    with pytest.raises(TimeoutError) as caught:
        write_file("flaky://bucket/object", [b"1"], flaky)
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.filename == "flaky://bucket/object"
    assert Flaky.counts["pipe_file"] == QUICK.tries
    assert flaky.kind("flaky://bucket/object") is None
    for error in (PermissionError(), FileNotFoundError(), ValueError("wrong")):  # stay as they are
        Flaky.counts.clear()
        Flaky.plan["pipe_file"] = [error]
        with pytest.raises(OSError, match="flaky://bucket/object"):
            write_file("flaky://bucket/object", [b"1"], flaky)
        assert Flaky.counts["pipe_file"] == 1


def test_pauses_grow_and_differ_and_end_with_patience(flaky):
    retry, state = Retry(pause=1.0, longest=8.0), random.getstate()
    for failures, top in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (9, 8.0)):
        drawn = [retry.draw_pause(failures) for _ in range(50)]
        assert all(top / 2 <= each <= top for each in drawn)
        assert len(set(drawn)) > 25
    assert random.getstate() == state  # a run's random numbers do not depend on the network
    Flaky.plan["info"] = [TimeoutError() for _ in range(9)]
    with pytest.raises(TimeoutError):
        RemoteFileSystem("flaky", retry=Retry(pause=0.001, patience=0)).kind("flaky://bucket/object")
    assert Flaky.counts["info"] == 1


def test_a_deletion_whose_answer_was_lost_has_been_done(flaky):
    write_file("flaky://bucket/object", [b"1"], flaky)
    Flaky.plan["rm_file"] = ["lost answer"]
    flaky.delete("flaky://bucket/object")
    assert flaky.entries("flaky://bucket") == {}
    with pytest.raises(FileNotFoundError):
        flaky.delete("flaky://bucket/object")


def test_an_object_that_is_replaced_while_it_is_read_is_the_old_or_the_new(flaky, monkeypatch):
    path, info = "flaky://bucket/index.json", Flaky.info
    write_file(path, [b"1" * 10], flaky)

    def replaced(self, name, **options):
        found = info(self, name, **options)
        monkeypatch.setattr(Flaky, "info", info)
        write_file(path, [b"2" * 700], flaky)
        return found

    monkeypatch.setattr(Flaky, "info", replaced)
    assert read_bytes(flaky, path) == b"2" * 700


def test_each_process_and_configuration_has_a_connection_of_its_own(flaky, monkeypatch):
    address = "flaky://bucket/object"
    mine = flaky._connection(address)
    assert flaky._connection(address) is mine
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked copy
    theirs = flaky._connection(address)
    monkeypatch.setitem(fsspec.config.conf, "flaky", {"asynchronous": False})
    assert len({id(each) for each in (mine, theirs, flaky._connection(address))}) == 3


def test_an_object_is_not_seen_before_it_is_whole_and_not_after_an_abort(tmp_path, memory):
    top = f"local://{tmp_path}/in"
    for files, place in ((RemoteFileSystem("local", {"auto_mkdir": True}, part=1000), top), (MEMORY, memory)):
        for name, end in (("object", lambda sink: sink.finish()), ("aborted", lambda sink: sink.abort())):
            sink = files.create(f"{place}/{name}")
            for _ in range(4):
                assert sink.write(memoryview(bytes(700))) == 700
                assert files.kind(f"{place}/{name}") is None
            end(sink)
        assert files.entries(place) == {"object": "file"}
        assert read_bytes(files, f"{place}/object") == bytes(2800)


def test_a_checkpoint_that_cannot_be_reached_is_not_called_damaged(flaky, helpers):
    manager = CheckpointManager("flaky://bucket/run", CheckpointConfig(by=None), files=flaky)
    manager.save(1, 0, {}, helpers.make_snapshot)
    Flaky.plan["cat_file"] = [OSError(errno.EIO, "a fault of the service") for _ in range(9)]
    with pytest.raises(CheckpointError, match="a fault of the service") as caught:
        CheckpointManager("flaky://bucket/run", CheckpointConfig(by=None), files=flaky).load_latest()
    assert not isinstance(caught.value, DamagedCheckpointError)


def answered(status, code):
    response = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(response, "PutObject")


class RefusedError(Exception):  # as the clients of Google and Azure tell of an answer
    def __init__(self, **attributes):
        super().__init__("said")
        self.__dict__.update(attributes)


ERRORS = [
    (answered(503, "SlowDown"), True, errno.EBUSY),
    (answered(429, "TooManyRequests"), True, errno.EBUSY),
    (answered(400, "RequestTimeout"), True, errno.EBUSY),
    (answered(403, "AccessDenied"), False, errno.EACCES),
    (answered(404, "NoSuchBucket"), False, errno.ENOENT),
    (answered(501, "NotImplemented"), False, errno.EPROTO),
    (RefusedError(code=503), True, errno.EBUSY),
    (RefusedError(status_code=403), False, errno.EACCES),
    (botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"), True, errno.EBUSY),
    (botocore.exceptions.NoCredentialsError(), False, errno.EACCES),
    (aiohttp.ServerDisconnectedError(), True, errno.EBUSY),
    (ConnectionRefusedError(), True, errno.ECONNREFUSED),
    (OSError(errno.EIO, "of a service"), False, errno.EPROTO),
    (FileNotFoundError("bucket/run"), False, errno.ENOENT),
    (RuntimeError("a bug"), False, errno.EPROTO),
]


def test_errors_of_clients_are_told_apart():
    wrapped = OSError(errno.EIO, "said")
    wrapped.__cause__ = answered(503, "SlowDown")
    for error, transient, number in (*ERRORS, (wrapped, True, errno.EBUSY)):
        assert is_transient(error) is transient, error
        translated = as_os_error(error, "s3://bucket/run")
        assert translated.filename == "s3://bucket/run"
        assert translated.errno == number, error


def test_a_large_object_is_read_from_any_position(flaky):
    size = 9876  # in blocks of 1000
    content = random.Random(1).randbytes(size)
    write_file("flaky://bucket/object", [content], flaky)
    source = flaky.open("flaky://bucket/object")
    chance = random.Random(2)
    for _ in range(60):
        position, length = chance.randrange(size), chance.randrange(1, 3000)
        source.seek(position)
        target, done = memoryview(bytearray(length)), 0
        while done < length and (count := source.readinto(target[done:])):
            done += count
        assert bytes(target[:done]) == content[position : position + length]
    source.close()
