"""The command `drivetrain runs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.cli.main import main
from drivetrain.run.ledger_report import KINDS, NAME, read_ledger


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run with two attempts."""
    directory = tmp_path / "run"
    for epochs in (1, 2):
        quiet(max_epochs=epochs, checkpoint=True, run_dir=directory).fit(
            Regression(), pairs(), pairs(2), resume="auto"
        )
    return directory


def test_show_has_each_kind_its_share_and_every_attempt(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "show", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    rows = {line[:11].strip(): line[11:].split() for line in printed.splitlines() if line.endswith("%")}
    assert set(rows) >= {*KINDS, "wall time"}
    seconds = {kind: float(rows[kind][0]) for kind in KINDS}
    assert sum(seconds.values()) == pytest.approx(float(rows["wall time"][0]), abs=0.05 * len(KINDS))
    assert "which is compute / wall time" in printed
    attempts = [line.split() for line in printed.splitlines() if line.endswith("finished")][-2:]
    assert [each[0] for each in attempts] == ["1", "2"]
    assert "0 to 5" in printed
    assert "5 to 10" in printed


def test_show_and_list_print_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", str(run_dir), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(read_ledger(run_dir).to_json()))
    assert sum(shown["seconds"].values()) == pytest.approx(shown["wall"])
    assert main(["runs", "list", str(run_dir.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [shown], "trouble": []}


def test_list_has_a_line_for_each_run_and_names_what_cannot_be_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    other = tmp_path / "other"
    other.mkdir()
    (other / NAME).write_text("torn", encoding="utf-8")
    assert main(["runs", "list", str(tmp_path)]) == 0
    head, row, trouble = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "attempts", "updates", "wall", "goodput", "ended", "heard"]
    assert row.split()[:3] == [str(run_dir), "2", "10"]
    assert str(other) in trouble
    assert main(["runs", "list", str(other)]) == 1  # nothing could be read
    assert str(other) in capsys.readouterr().out
    assert main(["runs", "list", str(other), "--json"]) == 1
    assert main(["runs", "show", str(run_dir / NAME)]) == 0


def test_a_torn_line_is_counted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run_dir / NAME).open("a", encoding="ascii") as out:
        out.write("{\n")
    assert main(["runs", "show", str(run_dir)]) == 0
    assert "unreadable lines: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["show", "nowhere"], 1, "no ledger.jsonl in 'nowhere'"),
        (["list", "nowhere"], 1, "no run with a ledger.jsonl in 'nowhere'"),
        (["show", "nowhere", "--jsn"], 2, "Did you mean '--json'?"),
    ],
)
def test_what_cannot_be_shown_is_said(
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", *words]) == code
    assert message in capsys.readouterr().err
