"""The report of runs: what it has of media and of long curves, and how it follows a run under way."""

import json
import math
import re

import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback
from drivetrain.integrations.report.command import ReportPage, watch
from drivetrain.integrations.report.contents import BINS, drawn
from drivetrain.integrations.report.media import fit_to, logged_media
from drivetrain.loggers import Audio, Image, Table, Text


def log_everything(run):
    run.log("image", Image(torch.eye(8)))
    run.log("large image", Image(torch.rand(3, 400, 300, generator=torch.Generator().manual_seed(0))))
    run.log("table", Table(["a|b", "<c>"], [[run.progress.steps, "<b>\x00"], [None, 2.5]]))
    run.log("text", Text(f"step {run.progress.steps} </script>"))
    run.log("audio", Audio(torch.zeros(100), 8000))
    run.log("long audio", Audio(torch.zeros(400_000), 8000))


def test_media_are_there_by_step_and_small_and_a_watched_page_follows_the_files(tmp_path, caplog):
    run, path, seen = tmp_path / "run", tmp_path / "report.html", []
    given = {"loggers": ("csv", "tensorboard"), "callbacks": [LambdaCallback(on_step_end=log_everything)]}
    quiet(run_dir=run, max_epochs=1, log_every=1, **given).fit(Regression(), pairs())
    media = {each["name"]: each for each in logged_media(run)}
    assert [each["kind"] for each in media.values()] == ["audio", "image", "image", "audio", "table", "text"]
    items = {name: each["items"][1] for name, each in media.items()}
    assert (items["image"]["src"][:15], items["text"]["text"]) == ("data:image/png;", "step 2 </script>")
    assert (items["large image"]["size"], len(items["large image"]["src"]) < 80_000) == ([300, 400], True)
    assert items["long audio"]["left"].startswith("left out: 0.8 MB")
    assert (items["table"]["columns"], items["table"]["rows"][0]) == (["a|b", "<c>"], ["2", "<b>\\x00"])
    assert fit_to([list(media.values())], 1)[1] == 25  # all but the long ones, which were left out before
    *rows, last = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(rows), "utf-8")
    (page := ReportPage([str(run)])).write(path, refresh=5.0)

    def contents():
        found = json.loads(re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)[1])
        return found["refresh"], len(found["curves"][0]["of"][0]["x"]), path.stat().st_mtime_ns

    def wait(seconds):
        seen.append(contents())
        if len(seen) == 1:
            (run / "metrics.csv").write_text((run / "metrics.csv").read_text("utf-8") + "6,nan\n", "utf-8")
        if len(seen) == 3:
            (run / "ledger.jsonl").write_text("".join([*rows, last]), encoding="utf-8")

    watch(page, path, wait)
    assert [each[:2] for each in [*seen, contents()]] == [(5.0, 5), (5.0, 6), (5.0, 6), (None, 6)]
    assert seen[1] == seen[2]  # it was not written again without a change


def test_a_long_curve_keeps_its_spikes_and_a_nan_is_a_gap():
    values = [math.sin(each) for each in range(100_000)]
    values[70_001], values[30_000] = 99.0, math.nan
    found = drawn(([float(each) for each in range(100_000)], values))
    places = [sum(found["x"][: found["y"].index(each) + 1]) for each in (99.0, None)]
    assert (places, found["gaps"], len(found["x"]) <= 2 * BINS + 3) == ([70_001, 30_000], 1, True)
