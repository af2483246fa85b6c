"""The command `drivetrain runs`."""

from __future__ import annotations

import json

import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.cli.main import main
from drivetrain.run.ledger_report import KINDS, NAME, read_ledger


def test_runs_show_and_list_tell_attempts_shares_and_what_cannot_be_read(tmp_path, capsys, monkeypatch):
    def printed(*words, code=0):
        assert main(["runs", *map(str, words)]) == code
        return capsys.readouterr().out

    run_dir = tmp_path / "run"
    for epochs in (1, 2):
        trainer = quiet(max_epochs=epochs, checkpoint=True, run_dir=run_dir)
        trainer.fit(Regression(), pairs(), pairs(2), resume="auto")
    capsys.readouterr()
    shown = printed("show", run_dir)
    rows = {line[:11].strip(): line[11:].split() for line in shown.splitlines() if line.endswith("%")}
    assert set(rows) >= {*KINDS, "wall time"}
    seconds = sum(float(rows[kind][0]) for kind in KINDS)
    assert seconds == pytest.approx(float(rows["wall time"][0]), abs=0.05 * len(KINDS))
    attempts = [line.split()[0] for line in shown.splitlines() if line.endswith("finished")][-2:]
    assert attempts == ["1", "2"]
    for text in ("which is compute / wall time", "0 to 5", "5 to 10"):
        assert text in shown
    found = json.loads(printed("show", run_dir, "--json"))
    assert found == json.loads(json.dumps(read_ledger(run_dir).to_json()))
    assert sum(found["seconds"].values()) == pytest.approx(found["wall"])
    assert json.loads(printed("list", tmp_path, "--json")) == {"runs": [found], "trouble": []}

    monkeypatch.setenv("COLUMNS", "300")
    other = tmp_path / "other"
    other.mkdir()
    (other / NAME).write_text("torn", encoding="utf-8")
    head, row, trouble = printed("list", tmp_path).splitlines()
    assert head.split() == ["run", "attempts", "updates", "wall", "goodput", "ended", "heard"]
    assert row.split()[:3] == [str(run_dir), "2", "10"]
    assert str(other) in trouble
    assert str(other) in printed("list", other, code=1)  # nothing could be read
    with (run_dir / NAME).open("a", encoding="ascii") as out:
        out.write("{\n")
    assert "unreadable lines: 1" in printed("show", run_dir / NAME)
