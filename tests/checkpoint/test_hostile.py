"""No file can make us run code, read outside of its directory, hang, or take the machine's memory."""

import importlib
import sys

import pytest
from tests.support.tasks import Regression

from drivetrain.checkpoint import resolve, verify

MODULES = ("paths", "tensors", "texts", "states")
GROUPS = (*MODULES, "places", "runs")
LINUX = sys.platform == "linux"  # for fork, limits, and /proc to measure by
if LINUX:
    from tests.checkpoint.hostile.cases import CASES, attempt_all, checkpoint_of, prepare

    for each in MODULES:
        importlib.import_module(f"tests.checkpoint.hostile.{each}")

pytestmark = pytest.mark.skipif(not LINUX, reason="needs fork, resource limits and /proc")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "good"
    directory.mkdir()
    prepare(directory)
    return directory


@pytest.mark.parametrize("group", [*GROUPS, pytest.param("large", marks=pytest.mark.nightly)])
def test_hostile_files_end_in_an_error_of_ours(group, good, caplog):  # what is set aside warns
    wrong = attempt_all(group, good)
    assert not wrong, "\n\n".join(f"{name}: {outcome}" for name, outcome in wrong.items())


def test_what_the_hostile_cases_begin_with_is_good(good):
    assert sys.maxsize > 1 << 32  # the sizes are meant for 64 bits
    verify(str(good / "c"))
    assert resolve(good / "run") == str(checkpoint_of(good))
    Regression.from_checkpoint(good / "run")
    assert {name: len(cases) > 20 for name, cases in CASES.items()} == dict.fromkeys([*GROUPS, "large"], True)
