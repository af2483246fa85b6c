"""Checkpoints on a local disk: whole or not there, and never believed without a check."""

import contextlib
import json
import os
import shutil
import subprocess
from unittest.mock import Mock

import pytest
from tests.support import held

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.io import read_manifest, verify
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks

io = DirectoryCheckpointIO()
FEW = ["manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES = [*FEW, "hparams.json", "state.json", "state.safetensors"]


@pytest.fixture
def in_files(saved):  # the checkpoint as a larger one is stored, whose manifest holds no other file
    return held.in_files(saved)


def damaged(path, name, checks=(io.load, verify)):  # all who read it say that this file is damaged
    for check in checks:
        with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
            check(str(path))


def test_a_snapshot_comes_back_bit_for_bit(saved, helpers):
    assert sorted(os.listdir(saved)) == FEW
    assert read_manifest(str(saved)).files.keys() == {*FILES} - {"manifest.json"}
    for path in (saved, held.in_files(saved)):  # from the manifest, and from files of their own
        assert helpers.same_snapshot(io.load(str(path)), helpers.make_snapshot())
        assert verify(str(path)).progress == {"steps": 1, "epoch": 0}
    assert sorted(os.listdir(saved)) == sorted(FILES)
    (saved / "notes.txt").write_text("lr was too high", encoding="utf-8")
    io.load(str(saved))  # a foreign file beside the others does no harm


def test_weights_are_read_without_the_rest(in_files):
    for name in ("optimizer.safetensors", "state.json", "state.safetensors"):
        (in_files / name).write_bytes(b"damaged")
    snapshot = io.load(str(in_files), groups=("model",))
    assert list(snapshot.tensors) == ["model"]
    assert snapshot.objects == {"hparams": {"hidden": 3}}
    with pytest.raises(DamagedCheckpointError):
        io.load(str(in_files))
    with pytest.raises(CheckpointError, match=r"'models'\. Did you mean 'model'"):
        io.load(str(in_files), groups=["models"])


def test_only_committed_checkpoints_exist(saved, tmp_path):
    parent = saved.parent
    shutil.copytree(saved, parent / "step-00000001.bad")
    shutil.copytree(saved, parent / ".saving-step-00000002-abc")
    shutil.copytree(saved, parent / "unfinished")
    (parent / "unfinished" / "manifest.json").unlink()
    (parent / "file").write_text("x", encoding="utf-8")
    os.symlink(saved, parent / "link")
    assert io.list(str(parent)) == [saved.name]
    assert io.list(str(tmp_path / "nowhere")) == []
    paths = (saved, parent / "unfinished", tmp_path / "nowhere")
    assert [io.exists(str(path)) for path in paths] == [True, False, False]


def test_nothing_is_overwritten_and_no_impossible_name_is_taken(saved, helpers, tmp_path):
    (saved.parent / "mine").mkdir()
    with pytest.raises(CheckpointError, match="something that is not a checkpoint is there"):
        io.save(str(saved.parent / "mine"), helpers.make_snapshot(2.0))
    assert sorted(os.listdir(saved.parent)) == ["mine", saved.name]
    for name in (".hidden", "best.bad", "best.bad-2"):
        with pytest.raises(CheckpointError, match="are reserved"):
            io.save(str(tmp_path / "new" / name), Snapshot())
    for part in ({"tensors": {"../m": {}}}, {"objects": {"a/b": 1}}, {"objects": {"manifest": 1}}):
        with pytest.raises(CheckpointError, match="cannot be a file name"):
            io.save(str(tmp_path / "new" / "c"), Snapshot(**part))
    assert not (tmp_path / "new").exists() or os.listdir(tmp_path / "new") == []


def test_only_checkpoints_are_removed_and_no_half_is_left(saved, tmp_path, monkeypatch):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x", encoding="utf-8")
    os.symlink(saved, tmp_path / "link")
    for path in (tmp_path / "precious", tmp_path / "link", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            io.remove(str(path))
    assert (tmp_path / "precious" / "thesis.txt").exists()
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="cannot remove"):
        io.remove(str(saved))
    assert not io.exists(str(saved))
    assert io.list(str(saved.parent)) == []


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_in_any_file_is_found(in_files, name):
    path = in_files / name
    content = path.read_bytes()
    step = max(1, len(content) // 40)
    for position in {*range(0, len(content), step), *range(min(9, len(content))), len(content) - 1}:
        for bit in (0, 5, 7):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with contextlib.suppress(ValueError):
                if name == "manifest.json" and json.loads(changed) == json.loads(content):
                    continue  # a text can be spelt in two ways: "\\n" and "\\u000a"
            damaged(in_files, name)


def test_any_flipped_bit_of_what_the_manifest_holds_is_found(saved):
    path = saved / "manifest.json"
    content = path.read_bytes()
    for place in range(content.index(b'"content"'), len(content), 29):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        damaged(saved, "manifest.json")


def test_a_manifest_that_misdescribes_a_tensor_is_found(saved):
    manifest = read_manifest(str(saved))
    tensors = manifest.tensors["model"]
    record = tensors.pop("bias")
    for renamed in ({}, {"renamed": record}, {"bias": tensors["weight"]}):
        manifest.tensors["model"] = {**tensors, **renamed}
        (saved / "manifest.json").write_bytes(manifest.dump())
        damaged(saved, "the tensor 'bias' of the group 'model' is F32 of shape")
    del manifest.files["model.safetensors"]
    (saved / "manifest.json").write_bytes(manifest.dump())
    damaged(saved, "places tensors in 'model.safetensors', which it does not list")


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_made_longer_missing_or_linked_is_found(in_files, name, tmp_path):
    path = in_files / name
    content = path.read_bytes()
    for length in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        damaged(in_files, name)
        if name != "manifest.json":
            with pytest.raises(DamagedCheckpointError, match=f"has {length} bytes, but {len(content)} were"):
                verify(str(in_files))
    path.write_bytes(content + b"\0")
    damaged(in_files, name)
    path.unlink()
    damaged(in_files, name)
    (tmp_path / "elsewhere").write_bytes(content)
    os.symlink(tmp_path / "elsewhere", path)
    damaged(in_files, f"{name}' is a symbolic link")
    path.unlink()
    path.write_bytes(content)
    io.load(str(in_files))
    os.symlink("/etc", in_files / "link")  # one that no manifest lists is refused too
    damaged(in_files, "link' is a symbolic link")


@pytest.mark.parametrize(("operation", "least"), [("mkdir", 2), ("fsync", 5), ("replace", 1)])
def test_a_fault_at_any_step_leaves_all_or_nothing(tmp_path, monkeypatch, operation, least, helpers):
    real = getattr(os, operation)
    faults = 0
    while True:
        calls = 0

        def failing(*arguments, fault=faults, **options):
            nonlocal calls
            calls += 1
            if calls == fault + 1:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)

        directory = tmp_path / f"{faults}"
        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            error = None
            try:
                io.save(str(directory / "c"), helpers.make_snapshot())
            except CheckpointError as caught:
                error = caught
        if error is None:
            break
        assert "ENOSPC" in str(error)
        # Only when the last sync failed: the rename is done, and cannot be undone.
        if io.list(str(directory)):
            assert operation == "fsync"
            assert helpers.same_snapshot(io.load(str(directory / "c")), helpers.make_snapshot())
        assert not directory.exists() or set(os.listdir(directory)) <= {"c"}
        faults += 1
    assert faults >= least
    monkeypatch.setattr(os, operation, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        io.save(str(tmp_path / "interrupted"), helpers.make_snapshot())
    assert "interrupted" not in os.listdir(tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name a descriptor")
def test_everything_is_synced_before_the_commit(tmp_path, monkeypatch, helpers):
    events = helpers.record_syncs(monkeypatch)
    io.save(str(tmp_path / "c"), helpers.make_snapshot())
    commit = [kind for kind, _ in events].index("replace")
    before = [os.path.relpath(path, events[commit][1]) for _, path in events[:commit]]
    assert sorted(set(before) - {".."}) == [".", *FEW]
    assert before[-1] == "."  # the files' names, before the rename commits them
    assert before.count(".") == 1
    assert events[commit + 1 :] == [("sync", str(tmp_path))]


def test_a_read_only_disk_can_be_resumed_from_and_says_that_it_cannot_be_saved_to(tmp_path, helpers):
    source, place = tmp_path / "source", tmp_path / "place"
    CheckpointManager(str(source), CheckpointConfig(by=None)).save(1, 0, {}, helpers.make_snapshot)
    place.mkdir()
    try:
        for options in (("--bind", source), ("-o", "remount,ro,bind")):
            subprocess.run(["mount", *options, place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["umount", "-q", place])
        pytest.skip(f"mounting is not allowed here: {error}")
    try:
        manager = CheckpointManager(str(place), CheckpointConfig(by=None))
        path, snapshot = manager.load_latest()
        assert path == str(place / "step-00000001")
        bias = helpers.make_snapshot().tensors["model"]["bias"]
        assert helpers.same_bits(snapshot.tensors["model"]["bias"], bias)
        with pytest.raises(CheckpointError, match=r"cannot create .*\(EROFS\); use a directory on a wr"):
            manager.save(2, 0, {}, helpers.make_snapshot)
    finally:
        subprocess.run(["umount", place], check=True)
    assert sorted(os.listdir(source)) == ["index.json", "step-00000001"]


def test_a_committed_checkpoint_stays_when_a_peer_is_lost_right_after(tmp_path, helpers):
    for path in (str(tmp_path / "c"), f"memory://{tmp_path.name}/c"):

        class Lossy(Ranks):  # a rank 0 whose exchanges fail once the checkpoint is committed
            def first(self, act, path=path):
                value = act()
                if io.exists(path):
                    raise RuntimeError("Connection closed by peer")
                return value

        with pytest.raises(RuntimeError, match="closed by peer"):
            DirectoryCheckpointIO(ranks=Lossy()).save(path, helpers.make_snapshot(1.0))
        verify(path)
