"""Whatever fails at whatever operation, nothing wrong is loaded and nothing that was saved is lost."""

import random

import pytest
import torch
from tests.campaigns.checkpoints import run_campaign
from tests.campaigns.life import content, differences
from tests.campaigns.processes import run_shards
from tests.support.fault_kinds import OPERATIONS, Fault
from tests.support.faults import FaultyFileSystem, read_bytes
from tests.support.memory import MemoryDisk, MemoryObjects
from tests.support.messages import warned

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO
from drivetrain.checkpoint.saving.reading import Reader
from drivetrain.checkpoint.storage.files import write_atomically
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError


@pytest.mark.parametrize(("storage", "make"), [("disk", MemoryDisk), ("objects", MemoryObjects)])
def test_faults_at_any_operation_do_no_harm(storage, make):
    score = run_campaign(60, 0, "/campaign", (storage,), files=make())
    assert not score.failures, str(score)
    assert score.wrong == 0
    assert score.faults.total() >= 60
    assert score.loads > 3 * score.trials


@pytest.mark.landing(long=True)
def test_faults_of_every_kind_at_any_operation_do_no_harm(tmp_path):
    for storage, files, faults in (("disk", MemoryDisk(), 700), ("disk", None, 30), ("objects", None, 300)):
        directory = "/campaign" if files else str(tmp_path)
        score = run_campaign(faults, 0, directory, (storage,), files=files)
        assert not score.failures, str(score)
        assert score.wrong == 0
        if faults > 100:
            assert set(score.faults) == set(OPERATIONS) - (set() if storage == "disk" else {"power cut"})
            assert score.newest.total() > score.earlier.total() > 0


@pytest.mark.landing
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_fault_of_one_process_of_two_does_no_harm(tmp_path):
    outcomes = run_shards(12, 0, str(tmp_path))
    assert [(each.case, each.wrong, each.complaints) for each in outcomes if not each.is_good] == []
    assert sum(len(each.struck) for each in outcomes) >= 6
    assert sum(each.loads for each in outcomes) > 12


def save_assets(disk):
    snapshot = content(2)
    snapshot.assets = {"config.json": b"{}", "words/vocabulary.txt": b"a b"}
    DirectoryCheckpointIO(disk).save("/run/step-2", snapshot)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (save_assets, ["step-1", "step-2"]),
        (lambda disk: DirectoryCheckpointIO(disk).remove("/run/step-1"), []),
        (lambda disk: write_atomically("/run/index", [b"content"], disk), ["index", "step-1"]),
    ],
)
def test_what_has_returned_survives_a_power_cut_at_once(act, expected):
    for seed in range(30):
        disk = MemoryDisk()
        io = DirectoryCheckpointIO(disk)
        io.save("/run/step-1", content(1))
        act(disk)
        disk.cut_power(random.Random(seed))
        assert sorted(disk.entries("/run")) == expected
        for name in io.list("/run"):
            assert differences(io.load(f"/run/{name}")) is None
            Reader(disk, f"/run/{name}").verify()
        if "index" in expected:
            assert read_bytes(disk, "/run/index") == b"content"


@pytest.fixture
def two(monkeypatch):  # a disk with two checkpoints, with every object in a file of its own
    monkeypatch.setattr("drivetrain.checkpoint.saving.io.SMALL", 0)
    disk = MemoryDisk()
    manager = CheckpointManager("/run", CheckpointConfig(by=None), files=disk)
    for step in (1, 2):
        manager.save(step, 0, {}, lambda step=step: content(step))
    return disk


def opened(disk, *faults):
    files = FaultyFileSystem(disk, *faults)
    return CheckpointManager("/run", CheckpointConfig(by=None), files=files), files


def reads(disk, operation, path):  # numbers of load_latest's operations of a kind on such files
    manager, files = opened(disk)
    manager.load_latest()
    steps = enumerate(files.steps, 1)
    return [number for number, step in steps if step.operation == operation and path in step.path]


@pytest.mark.parametrize("operation", ["look", "open"])
def test_what_may_not_be_read_is_no_reason_to_take_an_older_one(two, operation):
    for file in ("manifest.json", "model.safetensors", "state.json", "index.json"):
        for number in reads(two, operation, file):
            manager, files = opened(two, Fault(number, "EACCES"))
            with pytest.raises(CheckpointError, match=r"\(EACCES\); check the permissions") as caught:
                manager.load_latest()
            assert not isinstance(caught.value, DamagedCheckpointError)
            assert files.struck()
            path, snapshot = manager.load_latest()  # the same manager, once the permission is there
            assert path == "/run/step-00000002"
            assert differences(snapshot) is None


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "state.json"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [("EIO", r"Input/output error \(EIO\)"), ("flip", r"not what was written|not valid JSON|not a safe")],
)
def test_what_the_medium_has_lost_is_set_aside_with_the_reason(two, file, kind, why):
    manager, _ = opened(two, Fault(reads(two, "read", f"step-00000002/{file}")[0], kind))
    with warned(rf"step-00000002' is damaged and was set aside as .*\.bad': .*({why})"):
        path, snapshot = manager.load_latest()
    assert path == "/run/step-00000001"
    assert differences(snapshot) is None
    assert sorted(two.entries("/run")) == ["index.json", "step-00000001", "step-00000002.bad"]
