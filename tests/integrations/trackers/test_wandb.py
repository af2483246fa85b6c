"""Weights & Biases, whose offline files are read back."""

import json
from pathlib import Path

import pytest
from tests.integrations.trackers.kept import assert_each_value_once, killed_twice, run_program

from drivetrain.core.registry import is_installed
from drivetrain.integrations.trackers.wandb_file import read_history, read_records

pytest.importorskip("wandb", reason="the extra wandb is not installed")


def history(folder: str):
    return [row for path in sorted(Path(folder).glob("wandb/offline*/*.wandb")) for row in read_history(path)]


@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_a_killed_fit_goes_on_in_the_same_run_with_each_value_once():
    given = {"project": "digits", "mode": "offline"}
    prompt = {"options": {"settings": {"x_transaction_log_flush_interval": 0.05}}}
    killed_twice("wandb", given, {**given, **prompt})
    rows = history("run")
    assert_each_value_once(
        (row["step"], name, value)
        for row in rows
        for name, value in row.items()
        if "/" in name or name == "epoch"
    )
    assert len({path.name for path in Path("run/wandb").glob("offline*/*.wandb")}) == 1  # one id
    files = sorted(Path("run/wandb").glob("offline*/*.wandb"))
    assert [bool([*read_history(each)]) for each in files] == [False, True, True]


@pytest.mark.landing
def test_a_run_of_the_programs_own_gets_everything_and_stays_open():
    from wandb.proto import wandb_internal_pb2

    run_program("wandb_own_run.py")
    rows = history(".")
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4]
    assert rows[0]["weights/line.weight._type"] == "histogram"
    assert "validation/loss" in rows[1]
    assert "afterwards" in rows[2]
    (path,) = Path().glob("wandb/offline*/*.wandb")
    records = [wandb_internal_pb2.Record.FromString(each) for each in read_records(path)]
    artifacts = [each.request.log_artifact.artifact for each in records]
    artifacts += [each.artifact for each in records]
    names = {each.name: list(each.aliases) for each in artifacts if each.name}
    assert sorted(names["weights-own"]) == ["latest", "model.safetensors"]
    about = {each.name: json.loads(each.metadata) for each in artifacts if each.name}
    assert about["weights-own"] == {"step": 4, "epoch": 0}
    assert about["checkpoint-own"].keys() == {"step", "epoch", "validation/loss"}
    config = [each.key or each.nested_key for record in records for each in record.config.update]
    assert any("trainer" in str(each) for each in config)


@pytest.mark.landing
@pytest.mark.skipif(not is_installed("lightning"), reason="the extra lightning is not installed")
def test_the_logger_of_lightning_becomes_ours_with_its_arguments():
    assert run_program("wandb_of_lightning.py") == "digits small abc ('t',) sizes True\n"
    assert [(row["step"], row["loss"]) for row in history(".")] == [(3, 1.0)]
