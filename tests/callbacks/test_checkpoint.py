"""When checkpoints are saved in a run, and what is kept."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fault_kinds import Killed
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import CheckpointConfig, CheckpointError, ConfigError, LambdaCallback, OptimizerConfig
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.storage.schemes import file_system

NAN, INF = math.nan, math.inf


def saved(run_dir: Path) -> list[int]:  # the steps of the checkpoints that are there
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").glob("step-*"))


def kept(run_dir: Path) -> dict[str, list[int]]:
    entries = read_index(str(run_dir / "checkpoints")) or []
    return {
        "resume points": [entry.step for entry in entries if entry.resume],
        "best": [entry.step for entry in entries if entry.best],
    }


# A run of 5 steps an epoch; `losses` are those of its validations.
def run(run_dir: Path, policy: Any, losses: Any = (), resume: str | None = None, **options: Any) -> Any:
    left = list(losses)
    task = variant(validation_step=lambda self, batch: torch.tensor(left.pop(0)))()
    trainer = quiet(**{"max_epochs": 2, **options, "checkpoint": policy, "run_dir": run_dir})
    return trainer.fit(task, pairs(10), pairs(2) if losses else None, resume=resume)


def counted(run_dir: Path, policy: CheckpointConfig, *callbacks: Any, resume: str | None = None) -> None:
    """A run of ten steps in two epochs, each of 1000 seconds; after those of one, 2, 4, 6, 8, 9 samples."""

    def pass_time(run: Any) -> None:
        run.origin -= 1000

    watch = [LambdaCallback(on_step_end=pass_time), *callbacks]
    trainer = quiet(max_epochs=2, checkpoint=policy, run_dir=run_dir, callbacks=watch)
    trainer.fit(Regression(), pairs(9), resume=resume)


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (None, []),
        ("4 steps", [4, 8]),
        ("1 epoch", [5, 10]),
        ("0.4 epochs", [2, 4, 7, 9]),
        ("7 samples", [4, 8]),
        ("2600 seconds", [3, 6, 8]),
    ],
)
def test_every_saves_when_the_interval_ends_also_after_a_resume(every: Any, due: Any, tmp_path: Path) -> None:
    policy = CheckpointConfig(every=every, keep_last=99, by=None)
    counted(tmp_path, policy)
    assert saved(tmp_path) == sorted({*due, 10})
    assert kept(tmp_path) == {"resume points": saved(tmp_path), "best": []}
    for at in (4, 5):
        folder = tmp_path / str(at)
        stop = LambdaCallback(on_step_end=lambda run, at=at: at == run.progress.steps and run.stop("now"))
        counted(folder, policy, stop)
        assert saved(folder) == sorted({*(each for each in due if each < at), at})
        counted(folder, policy, resume="auto")
        assert saved(folder) == sorted({*due, at, 10})


def test_keep_last_keeps_as_many_resume_points_and_at_least_the_newest(tmp_path: Path) -> None:
    for keep_last, there in ((0, [10]), (1, [10]), (2, [9, 10]), (4, [3, 6, 9, 10])):
        addresses: list[str] = []
        note = LambdaCallback(on_checkpoint_saved=lambda run, to=addresses: to.append(run.last_checkpoint))
        folder = tmp_path / str(keep_last)
        policy = CheckpointConfig(every="3 steps", keep_last=keep_last, by=None)
        result = run(folder, policy, callbacks=[note])
        assert saved(folder) == there
        assert kept(folder)["resume points"] == there[len(there) - keep_last :]
        assert [Path(each).name for each in addresses] == [f"step-{at:08d}" for at in (3, 6, 9, 10)]
        assert result.last_checkpoint == addresses[-1]  # the end is saved too


@pytest.mark.parametrize(
    ("best", "mode", "losses", "bests"),
    [
        (2, "min", (4.0, 1.0, 2.0, 5.0), [3, 2]),
        (2, "max", (4.0, 1.0, 2.0, 5.0), [1, 4]),
        (1, "min", (NAN, 2.0, NAN, 1.0), [4]),
        (1, "max", (1.0, 2.0, 2.0, 1.0), [2]),
        (2, "max", (-INF, NAN, 1.0, INF), [3, 4]),
        (0, "min", (4.0, 1.0, 2.0, 5.0), []),
    ],
)
# `bests` are epochs, the best last.
def test_best_by_mode(best: int, mode: str, losses: Any, bests: list[int], tmp_path: Path) -> None:
    policy = CheckpointConfig(every=None, keep_last=1, best=best, mode=mode)
    result = run(tmp_path, policy, losses, max_epochs=4, on_nonfinite="skip")
    assert saved(tmp_path) == sorted({*(5 * epoch for epoch in bests), 20})
    assert kept(tmp_path) == {"resume points": [20], "best": sorted(5 * epoch for epoch in bests)}
    path = tmp_path / "checkpoints" / f"step-{5 * bests[-1]:08d}" if bests else None
    assert result.best_checkpoint == (path and str(path))


def test_best_is_judged_after_each_validation_and_no_other_is_written(tmp_path: Path) -> None:
    written: list[int] = []
    note = LambdaCallback(on_checkpoint_saved=lambda run: written.append(run.progress.steps))
    policy = CheckpointConfig(every="1 epoch", keep_last=1, best=2)
    run(tmp_path, policy, (1.0, 5.0, 2.0, 4.0, 3.0), validate_every="2 steps", callbacks=[note])
    assert written == [2, 4, 5, 6, 10]
    assert saved(tmp_path) == [2, 6, 10]
    assert kept(tmp_path) == {"resume points": [10], "best": [2, 6]}
    run(tmp_path / "both", CheckpointConfig(every="1 epoch", keep_last=1, best=1), (2.0, 1.0))
    assert saved(tmp_path / "both") == [10]  # one checkpoint serves both purposes


def test_best_of_a_resumed_run_has_to_beat_what_was_best_before(tmp_path: Path) -> None:
    policy = CheckpointConfig(keep_last=1, best=1)
    run(tmp_path, policy, (1.0, 3.0), max_epochs=2)
    run(tmp_path, policy, (2.0, 1.0), max_epochs=4, resume="auto")
    assert kept(tmp_path) == {"resume points": [20], "best": [5]}
    run(tmp_path, policy, (0.5,), max_epochs=5, resume="auto")
    assert saved(tmp_path) == [25]


def test_by_a_metric_that_is_not_there_ends_the_run_saved(tmp_path: Path) -> None:
    listed = r"'val_loss'.*Did you mean 'validation/loss'\? Allowed: 'train/loss', 'validation/.*by=None"
    with pytest.raises(ConfigError, match=listed):
        run(tmp_path, CheckpointConfig(every="2 steps", by="val_loss"), (1.0, 2.0), log_every=1)
    assert saved(tmp_path) == [4, 5]  # the validation was after the fifth step
    policy = CheckpointConfig(every="2 steps", by="validation/loss")
    assert run(tmp_path, policy, (1.0, 2.0), log_every=1, resume="auto").progress.steps == 10


def learn(run_dir: Path, by: str, losses: list[float], **options: Any) -> Any:
    left = list(losses)
    task = variant(training_step=lambda self, batch: left.pop(0) + 0.0 * self(batch[0]).sum())()
    policy = CheckpointConfig(**{"every": None, "best": 1, "by": by, **options.pop("policy", {})})
    return quiet(checkpoint=policy, run_dir=run_dir, **options).fit(task, pairs(10))


def test_by_a_metric_of_training_ranks_at_each_log_point_and_the_end(tmp_path: Path) -> None:
    result = learn(tmp_path / "1", "train/loss", [5.0, 3.0, 1.0, 2.0, 4.0, 6.0], max_steps=6, log_every=1)
    assert kept(tmp_path / "1") == {"resume points": [6], "best": [3]}
    assert Path(result.best_checkpoint).name == "step-00000003"
    result = learn(tmp_path / "2", "train/loss", [5.0, 5.0, 1.0], max_steps=3, log_every=2)
    assert kept(tmp_path / "2") == {"resume points": [3], "best": [3]}
    assert result.best_checkpoint == result.last_checkpoint
    losses = [9.0] * 5 + [1.0, 9.0, 1.0, 9.0, 1.0] + [5.0] * 5  # the second epoch has the least mean
    for options in ({}, {"log_every": "1 epoch"}):  # once per epoch if the log interval is longer
        folder = tmp_path / f"epochs {len(options)}"
        result = learn(folder, "train/loss", losses, max_epochs=3, **options)
        assert kept(folder) == {"resume points": [15], "best": [10]}
        assert result.metrics["train/loss"] == pytest.approx(5.0)
    policy = CheckpointConfig(every=None, best=9, by="train/loss", mode="max")
    run(tmp_path, policy, (1.0, 2.0), log_every=4)  # with validation too
    assert kept(tmp_path)["best"] == [4, 8, 10]


def test_by_a_metric_that_cannot_come_is_refused_before_training(tmp_path: Path) -> None:
    def fit(by: str, *validation: Any, **options: Any) -> Any:
        policy = CheckpointConfig(every=None, best=1, by=by)
        trainer = quiet(max_steps=6, checkpoint=policy, run_dir=tmp_path, **options)
        return lambda: trainer.fit(Regression(), pairs(10), *validation)

    loaders = {"near": pairs(2), "far": pairs(2)}
    table: dict[str, tuple[Any, ...]] = {
        "never": (fit("validation/accuracy"), "this fit never validates", "'train/loss'"),
        "test": (fit("test/loss"), "'test/loss'", "did you mean 'train/loss'"),
        "no log": (fit("train/loss", log_every=None), "log_every=None"),
        "loader": (fit("validation/fra/loss", loaders), "did you mean 'validation/far/loss'"),
    }
    assert_refused(ConfigError, table)
    assert saved(tmp_path) == []


def test_by_a_value_that_a_callback_logs(tmp_path: Path) -> None:
    score = LambdaCallback(on_epoch_end=lambda run: run.log("score", run.progress.epoch))
    options = {"callbacks": [score], "max_epochs": 3, "log_every": 2, "policy": {"mode": "max"}}
    learn(tmp_path, "score", [1.0] * 15, **options)
    assert kept(tmp_path)["best"] == [15]  # the last epoch's, logged at the end
    with pytest.raises(ConfigError, match=r"'scor', which is not logged. Did you mean 'score'"):
        learn(tmp_path / "other", "scor", [1.0] * 15, **options)
    assert saved(tmp_path / "other") == [10]  # an epoch after the value might have come
    spoiled = learn(tmp_path / "spoiled", "scor", [1.0, float("nan")] * 8, on_nonfinite="stop", **options)
    assert "NaN" in spoiled.stop_reason  # which ended the run before the value might have come
    options["callbacks"] = [LambdaCallback(on_fit_start=lambda run: run.stop("now"))]
    assert learn(tmp_path / "stopped", "score", [], **options).stop_reason == "now"


def test_checkpoints_that_are_not_resumable_hold_the_task_alone(tmp_path: Path) -> None:
    Noted = variant(
        note=3,
        get_extra_state=lambda self: {"note": self.note},
        set_extra_state=lambda self, state: setattr(self, "note", state["note"]),
    )
    sizes, adam = {}, OptimizerConfig("adamw", lr=0.1)
    for resumable in (True, False):
        config = CheckpointConfig(resumable=resumable, asynchronous=not resumable)
        trainer = quiet(run_dir=tmp_path / str(resumable), checkpoint=config, max_steps=2)
        task = Noted(adam)
        task.note = 4
        path = trainer.fit(task, pairs(), pairs(4)).last_checkpoint
        assert path is not None
        sizes[resumable] = sum(each.stat().st_size for each in Path(path).rglob("*.safetensors"))
        loaded = Noted.from_checkpoint(path, optimizer=None)
        assert torch.equal(loaded.line.weight, task.line.weight)
        assert loaded.note == 4
    assert sizes[False] < sizes[True] / 2
    with pytest.raises(CheckpointError, match=r"holds weights only, .*resumable=False"):
        quiet(run_dir=tmp_path / "False", max_steps=2).fit(Noted(adam), pairs(), resume=path)


@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_a_start_removes_what_a_killed_removal_has_left(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{scheme}{tmp_path}"
    policy = CheckpointConfig(every="1 steps", keep_last=2, by=None, directory=place)
    begun: list[set[str]] = []

    def fit(steps: int) -> None:
        look = LambdaCallback(
            on_epoch_start=lambda run: begun.append(set(file_system(place).entries(folder)))
        )
        trainer = quiet(max_steps=steps, checkpoint=policy, run_dir=tmp_path / "run", callbacks=[look])
        trainer.fit(Regression(), pairs(8), resume="auto")

    def kill(self: Any, path: str) -> None:
        raise Killed

    folder = file_system(place).join(place, "checkpoints")
    with monkeypatch.context() as patched:
        patched.setattr(DirectoryCheckpointIO, "remove", kill)
        with pytest.raises(Killed):
            fit(4)
    fit(4)
    assert begun[-1] - {"lock.json"} == {"index.json", "step-00000002", "step-00000003"}
