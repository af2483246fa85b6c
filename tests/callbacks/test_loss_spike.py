"""Spikes are skipped, or rolled back: what comes after is as if their data had never been there."""

import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.fragile import GOOD, GRADIENT, LARGE, NAN, Fragile, LeftBehind, marked
from tests.support.outcome import outcome, weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Duel, duels, quiet
from torch.utils.data import DataLoader, Subset

from drivetrain import CheckpointConfig, LambdaCallback, LossSpike, OptimizerConfig
from drivetrain.checkpoint import read_manifest
from drivetrain.core.errors import DivergenceError

POLICY = CheckpointConfig(every="4 steps", keep_last=99, best=0, by=None)
SIZE, COUNT = 4, 30


def data(*bad: int, mark: int = LARGE, count: int = COUNT, **options: Any) -> DataLoader[Any]:
    """Batches, of which some are bad."""
    marks = [mark if index in bad and not each else GOOD for index in range(count) for each in range(SIZE)]
    return marked(marks, SIZE, **options)


def without(passed_over: range, whole: DataLoader[Any]) -> DataLoader[Any]:  # the same batches, but for some
    kept = [i * SIZE + each for i in range(COUNT) if i not in passed_over for each in range(SIZE)]
    return DataLoader(Subset(whole.dataset, kept), batch_size=SIZE)


def spike(action: str, **options: Any) -> LossSpike:
    """Judge generously: with batches of four samples the losses scatter wide."""
    return LossSpike(action, **{"window": 10, "threshold": 20, **options})


def rolling(run_dir: Path, *callbacks: Any, **options: Any) -> Any:  # return a Trainer that rolls back
    callbacks += (spike("rollback", **options.pop("spike", {})),)
    given = {"max_epochs": 1, "log_every": "7 steps", "checkpoint": POLICY, "loggers": ("csv", "jsonl")}
    return quiet(**{**given, **options}, run_dir=run_dir, callbacks=callbacks)


def task() -> Fragile:
    return Fragile(OptimizerConfig("adamw", lr=0.003, schedule="inverse_sqrt", warmup_steps=3))


def test_skip_leaves_out_a_spike_whole_once_the_window_is_full(caplog: pytest.LogCaptureFixture) -> None:
    watch = LeftBehind()
    trainer = quiet(max_epochs=1, log_every="4 steps", callbacks=[spike("skip"), watch])
    with caplog.at_level(logging.WARNING):
        result = trainer.fit(task(), data(15, 22))
    assert watch.changed == {15: [], 22: []}
    assert (result.progress.skipped, result.metrics["spikes"]) == (2, 2)
    assert caplog.messages[0].startswith("step 15 was not made: loss is ")
    assert "deviations above the median" in caplog.messages[0]
    watch = LeftBehind()
    quiet(max_epochs=1, callbacks=[spike("skip", window=20), watch]).fit(task(), data(15, 25))
    assert watch.changed == {25: []}
    by_name = [spike("skip", metric="generator_loss")]
    quiet(max_epochs=1, log_every="2 steps", callbacks=by_name).fit(Duel(), duels())
    # A run whose level does not come back ends.
    trainer = quiet(max_epochs=1, callbacks=[spike("skip", max_in_a_row=3)])
    with pytest.raises(DivergenceError, match="4 steps in a row, number 12 each time"):
        trainer.fit(task(), data(*range(12, 30)))


@pytest.mark.parametrize(
    ("bad", "mark", "back", "seen", "options"),
    [
        (18, LARGE, 16, 20, {}),  # found before the save that comes next
        (29, LARGE, 28, 30, {}),  # at the log point at the end
        (5, NAN, 4, 7, {}),
        (7, GRADIENT, 4, 8, {"log_every": None}),  # the loss is finite, the weights are NaN when saved
    ],
)
def test_rollback_equals_a_run_without_the_data(bad, mark, back, seen, options, tmp_path, caplog) -> None:
    found = [task(), task()]
    with caplog.at_level(logging.WARNING):
        result = rolling(tmp_path / "spike", **options).fit(found[0], data(bad, mark=mark))
    rolling(tmp_path / "without", **options).fit(found[1], without(range(back, seen), data(bad)))
    assert weights(found[0]) == weights(found[1])
    progress = result.progress
    assert (progress.steps, progress.skipped) == (COUNT - (seen - back), seen - back)
    assert progress.samples == COUNT * SIZE
    assert f"step-{back:08d}. The data of {seen - back} step(s) are passed over" in caplog.messages[0]
    if mark == LARGE:
        assert result.metrics["spikes"] == 1
        assert f"a spike at step {bad}: loss is " in caplog.messages[0]


def test_rollback_in_a_run_by_steps_makes_up_for_the_steps(tmp_path: Path) -> None:
    result = rolling(tmp_path / "last", max_epochs=None, max_steps=20).fit(task(), data(19))
    assert result.progress.steps == 20
    assert result.progress.samples == 24 * SIZE, "the spike came in the last step, which was not the last"
    validated: list[int] = []
    note = LambdaCallback(on_evaluation_end=lambda run: validated.append(run.progress.steps))
    options: Any = {"max_epochs": None, "max_steps": 20, "validate_every": "2 steps"}
    rolling(tmp_path, note, **options).fit(task(), data(13), data(count=2))  # from 14 back to 12
    assert {*validated} == {*range(2, 21, 2)}
    assert validated.count(16) == 1


def two_epochs(run_dir: Path, dies_at: int = -1) -> None:
    """Fit; the process may end at once, when the data of so many steps are used."""

    def die(run: Any) -> None:
        if run.progress.micro_batches == dies_at:
            os._exit(9)

    trainer = rolling(run_dir, LambdaCallback(on_step_end=die), max_epochs=2, spike={"max_rollbacks": 4})
    trainer.fit(task(), data(13, 24), resume="auto")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_resume_of_a_process_that_died_around_a_rollback_is_exact(tmp_path: Path) -> None:
    two_epochs(tmp_path / "straight")
    for at in (14, 15, 27):
        run_dir = tmp_path / str(at)
        died = multiprocessing.get_context("fork").Process(target=two_epochs, args=(run_dir, at))
        died.start()
        died.join()
        assert died.exitcode == 9
        two_epochs(run_dir)
        assert outcome(run_dir) == outcome(tmp_path / "straight")


def test_rollback_saves_at_once_what_it_went_back_to(tmp_path: Path) -> None:
    # Found at a log point, and before a save.
    for bad, found, name in ((13, 14, "step-00000012"), (17, 20, "step-00000016")):

        def fail(run: Any, found: int = found) -> None:
            if run.progress.micro_batches == found:
                raise ConnectionError

        failing = LambdaCallback(on_step_start=fail)
        with pytest.raises(ConnectionError) as caught:
            rolling(tmp_path / name, failing).fit(task(), data(bad))
        newest = f"{tmp_path / name / 'checkpoints' / name}-2"
        assert f"the newest checkpoint is {newest}" in "".join(caught.value.__notes__)
        assert read_manifest(newest).progress["position"] == found * SIZE


def test_rollback_has_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DivergenceError, match=r"rolled back 2 time\(s\) before, as often as max_rollbacks=2"):
        rolling(tmp_path / "often", spike={"max_rollbacks": 2}).fit(task(), data(14, 19, 23, 27))
    late = CheckpointConfig(every="25 steps", best=0, by=None)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        result = rolling(tmp_path / "late", checkpoint=late).fit(task(), data(15))
    assert result.progress.steps == COUNT
    assert caplog.messages[0].endswith("there is no checkpoint from before it")


def on_ranks(strategy: str, run_dir: Path) -> Any:
    whole = data(31, count=44)  # the second rank's in the sixteenth step
    kept = [*range(12 * 2 * SIZE), *range(16 * 2 * SIZE, 44 * SIZE)]
    found = []
    for name, given in (("spike", whole), ("without", DataLoader(Subset(whole.dataset, kept), SIZE))):
        model = task()
        result = rolling(run_dir / name, strategy=strategy, devices=2).fit(model, given)
        found.append((weights(model), result.progress.steps, result.progress.skipped))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_rollback_takes_all_ranks_back_together(strategy: str, tmp_path: Path) -> None:
    first, second = on_two_ranks(on_ranks, strategy, tmp_path)
    assert first == second
    (with_spike, *counts), (without_it, *others) = first
    assert with_spike == without_it
    assert (counts, others) == ([18, 4], [18, 0])
