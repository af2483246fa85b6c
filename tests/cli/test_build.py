"""A precision with options beside its name, on the command line and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigError, Float8
from drivetrain.cli.build import build_trainer, plain_config
from drivetrain.cli.config import Settings, merged, read_file, split_dotted
from drivetrain.precision import as_precision

QUIET = "--trainer.loggers= --trainer.progress_bar false"


def settings(line: str) -> Settings:
    rest, dotted = split_dotted(line.split())
    assert rest == []
    return Settings({}, dotted, {})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trainer.precision bf16-mixed", "bf16-mixed"),
        ("--trainer.precision 64", "64"),
        (
            (
                "--trainer.precision fp8 --trainer.precision.emulate yes --trainer.precision.recipe rowwise"
                " --trainer.precision.leave_out lm_head,*.router"
            ),
            Float8(recipe="rowwise", leave_out=("lm_head", "*.router"), emulate=True),
        ),
    ],
)
def test_options_of_a_precision_stand_beside_its_name(
    line: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.float8.is_installed", lambda package: True)
    asked = settings(f"{line} {QUIET} --trainer.strategy cpu")
    assert build_trainer(asked).precision == as_precision(expected)
    printed = json.loads(json.dumps(plain_config(asked)))["trainer"]["precision"]
    assert (printed == expected) if isinstance(expected, str) else printed["recipe"] == "rowwise"


def test_a_precision_of_the_file_and_its_options_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    config = {"trainer": {"precision": {"name": "fp8", "emulate": True, "recipe": "rowwise"}}}
    path.write_text(json.dumps(config), encoding="utf-8")
    both = merged(
        read_file(str(path)), settings(f"--trainer.precision.leave_out=() --trainer.strategy cpu {QUIET}")
    )
    monkeypatch.setattr("drivetrain.float8.is_installed", lambda package: True)
    made = build_trainer(both).precision
    assert made == Float8(recipe="rowwise", leave_out=(), emulate=True)
    other = merged(read_file(str(path)), settings("--trainer.precision 32"))
    assert other.arguments["trainer"]["precision"] == {"name": "32"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "--trainer.precision.recipe rowwise",
            "which precision? trainer.precision.recipe is an option of one",
        ),
        ("--trainer.precision fp8 --trainer.precision.recipe rowise", "Did you mean 'rowwise'?"),
        ("--trainer.precision fp8 --trainer.precision.filter_fqns x", "Here it is called 'leave_out'."),
        ("--trainer.precision 32 --trainer.precision.recipe rowwise", "Precision has no parameter 'recipe'"),
    ],
)
def test_a_wrong_option_of_a_precision_is_one_message(line: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_trainer(settings(f"{line} {QUIET}"))
    assert told in str(caught.value)
