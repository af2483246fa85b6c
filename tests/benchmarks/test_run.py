"""The one command: what it writes, what can be chosen, and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers import HAND, OURS
from plots import plot
from report import NONE, Cell, Report, Table, lowest
from run import main
from starts import starts


def test_a_run_writes_a_page_and_data_and_leaves_out_what_was_not_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "clipping, acc", "--contestants", OURS, "--rounds", "1", "--updates", "5"]
    main([*only, "--output", str(tmp_path)])
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| clipping, accumulation 4 |" in page
    assert "in memory, bare" not in page
    assert page.split("## ")[1].startswith("An update")
    assert page[page.index("## An update") :].strip() in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["tables"][0]["rows"][0]["row"] == "clipping, accumulation 4"
    assert isinstance(found["tables"][0]["rows"][0][OURS], float)
    assert found["versions"]["drivetrain"]


def test_the_list_names_the_rows_and_who_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--list"])
    printed = capsys.readouterr().out
    assert "An update: in memory, bare" in printed
    assert "installed: hand-written, drivetrain" in printed


def test_rows_that_nobody_has_are_refused_with_all_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "clipping", "nosuchrow", "--output", str(tmp_path)])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "no row has 'nosuchrow'" in printed
    assert "Evaluation and prediction, a batch: prediction" in printed
    assert list(tmp_path.iterdir()) == []


def test_what_was_found_before_a_run_was_stopped_is_there(tmp_path: Path) -> None:
    report = Report(tmp_path, "python benchmarks/run.py")
    table = Table("First", "seconds", "", [HAND, OURS], [("row", [Cell("1.0", 1.0), NONE])], ["A note."])
    report.add(table)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert (
        "## First\n\nseconds\n\n|  | hand-written | drivetrain |\n| --- | ---: | ---: |\n| row | 1.0 | - |"
        in page
    )
    assert "A note." in page
    report.add(Table("Second", "seconds", "", [OURS]))
    assert "## Second" in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_where_ours_is_not_the_lowest_of_the_frameworks_it_is_said() -> None:
    assert lowest("row", {HAND: 0.0, OURS: 2.0, "Ignite": 3.0}) == ""
    assert (
        lowest("row", {HAND: 0.0, OURS: 2.0, "Ignite": 1.5, "Keras": 1.0}) == "row: Keras is lower than ours."
    )
    assert lowest("row", {HAND: 0.0, OURS: 2.0}) == ""


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = Table("An update", "us", "", [HAND, OURS], [("row", [Cell("60 us"), Cell("+2", 2.0)])])
    assert [path.name for path in plot(table, [HAND, OURS], tmp_path)] == ["an-update.png"]


def test_the_first_update_is_reported_by_an_interpreter_of_its_own() -> None:
    ours = starts([OURS], 1)[OURS]
    assert 0 < ours.imports < ours.first
    assert ours.memory is None or ours.memory > 50
