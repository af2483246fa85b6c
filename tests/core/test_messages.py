"""Messages: one logger, and a handler for programs that configure none."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from tests.support.messages import heard, unconfigured, warned
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ModelSummary
from drivetrain.core.errors import ConfigError, MissingDependencyError, shown, without_secrets
from drivetrain.core.files import NotAFileError
from drivetrain.core.messages import NAME, logger
from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.notebook.output import in_notebook
from drivetrain.loggers.files import to_json
from drivetrain.strategies.ddp import DDP


def test_without_configuration_messages_go_to_stderr() -> None:
    with unconfigured(), redirect_stderr(io.StringIO()) as stream:
        messages = logger(f"{NAME}.part")
        messages.info("progress")
        messages.warning("act on it")
        messages.info("a table\nof two lines")
        messages.debug("details")
    assert stream.getvalue() == "drivetrain: progress\ndrivetrain: act on it\na table\nof two lines\n"


def test_a_handler_of_the_program_replaces_stderr_wherever_it_is() -> None:
    for place in (NAME, f"{NAME}.part"):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        with unconfigured(), redirect_stderr(io.StringIO()) as errors:
            logging.getLogger(place).addHandler(handler)
            logger(f"{NAME}.part").warning("act on it")
            logging.getLogger(place).removeHandler(handler)
        assert (stream.getvalue(), errors.getvalue()) == ("act on it\n", "")


PROGRAM = """
import logging, sys
exec(sys.argv[1])
import drivetrain
from drivetrain.core.messages import logger
exec(sys.argv[2])
logger("drivetrain.part").info("progress")
logger("drivetrain.part").warning("act on it")
"""


def test_the_level_and_the_handlers_are_the_programs() -> None:
    ours, both = "logging.getLogger('drivetrain')", ["drivetrain: progress", "drivetrain: act on it"]
    formatted = ["INFO:drivetrain.part:progress", "WARNING:drivetrain.part:act on it"]
    for before, after, level, expected in (
        ("", "", "warning", both[1:]),
        ("", f"{ours}.setLevel('ERROR')", "info", []),
        (f"{ours}.setLevel('WARNING')", "", "info", both[1:]),
        ("logging.basicConfig()", "", "", formatted),
    ):
        command = [sys.executable, "-c", PROGRAM, before, after]
        env = {**os.environ, "DRIVETRAIN_LOG_LEVEL": level}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert (done.returncode, done.stderr.splitlines()) == (0, expected), (before, after, level)
    env["DRIVETRAIN_LOG_LEVEL"] = "warnings"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert "DRIVETRAIN_LOG_LEVEL='warnings' is no level. Did you mean 'warning'?" in done.stderr


def reported_on_a_rank() -> list[str]:
    rank = torch.distributed.get_rank()
    with heard(level=logging.INFO) as texts:
        trainer = quiet(strategy=DDP(world_size=2), devices=2, max_steps=1, callbacks=[ModelSummary()])
        trainer.fit(Regression(), pairs(4))
        messages = logger(f"{NAME}.part")
        messages.info(f"progress of {rank}")
        messages.warning(f"act on {rank}")
    return [each for each in texts if "parameters" not in each and "manual_seed" not in each]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_other_ranks_report_warnings_alone() -> None:
    assert on_two_ranks(reported_on_a_rank) == [["progress of 0", "act on 0"], ["act on 1"]]


WITH = (
    ("postgresql://user:{}@host:5432/db", "postgresql://user:<hidden>@host:5432/db"),
    ("redis://:a@{}:b/c@host/0", "redis://:<hidden>@host/0"),
    ("https://{}@github.com/a/b.git", "https://<hidden>@github.com/a/b.git"),
    ("https://h/x?X-Amz-Credential={0}&X-Goog-Signature={0}", "<hidden>"),
    ("az://c/x?AccountKey={0};sig={0}&se=3", "az://c/x?AccountKey=<hidden>;sig=<hidden>&se=3"),
    ("push --token hf_{0}, Authorization: Bearer {0}", "--token <hidden>, Authorization: Bearer <hidden>"),
)
WITHOUT = "s3://bucket/a sftp://user@host abfs://box@account/a tcp://10.0.0.1:2 a@b.c key=value h?monkey=3"


@pytest.mark.parametrize(("form", "wanted"), WITH)
def test_the_secrets_of_addresses_are_hidden_in_texts_errors_and_files(form: str, wanted: str) -> None:
    text = form.format(secret := "tops3cret")
    errors = ConfigError(text), NotAFileError(text, "is a pipe"), MissingDependencyError("a", "b", text)
    config = to_json({"storage": [text], "command": f"drivetrain search --storage {text}"})
    for each in (without_secrets(text), *map(str, errors), json.dumps(config), without_secrets(f'"{text}"')):
        assert wanted in each
        assert secret not in each


def test_other_addresses_are_shown_whole_and_control_characters_as_text() -> None:
    assert without_secrets(WITHOUT) == WITHOUT
    name = "a\x1b]0;owned\x07\u202eb"
    assert shown(f"{name}\n\té") == "a\\x1b]0;owned\\x07\\u202eb\n\té"
    assert str(ConfigError(name)).isprintable()
    with warned("no run a") as told:
        logger("drivetrain.test").warning("no run %s in ftp://me:mine@host", name)
    assert told[0].isprintable() and "mine" not in told[0]  # noqa: PT018


def test_a_table_escapes_its_cells_and_holds_curves_of_the_finite_values() -> None:
    table = html_table(("a/b",), [("<i>",), (sparkline([1.0, math.nan, math.inf, 2.0]),)])
    assert ">a/<wbr>b</th>" in table
    assert "&lt;i&gt;" in table
    assert 'points="0.0,23.0 120.0,1.0"' in table
    assert sparkline([math.nan, 1.0]) == sparkline([]) == ""
    (points,) = re.findall('points="(.*?)"', sparkline([float(each) for each in range(100_000)]))
    assert (len(points.split()), points[:8], points[-9:]) == (100, "0.0,23.0", "120.0,1.0")


def test_a_kernel_is_a_notebook_and_a_copy_of_its_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=SimpleNamespace(session=SimpleNamespace(pid=-1)))
    monkeypatch.setattr(pytest.importorskip("IPython"), "get_ipython", lambda: shell)
    assert not in_notebook()
    del shell.kernel.session  # of another kernel than ipykernel's
    assert in_notebook()
