"""The table of what a task is made of."""

import logging

import pytest
import torch
from tests.support.messages import heard, unconfigured
from torch import nn

from drivetrain.callbacks import ModelSummary, summarize
from drivetrain.core.errors import ConfigError


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each module's row, by the module's name."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {name: rest for name, *rest in cells}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 100)
        self.head.weight = self.embed.weight


def test_each_module_has_its_parameters_and_the_totals_are_below():
    text = summarize(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)))
    assert rows(text) == {
        "0": ["Linear", "15", "15", "float32"],
        "1": ["ReLU", "0", "0"],
        "2": ["Linear", "6", "6", "float32"],
    }
    assert text.endswith("21 parameters, 21 trainable, 84 bytes")


def test_tied_parameters_count_once():
    text = summarize(Tied())
    assert rows(text)["embed"][1] == "800"
    assert rows(text)["head"][1] == "100 + 800 shared"
    assert text.endswith("988 parameters, 988 trainable, 4.0 kB")


def test_frozen_parameters_are_not_trainable():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    text = summarize(model)
    assert rows(text)["0"][1:3] == ["15", "0"]
    assert "23 parameters, 8 trainable" in text


def test_depth_shows_more_levels_and_none_shows_the_totals_alone():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert list(rows(summarize(model, depth=1))) == ["0"]
    assert list(rows(summarize(model, depth=2))) == ["0", "0.0", "0.1"]
    assert summarize(model, depth=0) == "12 parameters, 12 trainable, 48 bytes"


def test_mixed_dtypes_and_buffers_are_named():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16)), nn.BatchNorm1d(2)
    )
    text = summarize(model)
    assert rows(text)["0"][-1] == "float32, bfloat16"
    assert "52 bytes and 24 bytes of buffers" in text


def test_parameters_of_the_task_itself_have_a_row():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.net = nn.Linear(1, 1)

    assert rows(summarize(Scale()))["(own)"] == ["Scale", "5", "5", "float32"]


def test_lazy_parameters_are_shown_as_such():
    text = summarize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)))
    assert rows(text)["0"][1] == "0 + 2 lazy"
    assert "4 parameters, 4 trainable, 16 bytes; 2 more tensors are lazy" in text


def test_a_task_without_parameters_has_a_summary():
    assert "0 parameters" in summarize(nn.Sequential(nn.ReLU()))


def test_the_callback_prints_the_table_with_where_it_runs_once_and_not_to_stdout(drive, capsys):
    with unconfigured():
        drive(ModelSummary()).fit()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "net     Sequential" in printed.err
    assert printed.err.endswith(
        "145 parameters, 145 trainable, 580 bytes\n\n"
        "weights, gradients   float32\n"
        "products             float32\n"
        "sums over processes  float32\n"
        "optimizer state      float32\n\n"
        "device cpu | strategy single | precision 32\n"
    )


def test_other_ranks_report_nothing(drive):
    with heard(level=logging.INFO) as texts:
        drive(ModelSummary(), is_main=False).fit()
    assert texts == []


def test_a_negative_depth_is_refused():
    with pytest.raises(ConfigError, match="depth=-1; give 0"):
        ModelSummary(depth=-1)
