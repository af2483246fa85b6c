"""Spikes are skipped, or end the run before a checkpoint contains them."""

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.support.fragile import GOOD, LARGE, NAN, Fragile, LeftBehind, marked
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Duel, duels, quiet
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, LossSpike, OptimizerConfig
from drivetrain.callbacks import LambdaCallback
from drivetrain.core.errors import DivergenceError

POLICY = CheckpointConfig(every="4 steps", keep_last=99, best=0, by=None)
SIZE, COUNT = 4, 30


def data(*bad: int, mark: int = LARGE, count: int = COUNT, **options: Any) -> DataLoader[Any]:
    """Batches, of which some are bad."""
    marks = [mark if index in bad and not each else GOOD for index in range(count) for each in range(SIZE)]
    return marked(marks, SIZE, **options)


def spike(action: str, **options: Any) -> LossSpike:
    """Judge generously: with batches of four samples the losses scatter wide."""
    return LossSpike(action, **{"window": 10, "threshold": 20, **options})


def stopping(run_dir: Path, *callbacks: Any, **options: Any) -> Any:
    given = {"max_epochs": 1, "log_every": "7 steps", "checkpoint": POLICY}
    return quiet(**{**given, **options}, run_dir=run_dir, callbacks=callbacks or [spike("stop")])


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
    with pytest.raises(DivergenceError, match="step 12 was tried 4 times"):
        trainer.fit(task(), data(*range(12, 30)))


@pytest.mark.parametrize(
    ("bad", "mark", "newest", "options"),
    [
        (18, LARGE, 16, {}),  # found before the save that comes next
        (29, LARGE, 28, {}),  # at the log point at the end
        (29, LARGE, 28, {"log_every": None}),
        (5, NAN, 4, {"log_every": None}),
    ],
)
def test_stop_ends_a_run_before_a_checkpoint_has_the_spike(bad, mark, newest, options, tmp_path) -> None:
    pointless: list[bool] = []
    ends = LambdaCallback(on_exception=lambda run: pointless.append(run.stopping.restart_is_pointless))
    with pytest.raises(DivergenceError, match=f"a spike at step {bad}: loss is ") as caught:
        stopping(tmp_path, spike("stop"), ends, **options).fit(task(), data(bad, mark=mark))
    notes = "".join(caught.value.__notes__)
    assert f"the newest checkpoint is {tmp_path / 'checkpoints'}/step-{newest:08d};" in notes
    assert pointless == [True]  # for a signal that comes at the same time
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_that_a_spike_has_stopped_goes_on_without_it(tmp_path: Path) -> None:
    found = [task(), task()]
    with pytest.raises(DivergenceError):
        stopping(tmp_path / "stopped").fit(task(), data(18))
    result = stopping(tmp_path / "stopped", spike("skip")).fit(found[0], data(18), resume="auto")
    assert (result.progress.steps, result.progress.skipped) == (COUNT - 1, 1)
    stopping(tmp_path / "straight", spike("skip")).fit(found[1], data(18))
    assert weights(found[0]) == weights(found[1])


def on_ranks(run_dir: Path) -> tuple[int, int]:
    progress = stopping(run_dir, spike("skip"), strategy="ddp", devices=2).fit(task(), data(23)).progress
    return progress.steps, progress.skipped


def test_all_ranks_judge_the_same_loss(tmp_path: Path) -> None:
    assert on_two_ranks(on_ranks, tmp_path) == [(COUNT // 2 - 1, 1)] * 2  # of the second rank's batch
