"""The command and its tables, the parts of a step, the works, and stored figures."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.site import site_script

import manifest
from calls import CallCounter
from drivetrain.engine import engine
from parts import BACKWARD, LOOP, MODEL, OPTIMIZER, PARTS, WINDOW, ZERO, Parts, measure
from parts import table as table_of_parts
from peers import HAND, OURS, load
from peers.hand import Hand
from plots import plot
from report import NONE, Cell, Report, Table, lowest
from rows import BY_NAME, ROWS
from run import main
from starts import starts
from workloads import GPT, TINY, Clock, Job, tokens

pytestmark = pytest.mark.nightly  # and before the benchmarks themselves, by `make bench`


def test_a_run_writes_a_page_and_data_and_refuses_unknown_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "clipping, acc", "--contestants", OURS, "--rounds", "1", "--steps", "5"]
    main([*only, "--output", str(tmp_path)])
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| clipping, accumulation 4 |" in page
    assert "in memory, bare" not in page
    assert page[page.index("## A step") :].strip() in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert isinstance(found["tables"][0]["rows"][0][OURS], float)
    assert found["versions"]["drivetrain"]
    with pytest.raises(SystemExit):
        main(["--only", "clipping", "nosuchrow", "--output", str(tmp_path / "none")])
    printed = capsys.readouterr().err
    assert "no row has 'nosuchrow'" in printed
    assert "Evaluation and prediction, a batch: prediction" in printed
    main(["--list"])
    assert "installed: hand-written, drivetrain" in capsys.readouterr().out


def test_a_report_is_there_after_each_table_and_says_where_ours_is_not_the_lowest(tmp_path: Path) -> None:
    report = Report(tmp_path, "python benchmarks/run.py")
    found = Table("First", "us", "", [HAND, OURS], [("row", [Cell("1.0", 1.0), NONE])], ["A note."])
    report.add(found)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    head = "## First\n\nus\n\n|  | hand-written | drivetrain |\n| --- | ---: | ---: |\n"
    assert head + "| row | 1.0 | - |" in page
    assert "A note." in page
    assert lowest("row", {HAND: 0.0, OURS: 2.0, "Ignite": 3.0}) == lowest("row", {HAND: 0.0, OURS: 2.0}) == ""
    assert lowest("row", {HAND: 0.0, OURS: 2.0, "A": 1.5, "B": 1.0}) == "row: B is lower than ours."
    pytest.importorskip("matplotlib")
    assert [path.name for path in plot(found, [HAND, OURS], tmp_path)] == ["first.png"]


def test_the_figure_and_the_table_of_the_page_are_of_the_stored_results() -> None:
    """`python docs/site/draw_overhead.py` draws the one and, with --table, prints the other."""
    drawer = site_script("draw_overhead")
    assert drawer.PICTURE.read_text(encoding="utf-8") == drawer.draw()
    page = (drawer.EXPLANATION / "benchmarks.md").read_text(encoding="utf-8")
    assert "\n".join(drawer.table()) in page
    assert drawer.source() in page


def test_time_is_charged_to_the_innermost_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Clock, "read", lambda: now[0])

    def work(spent: float) -> None:
        now[0] += spent

    parts = Parts(0, 1)
    inner = parts.timed(MODEL, work)
    parts.timed(BACKWARD, lambda: (work(1.0), inner(2.0), work(4.0)))()
    work(8.0)
    inner(16.0)
    spent = {part: seconds for part, seconds in parts.spent.items() if seconds}
    assert spent == {BACKWARD: 5.0, MODEL: 18.0, LOOP: 8.0}


@pytest.mark.parametrize("name", [HAND, OURS])
def test_each_loop_has_its_parts_and_is_left_as_it_was(name: str) -> None:
    before = torch.Tensor.backward, engine.read_output, engine.Engine.train_step
    found = measure(BY_NAME["in memory, bare"], load(name), 50)
    of_both = {WINDOW, MODEL, BACKWARD, OPTIMIZER, LOOP}
    others = set(PARTS) - of_both
    assert {part for part in PARTS if found[part] != 0} == of_both | (
        {ZERO} if name == HAND else others - {ZERO}
    )
    assert (torch.Tensor.backward, engine.read_output, engine.Engine.train_step) == before
    assert [row for row, _ in table_of_parts(BY_NAME["in memory, bare"], 1, 5).rows][: len(PARTS)] == list(
        PARTS
    )


def test_blocks_leave_the_warm_up_out_and_jobs_begin_alike() -> None:
    job = Job(TINY, steps=6, block=3, warm_up=2, accumulation=2)
    assert len(job.data) == (2 + 6 + 1) * 2
    Hand().train(job)
    assert len(job.clock.times) == len(job.data)  # type: ignore[union-attr]
    assert job.blocks([at + 8.0 * (at >= 10) for at in range(18)]) == pytest.approx([14 / 3, 6 / 3])
    one, other = Job(TINY), Job(TINY)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert torch.equal(one.data[3]["x"], other.data[3]["x"])
    counter = CallCounter()
    for _ in range(6):
        counter()
        (lambda: (abs(-1), len([])))()
    assert counter.per_step(1, 3) == {"python": 1, "c": 2}


def test_training_lowers_the_loss_of_every_work() -> None:
    for work in {row.work.name: row.work for row in ROWS if row.verb == "train"}.values():
        small = work
        if work.name.startswith("GPT"):
            small = type(work)(
                "small",
                lambda: GPT(1, 16, 2, 16, 8),
                lambda n, rows: tokens(n, rows, 8, 16),
                2,
                "adamw",
                1e-2,
            )
        job = Job(small, steps=20, warm_up=3)
        before = job.probed()
        Hand().train(job)
        assert job.probed() < before * 0.98, work.name


def test_a_manifest_grows_by_a_few_bytes_a_file_and_what_rank_0_sends_not_at_all() -> None:
    small, large = (manifest.measure(ranks, 2, 256) for ranks in (64, 512))
    assert (large["manifest_bytes"] - small["manifest_bytes"]) / (512 - 64) < 2 * 120  # a file of each group
    assert large["sent_bytes"] < 1.1 * small["sent_bytes"]
    row = manifest.measure(1024)
    assert row["tensors"] == 4 * 723  # Llama 70B
    assert row["manifest_bytes"] < 8 << 20
    assert max(row["files_opened"], row["files_opened_by_the_last"]) <= 4


def test_the_first_step_is_reported_by_an_interpreter_of_its_own() -> None:
    ours = starts([OURS], 1)[OURS]
    assert 0 < ours.imports < ours.first
