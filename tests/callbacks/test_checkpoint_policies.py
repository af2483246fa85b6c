"""Several policies of checkpoints in one run: what each keeps, and that one save serves them all."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.callbacks.test_checkpoint import saved
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import CheckpointConfig, ConfigError, Trainer
from drivetrain.checkpoint import CheckpointManager, DirectoryCheckpointIO
from drivetrain.checkpoint.saving.index import read_index

LOSS, ACCURACY = "validation/loss", "validation/accuracy"

ACCURATE = CheckpointConfig(every=None, keep_last=0, best=2, by=ACCURACY, mode="max")
LOWEST = CheckpointConfig(every=None, keep_last=0, best=1, by=LOSS)
ROLLING = CheckpointConfig(every="3 steps", keep_last=2, best=0)
FOR_EVER = CheckpointConfig(every="2 epochs", keep_last=None, best=0)
ALL = [ROLLING, ACCURATE, LOWEST, FOR_EVER]

LOSSES = (5.0, 1.0, 3.0, 2.0, 4.0, 6.0)
ACCURACIES = (0.5, 0.2, 0.9, 0.1, 0.7, 0.3)


class Planted(Regression):  # validations with known values, by the epoch
    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        epoch = self.progress.steps // 5 - 1
        return {"loss": torch.tensor(LOSSES[epoch]), "accuracy": torch.tensor(ACCURACIES[epoch])}


def fit(run_dir: Path, policies: Any, resume: str | None = None, **options: Any) -> Any:
    trainer = quiet(**{"max_epochs": 6, **options}, checkpoint=policies, run_dir=run_dir)
    return trainer.fit(Planted(), pairs(10), pairs(4), resume=resume)


def kept(run_dir: Path) -> dict[int, tuple[set[str], set[str]]]:
    entries = read_index(str(run_dir / "checkpoints")) or []
    return {entry.step: (set(entry.resume), set(entry.best)) for entry in entries}


KEPT = {  # what the four policies keep of the whole run
    10: ({"2 epochs"}, {LOSS}),
    15: (set(), {ACCURACY}),
    20: ({"2 epochs"}, set()),
    25: (set(), {ACCURACY}),
    27: ({"3 steps"}, set()),
    30: ({"3 steps", "2 epochs", ""}, set()),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_policy_keeps_its_own(tmp_path: Path, asynchronous: bool, monkeypatch: Any) -> None:
    written: list[str] = []
    save = DirectoryCheckpointIO.save

    def noted(self: Any, path: str, snapshot: Any) -> None:
        written.append(Path(path).name)
        save(self, path, snapshot)

    monkeypatch.setattr(DirectoryCheckpointIO, "save", noted)
    policies = [dataclasses.replace(each, asynchronous=asynchronous) for each in ALL]
    result = fit(tmp_path, policies)
    assert kept(tmp_path) == KEPT
    assert saved(tmp_path) == [*KEPT]
    assert len(written) == len(set(written)), "a step was written twice"
    assert [int(name.split("-")[1]) for name in written] == sorted({*range(3, 31, 3), 5, 10, 15, 20, 25})
    path = {number: str(tmp_path / "checkpoints" / f"step-{number:08d}") for number in KEPT}
    assert result.best_checkpoints == {ACCURACY: path[15], LOSS: path[10]}
    assert result.best_checkpoint == path[15]


@pytest.mark.parametrize("stop", [7, 10])
def test_resumed_run_keeps_what_the_undisturbed_one_keeps(tmp_path: Path, stop: int) -> None:
    fit(tmp_path / "straight", ALL)
    fit(tmp_path / "parts", ALL, max_steps=stop)
    fit(tmp_path / "parts", ALL, resume="auto")
    assert_same(tmp_path / "parts", tmp_path / "straight")


def assert_same(one: Path, other: Path) -> None:
    assert kept(one) == kept(other) == KEPT
    assert saved(one) == [*KEPT]
    task, straight = Planted(), Planted()
    task.load_weights(one)
    straight.load_weights(other)
    assert weights(task) == weights(straight)


def test_resume_under_other_policies(tmp_path: Path) -> None:
    fit(tmp_path, CheckpointConfig(every="1 epoch", keep_last=2, best=1, by=LOSS), max_epochs=3)
    assert kept(tmp_path) == {10: ({"1 epoch"}, {LOSS}), 15: ({"1 epoch", ""}, set())}
    # More policies: what no interval of now has made counts for the first.
    fit(tmp_path, [ROLLING, ACCURATE, LOWEST], max_epochs=5, resume="auto")
    assert kept(tmp_path) == {
        10: (set(), {LOSS}),
        20: (set(), {ACCURACY}),
        24: ({"3 steps"}, set()),
        25: ({""}, {ACCURACY}),
    }
    # Another metric alone: the best of before stay until a better one takes their places.
    by = CheckpointConfig(every=None, keep_last=1, best=3, by="train/loss")
    fit(tmp_path, by, max_epochs=6, resume="auto")
    assert kept(tmp_path) == {10: (set(), {LOSS}), 20: (set(), {ACCURACY}), 30: ({""}, {"train/loss"})}


def test_best_is_asked_for_by_its_metric_where_several_rank(tmp_path: Path) -> None:
    result = fit(tmp_path, ALL)
    for trainer in (quiet(run_dir=tmp_path, checkpoint=ALL), quiet(run_dir=tmp_path, checkpoint=True)):
        a, b = (f"'best:{by}'" for by in (ACCURACY, LOSS))
        with pytest.raises(ConfigError, match=f"ranks by 2 metrics. Give one of ({a}, {b}|{b}, {a})"):
            trainer.validate(Planted(), pairs(2), checkpoint="best")
        with pytest.raises(ConfigError, match="Did you mean 'best:validation/loss'"):
            trainer.validate(Planted(), pairs(2), checkpoint="best:validation/los")
        for by, path in result.best_checkpoints.items():
            task, expected = Planted(), Planted()
            trainer.predict(task, pairs(2), checkpoint=f"best:{by}")
            expected.load_weights(path)
            assert weights(task) == weights(expected)


def test_policies_that_do_not_go_together_are_refused() -> None:
    def given(*others: Any, **changes: Any) -> Any:
        policies = [ROLLING, dataclasses.replace(LOWEST, **changes)] if changes else list(others)
        return lambda: Trainer(max_epochs=1, checkpoint=policies)

    maximum = dataclasses.replace(LOWEST, mode="max")
    table: dict[str, tuple[Any, ...]] = {
        "none": (given(), "empty list", "checkpoint=False saves none"),
        "asynchronous": (given(asynchronous=True), "asynchronous=False in the first"),
        "directory": (given(directory="x"), "directory=None in the first", "number 2"),
        "number": (given(ROLLING, CheckpointConfig()), "number 2", "how many it keeps"),
        "mode": (given(LOWEST, maximum), "'validation/loss' with mode='"),
    }
    assert_refused(ConfigError, table)
    assert Trainer(max_epochs=1, checkpoint=[CheckpointConfig()]).checkpoint == CheckpointConfig()


def test_nothing_is_looked_up_by_names(tmp_path: Path) -> None:
    named = CheckpointConfig(every="5 steps", keep_last=None, best=1, by=LOSS)
    result = fit(tmp_path, named, max_epochs=3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == [f"step-000000{each}" for each in ("05", "10", "15")]
    assert Path(result.best_checkpoint).name == names[1]
    assert fit(tmp_path, named, max_epochs=4, resume="auto").progress.steps == 20
    (tmp_path / "checkpoints" / names[1]).rename(tmp_path / "checkpoints" / "my-favourite")  # by a user
    with heard() as told:
        found = CheckpointManager(str(tmp_path / "checkpoints"), named)
        assert found.best() == str(tmp_path / "checkpoints" / "my-favourite")
        assert str(found.load_latest()[0]).endswith("step-00000020")
    assert [text for text in told if "is in the index, but not on the disk" in text]


def restored(folder: Path, strategy: str) -> tuple[Any, Any]:
    task, best = Planted(), dataclasses.replace(ACCURATE, restore_best=True, keep_last=1)
    trainer = quiet(checkpoint=best, run_dir=folder, max_epochs=6, strategy=strategy)
    return trainer.fit(task, pairs(10), pairs(4)), weights(task)


def _end_of_rank(folder: Path) -> bool:
    result, ended = restored(folder, "fsdp")
    best, last = map(Planted.from_checkpoint, (result.best_checkpoint, result.last_checkpoint))
    return ended == weights(best) != weights(last)


def test_a_fit_ends_with_the_best_weights(tmp_path: Path) -> None:
    result, ended = restored(tmp_path / "one", "cpu")
    assert (result.best_value, result.metrics[ACCURACY]) == pytest.approx((0.9, 0.3))
    best, last = map(Planted.from_checkpoint, (result.best_checkpoint, result.last_checkpoint))
    finished = Planted()
    finished.load_weights(result.model_path)
    assert ended == weights(best) == weights(finished) != weights(last)
    assert all(on_two_ranks(_end_of_rank, tmp_path / "two"))
    twice = [dataclasses.replace(each, restore_best=True) for each in (ACCURATE, LOWEST)]
    assert_refused(
        ConfigError,
        {
            "none kept": (lambda: CheckpointConfig(best=0, restore_best=True), "give best=1"),
            "twice": (lambda: fit(tmp_path, twice), "one of them"),
        },
    )
