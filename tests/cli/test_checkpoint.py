"""`drivetrain checkpoint`: what it says, as text and as JSON, and its exit codes; it changes nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.faults import read_bytes
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


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


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


def save(path, tensors, objects=None, **fields):
    DirectoryCheckpointIO().save(str(path), Snapshot({"model": tensors}, objects or {}, **fields))


def test_list_tells_what_each_is_kept_for(capsys, run_dir):
    code, printed = run(capsys, "list", run_dir)
    assert code == 0
    lines = [re.split("  +", line) for line in printed.out.splitlines()]
    assert lines[0] == ["name", "order", "update", "epoch", "kept for", "metric", "size", "age"]
    assert [line[2:5] for line in lines[1:3]] == [["10", "2", "resume"], ["15", "3", "resume keeper"]]
    assert [line[0] for line in lines[3:]] == ["", "metric: validation/loss"]
    assert lines[2][6].endswith(" kB")
    assert max(map(len, printed.out.splitlines())) <= 80


def test_list_as_json_has_the_documented_keys(capsys, run_dir):
    code, found = as_json(capsys, "list", run_dir / "checkpoints")
    assert code == 0
    assert set(found) == {"directory", "trouble", "checkpoints"}
    entry = {"name", "order", "update", "epoch", "metrics", "resume", "keeper"}
    assert all(
        set(each) == entry | {"path", "condition", "bytes", "saved_at", "trouble"}
        for each in found["checkpoints"]
    )
    assert [each["update"] for each in found["checkpoints"]] == [10, 15]
    assert [each["trouble"] for each in found["checkpoints"]] == [None, None]
    files = (run_dir / "checkpoints" / "update-00000010").iterdir()
    assert found["checkpoints"][0]["bytes"] == sum(path.stat().st_size for path in files)


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
    assert code == 0
    assert "not what was written" in found["trouble"]
    assert found["checkpoints"][-1]["update"] == 15  # from its own words


def test_list_of_no_checkpoints_says_so(capsys, tmp_path):
    code, printed = run(capsys, "list", tmp_path)
    assert (code, printed.out) == (0, f"no checkpoints in {tmp_path}\n")


def test_show_says_what_a_checkpoint_is(capsys, run_dir):
    code, found = as_json(capsys, "show", run_dir, "--tensors")
    assert code == 0
    assert found["path"].endswith("update-00000015")
    assert found["progress"]["updates"] == 15
    assert found["saved_by"]["task"] == "Regression"
    assert found["purpose"]["keeper"] == {"validation/loss": "min"}
    assert found["hparams"]["dropout"] == 0.0
    assert found["groups"]["model"] == {"tensors": 2, "elements": 5, "bytes": 20, "dtypes": {"F32": 5}}
    assert found["optimizers"]["default"]["optimizer"] == "SGD"
    assert found["optimizers"]["default"]["groups"][0]["lr"] == 0.05
    assert found["optimizers"]["default"]["groups"][0]["parameters"] == 2
    weight = found["tensors"]["model"]["line.weight"]
    assert (weight["dtype"], weight["shape"]) == ("F32", [1, 4])
    assert [piece["file"] for piece in weight["pieces"]] == ["model.safetensors"]
    code, printed = run(capsys, "show", run_dir / "checkpoints" / "update-00000010", "--tensors")
    assert code == 0
    for text in ("  updates        10\n", "  dropout    0", "line.weight  F32[1, 4]", "lr 0.05", "188 bytes"):
        assert text in printed.out
    assert max(map(len, printed.out.splitlines()[1:])) <= 80


def test_show_needs_no_tensor_file(capsys, run_dir):
    path = run_dir / "checkpoints" / "update-00000010"
    for file in path.glob("*.safetensors"):
        file.unlink()
    assert run(capsys, "show", path, "--tensors")[0] == 0


def test_a_damaged_newest_is_passed_over_in_one_line(capsys, run_dir):
    damage(run_dir, "update-00000015", "model.safetensors")
    code, printed = run(capsys, "show", run_dir)
    assert code == 0
    assert printed.out.splitlines()[0].endswith("update-00000010")
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("drivetrain: the checkpoint")


def test_verify_checks_every_byte_of_all(capsys, run_dir):
    code, found = as_json(capsys, "verify", run_dir)
    assert code == 0
    assert found["good"] is True
    assert [each["condition"] for each in found["checkpoints"]] == ["good", "good"]
    damage(run_dir, "update-00000010", "model.safetensors")
    before = content(run_dir)
    code, printed = run(capsys, "verify", run_dir)
    assert code == 1
    assert "update-00000010: DAMAGED" in printed.out
    assert "model.safetensors' is not what was written at the tensor" in printed.out
    assert "update-00000015: good" in printed.out
    assert printed.err == ""
    assert content(run_dir) == before


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "hparams.json", "state.safetensors"])
def test_verify_names_the_file_that_is_wrong(capsys, run_dir, file):
    in_files(run_dir / "checkpoints" / "update-00000015")
    damage(run_dir, "update-00000015", file)
    code, found = as_json(capsys, "verify", run_dir / "checkpoints" / "update-00000015")
    assert (code, found["good"]) == (1, False)
    assert file in found["checkpoints"][0]["trouble"]


def test_verify_tells_what_a_run_has_set_aside_and_checks_it_when_it_is_named(capsys, run_dir):
    damage(run_dir, "update-00000010", "model.safetensors")
    aside = run_dir / "checkpoints" / "update-00000010.bad"
    (run_dir / "checkpoints" / "update-00000010").rename(aside)
    code, found = as_json(capsys, "verify", run_dir)
    conditions = {each["path"].rpartition("/")[2]: each["condition"] for each in found["checkpoints"]}
    assert conditions == {
        "update-00000010.bad": "set aside",
        "update-00000010": "gone",
        "update-00000015": "good",
    }
    assert code == 1  # the index still names the one that is gone
    code, found = as_json(capsys, "verify", aside)
    assert (code, found["checkpoints"][0]["condition"]) == (1, "damaged")


def test_verify_goes_on_after_one_that_cannot_be_read(capsys, run_dir):
    path = run_dir / "checkpoints" / "update-00000010" / "model.safetensors"
    path.unlink()
    path.mkdir()
    code, found = as_json(capsys, "verify", run_dir)
    assert code == 1
    assert [each["condition"] for each in found["checkpoints"]] == ["damaged", "good"]


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


def test_export_of_another_group(capsys, run_dir, tmp_path):
    target = tmp_path / "state.safetensors"
    assert run(capsys, "export", run_dir, target, "--group", "state")[0] == 0
    assert "host_streams.numpy.keys" in load_file(target)
    code, printed = run(capsys, "export", run_dir, tmp_path / "w.safetensors", "--group", "modle")
    assert code == 1
    assert "Did you mean 'model'?" in printed.err


def test_export_overwrites_only_when_told_to(capsys, run_dir, tmp_path):
    target = tmp_path / "w.safetensors"
    target.write_text("precious", encoding="ascii")
    code, printed = run(capsys, "export", run_dir, target)
    assert code == 2
    assert "exists; --force" in printed.err
    assert target.read_text(encoding="ascii") == "precious"
    assert run(capsys, "export", run_dir, target, "--force")[0] == 0
    assert set(load_file(target)) == {"line.weight", "line.bias"}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    "lost",
    [[], ["w.safetensors.index.json"], [f"w-0000{number}-of-00002.safetensors" for number in (1, 2)]],
    ids=["nothing lost", "without the index", "the index alone"],
)
def test_no_file_of_an_export_in_parts_is_replaced_unasked(capsys, run_dir, tmp_path, remote, lost):
    place = f"memory://{tmp_path.name}/out" if remote else str(tmp_path / "out")
    files, target = file_system(place), f"{place}/w.safetensors"
    assert run(capsys, "export", run_dir, target, "--max-shard-size", "16")[0] == 0
    for each in lost:
        files.delete(f"{place}/{each}")
    before = {name: read_bytes(files, f"{place}/{name}") for name in files.entries(place)}
    for size in ([], ["--max-shard-size", "16"]):
        code, printed = run(capsys, "export", run_dir, target, *size)
        assert code == 2
        assert re.search(rf"{re.escape(place)}/w.*' exists; --force", printed.err)
    assert before == {name: read_bytes(files, f"{place}/{name}") for name in files.entries(place)}
    assert len(before) == 3 - len(lost)
    assert run(capsys, "export", run_dir, target, "--force")[0] == 0
    assert files.entries(place).keys() - before.keys() == {"w.safetensors"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("w.pt",), "add --format torch"),
        (("w.safetensors", "--format", "torch"), "a name such as model.pt"),
        (("w.pt", "--format", "torch", "--max-shard-size", "5 GB"), "needs --format safetensors"),
        (("w.safetensors", "--dtype", "bf61"), "Did you mean 'bf16'?"),
        (("w.safetensors", "--max-shard-size", "5 XB"), "5 XB"),
    ],
)
def test_export_refuses_what_cannot_be_meant(capsys, run_dir, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    before = content(tmp_path)
    code, printed = run(capsys, "export", run_dir, *words)
    assert code == 2
    assert says in printed.err
    assert content(tmp_path) == before


def test_diff_of_the_same_is_nothing(capsys, run_dir):
    newest = run_dir / "checkpoints" / "update-00000015"
    code, printed = run(capsys, "diff", run_dir, newest)
    assert code == 0
    assert printed.out.startswith("the same: ")


def test_two_runs_with_the_same_seed_are_the_same(capsys, trained, tmp_path):
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=CheckpointConfig()).fit(Regression(), pairs(), pairs(4))
    code, printed = run(capsys, "diff", trained, tmp_path)
    assert code == 0, printed.out  # though they took not the same time


def test_diff_tells_tensors_and_values_apart(capsys, run_dir):
    first, second = (run_dir / "checkpoints" / f"update-000000{update}" for update in (10, 15))
    code, found = as_json(capsys, "diff", first, second, "--values")
    assert code == 1
    assert found["is_same"] is False
    by_name = {f"{each['group']}/{each['name']}": each for each in found["tensors"]}
    weight = by_name["model/line.weight"]
    stored = [
        DirectoryCheckpointIO().load(str(each)).tensors["model"]["line.weight"].double()
        for each in (first, second)
    ]
    assert weight["kind"] == "content"
    assert weight["first"] == weight["second"] == {"dtype": "F32", "shape": [1, 4]}
    assert weight["max_abs"] == pytest.approx((stored[0] - stored[1]).abs().max().item())
    assert weight["relative"] == pytest.approx(((stored[0] - stored[1]).norm() / stored[0].norm()).item())
    values = {(each["section"], each["name"]): (each["first"], each["second"]) for each in found["values"]}
    assert values["progress", "updates"] == (10, 15)
    code, printed = run(capsys, "diff", first, second)
    assert code == 1
    assert "model/line.weight" in printed.out
    assert "10 became 15" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80


def test_diff_needs_no_tensor_file_where_hashes_tell(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save(tmp_path / name, {"w": torch.full((3,), value), "same": torch.zeros(2)}, {"notes": value})
        (tmp_path / name / "model.safetensors").unlink()
    code, found = as_json(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert [each["name"] for each in found["tensors"]] == ["w"]
    assert [(each["section"], each["first"], each["second"]) for each in found["values"]] == [
        ("notes", 1.0, 2.0)
    ]
    assert as_json(capsys, "diff", tmp_path / "a", tmp_path / "b")[0] == 0


def test_diff_of_other_shapes_names_and_dtypes(capsys, tmp_path):
    first = {"shape": torch.zeros(2), "dtype": torch.zeros(2), "gone": torch.zeros(1)}
    second = {"shape": torch.zeros(3), "dtype": torch.zeros(2).half(), "new": torch.zeros(1)}
    save(tmp_path / "a", first)
    save(tmp_path / "b", second)
    code, printed = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--values")
    assert code == 1
    for text in ("F32[2] became F32[3]", "F32[2] became F16[2]", "only in the first", "only in the second"):
        assert text in printed.out


def test_diff_of_hundreds_shows_the_first_and_counts_the_rest(capsys, tmp_path):
    for name, value in (("a", 0.0), ("b", 1.0)):
        save(tmp_path / name, {f"layer.{index}.weight": torch.full((2,), value) for index in range(300)})
    code, printed = run(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "0 tensors are the same, 300 differ" in printed.out
    assert "... and 260 more; --all lists them" in printed.out
    _, printed = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--all")
    assert "layer.299.weight" in printed.out


def test_any_text_is_shown_without_harm_to_the_terminal(capsys, tmp_path):
    name = "層.重み." + "long" * 30
    hparams = {"values": {"title": "\x1b[2Jgone\nnew \ud800", "größe": "naïve"}, "unstored": ["loss"]}
    save(tmp_path / "a", {name: torch.zeros(1), "b": torch.zeros(1)}, {"hparams": hparams}, task="日本")
    code, printed = run(capsys, "show", tmp_path / "a", "--tensors")
    assert code == 0
    assert "\x1b" not in printed.out
    assert r"\x1b[2Jgone\nnew \ud800" in printed.out
    for text in (name, "日本", "größe", "naïve", "not stored"):
        assert text in printed.out
    _, found = as_json(capsys, "show", tmp_path / "a")
    assert found["hparams"]["title"] == hparams["values"]["title"]
    assert found["unstored"] == ["loss"]


def test_many_are_listed_without_a_look_into_their_files(capsys, tmp_path, monkeypatch):
    manager = CheckpointManager(str(tmp_path), CheckpointConfig(keep_last=2000, best=0, by=None))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it would take long, and prove nothing
    for update in range(30):
        manager.save(update, 0, {}, lambda: Snapshot({"model": {"w": torch.zeros(1)}}))
    for path in tmp_path.glob("update-*/*"):
        path.write_text("not even read", encoding="ascii")
    _, found = as_json(capsys, "list", tmp_path)
    assert [each["update"] for each in found["checkpoints"]] == list(range(30))
    assert {each["condition"] for each in found["checkpoints"]} == {"committed"}


def test_errors_are_one_message(capsys, tmp_path):
    for words in (("list", tmp_path / "nowhere"), ("show", tmp_path), ("diff", tmp_path, tmp_path)):
        code, printed = run(capsys, *words)
        assert code == 1
        assert printed.err.startswith("drivetrain: ")
        assert "Traceback" not in printed.err
    assert run(capsys, "lst", tmp_path)[0] == 2
    assert run(capsys, "show")[0] == 2
    code, printed = run(capsys, "show", tmp_path, "--tensor")
    assert code == 2
    assert "Did you mean '--tensors'?" in printed.err
    assert "Traceback" in run(capsys, "show", tmp_path, "--debug")[1].err


@pytest.mark.parametrize("action", ["list", "show", "verify", "export", "diff"])
def test_every_action_has_help(capsys, action):
    code, printed = run(capsys, action, "--help")
    assert code == 0
    assert f"usage: drivetrain checkpoint {action}" in printed.out
    assert "--json" in printed.out


def test_addresses_do_as_paths_do(capsys, tmp_path):
    run_dir = f"memory://{tmp_path.name}/run"
    manager = CheckpointManager(f"{run_dir}/checkpoints", CheckpointConfig(keep_last=3, best=0, by=None))
    for update in (1, 2):
        manager.save(update, 0, {}, lambda: Snapshot({"model": {"w": torch.full((2,), 1.0)}}))
    code, found = as_json(capsys, "list", run_dir)
    assert code == 0
    assert [(each["update"], each["condition"]) for each in found["checkpoints"]] == [
        (1, "committed"),
        (2, "committed"),
    ]
    assert all(each["bytes"] > 8 for each in found["checkpoints"])
    assert as_json(capsys, "verify", run_dir)[1]["good"] is True
    assert as_json(capsys, "show", run_dir)[1]["groups"]["model"]["elements"] == 2
    first, second = (each["path"] for each in found["checkpoints"])
    assert as_json(capsys, "diff", first, second)[0] == 0
    target = f"{run_dir}/w.safetensors"
    assert run(capsys, "export", run_dir, target)[0] == 0
    assert run(capsys, "export", run_dir, target)[0] == 2  # it is there
    assert run(capsys, "list", f"memory://{tmp_path.name}/nowhere")[0] == 1


def process(*words, **environment):
    """The command as a shell calls it."""
    everything = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return [sys.executable, "-m", "drivetrain", "checkpoint", *map(str, words)], everything


def test_the_command_as_a_process_prints_what_its_encoding_lacks(tmp_path):
    save(tmp_path / "a", {"größe.重み": torch.zeros(2)})
    words, environment = process("show", tmp_path / "a", "--tensors", PYTHONIOENCODING="ascii")
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe.\u91cd\u307f" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_has_seen_enough_ends_it_quietly(run_dir):
    words, environment = process("show", run_dir, "--tensors")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        running.stdout.close()
        error = running.stderr.read()
    assert error == b""


def test_help_does_not_wait_for_torch():
    words, environment = process("export", "--help")
    words[1:3] = [
        "-c",
        "import sys; from drivetrain.cli.main import main; main(); print('torch' in sys.modules)",
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-shard-size" in done.stdout
    assert done.stdout.endswith("False\n")
