"""The sizes of windows by schedule, against a run that is counted window by window."""

from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from drivetrain.core.progress import Progress
from drivetrain.core.stages import Stages
from drivetrain.data import Feed, Transfer, as_source
from drivetrain.data.window_plan import Place, WindowPlan


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> int:
        return index


class Counted(NamedTuple):  # one window of a run that is counted one by one
    place: Place
    batches: int
    sizes: list[int]
    last: bool


def counted(
    epochs: int, batches: Stages, sizes: Stages, samples: int, shards: int, limit: int | None
) -> list[Counted]:
    found: list[Counted] = []
    windows = seen = 0
    for epoch in range(epochs):
        position = rounds = 0
        while position < samples and (limit is None or rounds < limit):
            done = {"steps": windows, "epochs": epoch, "samples": seen}
            place, each = Place(epoch, position, rounds, windows, seen), sizes.at(done[sizes.unit])
            number = 0
            for _ in range(batches.at(done[batches.unit])):
                step = min(each * shards, samples - position)
                if not step or (limit is not None and rounds == limit):
                    break
                position, rounds, seen, number = position + step, rounds + 1, seen + step, number + 1
            last = position == samples or rounds == limit
            found.append(Counted(place, number, [each] * number, last))
            windows += 1
    return found


def points() -> Any:
    unit = st.sampled_from(["steps", "epochs", "samples"])
    later = st.dictionaries(st.integers(1, 60), st.integers(1, 5), max_size=4)
    return st.builds(
        lambda first, rest, unit: Stages("n", {0: first, **{f"{at} {unit}": n for at, n in rest.items()}}),
        st.integers(1, 5),
        later,
        unit,
    )


@given(
    batches=points(), sizes=points(), samples=st.integers(1, 40), shards=st.integers(1, 3),
    limit=st.none() | st.integers(1, 6), epochs=st.integers(1, 8),
)  # fmt: skip
def test_places_and_totals_are_those_of_a_run_counted_one_by_one(
    batches: Stages, sizes: Stages, samples: int, shards: int, limit: int | None, epochs: int
) -> None:
    plan = WindowPlan(batches, sizes, samples=samples, shards=shards, limit=limit)
    windows = counted(epochs, batches, sizes, samples, shards, limit)
    assert plan.windows_before(epochs) == len(windows)
    for number, each in enumerate(windows):
        assert plan.after(number) == each.place
    for epoch in range(epochs):
        own = [each for each in windows if each.place.epoch == epoch]
        assert plan.windows_in(epoch) == len(own)
        assert plan.rounds_in(epoch) == sum(each.batches for each in own)
    for number, each in enumerate(windows):  # as a run that is resumed there
        rest = [other for other in windows[number:] if other.place.epoch == each.place.epoch]
        plan.begin(each.place)
        assert list(plan.windows()) == [(other.batches, other.last) for other in rest]
        assert list(plan.batch_sizes(each.place.epoch)) == [size for other in rest for size in other.sizes]
        later = [other for other in windows if other.place.epoch == each.place.epoch + 1]
        if later:  # which workers prepare before its epoch begins
            sizes_ahead = [size for other in later for size in other.sizes]
            assert list(plan.batch_sizes(each.place.epoch + 1)) == sizes_ahead


def test_workers_that_make_the_next_epoch_ahead_make_its_sizes() -> None:
    sizes = Stages("batch_size", {0: 1, "4 steps": 3, "12 steps": 2})

    def windows(workers: int) -> list[tuple[list[list[int]], bool]]:
        progress, found = Progress(), []
        source = as_source(Numbers(), "training", 1, batch_size=1, num_workers=workers, shuffle=True)
        options: Any = {"accumulation": {0: 2, 6: 1}, "batch_sizes": sizes, "progress": progress}
        feed = Feed(source, Transfer(torch.device("cpu")), **options)
        for epoch in range(4):
            for window in feed.windows(epoch, until=4):
                found.append(([each.batch.tolist() for each in window.micro_batches], window.last))
                progress.steps += 1
                if window.last:
                    break
            progress.epoch += 1
        feed.close()
        return found

    here = windows(0)
    assert [[len(batch) for batch in window] for window, _ in here[:6]] == [[1, 1]] * 4 + [[3, 3], [3]]
    assert windows(2) == here
