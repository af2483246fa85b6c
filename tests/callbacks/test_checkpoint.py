"""When checkpoints are saved in a run, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback


def saved(run_dir: Path) -> list[int]:
    """The updates of the checkpoints that are there."""
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("update-*"))


def run(run_dir: Path, policy: Any, losses: tuple[float, ...] = (), **options: Any) -> Any:
    """A run of 5 updates an epoch; `losses` are those of its validations."""
    left = list(losses)

    class Planted(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(left.pop(0))

    trainer = quiet(**{"max_epochs": 2, **options, "checkpoint": policy, "run_dir": run_dir})
    return trainer.fit(Planted(), pairs(10), pairs(2) if losses else None)


def test_resume_points_are_saved_at_the_interval_and_the_newest_kept(tmp_path: Path) -> None:
    addresses: list[str] = []
    note = LambdaCallback(on_checkpoint_saved=lambda run: addresses.append(Path(run.last_checkpoint).name))
    policy = CheckpointConfig(every="3 steps", keep_last=2, by=None)
    result = run(tmp_path, policy, callbacks=[note])
    assert addresses == [f"update-{number:08d}" for number in (3, 6, 9, 10)]  # the end is saved too
    assert saved(tmp_path) == [9, 10]
    assert Path(result.last_checkpoint).name == "update-00000010"


@pytest.mark.parametrize(
    ("every", "expected"),
    [("1 epoch", [5, 10]), ("0.4 epochs", [2, 4, 7, 9, 10]), ("6 samples", [3, 6, 9, 10]), (None, [10])],
)
def test_intervals_may_be_epochs_parts_of_them_or_samples(
    every: str | None, expected: list[int], tmp_path: Path
) -> None:
    run(tmp_path, CheckpointConfig(every=every, keep_last=99, by=None))
    assert saved(tmp_path) == expected


@pytest.mark.parametrize(("mode", "kept"), [("min", [2, 3]), ("max", [1, 4])])
def test_the_best_are_kept_besides_the_newest(mode: str, kept: list[int], tmp_path: Path) -> None:
    policy = CheckpointConfig(every="5 epochs", keep_last=1, best=2, mode=mode)
    result = run(tmp_path, policy, (4.0, 1.0, 2.0, 5.0), max_epochs=4)
    assert saved(tmp_path) == sorted({*(5 * epoch for epoch in kept), 20})
    assert Path(result.best_checkpoint).name == f"update-{(10 if mode == 'min' else 20):08d}"


def test_a_validation_that_gives_no_number_keeps_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, CheckpointConfig(every=None, best=1), (float("nan"), float("nan")))
    assert result.best_checkpoint is None


def test_one_checkpoint_serves_both_purposes(tmp_path: Path) -> None:
    run(tmp_path, CheckpointConfig(every="1 epoch", keep_last=1, best=1), (2.0, 1.0))
    assert saved(tmp_path) == [10]


def test_a_metric_that_was_asked_for_and_is_not_there_is_an_error_that_lists_those_that_are(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"'validation/los'.*Did you mean 'validation/loss'"):
        run(tmp_path, CheckpointConfig(by="validation/los"), (1.0, 2.0))


def test_the_default_policy_does_without_a_metric_that_is_not_there(tmp_path: Path) -> None:
    class Silent(Regression):
        def validation_step(self, batch: Any) -> dict[str, Any] | None:
            return None

    result = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path).fit(Silent(), pairs(10), pairs(2))
    assert result.best_checkpoint is None
    assert saved(tmp_path) == [5, 10]


def test_a_run_that_somebody_stops_is_saved_where_it_stopped(tmp_path: Path) -> None:
    stop = LambdaCallback(on_step_end=lambda run: run.stop("enough") if run.progress.updates == 3 else None)
    run(tmp_path, CheckpointConfig(every="1 epoch", by=None), callbacks=[stop])
    assert saved(tmp_path) == [3]


def test_a_run_that_fails_keeps_what_was_saved_and_leaves_no_finished_weights(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        if run.progress.updates == 4:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        run(
            tmp_path, CheckpointConfig(every="2 steps", by=None), callbacks=[LambdaCallback(on_step_end=fail)]
        )
    assert saved(tmp_path) == [2]
    assert not (tmp_path / "model.safetensors").exists()


def test_without_checkpoints_a_run_directory_holds_none(tmp_path: Path) -> None:
    result = run(tmp_path, False, loggers="csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.csv"]
    assert result.model_path is None


def test_saving_at_an_interval_goes_on_after_a_resume(tmp_path: Path) -> None:
    policy = CheckpointConfig(every="4 steps", keep_last=99, by=None)
    run(tmp_path, policy, max_epochs=1)
    trainer = quiet(max_epochs=3, checkpoint=policy, run_dir=tmp_path)
    trainer.fit(Regression(), pairs(10), resume="auto")
    assert saved(tmp_path) == [4, 5, 8, 12, 15]
