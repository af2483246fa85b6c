"""Checkpoints on a local disk: whole or not there, and never believed without a check."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from tests.support import held

from drivetrain.checkpoint import (
    DamagedCheckpointError,
    DirectoryCheckpointIO,
    Snapshot,
    read_manifest,
    verify,
)
from drivetrain.checkpoint.format.manifest import Plan
from drivetrain.checkpoint.format.records import Layout, TensorRecord
from drivetrain.checkpoint.saving.io import SMALL, CheckpointIO, Place
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks

io: CheckpointIO = DirectoryCheckpointIO()
FEW = ["manifest.json", "model.safetensors", "optimizer.safetensors"]
FILES = [*FEW, "hparams.json", "state.json", "state.safetensors"]


@pytest.fixture
def in_files(saved):
    """The checkpoint as a larger one is stored, whose manifest holds no other file."""
    return held.in_files(saved)


def test_a_snapshot_comes_back_bit_for_bit(saved, helpers):
    assert sorted(os.listdir(saved)) == FEW
    assert read_manifest(str(saved)).files.keys() == {*FILES} - {"manifest.json"}
    assert helpers.same_snapshot(io.load(str(saved)), helpers.make_snapshot())
    assert verify(str(saved)).progress == {"updates": 1, "epoch": 0}


def test_it_comes_back_from_files_of_their_own_too(in_files, helpers):
    assert sorted(os.listdir(in_files)) == sorted(FILES)
    assert helpers.same_snapshot(io.load(str(in_files)), helpers.make_snapshot())
    assert verify(str(in_files)).progress == {"updates": 1, "epoch": 0}


@pytest.mark.parametrize("above", [0, 1])
def test_what_is_large_has_a_file_of_its_own(tmp_path, above):
    text = "x" * (SMALL - 2 + above)  # and two quotation marks
    snapshot = Snapshot({"model": {}}, {"state": text, "hparams": {"a": 1}})
    io.save(str(tmp_path / "c"), snapshot)
    own = ["state.json"] if above else []
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", *own]
    assert io.load(str(tmp_path / "c")).objects == snapshot.objects


@pytest.mark.parametrize(
    ("many", "size", "is_small"), [(1, 16_000, True), (1, 16_384, False), (2000, 1, False)]
)
def test_tensors_of_an_object_have_a_file_of_their_own_if_it_is_large(tmp_path, many, size, is_small):
    tensors = {f"t{number}": torch.full((size,), float(number)) for number in range(many)}
    io.save(str(tmp_path / "c"), Snapshot({"state": tensors}, {"state": 1}))
    assert (tmp_path / "c" / "state.safetensors").exists() is not is_small
    found = io.load(str(tmp_path / "c")).tensors["state"]
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


def test_what_the_manifest_holds_is_not_sent_to_other_processes(tmp_path):
    (tmp_path / "c").mkdir()
    place = Place(LocalFileSystem(), str(tmp_path / "c"), "c")
    tensors = {"model": {"w": torch.ones(2)}, "state": {"t": torch.ones(3000)}}
    records = {
        group: {name: TensorRecord(Layout.whole("F32", (len(each),)))}
        for group, named in tensors.items()
        for name, each in named.items()
    }
    shares = [place.write_share(Plan(records, tensors, processes=2), 0, {"state"}), {}]
    assert set(shares[0]) == {"model-00001-of-00002.safetensors"}
    place.write_rest(shares, Plan(records, tensors, processes=2), Snapshot(objects={"state": 1}))
    assert torch.equal(io.load(str(tmp_path / "c")).tensors["state"]["t"], torch.ones(3000))


def test_files_are_closed_before_an_error_is_told(tmp_path):
    """Rank 0 deletes them as soon as it hears of it, and some systems delete no open file."""
    ended = []

    class Watched(LocalFileSystem):
        def create(self, path):
            sink = super().create(path)
            abort = sink.abort
            sink.abort = lambda: (ended.append(os.path.basename(path)), abort())
            return sink

    place = Place(Watched(), str(tmp_path), "c")
    parts = {"model": {"w": torch.ones(2)}, "Not a name": {"w": torch.ones(2)}}
    with pytest.raises(CheckpointError, match="Not a name"):
        place.write_share(Plan({}, parts), 0)
    assert ended == ["model.safetensors"]


def test_weights_have_a_file_of_their_own_however_small(tmp_path):
    io.save(str(tmp_path / "c"), Snapshot({"model": {"w": torch.ones(1)}}, {"state": 1}))
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "model.safetensors"]


def test_empty_groups_and_tensors_come_back(tmp_path, helpers):
    snapshot = Snapshot(
        tensors={"model": {"empty": torch.empty(0, 3), "scalar": torch.tensor(1)}, "optimizer": {}}
    )
    io.save(str(tmp_path / "c"), snapshot)
    assert helpers.same_snapshot(io.load(str(tmp_path / "c")), snapshot)


def test_saving_changes_no_tensor_of_the_model(tmp_path):
    model = torch.nn.Linear(3, 2)
    weight = model.weight
    io.save(str(tmp_path / "c"), Snapshot(tensors={"model": dict(model.named_parameters())}))
    assert model.weight is weight
    assert weight.requires_grad


def test_weights_are_read_without_the_rest(in_files):
    saved = in_files
    for name in ("optimizer.safetensors", "state.json", "state.safetensors"):
        (saved / name).write_bytes(b"damaged")
    snapshot = io.load(str(saved), groups=("model",))
    assert list(snapshot.tensors) == ["model"]
    assert snapshot.objects == {"hparams": {"hidden": 3}}
    with pytest.raises(DamagedCheckpointError):
        io.load(str(saved))


def test_a_group_that_is_not_there_is_refused_with_the_nearest(saved):
    with pytest.raises(CheckpointError, match=r"'models'\. Did you mean 'model'"):
        io.load(str(saved), groups=["models"])


def test_only_committed_checkpoints_exist(saved, tmp_path):
    parent = saved.parent
    shutil.copytree(saved, parent / "update-00000001.bad")
    shutil.copytree(saved, parent / ".saving-update-00000002-abc")
    shutil.copytree(saved, parent / "unfinished")
    (parent / "unfinished" / "manifest.json").unlink()
    (parent / "file").write_text("x", encoding="utf-8")
    os.symlink(saved, parent / "link")
    assert io.list(str(parent)) == [saved.name]
    assert io.list(str(tmp_path / "nowhere")) == []
    assert io.exists(str(saved))
    assert not io.exists(str(parent / "unfinished"))
    assert not io.exists(str(tmp_path / "nowhere"))


def test_nothing_is_overwritten(saved, helpers):
    with pytest.raises(CheckpointError, match="a checkpoint is there already"):
        io.save(str(saved), helpers.make_snapshot(2.0))
    assert helpers.same_snapshot(io.load(str(saved)), helpers.make_snapshot())
    other = saved.parent / "mine"
    other.mkdir()
    with pytest.raises(CheckpointError, match="something that is not a checkpoint is there"):
        io.save(str(other), helpers.make_snapshot(2.0))
    assert sorted(os.listdir(saved.parent)) == ["mine", saved.name]


@pytest.mark.parametrize("name", [".hidden", "best.bad", "best.bad-2"])
def test_a_name_that_would_not_be_found_again_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="are reserved"):
        io.save(str(tmp_path / name), Snapshot())


@pytest.mark.parametrize(
    "part", [{"tensors": {"../m": {}}}, {"objects": {"a/b": 1}}, {"objects": {"manifest": 1}}]
)
def test_a_part_with_an_impossible_name_is_refused(tmp_path, part):
    with pytest.raises(CheckpointError, match="cannot be a file name"):
        io.save(str(tmp_path / "c"), Snapshot(**part))
    assert os.listdir(tmp_path) == []


def test_only_checkpoints_are_removed(saved, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x", encoding="utf-8")
    os.symlink(saved, tmp_path / "link")
    for path in (tmp_path / "precious", tmp_path / "link", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="it is not a checkpoint"):
            io.remove(str(path))
    assert (tmp_path / "precious" / "thesis.txt").exists()
    io.remove(str(saved))
    assert os.listdir(saved.parent) == []


def test_a_removal_that_is_cut_off_leaves_no_half(saved, monkeypatch):
    def failing(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "rmtree", failing)
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
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            if name == "manifest.json" and json_of(damaged) == json_of(content):
                continue  # a text can be spelt in two ways: "\\n" and "\\u000a"
            for check in (io.load, verify):
                with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
                    check(str(in_files))


def json_of(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_made_longer_is_found(in_files, name):
    path = in_files / name
    content = path.read_bytes()
    for length in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
            io.load(str(in_files))
        if name != "manifest.json":
            size = f"has {length} bytes, but {len(content)} were written"
            with pytest.raises(DamagedCheckpointError, match=size):
                verify(str(in_files))
    path.write_bytes(content + b"\0")
    with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
        io.load(str(in_files))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(in_files, name):
    (in_files / name).unlink()
    for check in (io.load, verify):
        with pytest.raises(DamagedCheckpointError, match=name.replace(".", r"\.")):
            check(str(in_files))


@pytest.mark.parametrize("name", FILES)
def test_a_symbolic_link_is_refused(in_files, name, tmp_path):
    target = tmp_path / "elsewhere"
    os.rename(in_files / name, target)
    os.symlink(target, in_files / name)
    for check in (io.load, verify):
        with pytest.raises(DamagedCheckpointError, match=f"{name}' is a symbolic link"):
            check(str(in_files))


def test_a_symbolic_link_that_no_manifest_lists_is_refused_too(saved):
    os.symlink("/etc", saved / "link")
    with pytest.raises(DamagedCheckpointError, match="link' is a symbolic link"):
        io.load(str(saved))


def test_any_flipped_bit_of_what_the_manifest_holds_is_found(saved):
    path = saved / "manifest.json"
    content = path.read_bytes()
    for place in range(content.index(b'"content"'), len(content), 29):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        for check in (io.load, verify):
            with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
                check(str(saved))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_does_not_hang_the_reader(in_files):
    (in_files / "state.json").unlink()
    os.mkfifo(in_files / "state.json")
    with pytest.raises(DamagedCheckpointError, match="not a regular file"):
        io.load(str(in_files))


def test_a_foreign_file_beside_the_others_does_no_harm(saved):
    (saved / "notes.txt").write_text("lr was too high", encoding="utf-8")
    io.load(str(saved))


def test_files_of_another_checkpoint_are_found(saved, tmp_path, helpers):
    io.save(str(tmp_path / "other"), helpers.make_snapshot(2.0))
    shutil.copy(tmp_path / "other" / "model.safetensors", saved / "model.safetensors")
    with pytest.raises(
        DamagedCheckpointError, match=r"model\.safetensors' is not what was written at the tensor 'bias'"
    ):
        io.load(str(saved))


def test_a_manifest_that_misdescribes_a_tensor_is_found(saved):
    manifest = read_manifest(str(saved))
    record = manifest.tensors["model"].pop("bias")
    (saved / "manifest.json").write_bytes(manifest.dump())
    for check in (io.load, verify):
        with pytest.raises(
            DamagedCheckpointError, match=r"'bias' of the group 'model' is F32 of shape .*but missing"
        ):
            check(str(saved))
    manifest.tensors["model"]["renamed"] = record
    (saved / "manifest.json").write_bytes(manifest.dump())
    with pytest.raises(DamagedCheckpointError, match="'bias'"):
        io.load(str(saved))


def test_a_pickle_in_the_place_of_weights_is_never_opened_as_one(saved):
    torch.save({"weight": torch.ones(2)}, saved / "model.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
        io.load(str(saved))


OPERATIONS = ["mkdir", "fsync", "replace"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fault_at_any_step_leaves_all_or_nothing(tmp_path, monkeypatch, operation, helpers):
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
    assert faults >= {"mkdir": 2, "fsync": 5, "replace": 1}[operation]


def test_everything_is_synced_before_the_commit(tmp_path, monkeypatch, helpers):
    synced, state = [], {}
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def record_rename(source, target):
        state["before"] = list(synced)
        state["temporary"] = source
        replace(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to name a descriptor")
    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    io.save(str(tmp_path / "c"), helpers.make_snapshot())
    before = [os.path.relpath(path, state["temporary"]) for path in state["before"]]
    assert sorted(set(before) - {".."}) == [".", *FEW]
    assert before[-1] == "."  # the files' names, before the rename commits them
    assert before.count(".") == 1
    assert synced[-1] == str(tmp_path)


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, helpers):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        io.save(str(tmp_path / "c"), helpers.make_snapshot())
    assert os.listdir(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_named(locked):
    for path in (locked / "c", locked / "deep" / "c"):
        with pytest.raises(CheckpointError, match=r"locked.*EACCES.*check the permissions"):
            io.save(str(path), Snapshot())


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system is not allowed here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def test_a_full_disk_leaves_what_was_there(small_disk, helpers):
    io.save(str(small_disk / "first"), helpers.make_snapshot())
    large = Snapshot(tensors={"model": {f"w{index}": torch.rand(1000, 100) for index in range(4)}})
    with pytest.raises(
        CheckpointError, match=r"cannot write .*second/model.safetensors.*\(ENOSPC\); free some space"
    ):
        io.save(str(small_disk / "second"), large)
    assert os.listdir(small_disk) == ["first"]
    assert helpers.same_snapshot(io.load(str(small_disk / "first")), helpers.make_snapshot())
    io.save(str(small_disk / "third"), helpers.make_snapshot(3.0))


@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_committed_checkpoint_stays_when_a_peer_is_lost_right_after(tmp_path, place, helpers):
    path = str(tmp_path / "c") if place == "disk" else f"memory://{tmp_path.name}/c"

    class Lossy(Ranks):
        """A rank 0 whose exchanges fail once the checkpoint is committed."""

        def first(self, act):
            value = act()
            if io.exists(path):
                raise RuntimeError("Connection closed by peer")
            return value

    with pytest.raises(RuntimeError, match="closed by peer"):
        DirectoryCheckpointIO(ranks=Lossy()).save(path, helpers.make_snapshot(1.0))
    assert io.exists(path)
    verify(path)
