"""Fits whose accumulation and batch size change during the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, Run
from drivetrain.core.calendar import Trigger
from drivetrain.core.intervals import Every
from drivetrain.trainer.assembly import planned_length
from drivetrain.trainer.plan.counts import Epoch, firings

SAMPLES = 23


class Numbered(Dataset[Any]):  # features and targets, with the sample's number; those of `bad` are NaN
    def __init__(self, count: int = SAMPLES, bad: tuple[int, ...] = ()) -> None:
        self.features, self.targets = pairs(count).dataset.tensors  # type: ignore[attr-defined]
        self.features[list(bad)] = torch.nan

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.features[index], self.targets[index], index


# The numbers in each window by epoch, and whether it was the last; and when validations were.
class Seen(Callback):
    def __init__(self) -> None:
        self.windows: list[tuple[int, list[list[int]], bool]] = []
        self.validated: list[int] = []
        self.length: Any = None

    def on_fit_start(self, run: Run) -> None:
        self.length = run.length

    def on_step_start(self, run: Run) -> None:
        numbers = [[] if each.is_placeholder else each.batch[2].tolist() for each in run.window.micro_batches]
        self.windows.append((run.progress.epoch, numbers, run.window.last))

    def on_evaluation_end(self, run: Run) -> None:
        self.validated.append(run.progress.steps)

    def sizes(self, epoch: int | None = None) -> list[list[int]]:
        return [[len(each) for each in window] for at, window, _ in self.windows if epoch in (None, at)]

    def order(self, epoch: int) -> list[int]:
        return [n for at, window, _ in self.windows if at == epoch for batch in window for n in batch]


def fitted(*, resume: str | None = None, data: Any = None, **options: Any) -> tuple[Seen, Regression, Any]:
    seen, trained = Seen(), options.pop("task", None)
    trained = trained or Regression(OptimizerConfig("adamw", lr=0.05, schedule="cosine"), dropout=0.2)
    callbacks = [seen, *options.pop("callbacks", ())]
    validation = Numbered(4) if "validate_every" in options else None
    trainer = quiet(callbacks=callbacks, **{"batch_size": 2, **options})
    return seen, trained, trainer.fit(trained, data or Numbered(), validation, resume=resume)


BY_EPOCHS: dict[str, Any] = {"gradient_accumulation_steps": {0: 4, "1 epoch": 2, "2 epochs": 1}}
BY_STEPS: dict[str, Any] = {"batch_size": {0: 1, 3: 4, 8: 6}}
BOTH: dict[str, Any] = {
    "batch_size": {0: 1, 3: 2, 12: 3},
    "gradient_accumulation_steps": {0: 4, "1 epoch": 2},
}
SCHEDULES: list[dict[str, Any]] = [
    BY_EPOCHS,
    BY_STEPS,
    BOTH,
    {"gradient_accumulation_steps": {0: 1, "7 samples": 2, "30 samples": 3}},
    {"batch_size": {0: 2, "9 samples": 3, "40 samples": 7}},
    {"batch_size": {0: 1, 3: 2, 12: 3}, "limit_train_batches": 7},
]


def test_accumulation_by_epochs_and_batch_size_by_steps_make_their_windows() -> None:
    seen, _, result = fitted(max_epochs=3, **BY_EPOCHS)
    assert [[len(each) for each in seen.sizes(epoch)] for epoch in range(3)] == [[4] * 3, [2] * 6, [1] * 12]
    assert [last for *_, last in seen.windows] == [number in (2, 8, 20) for number in range(21)]
    assert seen.length.steps == result.progress.steps == 21
    assert (seen.length.steps_per_epoch, seen.length.gradient_accumulation_steps) == (None, 4)
    seen, _, result = fitted(max_epochs=2, **BY_STEPS)
    assert seen.sizes(0) == [[1], [1], [1], [4], [4], [4], [4], [4]]
    assert seen.sizes(1) == [[6], [6], [6], [5]]
    assert seen.length.steps == result.progress.steps == 12


def test_every_schedule_reads_the_same_order_and_its_length_is_the_one_made() -> None:
    plain, _, _ = fitted(max_epochs=3)
    for options in SCHEDULES:
        seen, _, result = fitted(max_epochs=3, **options)
        for epoch in range(3):
            order = seen.order(epoch)
            assert order == plain.order(epoch)[: len(order)], options
            assert sorted(order) == list(range(SAMPLES)) or "limit_train_batches" in options
        assert seen.length.steps == result.progress.steps == len(seen.windows), options


@pytest.mark.heavy("a resume after each step")
@pytest.mark.parametrize(("workers", "options"), [(0, BY_EPOCHS), (0, BOTH), (2, BY_STEPS)])
def test_a_scheduled_fit_resumed_after_any_step_is_bitwise_the_uninterrupted_one(
    workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {**options, "max_epochs": 3, "num_workers": workers}
    policy = CheckpointConfig(every="1 step", keep_last=None, best=0, by=None)
    whole, expected, _ = fitted(run_dir=tmp_path, checkpoint=policy, **options)
    found = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(found) == len(whole.windows)
    for path in found[2:9:3] if workers else found[:-1]:  # each starts workers anew
        seen, trained, _ = fitted(resume=str(path), **options)
        assert seen.windows == whole.windows[int(path.name.rpartition("-")[2]) :]
        assert weights(trained) == weights(expected)


def test_a_plan_counts_what_is_due_after_each_step_of_every_schedule() -> None:
    for options in ({"gradient_accumulation_steps": 3}, *SCHEDULES):
        settings = quiet(**{"batch_size": 2, "max_epochs": 3.5, **options})
        epoch = Epoch(settings, Regression(), Numbered())
        length = planned_length(settings, epoch.feed, 1)
        for every, how in (
            (3, {"ends_epochs": True}),
            (1, {"first_step": True}),
            ("0.3 epochs", {"first_step": True}),
            ("0.5 epochs", {"begins": Every("1.5 epochs")}),
            ("40 samples", {"begins": Every(5)}),
        ):
            trigger = Trigger(Every(every), length.calendar, **how)
            found, after = firings(trigger, epoch, length), map(epoch.after, range(1, length.steps + 1))
            due = [at.steps for at in after if trigger.due(at, not at.epoch_steps)]
            assert (found.times, found.first, found.last) == (len(due), due[0], due[-1]), (options, every)


def test_the_gradient_of_each_scheduled_window_is_that_of_its_samples() -> None:
    seen, trained, _ = fitted(task=Regression(OptimizerConfig("sgd", lr=0.05)), max_epochs=2, **BOTH)
    plain, data = Regression(), Numbered()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _, window, _ in seen.windows:
        numbers = [number for batch in window for number in batch]
        optimizer.zero_grad()
        plain.loss(plain(data.features[numbers]), (None, data.targets[numbers])).backward()
        optimizer.step()
    torch.testing.assert_close(trained.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_parts_of_an_epoch_and_intervals_follow_the_steps_of_each_epoch() -> None:
    for max_epochs, steps, last in ((1.5, 6, [2, 2, 2]), (2.5, 15, [1] * 6), (0.5, 2, [4, 4])):
        seen, _, result = fitted(max_epochs=max_epochs, **BY_EPOCHS)
        assert (seen.length.steps, result.progress.steps) == (steps, steps)
        assert [len(each) for each in seen.sizes(result.progress.epoch)] == last
    half: Any = {"max_epochs": 3, "validate_every": "0.5 epochs"}
    assert fitted(**half, **BY_EPOCHS)[0].validated == [2, 3, 6, 9, 15, 21]  # of 3, 6 and 12 steps


def test_a_skipped_step_moves_no_point_of_a_schedule() -> None:
    options: dict[str, Any] = {"batch_size": {0: 1, 24: 3}, "on_nonfinite": "skip", "max_epochs": 2}
    seen, _, result = fitted(data=Numbered(bad=(3, 8)), **options)
    assert result.progress.skipped == 4
    assert [size for (size,) in seen.sizes()] == [1] * 24 + [3] * 7 + [1]


def part(folder: Path, resume: str | None = None, **options: Any) -> Any:
    """One fit without dropout; its weights, windows, and the steps that it made and had planned."""
    task = Regression(OptimizerConfig("adamw", lr=0.05))
    seen, _, result = fitted(task=task, run_dir=folder, checkpoint=True, resume=resume, **options)
    flat = torch.cat([each.detach().flatten() for each in task.parameters()]).tolist()
    return flat, seen.windows, result.progress.steps, seen.length.steps


def on_a_rank(folder: Path, options: dict[str, Any]) -> Any:
    straight = part(folder / "straight", max_epochs=3, **options)
    part(folder / "parts", max_epochs=1.5, **options)
    part(folder / "fewer", max_steps=3, **options)
    return straight, part(folder / "parts", "auto", max_epochs=3, **options)


def test_two_ranks_read_each_sample_once_and_resume_bitwise_also_on_one(tmp_path: Path) -> None:
    options = {**BY_STEPS, "strategy": "ddp", "devices": 2}
    (straight, resumed), (other, other_resumed) = on_two_ranks(on_a_rank, tmp_path, options)
    assert straight[0] == resumed[0] == other[0] == other_resumed[0]
    assert straight[2] == straight[3] == resumed[2]
    windows = [*straight[1], *other[1]]
    for epoch in range(3):
        seen = [n for at, window, _ in windows if at == epoch for batch in window for n in batch]
        assert sorted(seen) == list(range(SAMPLES))
    # As one process with batches of both, for such a schedule is one of steps.
    alone = {at: 2 * each for at, each in BY_STEPS["batch_size"].items()}
    flat = part(tmp_path / "alone", max_epochs=3, batch_size=alone)[0]
    assert straight[0] == pytest.approx(flat, abs=1e-6)
    # On one process the rest of the epoch is read once.
    with warned("samples per step, the checkpoint's had"):
        rest = part(tmp_path / "fewer", "auto", max_epochs=2, **BY_STEPS)
    read = [*straight[1][:3], *other[1][:3], *(each for each in rest[1] if each[0] == 0)]
    assert sorted(n for _, window, _ in read for batch in window for n in batch) == list(range(SAMPLES))
