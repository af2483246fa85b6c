"""`drivetrain checkpoint`: what it says, as text and as JSON, and its exit codes; it changes nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.faults import read_bytes
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):  # A run directory with two resume points, one of them the best
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
    return {path: path.read_bytes() for path in sorted(Path(directory).rglob("*")) if path.is_file()}


def damage(run_dir, name, file):
    path = run_dir / "checkpoints" / name / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def save(path, tensors, objects=None, **fields):
    DirectoryCheckpointIO().save(str(path), Snapshot({"model": tensors}, objects or {}, **fields))


def test_list_tells_what_each_is_kept_for(capsys, run_dir, tmp_path):
    code, printed = run(capsys, "list", run_dir)
    assert code == 0
    lines = [re.split("  +", line) for line in printed.out.splitlines()]
    assert lines[0] == ["name", "order", "step", "epoch", "kept for", "metric", "size", "age"]
    assert [line[2:5] for line in lines[1:3]] == [["10", "2", "resume"], ["15", "3", "resume best"]]
    assert [line[0] for line in lines[3:]] == ["", "metric: validation/loss"]
    assert max(map(len, printed.out.splitlines())) <= 80
    files = (run_dir / "checkpoints" / "step-00000010").iterdir()
    (first, _) = as_json(capsys, "list", run_dir / "checkpoints")[1]["checkpoints"]
    assert (first["bytes"], first["trouble"]) == (sum(path.stat().st_size for path in files), None)
    for path in (run_dir / "checkpoints").glob("step-*/*"):
        path.write_text("not even read", encoding="ascii")
    found = as_json(capsys, "list", run_dir)[1]["checkpoints"]
    assert [(each["step"], each["condition"]) for each in found] == [(10, "committed"), (15, "committed")]


def test_show_says_what_a_checkpoint_is_and_needs_no_tensor_file(capsys, run_dir):
    code, found = as_json(capsys, "show", run_dir)
    assert code == 0
    assert found["path"].endswith("step-00000015")
    assert (found["progress"]["steps"], found["saved_by"]["task"]) == (15, "Regression")
    assert found["purpose"]["best"] == {"validation/loss": "min"}
    assert found["hparams"]["dropout"] == 0.0
    assert found["groups"]["model"] == {"tensors": 2, "elements": 5, "bytes": 20, "dtypes": {"F32": 5}}
    assert found["optimizers"]["default"]["optimizer"] == "SGD"
    path = run_dir / "checkpoints" / "step-00000010"
    for file in path.glob("*.safetensors"):
        file.unlink()
    code, printed = run(capsys, "show", path)
    assert code == 0
    for text in ("  steps          10\n", "  dropout    0", "lr 0.05"):
        assert text in printed.out


def test_verify_checks_every_byte_and_names_the_file_that_is_wrong(capsys, run_dir):
    code, found = as_json(capsys, "verify", run_dir)
    assert (code, found["good"]) == (0, True)
    assert [each["condition"] for each in found["checkpoints"]] == ["good", "good"]
    damage(run_dir, "step-00000010", "model.safetensors")
    before = content(run_dir)
    code, printed = run(capsys, "verify", run_dir)
    assert (code, printed.err) == (1, "")
    for text in ("00000010: DAMAGED", "model.safetensors' is not what was written at the tensor", "15: good"):
        assert text in printed.out
    assert content(run_dir) == before
    damage(run_dir, "step-00000015", "manifest.json")
    code, found = as_json(capsys, "verify", run_dir / "checkpoints" / "step-00000015")
    assert (code, found["good"], "manifest.json" in found["checkpoints"][0]["trouble"]) == (1, False, True)


def test_list_and_verify_tell_what_was_set_aside_and_is_gone_and_change_nothing(capsys, run_dir):
    aside = run_dir / "checkpoints" / "step-00000010.bad"
    (run_dir / "checkpoints" / "step-00000010").rename(aside)
    before = content(run_dir)
    code, printed = run(capsys, "list", run_dir)
    assert (code, "[set aside]" in printed.out, "[gone]" in printed.out) == (0, True, True)
    code, found = as_json(capsys, "verify", run_dir)
    assert content(run_dir) == before
    conditions = {each["path"].rpartition("/")[2]: each["condition"] for each in found["checkpoints"]}
    assert conditions == {aside.name: "set aside", "step-00000010": "gone", "step-00000015": "good"}
    assert code == 1  # the index still names the one that is gone


def test_export_writes_plain_weights_in_each_form(capsys, run_dir, tmp_path):
    expected = load_file(run_dir / "model.safetensors")
    for dtype, wanted in (((), torch.float32), (("--dtype", "bf16"), torch.bfloat16)):
        target = tmp_path / f"{wanted}.safetensors"
        code, found = as_json(capsys, "export", run_dir, target, *dtype)
        assert (code, found["files"]) == (0, [str(target)])
        right = {name: each.to(wanted) for name, each in expected.items()}
        torch.testing.assert_close(load_file(target), right, rtol=0, atol=0)
    assert run(capsys, "export", run_dir, tmp_path / "w.pt", "--format", "torch")[0] == 0
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == expected.keys()
    assert not list(tmp_path.glob(".*"))


def test_import_writes_a_checkpoint_of_renamed_weights(capsys, tmp_path):
    torch.save({"a=b.weight": torch.ones(2)}, tmp_path / "theirs.pt")
    code, found = as_json(capsys, "import", tmp_path / "theirs.pt", tmp_path / "ours", "--rename", "^a=b=net")
    assert (code, found["tensors"]) == (0, 1)
    assert list(DirectoryCheckpointIO().load(str(tmp_path / "ours")).tensors["model"]) == ["net.weight"]
    code, printed = run(capsys, "import", tmp_path / "theirs.pt", tmp_path / "other", "--rename", "net")
    assert (code, "--rename takes PATTERN=NEW" in printed.err) == (2, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("remote", [False, True])
def test_export_replaces_no_file_unasked(capsys, run_dir, tmp_path, remote):
    precious = tmp_path / "precious.safetensors"
    precious.write_text("precious", encoding="ascii")
    code, printed = run(capsys, "export", run_dir, precious)
    assert (code, "exists; --force" in printed.err, precious.read_text("ascii")) == (2, True, "precious")
    parts = [f"w-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, lost in enumerate(([], ["w.safetensors.index.json"], parts)):
        place = f"memory://{tmp_path.name}/{number}" if remote else str(tmp_path / f"{number}")
        files, target = file_system(place), f"{place}/w.safetensors"
        code, printed = run(capsys, "export", run_dir, target, "--max-shard-size", "16")
        assert (code, printed.out.splitlines()[-1].endswith("w.safetensors.index.json")) == (0, True)
        for each in lost:
            files.delete(f"{place}/{each}")
        before = {name: read_bytes(files, f"{place}/{name}") for name in files.entries(place)}
        for size in ([], ["--max-shard-size", "16"]):
            code, printed = run(capsys, "export", run_dir, target, *size)
            assert (code, "exists; --force" in printed.err) == (2, True)
        assert before == {name: read_bytes(files, f"{place}/{name}") for name in files.entries(place)}
        assert len(before) == 3 - len(lost)
        assert run(capsys, "export", run_dir, target, "--force")[0] == 0
        assert files.entries(place).keys() - before.keys() == {"w.safetensors"}


def test_any_text_is_shown_without_harm_to_the_terminal(capsys, tmp_path):
    hparams = {"values": {"title": "\x1b[2Jgone\nnew \ud800", "größe": "naïve"}, "unstored": ["loss"]}
    save(tmp_path / "a", {"b": torch.zeros(1)}, {"hparams": hparams}, task="日本")
    code, printed = run(capsys, "show", tmp_path / "a")
    assert (code, "\x1b" in printed.out) == (0, False)
    for text in (r"\x1b[2Jgone\nnew \ud800", "日本", "größe", "naïve", "not stored"):
        assert text in printed.out
