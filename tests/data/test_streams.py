"""Streams and samplers give each sample once, also after a resume; or a message or an error says so."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import run
from tests.support.messages import heard, warned
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

import drivetrain
from drivetrain import DataError, LambdaCallback, already_split
from drivetrain.data import as_source
from drivetrain.data.repeats import Repeats
from drivetrain.strategies.ddp import DDP

PROGRAMS = Path(__file__).parent / "programs"
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def sample(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((4,), number / 24), torch.zeros(1)


class Numbers(IterableDataset[Any]):
    """The numbers below 24 in an order that a subclass changes."""

    def order(self) -> list[int]:
        return list(range(24))

    def __iter__(self) -> Iterator[Any]:
        return map(sample, self.order())


class Shuffled(Numbers):  # another order each time, as WebDataset's shuffle
    def order(self) -> list[int]:
        return random.Random(random.SystemRandom().random()).sample(range(24), 24)


class Sized(Numbers):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class Buffered(Numbers):
    """A shuffle buffer of eight samples; the state has the position alone, or also the buffer."""

    def __init__(self, whole: bool = False) -> None:
        self.whole, self.at, self.buffer = whole, 0, list[int]()

    def __iter__(self) -> Iterator[Any]:
        while self.at < 24 or self.buffer:
            while len(self.buffer) < 8 and self.at < 24:
                self.buffer.append(self.at)
                self.at += 1
            yield sample(self.buffer.pop(self.at % len(self.buffer)))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer if self.whole else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], list(state["buffer"])


class Stateful(Buffered):
    def __init__(self) -> None:
        super().__init__(whole=True)


class ItsOwnIterator(Numbers):  # `iter` begins anew and returns the stream, as in litData
    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at == 24:
            raise StopIteration
        self.at += 1
        return sample(self.at - 1)


class ForItsLoader(Numbers):
    """Its state is its own loader's, as that of the `StreamingDataset` of MosaicML and of litData."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody has called state_dict")


def fit(data: Any, stop: int | None = None, **options: Any) -> list[int]:
    seen: list[int] = []

    def note(run: Any) -> None:
        seen.extend(run.window.micro_batches[0].batch[0][:, 0].mul(24).round().int().tolist())
        if run.progress.steps == stop:
            run.stop("for the test")

    noting = LambdaCallback(on_step_end=note)
    options = {"max_epochs": 1, "checkpoint": True, "run_dir": "run", "callbacks": [noting], **options}
    quiet(**options).fit(Regression(), data, resume="auto")
    return seen


def in_parts(first: Any, second: Any, **options: Any) -> tuple[list[int], str]:
    with heard() as texts:
        seen = fit(first, stop=2, **options) + fit(second, **options)
    return sorted(seen), " | ".join(texts)


@pytest.mark.parametrize(
    ("kind", "batch_size", "words"),
    [
        (Shuffled, 4, ("comes in another order", "Its seed", "lost")),
        (lambda: DataLoader(Shuffled(), 4), None, ("comes in another order", "Its seed", "lost")),
        (Buffered, 4, ("comes in another order", "shuffle buffer", "lost")),
    ],
    ids=["shuffled", "in a loader", "a buffer"],
)
def test_a_resume_that_loses_samples_says_so(kind: Any, batch_size: int | None, words: Any) -> None:
    seen, said = in_parts(kind(), kind(), batch_size=batch_size)
    assert seen != list(range(24))
    for each in words:
        assert each in said


def test_a_resume_that_loses_none_does_not_say_it() -> None:
    seen, said = in_parts(Buffered(whole=True), Buffered(whole=True), batch_size=4)
    assert (seen, said) == (list(range(24)), "")


class Counting(Sampler[int]):
    """Counts its epochs, as those of timm; the order depends on their number alone."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(24), 24))

    def __len__(self) -> int:
        return 24


class WithState(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class Unseeded(WithState):
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(random.SystemRandom().random()).sample(range(24), 24))


class InBatches(Counting):
    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        return (indices[at : at + 4] for at in range(0, 24, 4))

    def __len__(self) -> int:
        return 6


class WithoutLength(Counting):
    __len__: Any = None


SAMPLES = list(map(sample, range(24)))


@pytest.mark.parametrize("stop", [6, 8])  # at the end of the first of two epochs, and within the second one
def test_a_sampler_goes_on_in_its_order_after_a_resume(stop: int) -> None:
    for kind in (Counting, WithState, WithoutLength, InBatches):
        name = "batch_sampler" if kind is InBatches else "sampler"
        options = {} if kind is InBatches else {"batch_size": 4}

        def loader(kind: Any = kind, name: str = name, options: Any = options) -> Any:
            return DataLoader(SAMPLES, **{name: kind()}, **options)  # type: ignore[arg-type]

        with heard() as texts:
            whole = fit(loader(), max_epochs=2, run_dir=f"whole-{kind.__name__}")
            parts = {"max_epochs": 2, "run_dir": kind.__name__}
            assert fit(loader(), stop=stop, **parts) + fit(loader(), **parts) == whole, kind.__name__
        assert texts == [], kind.__name__


def test_a_sampler_that_gives_another_order_after_a_resume_is_named_with_what_is_lost() -> None:
    loader = DataLoader(SAMPLES, batch_size=4, sampler=Unseeded())  # type: ignore[arg-type]
    _, said = in_parts(loader, loader)
    assert "sampler (Unseeded) gives another order for epoch 0 than before the checkpoint, although" in said
    assert "Samples of this epoch are lost, and others come twice" in said
    assert "on what its state_dict holds" in said


def test_the_error_of_a_stream_with_a_state_has_its_position() -> None:
    class Broken(Stateful):
        def __iter__(self) -> Iterator[Any]:
            for number, each in enumerate(super().__iter__()):
                if number == 10:
                    raise ValueError("cut short")
                yield each

    with pytest.raises(DataError, match=r"raised at batch 2 of epoch 0 \(its state: \{'at': 18, .*cut short"):
        fit(Broken(), batch_size=4)


def test_a_stream_that_is_its_own_iterator_goes_on_after_each_batch() -> None:
    assert fit(ItsOwnIterator(), batch_size=5, max_steps=9) == list(range(24))  # it must end by itself


def test_a_stream_with_the_state_of_its_own_loader_is_drawn_again() -> None:
    seen, said = in_parts(ForItsLoader(), ForItsLoader(), batch_size=4)
    assert seen == list(range(24))
    assert "another order" not in said
    assert "drawn again" in said


@needs_gloo
def test_a_stream_of_all_ranks_goes_on_on_any_number_of_them_without_a_word_of_loss() -> None:
    """Also in other batches, if it has a state; what a rank reads next depends on all of these."""

    def parts(kind: Any, stop: int | None, size: int) -> tuple[list[int], str]:
        options = {"strategy": DDP(world_size=2), "devices": 2, "batch_size": size, "run_dir": kind.__name__}
        with heard() as texts:
            return fit(kind(), stop, **options), "".join(texts)

    for kind, sizes in ((Numbers, (4, 4)), (Stateful, (4, 2))):
        first, rest = on_two_ranks(parts, kind, 2, sizes[0]), on_two_ranks(parts, kind, None, sizes[1])
        assert sorted(each for seen, _ in (*first, *rest) for each in seen) == list(range(24))
        assert "another order" not in "".join(said for _, said in rest)


@pytest.mark.parametrize(("length", "words"), [(40, "16 batches.*missing"), (12, "correct its")])
def test_a_stream_that_ends_elsewhere_than_at_its_length_says_so(length: int, words: str) -> None:
    # Of a loader whose dataset is longer than its length torch warns itself.
    for data in (Sized(length), *([DataLoader(Sized(length), 1)] if length > 24 else [])):
        source = as_source(data, "training", seed=0, batch_size=1)
        assert source.count() == length
        with warned(f"ended after 24 batches, and its length is {length}: {words}"):
            assert len(list(source.batches(0, 0))) == 24
    whole = Sized(24)
    source = as_source(whole, "training", seed=0, batch_size=1)
    list(source.batches(0, 0))
    whole.length = length  # a later epoch is compared too
    with warned(f"ended after 24 batches, and its length is {length}: {words}"):
        list(source.batches(1, 0))


def test_workers_that_do_not_divide_a_stream_are_named() -> None:
    source = as_source(DataLoader(Shuffled(), 4, num_workers=2), "training", seed=0)
    with warned("same samples in several of its 2 workers.*get_worker_info"):
        assert len(list(source.batches(0, 0))) == 12


@pytest.mark.parametrize(
    ("highest", "readers_share", "found"), [(20_000, True, True), (20_000, False, False), (50, True, False)]
)
def test_repeats_are_found_in_any_order_and_not_in_small_numbers(
    highest: int, readers_share: bool, found: bool
) -> None:
    repeats, order = Repeats("training", 2), random.Random(0)
    own = [range(3000), range(3000)] if readers_share else [range(0, 6000, 2), range(1, 6000, 2)]
    drawn = [[each % highest for each in order.sample(numbers, 3000)] for numbers in own]
    with heard("same samples in several of its 2 workers") as texts:
        for start in range(0, 3000, 100):
            for numbers in drawn:
                repeats.note({"x": torch.tensor(numbers[start : start + 100])})
    assert bool(texts) == found


class Lazy(Numbers):
    def order(self) -> list[int]:
        return list(range(drivetrain.rank(), 24, 2))


class Loaded(Lazy):
    """Its state lies in a file that is shared by all ranks, and is not whole while it is written."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        path = Path("shared")
        assert not path.exists() or path.read_text(encoding="utf-8") == "whole"
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()
        path = Path("shared")
        path.write_text("half", encoding="utf-8")
        torch.linalg.eigvals(torch.randn(300, 300))  # takes longer than the other rank's way here
        path.write_text("whole", encoding="utf-8")


def on_both(data: Any, *stops: int | None) -> tuple[str, list[bool]]:
    loaded, options = [], {"strategy": DDP(world_size=2), "devices": 2, "batch_size": 4}
    with heard() as texts:
        for stop in stops:
            fit(already_split(data()), stop, max_epochs=2, **options)
            loaded.append(Path("shared").exists())
    return " | ".join(texts), loaded


@needs_gloo
def test_a_state_is_loaded_by_one_rank_at_a_time_and_only_at_a_resume() -> None:
    for _, loaded in on_two_ranks(on_both, Loaded, 4, None):  # stops in its second epoch
        assert loaded == [False, True]


@needs_gloo
def test_data_that_was_divided_before_the_ranks_were_started_is_refused() -> None:
    ended = run(str(PROGRAMS / "divided_early.py"))
    assert ended.code != 0
    said = next(each for each in ended.errors if "DataError: " in each)
    assert "had called world_size() at divided_early.py:" in said
    assert "train_data()" in said
