"""`drivetrain checkpoint`: what it says, as text and as JSON, and its exit codes; it changes nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with two resume points, one of them the best."""
    run_dir = tmp_path_factory.mktemp("run")
    quiet(max_epochs=3, run_dir=run_dir, checkpoint=CheckpointConfig()).fit(Regression(), pairs(), pairs(4))
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def run(capsys, *words):
    code = main(["checkpoint", *map(str, words)])
    return code, capsys.readouterr()


def as_json(capsys, *words):
    code, printed = run(capsys, *words, "--json")
    assert printed.err == ""
    return code, json.loads(printed.out, parse_constant=pytest.fail)


def content(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    }


def damage(run_dir, name, file):
    path = run_dir / "checkpoints" / name / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_list_tells_what_each_is_kept_for(capsys, run_dir):
    code, printed = run(capsys, "list", run_dir)
    assert code == 0
    lines = [line.split() for line in printed.out.splitlines()]
    assert lines[0] == ["name", "update", "epoch", "kept", "for", "metric"]
    assert [line[:3] for line in lines[1:]] == [
        ["update-00000010", "10", "2"],
        ["update-00000015", "15", "3"],
    ]
    assert lines[2][3:5] == ["resume,", "keeper"]
    assert lines[2][5] == "validation/loss"
    code, found = as_json(capsys, "list", run_dir / "checkpoints")
    assert code == 0
    assert [each["entry"]["update"] for each in found["checkpoints"]] == [10, 15]
    assert [each["trouble"] for each in found["checkpoints"]] == [None, None]


def test_list_shows_what_is_wrong_and_changes_nothing(capsys, run_dir):
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "update-00000010", checkpoints / "update-00000005.bad")
    (checkpoints / "update-00000010" / "manifest.json").unlink()
    before = content(run_dir)
    code, printed = run(capsys, "list", run_dir)
    assert code == 0
    assert "update-00000005.bad" in printed.out
    assert "was set aside as damaged" in printed.out
    assert "has lost its manifest.json" in printed.out
    assert content(run_dir) == before
    (checkpoints / "index.json").write_text("{}", encoding="ascii")
    _, found = as_json(capsys, "list", run_dir)
    assert "not what was written" in found["checkpoints"][0]["trouble"]
    assert found["checkpoints"][-1]["entry"]["update"] == 15  # from its own words


def test_show_says_what_a_checkpoint_is(capsys, run_dir):
    code, found = as_json(capsys, "show", run_dir, "--tensors")
    assert code == 0
    assert found["path"].endswith("update-00000015")
    assert found["progress"]["updates"] == 15
    assert found["saved_by"]["task"] == "Regression"
    assert found["hparams"]["dropout"] == 0.0
    assert found["groups"]["model"] == {"count": 2, "elements": 5, "dtypes": ["F32"], "bytes": 20}
    assert found["optimizers"]["default"][0]["lr"] == 0.05
    assert found["tensors"]["model"]["tensors"]["line.weight"]["shape"] == [1, 4]
    code, printed = run(capsys, "show", run_dir / "checkpoints" / "update-00000010", "--tensors")
    assert code == 0
    for text in ("updates        10", "dropout", "line.weight  F32[1, 4]", "model.safetensors", "lr 0.05"):
        assert text in printed.out


def test_verify_checks_every_byte_of_all(capsys, run_dir):
    code, found = as_json(capsys, "verify", run_dir)
    assert code == 0
    assert [each["good"] for each in found["checkpoints"]] == [True, True]
    damage(run_dir, "update-00000010", "model.safetensors")
    before = content(run_dir)
    code, printed = run(capsys, "verify", run_dir)
    assert code == 1
    assert "update-00000010: DAMAGED" in printed.out
    assert "model.safetensors' is not what was written at the tensor" in printed.out
    assert "update-00000015: good" in printed.out
    assert content(run_dir) == before


def test_verify_of_nothing_is_an_error(capsys, tmp_path):
    code, printed = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "there are no checkpoints in" in printed.err


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_export_writes_plain_weights(capsys, run_dir, tmp_path, dtype):
    words = ["--dtype", dtype] if dtype else []
    code, found = as_json(capsys, "export", run_dir, tmp_path / "w.safetensors", *words)
    assert code == 0
    assert found["files"] == [str(tmp_path / "w.safetensors")]
    weights = load_file(tmp_path / "w.safetensors")
    expected = load_file(run_dir / "model.safetensors")
    wanted = torch.bfloat16 if dtype else torch.float32
    assert {name: each.dtype for name, each in weights.items()} == dict.fromkeys(expected, wanted)
    assert all(torch.equal(each, expected[name].to(wanted)) for name, each in weights.items())


def test_export_to_torch_and_in_parts(capsys, run_dir, tmp_path):
    assert run(capsys, "export", run_dir, tmp_path / "w.pt", "--format", "torch")[0] == 0
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == {"line.weight", "line.bias"}
    words = ("export", run_dir, tmp_path / "w.safetensors", "--max-shard-size", "16")
    code, printed = run(capsys, *words)
    assert code == 0
    assert printed.out.splitlines()[-1].endswith("w.safetensors.index.json")


def test_export_overwrites_only_when_told_to(capsys, run_dir, tmp_path):
    target = tmp_path / "w.safetensors"
    target.write_text("precious", encoding="ascii")
    code, printed = run(capsys, "export", run_dir, target)
    assert code == 2
    assert "is there already; --force" in printed.err
    assert target.read_text(encoding="ascii") == "precious"
    assert run(capsys, "export", run_dir, target, "--force")[0] == 0
    assert set(load_file(target)) == {"line.weight", "line.bias"}


def test_diff_of_the_same_is_nothing(capsys, run_dir):
    newest = run_dir / "checkpoints" / "update-00000015"
    code, printed = run(capsys, "diff", run_dir, newest)
    assert code == 0
    assert printed.out.startswith("the same: ")


def test_diff_tells_tensors_and_values_apart(capsys, run_dir):
    first, second = (run_dir / "checkpoints" / f"update-000000{update}" for update in (10, 15))
    code, found = as_json(capsys, "diff", first, second, "--values")
    assert code == 1
    by_name = {f"{each['group']}/{each['name']}": each for each in found["tensors"]}
    weight = by_name["model/line.weight"]
    stored = [
        DirectoryCheckpointIO().load(str(each)).tensors["model"]["line.weight"] for each in (first, second)
    ]
    assert weight["largest"] == pytest.approx((stored[0].double() - stored[1].double()).abs().max().item())
    assert found["values"]["progress.updates"] == [10, 15]
    code, printed = run(capsys, "diff", first, second)
    assert code == 1
    assert "model/line.weight" in printed.out
    assert "10 became 15" in printed.out


def test_diff_needs_no_tensor_file_where_hashes_tell(capsys, tmp_path):
    io = DirectoryCheckpointIO()
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        tensors = {"w": torch.full((3,), value), "same": torch.zeros(2)}
        io.save(str(tmp_path / name), Snapshot({"model": tensors}, {"state": value}))
        (tmp_path / name / "model.safetensors").unlink()
    code, found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert [each["name"] for each in found["tensors"]] == ["w"]
    assert found["values"] == {"state": [1.0, 2.0]}
    assert as_json(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 0


def test_diff_of_other_shapes_names_and_dtypes(capsys, tmp_path):
    io = DirectoryCheckpointIO()
    first = {"shape": torch.zeros(2), "dtype": torch.zeros(2), "gone": torch.zeros(1)}
    second = {"shape": torch.zeros(3), "dtype": torch.zeros(2).half(), "new": torch.zeros(1)}
    for name, tensors in (("a", first), ("b", second)):
        io.save(str(tmp_path / name), Snapshot({"model": tensors}))
    code, printed = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--values")
    assert code == 1
    for text in ("F32[2] became F32[3]", "F32[2] became F16[2]", "only in the first", "only in the second"):
        assert text in printed.out


def test_a_thousand_are_listed_by_the_index_alone(capsys, tmp_path, monkeypatch):
    config = CheckpointConfig(keep_last=2000, best=0, by=None)
    manager = CheckpointManager(str(tmp_path), config)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand would take long, and prove nothing
    for update in range(30):
        manager.save(update, 0, {}, lambda: Snapshot({"model": {"w": torch.zeros(1)}}))
    for path in tmp_path.glob("update-*/*"):
        if path.name != "manifest.json":
            path.unlink()
        else:
            path.write_text("not even read", encoding="ascii")
    _, found = as_json(capsys, "list", tmp_path)
    assert [each["entry"]["update"] for each in found["checkpoints"]] == list(range(30))


def test_errors_are_one_message(capsys, tmp_path):
    for words in (("list", tmp_path / "nowhere"), ("show", tmp_path), ("diff", tmp_path, tmp_path)):
        code, printed = run(capsys, *words)
        assert code == 1
        assert printed.err.startswith("drivetrain: ")
        assert "Traceback" not in printed.err
    assert run(capsys, "lst", tmp_path)[0] == 2
    assert run(capsys, "show")[0] == 2


def test_the_command_as_a_process(run_dir):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "drivetrain.cli", "checkpoint", "verify", str(run_dir), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["checkpoints"]) == 2
