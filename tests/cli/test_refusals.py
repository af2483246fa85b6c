"""Refused by the command line: exit code 2, one message with the word that helps, and no traceback."""

import pytest
from tests.cli.conftest import settings
from tests.support.refusals import assert_refused

from drivetrain import ConfigError
from drivetrain.cli.launch import run as launch

SHAPES = "--task shapes.Shapes --data shapes.data"
STOPPING = "callbacks drivetrain.EarlyStopping --trainer.callbacks"


def test_mistakes_in_the_arguments_of_fit(refuse):
    lines = {
        "--task shapes.Shape --data shapes.data": "Did you mean 'Shapes'?",
        "--task nowhere.py:Shapes --data shapes.data": "no file nowhere.py",
        "--task shapes.ready --data shapes.data": "not a TaskModule",
        "--data shapes.data": "which task?",
        "--model shapes.Shapes": "Here it is called '--task'",
        "--epochs 3": "called 'max_epochs'. The Trainer's arguments are written --trainer.NAME",
        "--max-epochs 3": "write --trainer.max_epochs",
        "--task shapes.Shapes": "no training data",
        f"{SHAPES} --train-data shapes.ready": "give one of them",
        f"{SHAPES} --trainer.max_epoch 3": "Did you mean 'max_epochs'?",
        f"{SHAPES} --trainer.checkpoint true --trainer.checkpoint.every 5": "whole and by parts",
        f"{SHAPES} --task.hiden 5": "Did you mean 'hidden'?",
        f"{SHAPES} --task.kind gelu": "--task.kind must be 'relu' or 'tanh', not 'gelu'",
        f"{SHAPES} --data.count 5": "--data.count has no effect",
        f"{SHAPES} --task.name=[5": "though it begins with a bracket",
        "--task shapes.Needy --data shapes.data": "a value is missing: give --task.classes VALUE",
        f"{SHAPES} --trainer.run_dir=${{oc.env:HOME}}/x": "no variables such as ${oc.env:HOME}. Write",
        f"{SHAPES} --resume ${{HOME}}/x": "no variables such as ${HOME}",
        f"{SHAPES} --resum auto": "Did you mean '--resume'?",
        f"{SHAPES} --config nowhere.json": "cannot be read",
    }
    refuse("fit", lines)


def test_mistakes_in_the_arguments_of_the_trainer_and_its_strategy(refuse):
    lines = {
        "precision fp8 --trainer.precision.recipe rowise": "Did you mean 'rowwise'?",
        "resume auto": "Write --resume in place of --trainer.resume",
        "checkpoint.save_top_k 1": "Here it is called 'best'.",
        f"{STOPPING}.monitor x": "called 'metric'",
        "callbacks+=EarlyStopping --trainer.callbacks.patience 3": "Write drivetrain.EarlyStopping or",
        "callbacks drivetrain.EarlyStoping": "Did you mean 'EarlyStopping'?",
        "callbacks drivetrain.core.intervals.Every": "drivetrain.core.intervals.Every is no Callback",
        "loggers+=jsonl --trainer.loggers.directory x": "the path of a class, such as drivetrain.CSVLogger",
        "callbacks.patience 3": "an option belongs to the item before it",
        "loggers+=drivetrain.CSVLogger": "a value is missing: give --trainer.loggers.directory VALUE",
        "strategy ddp --trainer.strategy.bucket_md 50": "Did you mean 'bucket_mb'?",
        "strategy ddp --trainer.strategy.bucket_mb 0": "bucket_mb=...) must be a finite number above 0",
        "strategy cpu --trainer.strategy.bucket_mb 50": "strategy 'cpu' has no options",
    }
    refuse("plan", {f"{SHAPES} --trainer.{line}": word for line, word in lines.items()})


@pytest.mark.usefixtures("here")
def test_mistakes_in_a_configuration_file(tmp_path):
    contents = {
        "{": "not valid YAML or JSON",
        '{"trianer": {}}': "Did you mean 'trainer'?",
        "trainer: {max_epoch: 3}": "Did you mean 'max_epochs'?",
        "trainer: {checkpoint: [{every: 3, best: 0}, {evry: 3}]}": "Did you mean 'every'?",
        "trainer: {max_epochs: three}": "--trainer.max_epochs must be a number or none, not 'three'",
        '{"trainer": {"seed": 1, "seed": 2}}': "'seed' is given twice",
        "task: {class_path: shapes.Shapes, init_args: {hiden: 3}}": "Did you mean 'hidden'?",
        "task: !!python/object/apply:os.mkdir [made]": "could not determine a constructor",
    }
    table = {}
    for number, (content, word) in enumerate(contents.items()):
        (tmp_path / f"{number}.yaml").write_text(content, encoding="utf-8")
        table[content] = (lambda number=number: settings(f"--config {number}.yaml"), word, f"{number}.yaml")
    assert_refused(ConfigError, table)
    assert not (tmp_path / "made").exists()


def test_mistakes_in_the_options_of_launch():
    launches = {
        "--devices two": "--devices takes a number of processes or 'auto', not 'two'",
        "--nodes 2 --address a": "--nodes 2 needs --address HOST of the first machine and --node-rank",
        "--nodes 2 --address a --node-rank 2": "--node-rank must be from 0 to 1, not 2",
        "--rendezvous a:1 --nodes 1:4": "all processes restart when a machine joins or leaves",
        "--rendezvous a:1 --nodes 3:1": "--nodes takes a number of machines, or MIN:MAX such as 1:4, not",
        "--rendezvous a:1 --nodes x": "--nodes takes a number of machines, or MIN:MAX such as 1:4, not 'x'",
        "--rendezvous a:0": "--rendezvous a:0: a port is a number from 1 to 65535",
        "--nodes 2 --node-rank 0 --address a:65536": "--address a:65536: a port is a number from 1 to 65535",
        "--rendezvous a:1 --node-rank 0": "leave out --address and --node-rank",
        "": "no file 'program.py'; for a module, write -m",
        "--nproc-per-node=2": "Here it is called '--devices'",
    }
    table = {a: (lambda a=a: launch([*a.split(), "program.py"]), word) for a, word in launches.items()}
    assert_refused(ConfigError, table)


def test_what_the_other_commands_refuse(refuse, tmp_path):
    refuse("env", {"--trainer.seed 3": "argument --trainer.seed. Allowed: '--debug', '--json'."})
    refuse("summary", {"--task shapes.Shapes --depth x": "--depth must be a whole number"})
    refuse("runs", {"show nowhere": "no ledger.jsonl", "list nowhere": "no run with a ledger.jsonl"}, code=1)
    refuse("completion", {"zs": "Did you mean 'zsh'?"})
    names = {"torch": "already the name of a module", "a-b": "such as my_task", "none.py": "such as"}
    (tmp_path / "made").mkdir()
    refuse("new", {**names, "class": "such as my_task", "made": f"{tmp_path / 'made'} exists already"})
    (tmp_path / "made").rmdir()
    export = f"export {tmp_path}"
    refuse("checkpoint", {f"{export} w.pt": "add --format torch"})
    refuse("checkpoint", {f"{export} w.safetensors --format torch": "one such as model.pt"})
    refuse("checkpoint", {f"{export} s3://bucket/w.pt --format torch": "a local file"})
    missing = ("list nowhere", f"show {tmp_path}", f"verify {tmp_path}")
    refuse("checkpoint", dict.fromkeys(missing, "checkpoint"), code=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["shapes.py"]
