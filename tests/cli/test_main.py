"""The commands, as a user runs them."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import PROGRAMS
from tests.support.forked import run_forked
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.cli import launch
from drivetrain.cli.main import _OTHERS, _RUNS, _SMALL, main
from drivetrain.cli.references import importable_here
from drivetrain.core.version import __version__
from drivetrain.run.ledger_report import KINDS, NAME, read_ledger

SHAPES = "--task shapes.Shapes --data shapes.data"
FIT = f"{SHAPES} --trainer.max_epochs 2 --trainer.run_dir run"


def test_fit_trains_as_python_does_and_says_what_it_left(drive, here):
    code, out, _ = drive("fit", f"{FIT} --trainer.loggers csv,jsonl --task.hidden 5 --trainer.seed 3")
    assert code == 0
    for text in ("max_epochs=2 reached after 10 steps, 2 epochs", "validation/loss", "path: run/model.safe"):
        assert text in out
    assert {"metrics.csv", "metrics.jsonl"} <= {path.name for path in (here / "run").iterdir()}
    from shapes import Shapes, data

    torch.manual_seed(3)
    task = Shapes(hidden=5)
    quiet(max_epochs=2, strategy="cpu", seed=3).fit(task, data)
    found = load_file(here / "run" / "model.safetensors")
    assert found.keys() == task.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in task.state_dict().items())


def test_fit_resumes_and_validate_and_test_judge_its_checkpoints(drive):
    drive("fit", FIT)
    assert "holds the checkpoints of an earlier run" in drive("fit", FIT)[2]
    longer = f"{SHAPES} --trainer.max_epochs 4 --trainer.run_dir run --resume auto --json"
    assert "'checkpoint'" in drive("fit", f"{longer} --optimizer-settings data")[2]
    longer = f"{longer} --optimizer-settings program"
    assert "skip='2 hours' cannot be counted" in drive("fit", f"{longer} --skip 2hours")[2]
    code, out, _ = drive("fit", f"{longer} --new-data")
    result = json.loads(out)
    assert (code, result["progress"]["steps"], result["run_dir"]) == (0, 20, "run")
    code, out, _ = drive("validate", f"{SHAPES} --trainer.run_dir run --checkpoint last --json")
    assert code == 0
    assert json.loads(out)["validation/loss"] == pytest.approx(result["metrics"]["validation/loss"])
    code, out, _ = drive("test", f"{SHAPES} --trainer.run_dir run --checkpoint best")
    assert (code, out.split()[0]) == (0, "test/loss")


def test_predict_prints_writes_and_has_metrics(drive, here):
    code, out, _ = drive("predict", SHAPES)
    assert (code, out.count("tensor(")) == (0, 2)
    assert drive("predict", f"{SHAPES} --save-to outputs")[:2] == (0, "2 files in outputs\n")
    assert len(list((here / "outputs").glob("*.safetensors"))) == 2
    assert drive("predict", f"{SHAPES} --metrics")[1].splitlines()[-1].startswith("validation/loss  0.")
    found = json.loads(drive("predict", f"{SHAPES} --metrics --json")[1])
    assert (found["batches"], list(found["metrics"])) == (2, ["validation/loss"])
    assert drive("predict", f"{SHAPES} --joined")[1].count("tensor(") == 1
    assert json.loads(drive("predict", f"{SHAPES} --joined --json")[1]) == {"samples": 16}


def test_plan_and_summary_are_printed_and_nothing_is_written(drive, here):
    before = sorted(here.iterdir())
    code, out, _ = drive("plan", f"{FIT} --trainer.log_every 500")
    assert (code, "10 in all, 5 per epoch" in out, "warning: log_every=500 steps" in out) == (0, True, True)
    code, out, _ = drive("summary", "--task shapes.Shapes --depth 2")
    assert (code, "parameters" in out) == (0, True)
    assert json.loads(drive("summary", "--task shapes.Shapes --json")[1])["total"]["parameters"] > 0
    assert [each for each in sorted(here.iterdir()) if each.name != "__pycache__"] == before
    ways = {
        "--data shapes.Data --data.count 7": 7,
        "--data shapes:make_data --data.count=8": 8,
        "--data shapes.py:ready": 4,
        "--train-data shapes.ready --validation-data shapes.ready": 4,
    }
    for data, steps in ways.items():
        code, out, err = drive("plan", f"--task shapes.py:Shapes {data} --trainer.max_epochs 1 --json")
        assert (code, err, json.loads(out)["steps"]) == (0, "", steps)
        assert bool(json.loads(out)["validation"]["times"]) == ("ready" not in data or "--validation" in data)


def test_plan_lists_the_collectives_of_any_number_of_processes_and_what_a_run_takes(drive, here):
    rates = "--steps-per-second 2 --disk-bytes-per-second 1e6"
    code, out, err = drive("plan", f"{FIT} --trainer.strategy ddp --world-size 1024 --run {rates}")
    assert (code, err, out.splitlines()[-1].split()[:4]) == (0, "", ["1", "all_reduce", "1024", "processes"])
    assert "hours: 0.0002778\nseconds of a save: " in out
    found = json.loads(drive("plan", f"{FIT} --json {rates}")[1])
    assert found["hours"] == 10 / 2 / 3600
    assert found["seconds_of_a_save"] == found["checkpoint"] / 1e6
    assert "collectives in a step of 1 process(es): none" in drive("plan", f"{FIT} --run")[1]
    for given, message in {
        "--world-size 3 --trainer.devices 2": "--world-size 3 is no multiple of --trainer.devices 2",
        "--world-size 1.5": "--world-size",
        "--steps-per-second fast": "--steps-per-second must be a number, such as 1024 or 4e14, not 'fast'",
    }.items():
        code, _, err = drive("plan", f"{FIT} --trainer.strategy ddp {given}")
        assert (code, message in err) == (2, True), err


def test_plan_makes_no_weights_unless_the_constructor_reads_them(drive, here):
    (here / "large.py").write_text(
        "import torch, shapes\n"
        "class Large(shapes.Shapes):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.large = torch.nn.Linear(2**20, 2**20)\n"  # 4 TB
        "    def training_step(self, batch):\n"
        "        print('in a step')\n"
        "        return super().training_step(batch)\n"
        "class Reads(shapes.Shapes):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = float(next(self.parameters()).sum())\n",
        encoding="utf-8",
    )
    for name, parameters in (("Large", "1,099,512,"), ("Reads", "trainable")):
        line = f"--task large.{name} --data shapes.Data --trainer.max_epochs 1"
        code, out, _ = drive("plan", line)
        assert (code, parameters in out, "in a step" in out) == (0, True, False)


def test_errors_exit_with_1_and_debug_shows_the_traceback(drive, here):
    line = f"{SHAPES} --trainer.run_dir run --checkpoint nowhere"
    for debug in ("", " --debug"):
        code, _, err = drive("validate", line + debug)
        assert (code, "nowhere" in err, "Traceback" in err) == (1, True, bool(debug))
    before = sorted(here.iterdir())
    for place in ("", "--trainer.run_dir=a/b"):
        code, _, err = drive("fit", f"{SHAPES} --trainer.max_epochs 1 --resume nosuch {place}")
        assert (code, "no checkpoint found at 'nosuch'" in err, sorted(here.iterdir())) == (1, True, before)
    (here / "bad.py").write_text("data = [3.0]\n", encoding="utf-8")
    line = "--task shapes.Shapes --data bad.data --trainer.max_epochs 1 --trainer.run_dir r"
    code, _, err = drive("fit", line)
    assert (code, "batch 0 of epoch 0" in err, "after step 0" in err) == (1, True, True)
    (here / "broken.py").write_text("import not_there_at_all\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):  # Python shows it with its traceback
        drive("fit", "--task broken.Task --data shapes.data")


@pytest.mark.parametrize(("name", "expected"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_a_signal_ends_a_fit_with_its_exit_code(drive, here, name, expected):
    (here / "ends.py").write_text(
        "import os, shapes, signal, time\n"
        "from drivetrain.callbacks import LambdaCallback\n"
        "class Ends(shapes.Shapes):\n"
        "    def __init__(self, signal: str):\n"
        "        super().__init__(); self.signal = signal\n"
        "    def end(self, run):\n"
        "        os.kill(os.getpid(), getattr(signal, self.signal))\n"
        "        while run.stopping.asked is None: time.sleep(0.01)\n"
        "    def configure_callbacks(self, stage):\n"
        "        return [LambdaCallback(on_step_end=self.end)]\n",
        encoding="utf-8",
    )
    line = f"--task ends.Ends --task.signal {name} --data shapes.data --trainer.max_epochs 1"
    code, _, err = drive("fit", f"{line} --trainer.run_dir run")
    assert (code, "Traceback" in err) == (expected, False), err


def test_the_command_line_names_the_jsonargparse_that_it_needs(drive, monkeypatch):
    monkeypatch.setattr("jsonargparse.__version__", "4.46.0")
    code, _, err = drive("plan", SHAPES)
    assert (code, "needs jsonargparse 4.53 or newer, and 4.46.0 is installed" in err) == (2, True)


def test_env_lists_versions_and_devices(drive):
    found = json.loads(drive("env", "--json", quiet=False)[1])
    assert (found["versions"]["drivetrain"], found["versions"]["torch"]) == (__version__, torch.__version__)
    assert found["devices"][0]["type"] == "cpu"
    assert "\ndevice " in drive("env", quiet=False)[1]


def test_usage_errors_return_2_and_help_returns_0(capsys):
    path = list(sys.path)
    assert (main([]), main(["tarin"]), main(["--help"]), main(["runs"])) == (2, 2, 0, 2)
    assert capsys.readouterr().out.count("usage: ") == 3
    for line, nearest in {
        "launch --devces 2 train.py": "--devices",
        "checkpoint show run --jso": "--json",
        "fti --task a.B": "fit",
        "checkpoint lst run": "list",
    }.items():
        assert main(line.split()) == 2
        assert f"Did you mean '{nearest}'?" in capsys.readouterr().err
    assert sys.path == path


def test_help_fits_on_a_screen_and_has_three_examples(drive):
    shapes = "--task shapes.Shapes --data shapes.Data "
    groups = ("checkpoint", "runs", "checkpoint export", "runs report", "search show")
    for command in ("--help", *groups, *(_RUNS | _SMALL | _OTHERS)):
        first, *rest = f"{command} {shapes if command == 'fit' else ''}--help".split()
        code, out, _ = drive(first, " ".join(rest), quiet=False)
        most, lines = 30 if command in _RUNS.keys() - {"fit"} else 44, out.splitlines()
        assert (command, code, len(lines) <= most, max(map(len, lines)) <= 80) == (command, 0, True, True), (
            out
        )
        assert out.count("\n  drivetrain ") >= (2 if command in ("new", "env") else 3), out
        if command == "fit":
            for text in ("--task.NAME: hidden=8, rate=0.1", "length: max_epochs, max", "num_workers=0"):
                assert text in out


def test_a_new_project_trains_and_passes_its_test(drive, here, monkeypatch):
    assert drive("new", "my_rings", quiet=False)[0] == 0
    monkeypatch.chdir("my_rings")
    code, out, err = drive("fit", "--config config.yaml --trainer.max_epochs 1 --data.count 64")
    assert (code, "after 2 steps" in out) == (0, True), err
    with importable_here():
        importlib.import_module("test_my_rings").test_it_learns(here)


def test_launch_finds_the_machines_at_their_address_or_rendezvous():
    def where(line):
        return " ".join(launch._where(launch._parser().parse_args([*line.split(), "train.py"])))

    def numbered(nodes, number, place):
        meeting = f"--rdzv-backend drivetrain --rdzv-endpoint {place} --rdzv-id drivetrain"
        return f"--nnodes {nodes} {meeting} --rdzv-conf number={number}"

    assert where("--nodes 2 --node-rank 1 --address host") == numbered(2, 1, "host:29500")
    assert where("--nodes 2 --node-rank 1 --address host:7") == numbered(2, 1, "host:7")
    meeting = "--nnodes 1:4 --rdzv-backend drivetrain-elastic --rdzv-endpoint host:7 --rdzv-id mine"
    assert where("--nodes 1:4 --rendezvous host:7 --job mine --max-restarts 3") == meeting
    assert where("--devices 4") == numbered(1, 0, "127.0.0.1:0")


def test_what_cannot_be_written_ends_a_command_without_a_traceback(here, monkeypatch, capfd):
    quiet(max_epochs=1, checkpoint=True, run_dir="run").fit(Regression(), pairs())
    capfd.readouterr()
    for line in ("checkpoint list run", "runs list run", "--help", f"fit {SHAPES} --print-config"):
        for place in ("", "/dev/full") if os.path.exists("/dev/full") else ("",):
            reader, writer = os.pipe()
            os.close(reader)
            with open(place or writer, "w", encoding="utf-8") as out:
                monkeypatch.setattr(sys, "stdout", out)
                assert main(line.split()) == 1
            words = "drivetrain: the output cannot be written: No space left on device\n" if place else ""
            assert capfd.readouterr().err == words


def test_rank_0_alone_prints(drive, monkeypatch):
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for rank, words in (("0", ["task:", "data:"]), ("1", [])):
        for name, value in {**job, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        code, out, err = drive("fit", f"{SHAPES} --print-config", quiet=False)
        assert (code, [line.split()[0] for line in out.splitlines()][:2], err) == (0, words, "")


def test_help_and_version_do_not_wait_for_torch():
    program = (
        "import sys; from drivetrain.cli.main import main; assert main(['--version']) == 0; words = (); "
        "assert all(main([*each.split(), '--help']) == 0 for each in "
        "('', 'checkpoint', 'checkpoint export', 'launch', 'runs')); assert main(['env', '--bogus']) == 2; "
        "assert not {'torch', 'numpy', 'jsonargparse', 'argcomplete'} & set(sys.modules), sorted(sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"drivetrain {__version__}\n")
    assert "--max-shard-size" in done.stdout


def test_a_shell_completes_words_arguments_and_values(here):
    for line, found in {
        "drivetrain fi": ["fit "],
        "drivetrain fit --task shapes.Shapes --task.": ["hidden", "kind", "name", "rate"],
        "drivetrain fit --task shapes.Shapes --task.kind ": ["relu", "tanh"],
        "drivetrain fit --trainer.strategy ddp --trainer.strategy.bu": ["--trainer.strategy.bucket_mb "],
    }.items():
        asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(here / "found"), "COMP_TYPE": "9"}
        asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
        done = run_forked([str(PROGRAMS / "command.py")], here, {**os.environ, **asked})
        assert done.returncode == 0, done.stderr
        words = sorted((here / "found").read_text(encoding="utf-8").split("\v"))
        assert [word.removeprefix("--task.") for word in words] == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_read_what_completes(drive, shell):
    code, out, _ = drive("completion", shell, quiet=False)
    assert (code, "drivetrain" in out, "_ARGCOMPLETE" in out) == (0, True, True)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True, timeout=600)


@pytest.mark.landing
def test_fit_works_from_a_shell_in_the_users_directory(here):
    words = f"-m drivetrain fit {FIT} --trainer.strategy cpu --trainer.progress_bar no".split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "model path: run/model.safetensors" in done.stdout


def test_runs_show_and_list_tell_attempts_shares_and_what_cannot_be_read(tmp_path, capsys, monkeypatch):
    def printed(*words, code=0):
        assert main(["runs", *map(str, words)]) == code
        return capsys.readouterr().out

    run_dir = tmp_path / "run"
    for epochs in (1, 2):
        trainer = quiet(max_epochs=epochs, checkpoint=True, run_dir=run_dir)
        trainer.fit(Regression(), pairs(), pairs(2), resume="auto")
    capsys.readouterr()
    shown = printed("show", run_dir)
    for text in (*KINDS, "wall time", "which is compute / wall time", "0 to 5", "5 to 10"):
        assert text in shown
    found = json.loads(printed("show", run_dir, "--json"))
    assert found == json.loads(json.dumps(read_ledger(run_dir).to_json()))
    listed = {"runs": [{**found, "best": None}], "searches": [], "trouble": []}
    assert json.loads(printed("list", tmp_path, "--json")) == listed
    monkeypatch.setenv("COLUMNS", "300")
    other = tmp_path / "other"
    other.mkdir()
    (other / NAME).write_text("torn", encoding="utf-8")
    head, row, trouble = printed("list", tmp_path).splitlines()
    assert head.split() == ["run", "best", "attempts", "steps", "wall", "goodput", "ended", "heard"]
    assert row.split()[:3] == [str(run_dir), "2", "10"]
    monkeypatch.chdir(tmp_path)
    run_dir.rename("runs")
    assert printed("list").splitlines()[1].split()[0] == "runs"
    (tmp_path / "runs").rename(run_dir)
    assert str(other) in trouble
    assert str(other) in printed("list", other, code=1)  # nothing could be read
    with (run_dir / NAME).open("a", encoding="ascii") as out:
        out.write("{\n")
    assert "unreadable lines: 1" in printed("show", run_dir / NAME)
