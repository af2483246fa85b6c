"""The table of what a task is made of."""

import json
import logging

import torch
from tests.support.messages import heard, unconfigured
from tests.support.tasks import Regression, pairs, quiet
from torch import nn

from drivetrain.callbacks import ModelSummary, summarize


def rows(text: str) -> dict[str, list[str]]:  # the cells of each module's row, by the module's name
    lines = text.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {name: rest for name, *rest in cells}


def test_summary_has_the_parameters_of_modules_tied_and_own_ones_once_and_the_totals():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    text = str(summarize(model))
    assert rows(text) == {
        "0": ["Linear", "15", "15", "float32"],
        "1": ["ReLU", "0", "0"],
        "2": ["Linear", "6", "6", "float32"],
    }
    assert text.endswith("21 parameters, 21 trainable, 84 bytes")
    model[0].requires_grad_(False)
    text = str(summarize(model))
    assert rows(text)["0"][1:3] == ["15", "0"]
    assert "21 parameters, 6 trainable" in text
    tied = nn.Module()
    tied.embed, tied.head = nn.Embedding(100, 8), nn.Linear(8, 100)
    tied.head.weight, tied.scale = tied.embed.weight, nn.Parameter(torch.ones(5))
    text = str(summarize(tied))
    assert rows(text)["embed"][1] == "800"
    assert rows(text)["head"][1] == "100 + 800 shared"
    assert rows(text)["(own)"] == ["Module", "5", "5", "float32"]
    assert text.endswith("905 parameters, 905 trainable, 3.6 kB")


def test_the_callback_prints_the_table_once_with_where_it_runs_and_not_to_stdout(drive, capsys):
    with unconfigured():
        drive(ModelSummary()).fit()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "net     Sequential" in printed.err
    assert printed.err.endswith(
        "device cpu | strategy single | precision 32 (parameters float32, compute float32)\n"
    )
    with heard(level=logging.INFO) as texts:
        drive(ModelSummary(), is_main=False).fit()
    assert texts == []


def test_the_data_of_a_summary_are_those_of_its_table():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = json.loads(json.dumps(summarize(net).to_json()))
    assert {each["name"]: each["parameters"] for each in found["modules"]} == {"0": 144, "1": 0, "2": 68}
    assert (found["total"]["parameters"], found["total"]["bytes"], found["buffer_bytes"]) == (212, 848, 0)


def test_an_escape_in_a_name_is_text_in_the_tables_of_a_summary_and_a_plan():
    task = Regression()
    task.add_module("odd\x1b[2J", nn.BatchNorm1d(2).eval())
    for text in (str(summarize(task)), str(quiet(max_steps=1).plan(task, pairs(8)))):
        assert "odd\\x1b[2J" in text
        assert "\x1b" not in text
