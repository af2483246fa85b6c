"""The command that W&B's agent makes of the sweep in docs/how-to/sweeps.md."""

import re
from pathlib import Path

import pytest
import yaml

from drivetrain.cli.references import importable_here
from drivetrain.cli.settings import Settings

pytest.importorskip("wandb", reason="the extra wandb is not installed")

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "sweeps.md"
TASK = """
from drivetrain import TaskModule

class Digits(TaskModule):
    def __init__(self, hidden: int = 8, lr=0.1, rates: list[float] = [], drop: float | None = 1.0, bias=True):
        super().__init__()
        self.given = [hidden, lr, rates, drop, bias]

class Data:
    pass
"""


def test_the_command_of_a_sweep_parses_with_the_values_of_a_trial(tmp_path, monkeypatch):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_search.py").write_text(TASK, encoding="utf-8")
    sweep = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1])
    assert sweep["parameters"].keys() == {"task.lr", "task.hidden", "trainer.batch_size"}
    values = {"task.lr": 3e-05, "task.hidden": 64, "trainer.batch_size": 128}
    values |= {"task.rates": [0.1, 1e-06], "task.drop": None, "task.bias": False}
    parts = create_sweep_command_args({"args": {name: {"value": each} for name, each in values.items()}})
    parts |= {"env": ["/usr/bin/env"], "program": [sweep["program"]]}
    words = []
    for each in create_sweep_command(sweep["command"]):  # as the agent does
        words += parts[each[2:-1]] if each.startswith("${") else [str(each)]
    assert words[:3] == ["/usr/bin/env", "drivetrain", "fit"]
    with importable_here():
        settings = Settings("fit", "train", words[3:])
        assert settings.make("task").given == [64, 3e-05, [0.1, 1e-06], None, False]
        trainer = settings.trainer()
    assert (trainer.batch_size, trainer.max_epochs, [*trainer.loggers]) == (128, 8, ["wandb"])
