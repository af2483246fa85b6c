"""From data of any kind to the counted windows that a loop reads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.data.test_sources import Cursor, numbered
from tests.support.messages import heard
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.core.errors import DataError
from drivetrain.core.int_schedule import IntSchedule
from drivetrain.core.progress import Progress
from drivetrain.data import Feed, Measure, Transfer, Window, as_source

CPU, META = torch.device("cpu"), torch.device("meta")


class Plain:  # an iterable of unknown length; counts what is asked of it
    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.asked = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.asked += 1
            yield batch


class SizedCursor(Cursor):  # one that knows its length too
    def __len__(self) -> int:
        return len(self.batches)


def feed(data: Any, *, device: torch.device = CPU, measure: Measure | None = None, **options: Any) -> Feed:
    return Feed(as_source(data, "training", seed=1), Transfer(device), measure, **options)


def shown(windows: Iterator[Window]) -> list[tuple[list[int], bool]]:
    return [([int(each.batch[0, 0]) for each in window.micro_batches], window.last) for window in windows]


KINDS = {
    "list": numbered,
    "unknown length": lambda n: Plain(numbered(n)),
    "own state": lambda n: Cursor(numbered(n)),
}
WINDOWS: tuple[tuple[int, int, int | None, list[tuple[list[int], bool]]], ...] = (
    (1, 1, None, [([0], True)]),
    (3, 1, None, [([0], False), ([1], False), ([2], True)]),
    (4, 2, None, [([0, 1], False), ([2, 3], True)]),
    (5, 2, None, [([0, 1], False), ([2, 3], False), ([4], True)]),
    (2, 8, None, [([0, 1], True)]),
    (5, 2, 3, [([0, 1], False), ([2], True)]),
    (5, 2, 4, [([0, 1], False), ([2, 3], True)]),
    (3, 2, 9, [([0, 1], False), ([2], True)]),
    (3, 2, 0, []),
)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_full_but_for_the_last_which_is_marked(kind: str) -> None:
    for count, accumulation, limit, expected in WINDOWS:
        read = feed(KINDS[kind](count), accumulation=accumulation, limit=limit)
        assert shown(read.windows(0)) == expected, (count, accumulation, limit)
        assert read.calendar.steps_per_epoch in (None, len(expected))


@pytest.mark.parametrize("workers", [0, 1])
def test_indexed_data_is_windowed_from_any_position(workers: int) -> None:
    dataset = TensorDataset(torch.arange(11.0).unsqueeze(1))

    def read(size: int) -> Feed:
        loader = DataLoader(dataset, batch_size=size, shuffle=True, num_workers=workers)
        return feed(loader, accumulation=2)

    whole = list(read(2).windows(1))
    assert [(len(each.micro_batches), each.last) for each in whole] == [(2, False), (2, False), (2, True)]
    used = sum(each.advance for each in whole[0].micro_batches)
    assert used == 4
    rest = [each for window in read(3).windows(1, position=used) for each in window.micro_batches]
    assert [each.samples for each in rest] == [3, 3, 1]
    expected = torch.cat([each.batch[0] for window in whole[1:] for each in window.micro_batches])
    assert torch.equal(torch.cat([each.batch[0] for each in rest]), expected)


@pytest.mark.parametrize("kind", [Cursor, SizedCursor])
def test_data_with_a_state_of_its_own_is_resumed_after_any_window(kind: Any) -> None:
    whole = shown(feed(kind(numbered(7)), accumulation=2).windows(0))
    for done in range(1, len(whole)):
        read = feed(kind(numbered(7)), accumulation=2)
        windows = read.windows(0)
        for _ in range(done):
            next(windows)
        state = read.snapshot()  # as a checkpoint does, after the step and before the next window
        list(windows)
        data = kind(numbered(7))
        resumed = feed(data, accumulation=2)
        resumed.restore(state, 2 * done)
        assert shown(resumed.windows(0, position=2 * done, done=2 * done)) == whole[done:]
        assert data.asked == 7 - 2 * done


def test_tensors_that_disagree_about_the_number_of_samples_are_named_once() -> None:
    graph = {"edges": torch.zeros(2, 7), "nodes": torch.zeros(5, 3), "scale": torch.tensor(1.0)}
    collated = DataLoader([graph] * 4, batch_size=2, collate_fn=lambda samples: samples[0])
    whole = {"edges": torch.zeros(4), "nodes": torch.zeros(4)}
    boxes = [(torch.zeros(2, 3), [{"boxes": torch.zeros(5, 4)}])]  # of each image; they count no samples
    for data, measure, many in (
        ([graph] * 3, Measure(), 1),
        (iter([graph] * 3), Measure(), 1),
        ([whole, graph, whole], Measure(), 1),
        (
            [{"edges": torch.zeros(2), "nodes": torch.zeros(2)}, graph],
            Measure(),
            1,
        ),  # as a table of all batches
        ([graph], Measure(weight=lambda batch: 5), 0),
        (collated, Measure(), 0),
        (boxes, Measure(), 0),
    ):
        with heard("edges: 2, nodes: 5.* 2 samples, by the first tensor, .*loss_weight") as found:
            read = feed(data, measure=measure)
            assert [each.weight for window in read.windows(0) for each in window.micro_batches]
        assert len(found) == many


def test_a_list_of_single_samples_is_named() -> None:
    with heard("entry 1 of each is one number.* DataLoader") as found:
        feed([(torch.zeros(3), number) for number in range(3)])
        feed([(torch.zeros(3), 0.5)] * 3)  # a number for all samples
    assert len(found) == 1


def test_weights_and_tokens_are_counted_on_the_host_batch() -> None:
    measure = Measure(weight=lambda batch: (batch > 0).sum(), tokens=lambda batch: batch.numel() * 3)
    read = feed(numbered(2), device=META, measure=measure)
    found = [each for window in read.windows(0) for each in window.micro_batches]
    assert [(each.weight, each.samples, each.tokens) for each in found] == [(0.0, 2, 6), (2.0, 2, 6)]
    assert all(type(each.weight) is float for each in found)
    assert all(each.batch.device == CPU for each in found), "they are moved when their turn comes"
    measures = None, Measure(weight=on_meta)
    found = [next(feed(numbered(1), measure=each).micro_batches()) for each in measures]
    assert (found[0].weight, found[0].samples, found[0].tokens, found[0].advance) == (2, 2, 0, 1)
    assert isinstance(found[1].weight, Tensor), "one on an accelerator is not waited for"
    assert found[1].weight.device == META


def on_meta(batch: Tensor) -> Tensor:
    return torch.ones((), device=META)


class OwnSize(TensorDataset):
    batch_size = 2


def test_a_bare_dataset_uses_its_own_batch_size_before_the_trainers() -> None:
    for dataset, size in ((OwnSize(torch.ones(8, 1)), 2), (TensorDataset(torch.ones(8, 1)), 4)):
        read = as_source(dataset, "training", seed=0, batch_size=4, shuffle=True)
        assert [samples for _, _, samples in read.batches(0, 0)] == [size] * (8 // size)


class Counter(IterableDataset[Tensor]):  # samples with a state
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 7:
            self.at += 1
            yield torch.full((3,), float(self.at))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_bare_iterable_dataset_gives_samples_with_a_batch_size_and_batches_without() -> None:
    batches = [batch for batch, _, _ in as_source(Counter(), "training", seed=0, batch_size=4).batches(0, 0)]
    assert [each[:, 0].tolist() for each in batches] == [[1, 2, 3, 4], [5, 6, 7]]
    (batch, *_) = (batch for batch, _, _ in as_source(Counter(), "training", seed=0).batches(0, 0))
    assert batch.shape == (3,)
    with pytest.raises(DataError, match=r"IterableDataset \(Counter\), and num_workers=2 was given"):
        as_source(Counter(), "training", seed=0, batch_size=4, num_workers=2)


def test_workers_that_make_the_next_epoch_ahead_make_its_sizes() -> None:
    sizes = IntSchedule("batch_size", {0: 1, "4 steps": 3, "12 steps": 2})

    def windows(workers: int) -> list[tuple[list[list[int]], bool]]:
        progress, found = Progress(), []
        source = as_source(
            TensorDataset(torch.arange(17)), "training", 1, batch_size=1, num_workers=workers, shuffle=True
        )
        options: Any = {"accumulation": {0: 2, 6: 1}, "batch_sizes": sizes, "progress": progress}
        feed = Feed(source, Transfer(CPU), **options)
        for epoch in range(4):
            for window in feed.windows(epoch, until=4):
                found.append(([each.batch[0].tolist() for each in window.micro_batches], window.last))
                progress.steps += 1
                if window.last:
                    break
            progress.epoch += 1
        feed.close()
        return found

    here = windows(0)
    assert [[len(batch) for batch in window] for window, _ in here[:6]] == [[1, 1]] * 4 + [[3, 3], [3]]
    assert windows(2) == here
