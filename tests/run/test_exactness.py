"""The promises of exactness: a run that is killed and resumed is the run that was not, to the bit."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.outcome import outcome
from tests.support.trials import SAMPLES, STEPS, STEPS_PER_EPOCH, Trials, trials

# The fourth step is the last of its epoch; a checkpoint is saved every two.
KILLS: dict[str, dict[str, Any]] = {
    "in the first forward": {"call": 1},
    "before the first optimizer step": {"hook": "on_before_optimizer_step", "step": 0},
    **{f"after step {u}": {"hook": "on_step_end", "step": u} for u in range(1, STEPS + 1)},
    "between the micro-batches of a window": {"call": 8},
    "in the last, short window of an epoch": {"call": 11},
    "before the last optimizer step of an epoch": {"hook": "on_before_optimizer_step", "step": 3},
    "during validation": {"hook": "on_evaluation_step_end", "step": 4},
    "during the last validation": {"hook": "on_evaluation_step_end", "step": 8},
    "when an epoch ends": {"hook": "on_epoch_end", "step": 4},
    "when an epoch begins": {"hook": "on_epoch_start", "step": 4},
    "between the log point and the loggers": {"hook": "on_log", "step": 6},
    "just after a checkpoint": {"hook": "on_checkpoint_saved", "step": 4},
    "when a saving begins": {"event": "os.mkdir", "part": ".saving-step-", "number": 2},
    "in the middle of a saving": {"event": "open", "part": ".saving-step-", "number": 6},
    "just before a commit": {"event": "os.rename", "part": ".saving-step-", "number": 2},
    "between a commit and the index": {"event": "os.rename", "part": "index.json", "number": 2},
    "when an old checkpoint is removed": {"event": "os.rename", "part": ".removing-", "number": 1},
    "while an old checkpoint is deleted": {"event": "shutil.rmtree", "part": ".removing-", "number": 1},
    "when the finished weights are written": {"event": "open", "part": "model.safetensors", "number": 5},
}
KILLED = -signal.SIGKILL
pytestmark = pytest.mark.heavy("a server that trains in some eighty short processes")
WITH_WORKERS = ("after step 3", "after step 6", "during validation", "just before a commit")
IN_THE_BACKGROUND = (
    *("after step 3", "during the last validation", "when a saving begins", "in the middle of a saving"),
    *("just before a commit", "between a commit and the index", "when an old checkpoint is removed"),
    "when the finished weights are written",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Trials]:
    with trials() as running:
        yield running


Undisturbed = Callable[[int], Path]


@pytest.fixture(scope="module")
def undisturbed(server: Trials, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Given the number of data workers, the directory of a run that nothing disturbed."""
    made: dict[int, Path] = {}

    def directory(workers: int) -> Path:
        if workers not in made:
            made[workers] = tmp_path_factory.mktemp("undisturbed")
            assert server.run(made[workers], 0, workers=workers) == 0
        return made[workers]

    return directory


def rows(directory: Path, attempt: int) -> list[dict[str, Any]]:
    text = (directory / f"witness-{attempt}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def steps(witnessed: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in witnessed if "step" in row}


def fetched(directory: Path, attempt: int) -> list[int]:
    file = directory / f"fetched-{attempt}.txt"
    return [int(line) for line in file.read_text(encoding="utf-8").split()] if file.exists() else []


def used(made: Mapping[int, Mapping[str, Any]], after: int) -> list[int]:
    return [i for u in sorted(made) if u > after for batch in made[u]["samples"] for i in batch]


def check_attempt(directory: Path, attempt: int, workers: int, expected: list[dict[str, Any]]) -> None:
    """An attempt did what the uninterrupted run did at the same place, and fetched nothing else."""
    witnessed = rows(directory, attempt)
    made, right = steps(witnessed), steps(expected)
    for step, row in made.items():
        assert row == right[step]
    logged = [row for row in expected if "logged" in row]
    assert all(row in logged for row in witnessed if "logged" in row)
    start = next((row["start"] for row in witnessed if "start" in row), 0)
    finished = STEPS in made
    wanted = used(right, start)
    got = fetched(directory, attempt)
    if workers == 0:
        assert got == (wanted if finished else wanted[: len(got)])
    elif finished:
        assert sorted(got) == sorted(wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_uninterrupted_run_is_what_the_kills_assume(workers: int, undisturbed: Undisturbed) -> None:
    directory = undisturbed(workers)
    made = steps(rows(directory, 0))
    assert sorted(made) == list(range(1, STEPS + 1))
    assert [len(made[u]["samples"]) for u in (1, 2, 3, 4)] == [3, 3, 3, 2]  # the last window is short
    for epoch in range(STEPS // STEPS_PER_EPOCH):
        seen = used({u: row for u, row in made.items() if row["epoch"] == epoch}, 0)
        assert sorted(seen) == list(range(SAMPLES))
    assert used(made, 0)[:SAMPLES] != used(made, STEPS_PER_EPOCH)  # shuffled anew in each epoch
    check_attempt(directory, 0, workers, rows(directory, 0))


def check_killed(
    server: Trials, directory: Path, undisturbed: Undisturbed, *moments: str, workers: int = 0, **options: Any
) -> None:  # a run that is killed at these moments, one an attempt, and resumed equals the uninterrupted one
    for attempt, moment in enumerate(moments):
        assert server.run(directory, attempt, workers=workers, kill=KILLS[moment], **options) == KILLED
    assert server.run(directory, len(moments), workers=workers, **options) == 0
    right = undisturbed(workers)
    assert outcome(directory / "run") == outcome(right / "run")
    for attempt in range(len(moments) + 1):
        check_attempt(directory, attempt, workers, rows(right, 0))


@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_and_resumed_equals_the_uninterrupted_one(
    moment: str, undisturbed: Undisturbed, server: Trials, tmp_path: Path
) -> None:
    check_killed(server, tmp_path, undisturbed, moment)


@pytest.mark.parametrize("moment", WITH_WORKERS)
def test_a_run_with_loader_workers_killed_and_resumed_equals_the_uninterrupted_one(
    moment: str, undisturbed: Undisturbed, server: Trials, tmp_path: Path
) -> None:
    check_killed(server, tmp_path, undisturbed, moment, workers=2)


@pytest.mark.parametrize("moment", IN_THE_BACKGROUND)
def test_a_run_that_saves_in_the_background_killed_and_resumed_equals_the_uninterrupted_one(
    moment: str, undisturbed: Undisturbed, server: Trials, tmp_path: Path
) -> None:
    check_killed(server, tmp_path, undisturbed, moment, asynchronous=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_twice_and_resumed_equals_the_uninterrupted_one(
    workers: int, undisturbed: Undisturbed, server: Trials, tmp_path: Path
) -> None:
    moments = ("after step 3", "in the middle of a saving")
    check_killed(server, tmp_path, undisturbed, *moments, workers=workers)


def test_resuming_a_finished_run_changes_nothing(server: Trials, tmp_path: Path) -> None:
    assert server.run(tmp_path, 0) == 0
    before = outcome(tmp_path / "run")
    assert server.run(tmp_path, 1) == 0
    assert outcome(tmp_path / "run") == before
    assert not steps(rows(tmp_path, 1))
    assert fetched(tmp_path, 1) == []
