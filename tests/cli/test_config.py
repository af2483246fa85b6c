"""Settings from a file and from the command line."""

from __future__ import annotations

import json

import pytest

from drivetrain.cli.config import Settings, merged, read_file, split_dotted
from drivetrain.errors import ConfigError

FIT = "--task shapes.Shapes --data shapes.Data --trainer.max_epochs 2"


def test_dotted_options_are_taken_out_of_the_line_in_both_spellings():
    words = [
        "fit",
        "--trainer.max-epochs",
        "3",
        "--task",
        "a.B",
        "--task.rate=-1",
        "--trainer.checkpoint.every",
        "5 steps",
    ]
    rest, found = split_dotted(words)
    assert rest == ["fit", "--task", "a.B"]
    assert found == {
        "task": {"rate": "-1"},
        "data": {},
        "trainer": {"max_epochs": "3", "checkpoint": {"every": "5 steps"}},
    }


def test_negative_numbers_and_paths_with_dots_are_values():
    rest, found = split_dotted(["--task.bias", "-1.5", "--config", "a.b.json"])
    assert rest == ["--config", "a.b.json"]
    assert found["task"] == {"bias": "-1.5"}


def test_the_command_line_wins_name_by_name():
    base = Settings(
        {"task": "a.B", "data": "a.d"},
        {"task": {"x": 1, "y": 2}, "data": {}, "trainer": {"c": {"k": 1, "m": 2}}},
    )
    over = Settings({}, {"task": {"y": "3"}, "data": {}, "trainer": {"c": {"k": "5"}}}, {"resume": "auto"})
    result = merged(base, over)
    assert result.objects == {"task": "a.B", "data": "a.d"}
    assert result.arguments == {"task": {"x": 1, "y": "3"}, "data": {}, "trainer": {"c": {"k": "5", "m": 2}}}
    assert result.texts == {"resume": "auto"}


def test_another_task_does_not_inherit_the_arguments_of_the_files():
    base = Settings({"task": "a.B"}, {"task": {"x": 1}, "data": {}, "trainer": {}})
    over = Settings({"task": "a.C"}, {"task": {"z": "2"}, "data": {}, "trainer": {}})
    assert merged(base, over).arguments["task"] == {"z": "2"}


def test_what_is_printed_is_converted_and_reads_back_as_the_same(drive, here):
    line = (
        f"{FIT} --task.hidden 16 --task.rate 1 --data.count 4 --trainer.checkpoint.every 10 "
        "--trainer.callbacks drivetrain.EarlyStopping --resume auto --print-config"
    )
    code, out, _ = drive("fit", line)
    assert code == 0
    config = json.loads(out)
    assert config["task"] == {"object": "shapes.Shapes", "arguments": {"hidden": 16, "rate": 1.0}}
    assert config["data"] == {"object": "shapes.Data", "arguments": {"count": 4}}
    assert config["trainer"] == {
        "max_epochs": 2,
        "progress_bar": False,
        "strategy": "cpu",
        "loggers": [],
        "checkpoint": {"every": 10},
        "callbacks": ["drivetrain.EarlyStopping"],
    }
    assert config["resume"] == "auto"
    (here / "config.json").write_text(out, encoding="utf-8")
    assert drive("fit", "--config config.json --print-config")[1] == out


def test_a_file_configures_a_run_and_the_line_overrides_it(drive, here):
    content = {
        "task": "shapes.Shapes",
        "data": {"object": "shapes.Data", "arguments": {"count": 4}},
        "trainer": {
            "max_epochs": 3,
            "checkpoint": {"every": "6 steps", "best": 0},
            "callbacks": [{"object": "drivetrain.EarlyStopping", "arguments": {"patience": 2}}],
        },
    }
    (here / "config.json").write_text(json.dumps(content), encoding="utf-8")
    plan = json.loads(drive("plan", "--config config.json --json")[1])
    assert (plan["updates"], plan["saving"]["first"], plan["saving"]["times"]) == (12, 6, 2)
    plan = json.loads(drive("plan", "--config config.json --json --trainer.max_epochs 1")[1])
    assert plan["updates"] == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        ('{"trianer": {}}', "Did you mean 'trainer'?"),
        ('{"trainer": 3}', "trainer must be a JSON object"),
        ('{"task": {"objekt": "a.B"}}', "Did you mean 'object'?"),
        ('{"task": 3}', "task must be a JSON object, not 3"),
        ('{"resume": 3}', "resume must be a text"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(str(path))
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
