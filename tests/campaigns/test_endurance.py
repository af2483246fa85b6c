"""Long runs and many runs leave nothing behind, and what would be left is found."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns.endurance import (
    FITS,
    UPDATES,
    Course,
    Measure,
    Small,
    Watch,
    apart,
    loader,
    long_run,
    main,
    many_fits,
    measure,
)
from tests.support.messages import unconfigured

from drivetrain import Callback, Trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")


@pytest.mark.full
def test_five_thousand_updates_with_all_that_a_run_does_are_flat(tmp_path: Path) -> None:
    course = long_run(tmp_path)
    assert len(course.measures) == 50
    assert course.grown == [], f"\n{course}"
    rows = (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) > UPDATES // 10  # it has logged
    assert len(list((tmp_path / "run" / "checkpoints").glob("update-*"))) >= 2  # and saved


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_twenty_fits_in_one_process_leave_nothing(asynchronous: bool, tmp_path: Path) -> None:
    with unconfigured():  # pytest keeps each message until the test has ended
        course = many_fits(tmp_path, FITS, asynchronous=asynchronous)
    assert course.grown == [], f"\n{course}"
    first, last = course.measures[0], course.measures[-1]
    assert last.tensors == 0
    assert last.children == first.children, "those of other tests, such as Python's resource tracker"


@pytest.mark.full
def test_worker_processes_and_what_they_bring_are_gone_after_each_fit(tmp_path: Path) -> None:
    with unconfigured():
        course = many_fits(tmp_path, 5, workers=2)
    assert [name for name in course.grown if name != "memory"] == [], f"\n{course}"


class Hoarder(Callback):
    """Keeps something of each update."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_step_end(self, run: Any) -> None:
        self.kept.append([run.progress.updates])


def test_a_callback_that_keeps_something_of_each_update_is_noticed() -> None:
    watch, hoarder = Watch(20), Hoarder()
    with apart():
        options: dict[str, Any] = {"strategy": "cpu", "checkpoint": False, "log_every": "20 steps"}
        Trainer(max_steps=400, callbacks=[hoarder, watch], **options).fit(Small(), loader())
    course = Course("hoarding", watch.measures)
    assert course.grown == ["objects"], f"\n{course}"


def test_numbers_that_no_garbage_collector_knows_are_noticed_too() -> None:
    kept: list[float] = []
    measures = []
    with apart():
        for each in range(10):
            kept += [each + 0.5 * number for number in range(300)]
            measures.append(measure())
    assert Course("numbers", measures).grown == ["blocks"]


def test_what_has_grown_is_told_and_what_only_began_late_is_not() -> None:
    def of(**values: int) -> Measure:
        return Measure(**{**dict.fromkeys(Measure._fields, 1000), **values})

    steady = [of(memory=0), *(of() for _ in range(9))]
    assert Course("steady", steady).grown == []
    leaking = [of(descriptors=100 + each) for each in range(10)]
    course = Course("leaking", leaking)
    assert course.grown == ["descriptors"]
    assert re.search(r"descriptors +100 +102 +109 +\+5\.\d\d%", str(course))


def test_the_command_ends_with_1_where_something_grew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--updates", "0", "--fits", "0"]) == 0
    kept: list[Any] = []
    monkeypatch.setattr("tests.campaigns.endurance._fit_once", lambda *_: kept.append([0]))
    assert main(["--updates", "0", "--fits", "10"]) == 1
    assert "grown: objects" in capsys.readouterr().out
