"""When checkpoints are saved in a run, and what is kept."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, LossSpike, OptimizerConfig
from drivetrain.checkpoint.format import strict_json
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.core.errors import CheckpointError
from drivetrain.testing.distributed import run_distributed

NAN, INF = math.nan, math.inf


def saved(run_dir: Path) -> list[int]:
    """The updates of the checkpoints that are there."""
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("update-*"))


def kept(run_dir: Path) -> dict[str, list[int]]:
    """The updates of the resume points and of the keepers, as the index tells them."""
    entries = read_index(str(run_dir / "checkpoints")) or []
    return {
        "resume points": [entry.update for entry in entries if entry.resume],
        "keepers": [entry.update for entry in entries if entry.keeper],
    }


def run(
    run_dir: Path, policy: Any, losses: tuple[float, ...] = (), resume: str | None = None, **options: Any
) -> Any:
    """A run of 5 updates an epoch; `losses` are those of its validations."""
    left = list(losses)

    class Planted(Regression):
        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(left.pop(0))

    trainer = quiet(**{"max_epochs": 2, **options, "checkpoint": policy, "run_dir": run_dir})
    return trainer.fit(Planted(), pairs(10), pairs(2) if losses else None, resume=resume)


def test_resume_points_are_saved_at_the_interval_and_the_newest_kept(tmp_path: Path) -> None:
    addresses: list[str] = []
    note = LambdaCallback(on_checkpoint_saved=lambda run: addresses.append(Path(run.last_checkpoint).name))
    policy = CheckpointConfig(every="3 steps", keep_last=2, by=None)
    result = run(tmp_path, policy, callbacks=[note])
    assert addresses == [f"update-{number:08d}" for number in (3, 6, 9, 10)]  # the end is saved too
    assert saved(tmp_path) == [9, 10]
    assert Path(result.last_checkpoint).name == "update-00000010"


class Counted(Regression):
    """Three tokens in a sample."""

    def tokens(self, batch: Any) -> int:
        return 3 * len(batch[0])


def pass_time(run: Any) -> None:
    """Make an update take a thousand seconds, by the run's clock."""
    run.origin -= 1000


# Intervals, and when they are due in ten updates of two epochs. The last batch of an epoch is a half one: the
# samples are 2, 4, 6, 8, 9, the tokens 6, 12, 18, 24, 27, and so on.
INTERVALS = [
    (None, []),
    (1, list(range(1, 11))),
    ("4 steps", [4, 8]),
    ("1 epoch", [5, 10]),
    ("2 epochs", [10]),
    ("3 epochs", []),
    ("0.4 epochs", [2, 4, 7, 9]),
    ("7 samples", [4, 8]),
    ("9 samples", [5, 10]),
    ("20 tokens", [4, 8]),
    ("1e2 tokens", []),
    ("2600 seconds", [3, 6, 8]),
    ("55 minutes", [4, 7, 10]),
    ("1.1 hours", [4, 8]),
    (timedelta(minutes=55), [4, 7, 10]),
]


def run_counted(run_dir: Path, policy: CheckpointConfig, *callbacks: Any, resume: str | None = None) -> None:
    time = LambdaCallback(on_step_end=pass_time)
    trainer = quiet(max_epochs=2, checkpoint=policy, run_dir=run_dir, callbacks=[time, *callbacks])
    trainer.fit(Counted(), pairs(9), resume=resume)


@pytest.mark.parametrize(("every", "due"), INTERVALS)
def test_a_resume_point_is_saved_when_the_interval_ends_in_its_unit_and_at_the_end(
    every: Any, due: list[int], tmp_path: Path
) -> None:
    run_counted(tmp_path, CheckpointConfig(every=every, keep_last=99, by=None))
    assert saved(tmp_path) == sorted({*due, 10})
    assert kept(tmp_path) == {"resume points": saved(tmp_path), "keepers": []}


@pytest.mark.parametrize("at", [4, 5])
@pytest.mark.parametrize(("every", "due"), INTERVALS)
def test_a_stop_and_a_resume_move_no_interval(every: Any, due: list[int], at: int, tmp_path: Path) -> None:
    policy = CheckpointConfig(every=every, keep_last=99, by=None)
    stop = LambdaCallback(on_step_end=lambda run: run.stop("enough") if run.progress.updates == at else None)
    run_counted(tmp_path, policy, stop)
    assert saved(tmp_path) == sorted({*(each for each in due if each < at), at})
    run_counted(tmp_path, policy, resume="auto")
    assert saved(tmp_path) == sorted({*due, at, 10})


@pytest.mark.parametrize(
    ("every", "due"), [("2 steps", [2, 4, 6]), ("1 epoch", [3, 6]), ("6 samples", [2, 4, 5, 6])]
)
def test_a_step_is_an_update_whatever_number_of_batches_it_takes(
    every: str, due: list[int], tmp_path: Path
) -> None:
    # Five batches of two samples make three updates: samples 4, 8, 10, and 14, 18, 20.
    run(tmp_path, CheckpointConfig(every=every, keep_last=99, by=None), gradient_accumulation_steps=2)
    assert saved(tmp_path) == due


@pytest.mark.parametrize(
    ("keep_last", "there"), [(0, [10]), (1, [10]), (2, [9, 10]), (3, [6, 9, 10]), (4, [3, 6, 9, 10])]
)
def test_as_many_resume_points_are_kept_as_asked_for_and_at_least_the_newest(
    keep_last: int, there: list[int], tmp_path: Path
) -> None:
    run(tmp_path, CheckpointConfig(every="3 steps", keep_last=keep_last, by=None))
    assert saved(tmp_path) == there
    assert kept(tmp_path)["resume points"] == there[len(there) - keep_last :]


@pytest.mark.parametrize(
    ("best", "mode", "losses", "keepers"),
    [
        (2, "min", (4.0, 1.0, 2.0, 5.0), [3, 2]),
        (2, "max", (4.0, 1.0, 2.0, 5.0), [1, 4]),
        (1, "min", (NAN, 2.0, NAN, 1.0), [4]),
        (1, "max", (NAN, 2.0, NAN, 1.0), [2]),
        (1, "min", (2.0, 1.0, 1.0, 1.0), [2]),
        (1, "max", (1.0, 2.0, 2.0, 1.0), [2]),
        (2, "min", (3.0, NAN, 3.0, 3.0), [3, 1]),
        (2, "max", (-INF, NAN, 1.0, INF), [3, 4]),
        (3, "min", (INF, NAN, NAN, NAN), [1]),
        (3, "min", (NAN, NAN, NAN, NAN), []),
        (0, "min", (4.0, 1.0, 2.0, 5.0), []),
    ],
)
def test_the_best_are_kept_besides_the_newest(
    best: int, mode: str, losses: tuple[float, ...], keepers: list[int], tmp_path: Path
) -> None:
    """`keepers` are epochs, the best last."""
    policy = CheckpointConfig(every=None, keep_last=1, best=best, mode=mode)
    result = run(tmp_path, policy, losses, max_epochs=4, on_nonfinite="skip")
    assert saved(tmp_path) == sorted({*(5 * epoch for epoch in keepers), 20})
    assert kept(tmp_path) == {"resume points": [20], "keepers": sorted(5 * epoch for epoch in keepers)}
    assert result.best_checkpoint == (
        str(tmp_path / "checkpoints" / f"update-{5 * keepers[-1]:08d}") if keepers else None
    )


def test_keepers_are_judged_after_each_validation_and_nothing_is_written_for_those_that_are_none(
    tmp_path: Path,
) -> None:
    written: list[int] = []
    note = LambdaCallback(on_checkpoint_saved=lambda run: written.append(run.progress.updates))
    policy = CheckpointConfig(every="1 epoch", keep_last=1, best=2)
    run(tmp_path, policy, (1.0, 5.0, 2.0, 4.0, 3.0), validate_every="2 steps", callbacks=[note])
    assert written == [2, 4, 5, 6, 10]
    assert saved(tmp_path) == [2, 6, 10]
    assert kept(tmp_path) == {"resume points": [10], "keepers": [2, 6]}


def test_a_resumed_run_has_to_beat_what_was_best_before(tmp_path: Path) -> None:
    policy = CheckpointConfig(keep_last=1, best=1)
    run(tmp_path, policy, (1.0, 3.0), max_epochs=2)
    run(tmp_path, policy, (2.0, 1.0), max_epochs=4, resume="auto")
    assert kept(tmp_path) == {"resume points": [20], "keepers": [5]}
    run(tmp_path, policy, (0.5,), max_epochs=5, resume="auto")
    assert saved(tmp_path) == [25]


@pytest.mark.parametrize(("loader", "best"), [("near", 5), ("far", 10)])
def test_any_metric_of_any_loader_may_rank(loader: str, best: int, tmp_path: Path) -> None:
    left = [0.9, 0.1, 0.5, 0.7, 0.7, 0.3]  # near and far, epoch after epoch

    class Planted(Regression):
        def validation_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": torch.tensor(1.0), "accuracy": torch.tensor(left.pop(0))}

    policy = CheckpointConfig(every=None, by=f"validation/{loader}/accuracy", mode="max")
    trainer = quiet(max_epochs=3, checkpoint=policy, run_dir=tmp_path)
    trainer.fit(Planted(), pairs(10), {"near": pairs(2), "far": pairs(2, seed=1)})
    assert saved(tmp_path) == [best, 15]


def test_one_checkpoint_serves_both_purposes(tmp_path: Path) -> None:
    run(tmp_path, CheckpointConfig(every="1 epoch", keep_last=1, best=1), (2.0, 1.0))
    assert saved(tmp_path) == [10]


@pytest.mark.parametrize(
    ("by", "nearest"),
    [
        ("validation/los", "validation/loss"),
        ("val_loss", "validation/loss"),
        ("validation/Loss", "validation/loss"),
        ("training/loss", "train/loss"),
    ],
)
def test_a_metric_that_is_not_there_ends_the_run_at_the_first_validation_with_everything_saved(
    by: str, nearest: str, tmp_path: Path
) -> None:
    policy = CheckpointConfig(every="2 steps", by=by)
    listed = rf"'{by}'.*Did you mean '{nearest}'\? Allowed: 'train/loss', 'validation/loss'\. .*by=None"
    with pytest.raises(ConfigError, match=listed):
        run(tmp_path, policy, (1.0, 2.0), log_every=1)
    assert saved(tmp_path) == [4, 5]  # the validation was after the fifth update
    policy = CheckpointConfig(every="2 steps", by=nearest)
    assert run(tmp_path, policy, (1.0, 2.0), log_every=1, resume="auto").progress.updates == 10


def learn(run_dir: Path, by: str, losses: list[float], **options: Any) -> Any:
    """A run without validation, of 5 updates an epoch; `losses` are those of its updates."""
    left = list(losses)

    class Planted(Regression):
        def training_step(self, batch: Any) -> Tensor:
            return left.pop(0) + 0.0 * self(batch[0]).sum()

    policy = CheckpointConfig(**{"every": None, "best": 1, "by": by, **options.pop("policy", {})})
    return quiet(checkpoint=policy, run_dir=run_dir, **options).fit(Planted(), pairs(10))


def test_a_metric_of_training_ranks_at_each_log_point(tmp_path: Path) -> None:
    result = learn(tmp_path, "train/loss", [5.0, 3.0, 1.0, 2.0, 4.0, 6.0], max_steps=6, log_every=1)
    assert kept(tmp_path) == {"resume points": [6], "keepers": [3]}
    assert Path(result.best_checkpoint).name == "update-00000003"


@pytest.mark.parametrize("options", [{}, {"log_every": "1 epoch"}])
def test_a_metric_of_training_ranks_once_per_epoch_if_the_log_interval_is_longer(
    options: dict[str, Any], tmp_path: Path
) -> None:
    losses = [9.0] * 5 + [1.0, 9.0, 1.0, 9.0, 1.0] + [5.0] * 5  # the second epoch has the least mean
    result = learn(tmp_path, "train/loss", losses, max_epochs=3, **options)
    assert kept(tmp_path) == {"resume points": [15], "keepers": [10]}
    assert result.metrics["train/loss"] == pytest.approx(5.0)


def test_the_log_point_at_the_end_of_training_ranks_too(tmp_path: Path) -> None:
    result = learn(tmp_path, "train/loss", [5.0, 5.0, 1.0], max_steps=3, log_every=2)
    assert kept(tmp_path) == {"resume points": [3], "keepers": [3]}
    assert result.best_checkpoint == result.last_checkpoint


def test_with_validation_too_a_metric_of_training_ranks_when_it_is_logged(tmp_path: Path) -> None:
    policy = CheckpointConfig(every=None, best=9, by="train/loss", mode="max")
    run(tmp_path, policy, (1.0, 2.0), log_every=4)
    assert kept(tmp_path)["keepers"] == [4, 8, 10]


@pytest.mark.parametrize("every", ["1 epoch", "2 steps"])
def test_a_misspelt_metric_of_training_ends_the_run_at_the_first_log_point_with_everything_saved(
    every: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"by 'train/los', .*Did you mean 'train/loss'\?.*by=None"):
        learn(tmp_path, "train/los", [1.0] * 9, max_epochs=2, log_every=3, policy={"every": every})
    assert saved(tmp_path)[-1] == 3
    result = learn(tmp_path / "next", "train/loss", [1.0] * 3, max_steps=3)
    assert result.best_checkpoint is not None


@pytest.mark.parametrize(
    ("by", "options", "message"),
    [
        ("validation/accuracy", {}, r"at each validation, but this fit never validates.*'train/loss'"),
        ("test/loss", {}, r"'test/loss', which a fit does not give. Did you mean 'train/loss'"),
        (
            "train/loss",
            {"log_every": None},
            "log_every=None logs nothing during training. Give the Trainer a",
        ),
    ],
)
def test_a_metric_that_cannot_come_is_refused_before_training(
    by: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        learn(tmp_path, by, [], max_steps=6, **options)
    assert saved(tmp_path) == []


def test_a_loader_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    policy = CheckpointConfig(by="validation/fra/loss")
    trainer = quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no validation loader gives. Did you mean 'validation/far/loss'"):
        trainer.fit(Regression(), pairs(10), {"near": pairs(2), "far": pairs(2)})
    assert saved(tmp_path) == []


class Score:
    """A callback that logs a value of its own after each epoch."""

    def on_epoch_end(self, run: Any) -> None:
        run.log("score", run.progress.epoch)


def test_a_value_that_a_callback_logs_ranks_too(tmp_path: Path) -> None:
    options = {"callbacks": [Score()], "max_epochs": 3, "log_every": 2, "policy": {"mode": "max"}}
    learn(tmp_path, "score", [1.0] * 15, **options)
    assert kept(tmp_path)["keepers"] == [15]  # the last epoch's, logged at the end
    with pytest.raises(ConfigError, match=r"'scor', which is not logged. Did you mean 'score'"):
        learn(tmp_path / "other", "scor", [1.0] * 15, **options)
    assert saved(tmp_path / "other") == [10]  # an epoch after the value might have come


def test_a_value_that_never_came_is_an_error_after_the_last_save(tmp_path: Path) -> None:
    options = {"callbacks": [Score()], "max_epochs": 1}
    with pytest.raises(ConfigError, match="'scor', which is not logged"):
        learn(tmp_path, "scor", [1.0] * 5, **options)
    assert saved(tmp_path) == [5]
    assert (tmp_path / "model.safetensors").exists()


def rank_on_two(run_dir: Path) -> tuple[str, str]:
    class Uneven(Regression):
        def training_step(self, batch: Any) -> Tensor:
            return self(batch[0]).square().mean()

    policy = CheckpointConfig(every=None, best=1, by="train/loss")
    trainer = quiet(strategy="ddp", devices=2, checkpoint=policy, run_dir=run_dir, max_steps=3, log_every=1)
    result = trainer.fit(Uneven(), pairs(12))
    return str(result.best_checkpoint), str(result.last_checkpoint)


def test_all_ranks_keep_the_same_best_by_a_metric_of_training(tmp_path: Path) -> None:
    first, second = run_distributed(rank_on_two, tmp_path, world_size=2)
    assert first == second
    assert Path(first[0]).is_dir()


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "ledger.jsonl", "metrics.csv"]
    assert result.model_path is None


def test_saving_at_an_interval_goes_on_when_a_finished_run_is_made_longer(tmp_path: Path) -> None:
    policy = CheckpointConfig(every="4 steps", keep_last=99, by=None)
    run(tmp_path, policy, max_epochs=1)
    run(tmp_path, policy, max_epochs=3, resume="auto")
    assert saved(tmp_path) == [4, 5, 8, 12, 15]


def test_more_parameters_than_a_checkpoint_can_describe_end_the_run_after_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    callback = LambdaCallback(on_step_end=lambda run: seen.append(run.progress.updates))
    policy = CheckpointConfig(every=1000, best=0)
    monkeypatch.setattr(strict_json, "MAX_CONTAINERS", 5)
    with pytest.raises(CheckpointError, match=r"2 trained parameters with 0 entries.*at most 1\."):
        quiet(max_epochs=2, checkpoint=policy, run_dir=tmp_path, callbacks=[callback]).fit(
            Regression(), pairs()
        )
    assert seen == [1]


@pytest.mark.parametrize("extras", [False, True])
def test_checkpoints_that_are_not_resumable_hold_the_task_alone(tmp_path: Path, extras: bool) -> None:
    class Noted(Regression):
        def get_extra_state(self) -> Any:
            return {"note": 3}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    kind = Noted if extras else Regression
    adam = OptimizerConfig("adamw", lr=0.1)
    options: Any = {"max_steps": 2}
    sizes = {}
    for resumable in (True, False):
        config = CheckpointConfig(resumable=resumable, asynchronous=not resumable)
        trainer = quiet(run_dir=tmp_path / str(resumable), checkpoint=config, **options)
        task = kind(adam)
        saved = trainer.fit(task, pairs(), pairs(4)).last_checkpoint
        assert saved is not None
        sizes[resumable] = sum(each.stat().st_size for each in Path(saved).rglob("*.safetensors"))
        loaded = kind.from_checkpoint(saved, optimizer=None)
        assert torch.equal(loaded.line.weight, task.line.weight)
        assert not extras or loaded.note == 3  # type: ignore[attr-defined]
    assert sizes[False] < sizes[True] / 2
    with pytest.raises(
        CheckpointError, match=r"holds weights only, as with CheckpointConfig\(resumable=False"
    ):
        quiet(run_dir=tmp_path / "False", **options).fit(kind(adam), pairs(), resume=saved)


def test_a_roll_back_needs_resumable_checkpoints() -> None:
    policy = CheckpointConfig(resumable=False)
    with pytest.raises(ConfigError, match=r"LossSpike\(action='rollback'\) resumes from a checkpoint"):
        quiet(max_steps=1, checkpoint=policy, callbacks=[LossSpike(action="rollback")])
