"""Searches that are killed, and trials in processes of their own."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.forked import run_forked, undisturbed

pytest.importorskip("optuna", reason="the extra search is not installed")

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("programs") / "searched.py"


def start(tmp_path, name, storage="", point="", parallel=1):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**undisturbed(), "PYTHONPATH": os.pathsep.join(paths)}
    words = [str(PROGRAM), str(tmp_path / name), storage, point, str(parallel)]
    return run_forked(words, tmp_path, environment, timeout=300)


def search(*arguments, **options):
    done = start(*arguments, **options)
    assert done.returncode in (0, -9), done.stderr[-4000:]
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.landing
@pytest.mark.real("kills a search three times")
def test_a_search_that_is_killed_has_the_trials_and_weights_of_an_uninterrupted_one(tmp_path):
    whole = search(tmp_path, "whole", "sqlite:///search.db")
    for point in ("make_task", "step", "end"):
        assert search(tmp_path, "killed", point=point) is None
    assert search(tmp_path, "killed") == whole
    assert {row[1] for row in whole[0]} == {"complete", "pruned"}


@pytest.mark.landing
@pytest.mark.real("a trial kills its process")
def test_trials_run_in_processes_and_one_that_dies_has_failed(tmp_path):
    rows, weights = search(tmp_path, "spread", point="step", parallel=2)
    assert [row[5] for row in rows if row[1] == "failed"] == ["its process was killed by SIGKILL"]
    assert len(rows) == 5
    assert sum(each is not None for each in weights) == 4


@pytest.mark.landing
@pytest.mark.real("signals a search")
def test_a_signal_to_a_search_ends_its_trials_in_order_and_says_how_it_goes_on(tmp_path):
    done = start(tmp_path, "signalled", point="parent", parallel=2)
    assert done.returncode == 75, done.stderr[-4000:]
    assert f"start the same search again, which goes on in {tmp_path / 'signalled'}; exit" in done.stderr
    rows, _ = search(tmp_path, "signalled")
    assert {row[1] for row in rows} <= {"complete", "pruned"}


@pytest.mark.landing
@pytest.mark.real("waits for two programs")
def test_two_programs_that_start_together_share_the_trials(tmp_path):
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(search, tmp_path, "shared", "sqlite:///shared.db") for _ in range(2)]
        rows = max(
            (each.result()[0] for each in both), key=lambda rows: sum(row[1] != "running" for row in rows)
        )
    assert len(rows) == 5
    assert {row[1] for row in rows} <= {"complete", "pruned"}
