"""No file can make us run code, read outside of its directory, hang, or take the machine's memory.

Every case is a file that an attacker could make: hashes and seals are right where that takes the attack
further. Each is read in a process of its own with little memory, and must end in one of our errors. Run as a
program, it prints what each case takes: ``python -m tests.checkpoint.test_hostile``.
"""

import importlib
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from tests.support.tasks import Regression

from drivetrain.checkpoint import resolve, verify

LINUX = sys.platform == "linux"  # for fork, limits, and /proc to measure by
if LINUX:
    from tests.checkpoint.hostile.cases import CASES, attempt, checkpoint_of, prepare

    for module in ("paths", "tensors", "texts", "states"):
        importlib.import_module(f"tests.checkpoint.hostile.{module}")
else:
    CASES = {}

pytestmark = pytest.mark.skipif(not LINUX, reason="needs fork, resource limits and /proc")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hostile") / "good"
    directory.mkdir()
    prepare(directory)
    return directory


@pytest.mark.usefixtures("caplog")  # warns of what was set aside; here the errors count
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_ends_in_an_error_of_ours(name, good):
    outcome, _, _ = attempt(name, good)
    assert not outcome, outcome


def test_what_the_cases_begin_with_is_good(good):
    assert sys.maxsize > 1 << 32  # the sizes are meant for 64 bits
    verify(str(good / "c"))
    assert resolve(good / "run") == str(checkpoint_of(good))
    Regression.from_checkpoint(good / "run")


def main():
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        start = Path(scratch) / "good"
        start.mkdir()
        prepare(start)
        results = {name: attempt(name, start) for name in sys.argv[1:] or CASES}
    for name, (outcome, seconds, taken) in sorted(results.items(), key=lambda item: item[1][1]):
        print(f"{seconds:8.3f} s {taken / 1e6:8.1f} MB  {name}  {outcome[-200:]}")
    failed = sum(bool(outcome) for outcome, _, _ in results.values())
    longest, most = (max(each[place] for each in results.values()) for place in (1, 2))
    print(f"{len(results)} cases, {failed} failed; at most {longest:.2f} s and {most / 1e6:.0f} MB")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
