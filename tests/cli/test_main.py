"""The commands, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.cli.main import main
from drivetrain.core.version import __version__

SHAPES = "--task shapes.Shapes --data shapes.data"
FIT = f"{SHAPES} --trainer.max_epochs 2 --trainer.run_dir run"


def shell(*words, cwd, options=("-m", "drivetrain"), **more):
    words = [sys.executable, *options, *words]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=False, **more)


def test_fit_trains_and_says_what_it_left(drive, here):
    code, out, _ = drive("fit", f"{FIT} --trainer.loggers csv,jsonl")
    assert code == 0
    assert "max_epochs=2 reached after 10 updates, 2 epochs" in out
    assert "validation/loss" in out
    assert "model path: run/model.safetensors" in out
    assert (here / "run" / "metrics.csv").exists()
    assert (here / "run" / "metrics.jsonl").exists()
    assert load_file(here / "run" / "model.safetensors")["net.0.weight"].shape == (8, 4)


def test_the_same_from_the_command_line_and_from_python(drive, here):
    drive("fit", f"{FIT} --task.hidden 5 --trainer.seed 3")
    from shapes import Shapes, data

    from drivetrain import Trainer

    torch.manual_seed(3)
    task = Shapes(hidden=5)
    quiet = {"loggers": (), "progress_bar": False, "checkpoint": False}
    Trainer(max_epochs=2, strategy="cpu", seed=3, **quiet).fit(task, data)
    found = load_file(here / "run" / "model.safetensors")
    assert found.keys() == task.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in task.state_dict().items())


def test_a_run_goes_on_and_is_judged_by_its_checkpoints(drive):
    drive("fit", FIT)
    longer = f"{SHAPES} --trainer.max_epochs 4 --trainer.run_dir run --resume auto --json"
    code, out, _ = drive("fit", longer)
    assert code == 0
    result = json.loads(out)
    assert result["progress"]["updates"] == 20
    assert result["run_dir"] == "run"
    code, out, _ = drive("validate", f"{SHAPES} --trainer.run_dir run --checkpoint last --json")
    assert code == 0
    assert json.loads(out)["validation/loss"] == pytest.approx(result["metrics"]["validation/loss"])
    code, out, _ = drive("test", f"{SHAPES} --trainer.run_dir run --checkpoint best")
    assert (code, out.split()[0]) == (0, "test/loss")


def test_a_run_with_several_policies_says_which_is_the_best_by_which_metric(drive, here):
    policies = [{"every": "2 steps", "best": 1, "by": "train/loss"}, {"best": 1}]
    (here / "c.json").write_text(json.dumps({"trainer": {"checkpoint": policies}}), encoding="utf-8")
    code, out, _ = drive("fit", f"{FIT} --config c.json")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("best checkpoint by")]
    assert [line.partition(": ")[0] for line in lines] == [
        "best checkpoint by train/loss",
        "best checkpoint by validation/loss",
    ]
    judged = f"{SHAPES} --trainer.run_dir run --checkpoint"
    code, _, err = drive("test", f"{judged} best")
    assert code == 2
    assert "Give one of 'best:" in err
    assert drive("test", f"{judged} best:train/loss")[0] == 0
    listed = drive("checkpoint", "list run", quiet=False)[1]
    assert "keeper(train/loss" in listed


def test_a_second_run_in_the_same_directory_is_refused(drive):
    drive("fit", FIT)
    code, out, err = drive("fit", FIT)
    assert (code, out) == (2, "")
    assert "holds the checkpoints of an earlier run" in err
    assert "Traceback" not in err


def test_predictions_are_printed_or_written(drive, here):
    code, out, _ = drive("predict", SHAPES)
    assert code == 0
    assert out.count("tensor(") == 2
    code, out, _ = drive("predict", f"{SHAPES} --save-to outputs")
    assert (code, out) == (0, "2 files in outputs\n")
    assert len(list((here / "outputs").glob("*.safetensors"))) == 2


def test_predictions_have_the_metrics_of_a_validation_where_they_are_asked_for(drive):
    code, out, _ = drive("predict", f"{SHAPES} --metrics")
    assert code == 0
    assert out.count("tensor(") == 2
    assert out.splitlines()[-1].startswith("validation/loss  0.")
    code, out, _ = drive("predict", f"{SHAPES} --metrics --json")
    assert (code, json.loads(out)["batches"]) == (0, 2)
    assert "validation/loss" in json.loads(out)["metrics"]


def test_a_plan_is_printed_and_nothing_is_written(drive, here):
    before = sorted(here.iterdir())
    code, out, _ = drive("plan", f"{FIT} --trainer.log_every 500")
    assert code == 0
    assert "10 in all, 5 per epoch" in out
    assert "warning: log_every=500 steps" in out
    code, out, _ = drive("plan", f"{FIT} --json")
    assert json.loads(out)["updates"] == 10
    assert [each for each in sorted(here.iterdir()) if each.name != "__pycache__"] == before


def test_a_summary_has_shapes_where_data_is_given(drive, here):
    before = sorted(here.iterdir())
    code, out, _ = drive("summary", "--task shapes.Shapes --depth 2")
    assert code == 0
    assert "parameters" in out
    assert "operations" not in out
    code, out, _ = drive("summary", f"{SHAPES} --json")
    found = json.loads(out)
    assert found["total"]["forward_flops"] > 0
    assert found["modules"][0]["inputs"] is not None
    assert [each for each in sorted(here.iterdir()) if each.name != "__pycache__"] == before
    code, _, err = drive("summary", "--task shapes.Shapes --depth x")
    assert (code, "--depth must be a whole number, at least 0, not 'x'" in err) == (2, True)


@pytest.mark.parametrize(
    ("data", "updates"),
    [
        ("--data shapes.data", 5),
        ("--data shapes.Data --data.count 7", 7),
        ("--data shapes.make_data", 6),
        ("--data shapes:make_data --data.count=8", 8),
        ("--data shapes.py:ready", 4),
        ("--train-data shapes.ready --validation-data shapes.ready", 4),
        ("--data shapes.data --validation-data shapes.ready", 5),
    ],
)
def test_data_may_be_named_in_every_way(drive, data, updates):
    code, out, err = drive("plan", f"--task shapes.py:Shapes {data} --trainer.max_epochs 1 --json")
    assert (code, err) == (0, "")
    assert json.loads(out)["updates"] == updates
    assert (json.loads(out)["validation"]["times"] == 1) == ("ready" not in data or "--validation" in data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--task shapes.Shape --data shapes.data", "Did you mean 'Shapes'?"),
        ("--task shape.Shapes --data shapes.data", "there is no module 'shape'"),
        ("--task shapes --data shapes.data", "does not name an object"),
        ("--task shapes.py --data shapes.data", "shapes.py:Name"),
        ("--task nowhere.py:Shapes --data shapes.data", "no file nowhere.py"),
        ("--task shapes.ready --data shapes.data", "not a TaskModule"),
        ("--data shapes.data", "which task?"),
        ("--model shapes.Shapes", "Here it is called '--task'"),
        ("--task shapes.Shapes", "no data to train on"),
        (f"{SHAPES} --train-data shapes.ready", "give one of them"),
        (f"{SHAPES} --trainer.max_epoch 3", "Did you mean 'max_epochs'?"),
        (f"{SHAPES} --trainer.max_epochs three", "must be a number or none, not 'three'"),
        (f"{SHAPES} --trainer.progress_bar maybe", "must be true or false, not 'maybe'"),
        (f"{SHAPES} --trainer.precision bf16", "Here it is called 'bf16-mixed'."),
        (f"{SHAPES} --trainer.max_epochs", "--trainer.max_epochs needs a value"),
        (f"{SHAPES} --trainer.checkpoint.evry 5", "Did you mean 'every'?"),
        (f"{SHAPES} --trainer.checkpoint true --trainer.checkpoint.every 5", "as a whole and by its parts"),
        (f"{SHAPES} --trainer.seed.x 5", "--trainer.seed must be a whole number, not"),
        (f"{SHAPES} --task.hiden 5", "Did you mean 'hidden'?"),
        (f"{SHAPES} --task.hidden many", "task.hidden must be a whole number, not 'many'"),
        (f"{SHAPES} --task.kind gelu", "task.kind must be 'relu' or 'tanh', not 'gelu'"),
        (f"{SHAPES} --data.count 5", "--data.count has no effect"),
        ("--task shapes.Needy --data shapes.data", "a value is missing: give --task.classes VALUE"),
        (f"{SHAPES} --trane.max_epochs 3", "Did you mean 'trainer'?"),
        (f"{SHAPES} --resum auto", "Did you mean '--resume'?"),
        (f"{SHAPES} --config nowhere.json", "cannot be read"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(drive, line, message):
    code, out, err = drive("fit", line, quiet=False)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("drivetrain: ")
    assert "Traceback" not in err


def test_other_errors_exit_with_1_and_debug_shows_the_traceback(drive):
    line = f"{SHAPES} --trainer.run_dir run --checkpoint nowhere"
    code, _, err = drive("validate", line)
    assert code == 1
    assert "nowhere" in err
    assert "Traceback" not in err
    code, _, err = drive("validate", f"{line} --debug")
    assert code == 1
    assert "Traceback" in err


def test_an_error_in_a_run_says_where_it_stood(drive, write):
    write("bad.py", "data = [3.0]\n")
    code, _, err = drive(
        "fit", "--task shapes.Shapes --data bad.data --trainer.max_epochs 1 --trainer.run_dir r"
    )
    assert code == 1
    assert "batch 0 of epoch 0" in err
    assert "after update 0" in err


def test_callbacks_are_named_by_their_class(drive, write):
    write("mine.py", "class Loud:\n    def on_fit_start(self, run):\n        print('loud')\n")
    code, out, _ = drive("fit", f"{FIT} --trainer.callbacks mine.Loud,drivetrain.EarlyStopping")
    assert code == 0
    assert out.startswith("loud\n")


def test_the_argument_that_deepspeeds_launcher_adds_is_passed_over(drive, monkeypatch):
    assert drive("--local_rank=0", "env", quiet=False)[0] == 2
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert drive("--local_rank=0", "env", quiet=False)[0] == 0


def test_the_environment_is_listed(drive):
    code, out, _ = drive("env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["drivetrain"] == __version__
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"][0]["type"] == "cpu"
    assert set(found["extras"]) == {"deepspeed", "accelerate", "xla", "remote", "s3", "examples"}
    code, out, _ = drive("env")
    assert f"torch          {torch.__version__}"[:5] in out
    assert "extra xla" in out


def test_usage_errors_return_2_and_help_returns_0(capsys):
    assert main([]) == 2
    assert main(["tarin"]) == 2
    assert main(["--help"]) == 0
    assert main(["fit", "--help"]) == 0
    assert "--trainer.max_epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("launch --devces 2 train.py", "--devices"),
        ("check-resume --update 3 train.py", "--updates"),
        ("checkpoint show run --tensor", "--tensors"),
        ("strategies --jsn", "--json"),
        ("fti --task a.B", "fit"),
        ("checkpoint lst run", "list"),
    ],
)
def test_an_unknown_word_of_any_command_is_answered_with_the_nearest(capsys, line, nearest):
    assert main(line.split()) == 2
    assert f"Did you mean '{nearest}'?" in capsys.readouterr().err


def test_the_search_path_is_left_as_it_was(drive):
    before = list(sys.path)
    drive("plan", f"{FIT}")
    assert sys.path == before


def test_help_and_version_do_not_wait_for_torch(tmp_path):
    program = (
        "import sys; from drivetrain.cli.main import main; assert main(['--version']) == 0; "
        "assert all(main([*words, '--help']) == 0 for words in ([], ['checkpoint'], ['launch'], ['runs'])); "
        "assert main(['env', '--bogus']) == 2; "
        "assert not {'torch', 'numpy', 'jsonargparse', 'argcomplete'} & set(sys.modules), sorted(sys.modules)"
    )
    done = shell(cwd=tmp_path, options=("-c", program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"drivetrain {__version__}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("drivetrain fi", ["fit "]),
        (
            "drivetrain fit --task shapes.Shapes --task.",
            ["--task.hidden", "--task.kind", "--task.name", "--task.rate"],
        ),
        ("drivetrain fit --task shapes.Shapes --task.kind ", ["relu", "tanh"]),
        ("drivetrain fit --task shapes.Needy --task.", ["--task.classes "]),
        ("drivetrain plan --task not.Here --trainer.progress_bar ", ["false", "true"]),
        ("drivetrain fit --trainer.strategy ddp --trainer.strategy.bu", ["--trainer.strategy.bucket_mb "]),
    ],
)
def test_a_shell_is_told_how_a_line_may_go_on(here, line, found):
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(here / "found"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    done = shell(cwd=here, env={**os.environ, **asked})
    assert done.returncode == 0, done.stderr
    assert sorted((here / "found").read_text(encoding="utf-8").split("\v")) == found


def test_fit_works_from_a_shell_in_the_users_directory(here):
    words = f"fit {FIT} --trainer.strategy cpu --trainer.progress_bar false".split()
    done = shell(*words, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "model path: run/model.safetensors" in done.stdout


def test_a_users_broken_module_shows_its_own_traceback(here, write):
    write("broken.py", "import not_there_at_all\n")
    done = shell(*["fit", "--task", "broken.Task", "--data", "shapes.data"], cwd=here)
    assert done.returncode == 1
    assert "broken.py" in done.stderr
    assert "No module named 'not_there_at_all'" in done.stderr


def test_the_package_runs_as_a_module_where_the_command_is_not_on_the_path():
    run = subprocess.run(
        [sys.executable, "-m", "drivetrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "checkpoint" in run.stdout
    assert run.stdout.startswith("usage: drivetrain")
