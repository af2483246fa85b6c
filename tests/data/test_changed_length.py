"""Datasets that grow or shrink between epochs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from drivetrain import Callback, CheckpointConfig, CheckpointError, DataError, already_split, rank
from drivetrain.core.int_schedule import IntSchedule
from drivetrain.data import Feed, Transfer, as_source
from drivetrain.strategies.ddp import DDP

SIZES = (4, 8, 6)


class Buffer(Dataset[tuple[Tensor, Tensor]]):
    count = SIZES[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.count:
            raise IndexError("list index out of range")
        return torch.full((4,), index / 8), torch.ones(1)


class Stateful(Sampler[int]):
    def __init__(self, data: Buffer) -> None:
        self.data, self.state = data, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Any:
        return iter(torch.randperm(len(self.data), generator=self.state).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.set_state(state["state"])


class Change(Callback):
    def __init__(self, data: Buffer, sizes: Any = SIZES, stop: int | None = None) -> None:
        self.data, self.sizes, self.stop, self.seen = data, sizes, stop, [[], [], []]  # type: ignore[var-annotated]

    def on_epoch_start(self, run: Any) -> None:
        self.data.count = self.sizes[run.progress.epoch]

    def on_step_end(self, run: Any) -> None:
        batches = [each.batch[0] for each in run.window.micro_batches if not each.is_placeholder]
        self.seen[run.progress.epoch] += [round(8 * float(each)) for batch in batches for each in batch[:, 0]]
        if run.progress.steps == self.stop:
            run.stop("for the test")


KINDS: dict[str, Callable[[Buffer], Any]] = {
    "bare": lambda data: data,
    "with replacement": lambda data: DataLoader(data, 2, sampler=RandomSampler(data, replacement=True)),
    "with a state": lambda data: DataLoader(data, 2, sampler=Stateful(data)),
    "workers that stay": lambda data: DataLoader(data, 2, True, num_workers=1, persistent_workers=True),
}


def fit(kind: str, sizes: Any = SIZES, stop: int | None = None, first: int = SIZES[0], **options: Any) -> Any:
    data, task = Buffer(), Regression()
    data.count = first
    change = Change(data, sizes, stop)
    more = {"batch_size": 2} if kind == "bare" else {}
    trainer = quiet(max_epochs=3, callbacks=[change, *options.pop("callbacks", ())], **more, **options)
    trainer.fit(task, KINDS[kind](data), resume="auto" if "run_dir" in options else None)
    return change.seen, weights(task)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_of_the_data_is_asked_for_at_each_epoch_and_the_run_resumes_exactly(
    kind: str, tmp_path: Path
) -> None:
    seen, straight = fit(kind)
    assert [len(each) for each in seen] == list(SIZES)
    if kind != "with replacement":
        assert [sorted(each) for each in seen] == [list(range(size)) for size in SIZES]
    for stop in (4, 6) if kind != "workers that stay" else (4,):  # within an epoch, and between two
        saved: Any = {"checkpoint": CheckpointConfig(every="1 step"), "run_dir": tmp_path / str(stop)}
        before, _ = fit(kind, stop=stop, **saved)
        after, resumed = fit(kind, **saved)
        assert resumed == straight
        assert [[*one, *other] for one, other in zip(before, after, strict=True)] == seen


def test_one_length_of_sequences_holds_for_data_of_any_length() -> None:
    data, lengths = Buffer(), []
    feed = Feed(as_source(data, "training", 1, batch_size=2), Transfer(torch.device("cpu")))
    schedule = IntSchedule("SequenceLength", 3)
    feed.cut(schedule, lambda batch, length: lengths.append(length) or batch, "cut")
    for epoch, data.count in enumerate(SIZES):
        assert [window.last for window in feed.windows(epoch)][-1]
    assert lengths == [3] * (sum(SIZES) // 2)


def test_what_must_keep_its_length_is_refused(tmp_path: Path) -> None:
    saved: Any = {"checkpoint": CheckpointConfig(every="1 step"), "run_dir": tmp_path}
    fit("bare", stop=4, **saved)

    class Late(Callback):
        def on_step_end(self, run: Any) -> None:
            run.callbacks[0].data.count = 1

    assert_refused(
        (DataError, CheckpointError),
        {
            "within an epoch": (
                lambda: fit("bare", (4, 7, 6), **saved),
                *("saved within an epoch", "8 samples", "7 now", "on_epoch_start", "at the end of an epoch"),
            ),
            "groups": (
                lambda: fit("bare", group_by_length=lambda sample: 1),
                *("8 samples in epoch 1", "had 4", "group_by_length"),
            ),
            "a schedule": (
                lambda: fit("bare", gradient_accumulation_steps={0: 1, 3: 2}),
                *("length 8 in epoch 1", "had 4", "Use one number"),
            ),
            "in the middle of an epoch": (
                lambda: fit("bare", callbacks=[Late()]),
                *("had 4 samples as the epoch began and has 1", "between epochs"),
            ),
        },
    )


def on_ranks(split: bool, other: int) -> list[int]:
    data = Buffer()
    change = Change(data, [4, 8 + other * rank(), 6])
    trainer = quiet(strategy=DDP(world_size=2), devices=2, max_epochs=3, callbacks=[change])
    loader = DataLoader(data, 2)
    trainer.fit(Regression(), already_split(loader) if split else loader)
    return [len(each) for each in change.seen]


def test_ranks_follow_a_length_that_changes_on_all_of_them() -> None:
    assert on_two_ranks(on_ranks, False, 0) == [[2, 4, 3]] * 2
    assert on_two_ranks(on_ranks, True, 2) == [[4, 8, 6], [4, 10, 6]]
    with pytest.raises(RuntimeError, match=r"samples on rank . and \d+ on rank . as epoch 1 begins"):
        on_two_ranks(on_ranks, False, 2)
