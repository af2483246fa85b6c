"""A hang ends the process with its stacks; work, however slow its steps, does not."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.support.failing import Ended
from tests.support.forked import run_forked

from drivetrain.distributed.failure.watchdog import EXIT_HANG, Watchdog


def run(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which ends by itself or is killed after a minute."""
    (directory / "program.py").write_text(program, encoding="utf-8")
    return run_forked(["program.py", str(directory)], directory, timeout=240)


BEGIN = """
import sys, threading, time
from pathlib import Path
from drivetrain.distributed.failure.watchdog import Watchdog

progress = [0]
directory = Path(sys.argv[1])

def stuck_in_a_collective():
    threading.Event().wait()
"""


def test_a_process_that_hangs_is_ended_with_its_stacks_and_a_code_of_its_own(tmp_path: Path) -> None:
    program = f"""{BEGIN}
with Watchdog(0.3, lambda: progress[0], lambda: "update 7, epoch 1", directory / "made" / "here"):
    progress[0] += 1
    stuck_in_a_collective()
"""
    done = run(program, tmp_path)
    assert done.returncode == EXIT_HANG == 75
    written = (tmp_path / "made" / "here" / "hang-stacks.txt").read_text(encoding="utf-8")
    for text in (done.stderr, written):
        assert "no progress for 0.3 seconds (update 7, epoch 1)" in text
        assert "stuck_in_a_collective" in text, "the stack of the main thread is shown"
        assert "exit 75" in text


def test_a_process_that_makes_progress_slowly_is_left_alone(tmp_path: Path) -> None:
    program = f"""{BEGIN}
with Watchdog(0.6, lambda: progress[0], lambda: "", directory):
    for _ in range(12):  # three timeouts long, with progress three times in each
        time.sleep(0.15)
        progress[0] += 1
print("finished")
"""
    done = run(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    assert [each.name for each in tmp_path.iterdir()] == ["program.py"]


def test_progress_before_the_hang_does_not_shorten_the_time_allowed(tmp_path: Path) -> None:
    program = f"""{BEGIN}
started = time.monotonic()
def describe():
    return f"waited {{time.monotonic() - started:.2f}}"
with Watchdog(0.5, lambda: progress[0], describe):
    time.sleep(0.4)
    progress[0] += 1
    started = time.monotonic()
    stuck_in_a_collective()
"""
    done = run(program, tmp_path)
    assert done.returncode == EXIT_HANG
    waited = float(done.stderr.split("waited ")[1].split(")")[0])
    assert waited >= 0.44, "a timeout, counted from the last progress, to within one of its ten checks"


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param("sys.stderr = None", id="there is no standard error"),
        pytest.param("directory = Path('/dev/null/x')", id="the directory cannot be made"),
    ],
)
def test_it_ends_the_process_even_if_it_cannot_report(broken: str, tmp_path: Path) -> None:
    program = f"""{BEGIN}
{broken}
with Watchdog(0.1, lambda: 0, lambda: "update 7", directory):
    stuck_in_a_collective()
"""
    assert run(program, tmp_path).returncode == EXIT_HANG


def test_a_description_that_raises_costs_no_stack(tmp_path: Path) -> None:
    program = f"""{BEGIN}
with Watchdog(0.1, lambda: 0, lambda: 1 / 0, directory):
    stuck_in_a_collective()
"""
    done = run(program, tmp_path)
    assert "at an unknown place: ZeroDivisionError: division by zero" in done.stderr
    assert "stuck_in_a_collective" in done.stderr


def test_it_ends_the_process_even_if_the_file_system_is_what_hangs(tmp_path: Path) -> None:
    program = f"""{BEGIN}
from drivetrain.distributed.failure import watchdog
watchdog._WRITING = 0.2

class Hung(type(directory)):
    def mkdir(self, *arguments, **keywords):
        threading.Event().wait()

with Watchdog(0.1, lambda: 0, lambda: "", Hung(directory)):
    stuck_in_a_collective()
"""
    assert run(program, tmp_path).returncode == EXIT_HANG


def test_its_thread_ends_with_it_at_once() -> None:
    before = threading.active_count()
    started = time.monotonic()
    with pytest.raises(KeyError), Watchdog(3600, lambda: 0, lambda: ""):  # noqa: PT012
        assert threading.active_count() == before + 1
        raise KeyError
    assert threading.active_count() == before
    assert time.monotonic() - started < 5


SLOW = """
import sys, time
from tests.support.tasks import Regression, pairs, quiet

class Slow(Regression):
    def validation_step(self, batch):
        time.sleep(0.6)
        return super().validation_step(batch)

trainer = quiet(max_epochs=1, strategy="ddp" if DEVICES > 1 else "cpu", devices=DEVICES, hang_timeout=LIMIT)
trainer.fit(Slow(), pairs(4 * DEVICES), pairs(8 * DEVICES))
sys.stdout.write("validated\\n")
"""


def slow(devices: int, limit: float) -> pytest.MarkDecorator:
    text = SLOW.replace("DEVICES", str(devices)).replace("LIMIT", str(limit))
    return pytest.mark.program(text, PYTHONPATH=str(Path(__file__).parents[3]))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "devices", [pytest.param(1, marks=slow(1, 1.5)), pytest.param(2, marks=slow(2, 2.0))]
)
def test_a_validation_that_moves_is_no_hang_however_long_it_takes(ended: Ended, devices: int) -> None:
    assert (ended.code, ended.out, ended.errors) == (0, devices * "validated\n", [])
