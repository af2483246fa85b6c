"""`drivetrain runs list`, `runs compare` and `runs report`, of runs that were made here."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import DataError, LambdaCallback
from drivetrain.cli.main import main
from drivetrain.cli.run_record import differences, read_runs, unknown_settings
from drivetrain.core.messages import logger


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
    folder = tmp_path_factory.mktemp("runs")
    made = [folder / name for name in ("good", "bad")]
    fit(made[0])
    with warned("look"), pytest.raises(ValueError, match="no </script> more"):
        fit(made[1], warns_then_fails, max_grad_norm=1e-5)
    return [str(each) for each in made]


def test_runs_are_compared_by_settings_and_metrics(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["trainer.max_grad_norm"] == ["None", "1e-05"]
    assert "trainer.seed" not in found["settings"]
    good, bad = read_runs(runs)
    steps, values = bad.read_curves()["train/loss"]
    assert steps == [1, 2, 3, 4]
    assert found["last"]["train/loss"] == [good.read_curves()["train/loss"][1][-1], values[-1]]
    assert main(["runs", "compare", *runs]) == 0
    assert re.search(r"trainer.max_grad_norm +None +1e-05", capsys.readouterr().out)
    assert differences([good, good]) == {}


def test_a_list_has_the_best_value_of_each_run_and_needs_no_torch(
    runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps, values = read_runs(runs[:1])[0].read_curves()["validation/loss"]
    folder = str(Path(runs[0]).parent)
    assert main(["runs", "list", folder, "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out)["runs"]
    least = min(values)
    assert good["best"] == {"name": "validation/loss", "value": least, "step": steps[values.index(least)]}
    assert bad["best"]["name"] == "train/loss"  # which failed before its first validation
    program = f"import sys; from drivetrain.cli.main import main; main(['runs', 'list', {folder!r}]); "
    told = subprocess.check_output(
        [sys.executable, "-c", program + "print('torch' in sys.modules)"], text=True
    )
    assert re.search(rf"good +validation/loss {least:.6g} ", told)
    assert told.endswith("False\n")


def test_a_run_without_a_table_has_no_values_and_no_settings(runs: list[str], tmp_path: Path) -> None:
    fit(tmp_path, loggers="tensorboard")
    good, other = read_runs([runs[0], str(tmp_path)])
    assert good.read_curves()
    assert other.read_curves() == {}
    assert differences([good, other]) == {}
    assert (
        unknown_settings([good, other])
        == f"unknown settings, because no logger wrote config.json: {other.name}"
    )


def test_what_cannot_be_compared_or_written_is_told(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=r"there is no ledger\.jsonl"):
        read_runs([str(tmp_path)])
    assert [run.name for run in read_runs([str(Path(runs[0]).parent)])] == ["bad", "good"]
    for words, told in (
        (["compare", runs[0]], "give two runs or more"),
        (["report", runs[0], "--output", str(tmp_path)], "is a directory"),
        (["report", runs[0], "--ouput", "x"], "--output"),
    ):
        assert main(["runs", *words]) == 2
        assert told in capsys.readouterr().err


def report_of(*paths: str, to: Path) -> tuple[str, Any]:
    assert main(["runs", "report", *paths, "--output", str(to)]) == 0
    page = to.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return page, json.loads(found[1])


def test_a_report_has_curves_states_settings_and_messages_and_no_markup_of_theirs(
    runs: list[str], tmp_path: Path
) -> None:
    folder = Path(runs[0]).parent
    page, found = report_of(str(folder), to=tmp_path / "new" / "page.html")
    assert f"<title>2 runs of {folder}/</title>" in page
    assert [page.count(each) for each in ("http", "@@", "</script>")] == [0, 0, 2]
    states = [(each["name"], each["state"], each["steps"]) for each in found["runs"]]
    assert states == [("bad", "ValueError", 5), ("good", "finished", 10)]
    said = [[1, "warning", "look <b>here</b>"], [1, "ValueError", "no </script> more"]]
    assert [each["messages"] for each in found["runs"]] == [said, []]
    assert {"name": "trainer.max_grad_norm", "minor": False, "of": ["1e-5", "None"]} in found["settings"]
    curves = {each["name"]: each for each in found["curves"]}
    assert [each["group"] for each in curves.values()] == ["train", "validation"]
    drawn, (steps, values) = curves["train/loss"]["of"][1], read_runs(runs[:1])[0].read_curves()["train/loss"]
    assert drawn["y"] == pytest.approx(values, rel=1e-5)
    assert (sum(drawn["x"]), drawn["last"], drawn["least"][0]) == (steps[-1], values[-1], min(values))


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_all_and_the_bar_covers_little(runs: list[str], tmp_path: Path, width: int) -> None:
    page, _ = report_of(*runs, to=tmp_path / "page.html")
    probe = """<script>onload = () => setTimeout(() => {
    const all = [...document.querySelectorAll("#curves canvas")], box = document.documentElement;
    const data = each => each.getContext("2d").getImageData(0, 0, each.width, each.height).data;
    const bar = document.querySelector(".bar").offsetHeight < innerHeight / 4;
    const drawn = all.filter(each => data(each).some(Boolean)).length;
    box.dataset.probe = [bar, drawn, box.scrollWidth <= innerWidth];
    }, 500)</script>"""
    (tmp_path / "page.html").write_text(page + probe, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=10000"]
    command = ["chromium", *options, (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert 'data-probe="true,2,true"' in shown
