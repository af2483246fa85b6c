"""Messages: one logger, and a handler for programs that configure none."""

import io
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import torch
from tests.support.messages import heard, unconfigured
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ModelSummary
from drivetrain.core.messages import NAME, logger
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
