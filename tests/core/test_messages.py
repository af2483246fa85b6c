"""Messages: one logger, a handler for programs that configure none, and nothing that is printed elsewhere."""

from __future__ import annotations

import ast
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from tests.support.messages import heard, unconfigured
from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import ModelSummary
from drivetrain.core.messages import NAME, handled_by, logger
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

PACKAGE = Path(drivetrain.__file__).parent

PRINTED = {
    "cli/": "the output of a command",
    "callbacks/progress_bar.py": "the progress bar",
    "trainer/trainer.py": "`plan` prints the forecast that was asked for",
    "testing/strategies/check.py": "`check_strategy` prints its result",
    "distributed/failure/": "the last words of a process that ends",
    "distributed/launch/": "the last words of a process that ends",
    "data/keyed_batches.py": "the last words of a worker",
    "integrations/hub/upload.py": "the answer of a process to the one that started it",
    "core/messages.py": "the handler",
}
OTHER_LOGGERS = {
    "core/messages.py": "the module that gives loggers",
    "strategies/transforms/recompute.py": "a message of torch's",
    "strategies/fsdp/strategy.py": "a message of torch's",
    "strategies/deepspeed/library.py": "DeepSpeed's messages",
}
WARNED = {"core/synonyms.py": "methods of a class that the user has written"}


def calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize(
    ("names", "allowed"),
    [
        (("print", "sys.stderr.write", "traceback.print_exc", "traceback.print_exception"), PRINTED),
        (("logging.getLogger",), OTHER_LOGGERS),
        (("warnings.warn",), WARNED),
    ],
)
def test_messages_go_through_the_logger(names: tuple[str, ...], allowed: dict[str, str]) -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if set(calls(ast.parse(path.read_text(encoding="utf-8")))) & set(names)
    }
    strangers = sorted(each for each in found if not each.startswith(tuple(allowed)))
    assert not strangers, f"{names} in these files: use drivetrain.core.messages.logger"
    unused = [row for row in allowed if not any(each.startswith(row) for each in found)]
    assert not unused, "rows that no file needs"


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


@pytest.mark.parametrize(
    ("before", "after", "level", "expected"),
    [
        ("", "", None, ["drivetrain: progress", "drivetrain: act on it"]),
        ("", "", "warning", ["drivetrain: act on it"]),
        ("", "", "50", []),
        ("", "logging.getLogger('drivetrain').setLevel('ERROR')", "info", []),
        ("logging.getLogger('drivetrain').setLevel('WARNING')", "", "info", ["drivetrain: act on it"]),
        (
            "logging.basicConfig()",
            "",
            None,
            ["INFO:drivetrain.part:progress", "WARNING:drivetrain.part:act on it"],
        ),
        (
            "",
            "logging.getLogger('drivetrain').addHandler(logging.NullHandler())",
            "warning",
            ["drivetrain: act on it"],
        ),
    ],
)
def test_the_level_and_the_handlers_are_the_programs(
    before: str, after: str, level: str | None, expected: list[str]
) -> None:
    env = {**os.environ, **({} if level is None else {"DRIVETRAIN_LOG_LEVEL": level})}
    command = [sys.executable, "-c", PROGRAM, before, after]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (0, expected)


def reported_on_a_rank() -> list[str]:
    rank = torch.distributed.get_rank()
    with heard(level=logging.INFO) as texts:
        trainer = quiet(strategy=DDP(world_size=2), devices=2, max_steps=1, callbacks=[ModelSummary()])
        trainer.fit(Regression(), pairs(4))
        messages = logger(f"{NAME}.part")
        messages.info(f"progress of {rank}")
        messages.warning(f"act on {rank}")
    return [each for each in texts if "parameters" not in each]


def test_a_level_that_there_is_not_is_refused() -> None:
    env = {**os.environ, "DRIVETRAIN_LOG_LEVEL": "warnings"}
    command = [sys.executable, "-c", "import drivetrain.core.messages"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert "DRIVETRAIN_LOG_LEVEL='warnings' is no level. Did you mean 'warning'?" in done.stderr


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_other_ranks_report_warnings_alone() -> None:
    assert run_distributed(reported_on_a_rank) == [["progress of 0", "act on 0"], ["act on 1"]]


def test_pytest_sees_messages(caplog: pytest.LogCaptureFixture) -> None:
    quiet(max_steps=1, callbacks=[ModelSummary()]).fit(Regression(), pairs(4))
    (record,) = [each for each in caplog.records if "trainable" in each.getMessage()]
    assert (record.name, record.levelname) == ("drivetrain.callbacks.summary", "INFO")


def test_a_handler_inside_a_block_is_removed_after_an_error() -> None:
    handler = logging.NullHandler()
    with pytest.raises(ValueError, match="planted"), handled_by(handler):
        raise ValueError("planted")
    assert handler not in logging.getLogger(NAME).handlers
