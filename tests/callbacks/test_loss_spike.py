"""Spikes end the run before a checkpoint contains them."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.fragile import GOOD, LARGE, NAN, Fragile, marked
from tests.support.tasks import quiet
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, LossSpike, OptimizerConfig
from drivetrain.callbacks import LambdaCallback
from drivetrain.core.errors import DivergenceError

POLICY = CheckpointConfig(every="4 steps", keep_last=99, best=0, by=None)
SIZE, COUNT = 4, 30


def data(*bad: int, mark: int = LARGE, count: int = COUNT, **options: Any) -> DataLoader[Any]:
    marks = [mark if index in bad and not each else GOOD for index in range(count) for each in range(SIZE)]
    return marked(marks, SIZE, **options)


def spike() -> LossSpike:
    """Judge generously: with batches of four samples the losses scatter wide."""
    return LossSpike(window=10, threshold=20)


def stopping(run_dir: Path, *callbacks: Any, **options: Any) -> Any:
    given = {"max_epochs": 1, "log_every": "7 steps", "checkpoint": POLICY}
    return quiet(**{**given, **options}, run_dir=run_dir, callbacks=callbacks or [spike()])


def task() -> Fragile:
    return Fragile(OptimizerConfig("adamw", lr=0.003, schedule="inverse_sqrt", warmup_steps=3))


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
        stopping(tmp_path, spike(), ends, **options).fit(task(), data(bad, mark=mark))
    notes = "".join(caught.value.__notes__)
    assert f"the newest checkpoint is {tmp_path / 'checkpoints'}/step-{newest:08d};" in notes
    assert pointless == [True]  # for a signal that comes at the same time
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_that_a_spike_has_stopped_goes_on_without_its_data(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="skip='20 steps'"):
        stopping(tmp_path).fit(task(), data(18))
    result = stopping(tmp_path).fit(task(), data(18), resume="auto", skip="3 steps")
    assert (result.progress.steps, result.progress.skipped) == (COUNT - 3, 0)


def test_all_ranks_judge_the_same_loss(tmp_path: Path) -> None:
    # It is in the second rank's batch, and the error is of the first rank, which has judged the same loss.
    trainer = stopping(tmp_path, strategy="ddp", devices=2)
    with pytest.raises(DivergenceError, match="a spike at step 11: "):
        trainer.fit(task(), data(23))
