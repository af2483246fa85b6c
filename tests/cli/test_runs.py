"""`drivetrain runs compare` and `runs report`, of runs that were made here; Chromium opens the report."""

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError, DataError, LambdaCallback
from drivetrain.cli.main import main
from drivetrain.cli.report import PIXELS, _drawn, make_report
from drivetrain.cli.run_record import RunRecord, differences, read_runs, unknown_settings
from drivetrain.core.messages import logger
from drivetrain.run.ledger_report import Attempt, RunLedger


def warns_then_fails(run: Any) -> None:
    if run.progress.steps == 3:
        logger("drivetrain.tests").warning("look <b>here</b>")
        logger("drivetrain.tests").warning("look <b>here</b>")
    if run.progress.steps == 5:
        raise ValueError("no </script> more")


def fit(directory: Path, *hooks: Any, **options: Any) -> Any:
    given = {"max_epochs": 2, "loggers": "csv", "log_every": 1, **options}
    trainer = quiet(
        run_dir=directory, callbacks=[LambdaCallback(on_step_end=each) for each in hooks], **given
    )
    return trainer.fit(Regression(), pairs(), pairs(2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    made = [tmp_path_factory.mktemp("runs") / name for name in ("good", "bad")]
    fit(made[0])
    with warned("look"), pytest.raises(ValueError, match="no </script> more"):
        fit(made[1], warns_then_fails, max_grad_norm=0.5)
    return [str(each) for each in made]


def test_runs_are_compared_by_settings_and_last_values(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["trainer.max_grad_norm"] == ["None", "0.5"]
    assert "trainer.seed" not in found["settings"]
    good, bad = read_runs(runs)
    assert found["last"]["train/loss"] == [good.last("train/loss"), bad.last("train/loss")]
    assert bad.curves["train/loss"][0] == [1, 2, 3, 4]
    assert main(["runs", "compare", *runs]) == 0
    assert re.search(r"trainer.max_grad_norm +None +0.5", capsys.readouterr().out)
    assert differences([good, good]) == {}


def test_values_are_read_from_tensorboards_files_where_there_is_no_table(
    runs: list[str], tmp_path: Path
) -> None:
    fit(tmp_path, loggers="tensorboard")
    good, other = read_runs([runs[0], str(tmp_path)])
    assert other.curves.keys() == good.curves.keys()
    for name, (steps, values) in good.curves.items():
        assert other.curves[name][0] == steps
        assert other.curves[name][1] == pytest.approx(values, rel=1e-6)
    assert differences([good, other]) == {}
    assert (
        unknown_settings([good, other])
        == f"unknown settings, because no logger wrote config.json: {other.name}"
    )


def test_what_cannot_be_compared_or_written_is_told(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="is given twice"):
        read_runs([runs[0], runs[0] + "/../good"])
    with pytest.raises(DataError, match=r"there is no ledger\.jsonl"):
        read_runs([str(tmp_path)])
    assert [run.name for run in read_runs([str(Path(runs[0]).parent)])] == ["good"]
    for words, told in (
        (["compare", runs[0]], "give two runs or more"),
        (["report", runs[0], "--output", str(tmp_path)], "is a directory"),
        (["report", runs[0], "--ouput", "x"], "--output"),
    ):
        assert main(["runs", *words]) == 2
        assert told in capsys.readouterr().err


def test_a_report_has_messages_and_settings_and_no_markup_of_theirs(runs: list[str]) -> None:
    page = make_report(read_runs(runs)).replace(get_plotlyjs(), "")
    assert page.count("look &lt;b&gt;here&lt;/b&gt;") == 1
    assert "ValueError</td><td>no &lt;/script&gt; more" in page
    assert "<td>trainer.max_grad_norm</td><td>None</td><td>0.5</td>" in page
    assert "http" not in page
    assert "@@" not in page


def test_a_long_curve_is_drawn_with_its_spikes_and_a_report_of_many_stays_small() -> None:
    steps, values = [float(each) for each in range(100_000)], [math.sin(each) for each in range(100_000)]
    values[70_001], values[30_000] = 99.0, math.nan
    drawn = _drawn((steps, values))
    assert len(drawn["x"]) <= 5 * PIXELS
    assert drawn["y"][drawn["x"].index(70_001)] == 99.0
    assert drawn["y"][drawn["x"].index(30_000)] is None
    ledger = RunLedger(Path("runs/a"), [Attempt(0.0, 1.0, 0.0, {"compute": 1.0}, 0, 9, "finished")])
    record = RunRecord("a", ledger, {f"value {each}": (steps, values) for each in range(40)}, {})
    assert len(make_report([record])) - len(get_plotlyjs()) < 5_000_000


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_the_curves_of_all_runs(runs: list[str], tmp_path: Path) -> None:
    assert main(["runs", "report", *runs, "--output", str(tmp_path / "report.html")]) == 0
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,4000"]
    options += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=10000", "--dump-dom"]
    command = ["chromium", *options, (tmp_path / "report.html").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    drawn = {
        html.unescape(title): len(re.findall(r'class="js-line" [^>]*d="M', plot))
        for title, plot in re.findall(r"<h3>([^<]*)</h3>(.*?)(?=<h3>|<h2>)", page, re.DOTALL)
    }
    assert drawn == {"train/loss": 2, "validation/loss": 1}
    assert re.findall(r"<button title=[^>]*>([^<]*)</button>", page)[:2] == ["good", "bad"]
    assert len(re.findall(r'class="point"', page)) >= 2
