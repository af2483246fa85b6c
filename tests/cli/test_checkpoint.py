"""`drivetrain checkpoint`: what it says, as text and as JSON, and its exit codes; it changes nothing."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import PROGRAMS
from tests.support.faults import read_bytes
from tests.support.forked import run_forked
from tests.support.held import in_files
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.storage.schemes import file_system
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
    assert lines[0] == ["name", "order", "update", "epoch", "kept for", "metric", "size", "age"]
    assert [line[2:5] for line in lines[1:3]] == [["10", "2", "resume"], ["15", "3", "resume keeper"]]
    assert [line[0] for line in lines[3:]] == ["", "metric: validation/loss"]
    assert max(map(len, printed.out.splitlines())) <= 80
    code, found = as_json(capsys, "list", run_dir / "checkpoints")
    assert (code, set(found)) == (0, {"directory", "trouble", "checkpoints"})
    keys = "name order update epoch metrics resume keeper path condition bytes saved_at trouble"
    assert all(set(each) == set(keys.split()) for each in found["checkpoints"])
    assert [(each["update"], each["trouble"]) for each in found["checkpoints"]] == [(10, None), (15, None)]
    files = (run_dir / "checkpoints" / "update-00000010").iterdir()
    assert found["checkpoints"][0]["bytes"] == sum(path.stat().st_size for path in files)
    for path in (run_dir / "checkpoints").glob("update-*/*"):
        path.write_text("not even read", encoding="ascii")
    found = as_json(capsys, "list", run_dir)[1]["checkpoints"]
    assert [(each["update"], each["condition"]) for each in found] == [(10, "committed"), (15, "committed")]
    (tmp_path / "empty").mkdir()
    code, printed = run(capsys, "list", tmp_path / "empty")
    assert (code, printed.out) == (0, f"no checkpoints in {tmp_path / 'empty'}\n")


def test_list_shows_what_is_wrong_and_changes_nothing(capsys, run_dir):
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "update-00000010", checkpoints / "update-00000005.bad")
    (checkpoints / ".saving-update-00000020-0123abcd").mkdir()
    (checkpoints / "update-00000010" / MANIFEST).unlink()
    before = content(run_dir)
    code, printed = run(capsys, "list", run_dir)
    assert code == 0
    for text in ("[set aside]", "[unfinished]", "[damaged]", "has lost its manifest.json", "interrupted"):
        assert text in printed.out
    assert content(run_dir) == before
    (checkpoints / "index.json").write_text("{}", encoding="ascii")
    code, found = as_json(capsys, "list", run_dir)
    assert (code, "not what was written" in found["trouble"]) == (0, True)
    assert found["checkpoints"][-1]["update"] == 15  # from its own words


def test_show_says_what_a_checkpoint_is_and_needs_no_tensor_file(capsys, run_dir):
    code, found = as_json(capsys, "show", run_dir, "--tensors")
    assert code == 0
    assert found["path"].endswith("update-00000015")
    assert (found["progress"]["updates"], found["saved_by"]["task"]) == (15, "Regression")
    assert found["purpose"]["keeper"] == {"validation/loss": "min"}
    assert found["hparams"]["dropout"] == 0.0
    assert found["groups"]["model"] == {"tensors": 2, "elements": 5, "bytes": 20, "dtypes": {"F32": 5}}
    assert found["optimizers"]["default"]["optimizer"] == "SGD"
    group = found["optimizers"]["default"]["groups"][0]
    assert (group["lr"], group["parameters"]) == (0.05, 2)
    weight = found["tensors"]["model"]["line.weight"]
    assert (weight["dtype"], weight["shape"]) == ("F32", [1, 4])
    assert [piece["file"] for piece in weight["pieces"]] == ["model.safetensors"]
    path = run_dir / "checkpoints" / "update-00000010"
    for file in path.glob("*.safetensors"):
        file.unlink()
    code, printed = run(capsys, "show", path, "--tensors")
    assert code == 0
    for text in ("  updates        10\n", "  dropout    0", "line.weight  F32[1, 4]", "lr 0.05", "188 bytes"):
        assert text in printed.out
    assert max(map(len, printed.out.splitlines()[1:])) <= 80


def test_show_passes_over_a_damaged_newest_in_one_line(capsys, run_dir):
    damage(run_dir, "update-00000015", "model.safetensors")
    code, printed = run(capsys, "show", run_dir)
    assert code == 0
    assert printed.out.splitlines()[0].endswith("update-00000010")
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("drivetrain: the checkpoint")


def test_verify_checks_every_byte_and_names_the_file_that_is_wrong(capsys, run_dir):
    code, found = as_json(capsys, "verify", run_dir)
    assert (code, found["good"]) == (0, True)
    assert [each["condition"] for each in found["checkpoints"]] == ["good", "good"]
    damage(run_dir, "update-00000010", "model.safetensors")
    before = content(run_dir)
    code, printed = run(capsys, "verify", run_dir)
    assert (code, printed.err) == (1, "")
    for text in ("00000010: DAMAGED", "model.safetensors' is not what was written at the tensor", "15: good"):
        assert text in printed.out
    assert content(run_dir) == before
    newest = run_dir / "checkpoints" / "update-00000015"
    in_files(newest)
    for file in ("manifest.json", "state.json", "hparams.json", "state.safetensors"):
        whole = (newest / file).read_bytes()
        damage(run_dir, newest.name, file)
        code, found = as_json(capsys, "verify", newest)
        assert (code, found["good"]) == (1, False)
        assert file in found["checkpoints"][0]["trouble"]
        (newest / file).write_bytes(whole)


def test_verify_tells_what_was_set_aside_is_gone_or_cannot_be_read(capsys, run_dir):
    damage(run_dir, "update-00000010", "model.safetensors")
    aside = run_dir / "checkpoints" / "update-00000010.bad"
    (run_dir / "checkpoints" / "update-00000010").rename(aside)
    code, found = as_json(capsys, "verify", run_dir)
    conditions = {each["path"].rpartition("/")[2]: each["condition"] for each in found["checkpoints"]}
    assert conditions == {aside.name: "set aside", "update-00000010": "gone", "update-00000015": "good"}
    assert code == 1  # the index still names the one that is gone
    code, found = as_json(capsys, "verify", aside)
    assert (code, found["checkpoints"][0]["condition"]) == (1, "damaged")
    shutil.copytree(run_dir / "checkpoints" / "update-00000015", run_dir / "checkpoints" / "update-00000010")
    path = run_dir / "checkpoints" / "update-00000010" / "model.safetensors"
    path.unlink()
    path.mkdir()
    found = as_json(capsys, "verify", run_dir)[1]
    assert [each["condition"] for each in found["checkpoints"]][-2:] == ["damaged", "good"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no pseudo-terminals here")
def test_verify_shows_its_progress_on_a_terminal_alone(tmp_path, monkeypatch, capsys):
    save(tmp_path / "a", {"w": torch.zeros(1000)})
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().err == ""
    ours, theirs = os.openpty()
    pytest.importorskip("termios").tcsetwinsize(theirs, (24, 300))  # tqdm draws nothing on one without rows
    with open(ours, "rb", buffering=0) as reader, open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 0
        terminal.write("the end")
        terminal.flush()
        shown = ""
        while not shown.endswith("the end"):  # a terminal hands over what was written bit by bit
            shown += reader.read(4096).decode()
    assert f"{tmp_path / 'a'}: " in shown
    assert " 0.00/" in shown
    assert shown.endswith("\rthe end")
    size = sum(each.stat().st_size for each in (tmp_path / "a").iterdir())
    assert capsys.readouterr().out.endswith(f": good, {size / 1000:.1f} kB\n")


def test_export_writes_plain_weights_in_each_form(capsys, run_dir, tmp_path):
    expected = load_file(run_dir / "model.safetensors")
    for dtype, wanted in (((), torch.float32), (("--dtype", "bf16"), torch.bfloat16)):
        target = tmp_path / f"{wanted}.safetensors"
        code, found = as_json(capsys, "export", run_dir, target, *dtype)
        assert (code, found["files"]) == (0, [str(target)])
        weights = load_file(target)
        assert weights.keys() == expected.keys()
        assert all(
            each.dtype == wanted and each.equal(expected[name].to(wanted)) for name, each in weights.items()
        )
    assert run(capsys, "export", run_dir, tmp_path / "w.pt", "--format", "torch")[0] == 0
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == expected.keys()
    assert run(capsys, "export", run_dir, tmp_path / "s.safetensors", "--group", "state")[0] == 0
    assert "host_streams.numpy.keys" in load_file(tmp_path / "s.safetensors")
    for words, code, word in (
        (("--group", "modle"), 1, "Did you mean 'model'?"),
        (("--dtype", "bf61"), 2, "Did you mean 'bf16'?"),
        (("--max-shard-size", "5 XB"), 2, "5 XB"),
    ):
        found, printed = run(capsys, "export", run_dir, tmp_path / "w.safetensors", *words)
        assert (found, word in printed.err) == (code, True)
    assert not (tmp_path / "w.safetensors").exists()


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
            assert (code, bool(re.search(rf"{re.escape(place)}/w.*' exists; --force", printed.err))) == (
                2,
                True,
            )
        assert before == {name: read_bytes(files, f"{place}/{name}") for name in files.entries(place)}
        assert len(before) == 3 - len(lost)
        assert run(capsys, "export", run_dir, target, "--force")[0] == 0
        assert files.entries(place).keys() - before.keys() == {"w.safetensors"}


def test_diff_of_two_runs_with_the_same_seed_is_nothing(capsys, trained, tmp_path):
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=CheckpointConfig()).fit(Regression(), pairs(), pairs(4))
    code, printed = run(capsys, "diff", trained, tmp_path)
    assert (code, printed.out.startswith("the same: ")) == (0, True)  # though they took not the same time


def test_diff_tells_tensors_and_values_apart(capsys, run_dir):
    first, second = (run_dir / "checkpoints" / f"update-000000{update}" for update in (10, 15))
    code, found = as_json(capsys, "diff", first, second, "--values")
    assert (code, found["is_same"]) == (1, False)
    weight = {f"{each['group']}/{each['name']}": each for each in found["tensors"]}["model/line.weight"]
    loaded = [
        DirectoryCheckpointIO().load(str(each)).tensors["model"]["line.weight"] for each in (first, second)
    ]
    a, b = (each.double() for each in loaded)
    assert weight["kind"] == "content"
    assert weight["first"] == weight["second"] == {"dtype": "F32", "shape": [1, 4]}
    assert weight["max_abs"] == pytest.approx((a - b).abs().max().item())
    assert weight["relative"] == pytest.approx(((a - b).norm() / a.norm()).item())
    values = {(each["section"], each["name"]): (each["first"], each["second"]) for each in found["values"]}
    assert values["progress", "updates"] == (10, 15)
    code, printed = run(capsys, "diff", first, second)
    assert (code, "model/line.weight" in printed.out, "10 became 15" in printed.out) == (1, True, True)
    assert max(map(len, printed.out.splitlines())) <= 80


def test_diff_by_hashes_of_other_shapes_and_of_hundreds(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save(tmp_path / name, {"w": torch.full((3,), value), "same": torch.zeros(2)}, {"notes": value})
        (tmp_path / name / "model.safetensors").unlink()
    code, found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert (code, [each["name"] for each in found["tensors"]]) == (1, ["w"])
    values = [(each["section"], each["first"], each["second"]) for each in found["values"]]
    assert values == [("notes", 1.0, 2.0)]
    assert as_json(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 0
    save(tmp_path / "d", {"shape": torch.zeros(2), "dtype": torch.zeros(2), "gone": torch.zeros(1)})
    save(tmp_path / "e", {"shape": torch.zeros(3), "dtype": torch.zeros(2).half(), "new": torch.zeros(1)})
    code, printed = run(capsys, "diff", tmp_path / "d", tmp_path / "e", "--values")
    assert code == 1
    for text in ("F32[2] became F32[3]", "F32[2] became F16[2]", "only in the first", "only in the second"):
        assert text in printed.out
    for name, value in (("f", 0.0), ("g", 1.0)):
        save(tmp_path / name, {f"layer.{index}.weight": torch.full((2,), value) for index in range(300)})
    code, printed = run(capsys, "diff", tmp_path / "f", tmp_path / "g")
    assert (code, "0 tensors are the same, 300 differ" in printed.out) == (1, True)
    assert "... and 260 more; --all lists them" in printed.out
    assert "layer.299.weight" in run(capsys, "diff", tmp_path / "f", tmp_path / "g", "--all")[1].out


def test_any_text_is_shown_without_harm_to_the_terminal(capsys, tmp_path):
    name = "層.重み." + "long" * 30
    hparams = {"values": {"title": "\x1b[2Jgone\nnew \ud800", "größe": "naïve"}, "unstored": ["loss"]}
    save(tmp_path / "a", {name: torch.zeros(1), "b": torch.zeros(1)}, {"hparams": hparams}, task="日本")
    code, printed = run(capsys, "show", tmp_path / "a", "--tensors")
    assert (code, "\x1b" in printed.out) == (0, False)
    for text in (r"\x1b[2Jgone\nnew \ud800", name, "日本", "größe", "naïve", "not stored"):
        assert text in printed.out
    found = as_json(capsys, "show", tmp_path / "a")[1]
    assert (found["hparams"]["title"], found["unstored"]) == (hparams["values"]["title"], ["loss"])
    words = [str(PROGRAMS / "command.py"), "checkpoint", "show", str(tmp_path / "a"), "--tensors"]
    done = run_forked(words, tmp_path, {**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout


def test_every_action_has_help_and_debug_shows_the_traceback(capsys, tmp_path):
    for action in ("list", "show", "verify", "export", "diff"):
        code, printed = run(capsys, action, "--help")
        assert (code, f"usage: drivetrain checkpoint {action}" in printed.out, "--json" in printed.out) == (
            0,
            1,
            1,
        )
    assert "Traceback" in run(capsys, "show", tmp_path, "--debug")[1].err


def test_addresses_do_as_paths_do(capsys, tmp_path):
    run_dir = f"memory://{tmp_path.name}/run"
    manager = CheckpointManager(f"{run_dir}/checkpoints", CheckpointConfig(keep_last=3, best=0, by=None))
    for update in (1, 2):
        manager.save(update, 0, {}, lambda: Snapshot({"model": {"w": torch.full((2,), 1.0)}}))
    found = as_json(capsys, "list", run_dir)[1]["checkpoints"]
    assert [(each["update"], each["condition"]) for each in found] == [(1, "committed"), (2, "committed")]
    assert all(each["bytes"] > 8 for each in found)
    assert as_json(capsys, "verify", run_dir)[1]["good"] is True
    assert as_json(capsys, "show", run_dir)[1]["groups"]["model"]["elements"] == 2
    assert as_json(capsys, "diff", found[0]["path"], found[1]["path"])[0] == 0
    assert run(capsys, "list", f"memory://{tmp_path.name}/nowhere")[0] == 1


PIPE = """
import os, sys
from drivetrain.cli.main import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.exit(main(sys.argv[1:]))
"""


def test_a_reader_that_has_seen_enough_ends_it_quietly(run_dir, tmp_path):
    (tmp_path / "pipe.py").write_text(PIPE, encoding="utf-8")
    done = run_forked(["pipe.py", "checkpoint", "show", str(run_dir), "--tensors"], tmp_path, timeout=600)
    assert (done.stderr, done.returncode) == ("", 1)
