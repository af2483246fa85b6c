"""Data that was divided by rank before: each rank reads its own, all of it, once, and goes on from there."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from drivetrain import Callback, CheckpointError, Engine, already_split
from drivetrain.data import Feed, Transfer, as_source, evaluation_sources
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FEATURES = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
NUMBERED = TensorDataset(
    torch.cat([torch.arange(24.0)[:, None], FEATURES[:, 1:]], 1) / 24, FEATURES.sum(1, True)
)
RANK = "RANK"


class Part(IterableDataset[Any]):
    """Every second sample; of rank 1 only the first few, where a number is given."""

    def __init__(self, short: int | None = None) -> None:
        self.short = short

    def __iter__(self) -> Any:
        rank = int(os.environ[RANK])
        return (NUMBERED[index] for index in list(range(rank, 24, 2))[: self.short if rank else None])


class Buckets:
    """Batches of indices that are not of one length, and on each rank others."""

    def __iter__(self) -> Any:
        rank = int(os.environ[RANK])
        return iter([[0, 1, 2], [3], [4, 5], [6, 7], [8, 9, 10, 11]][rank:])

    def __len__(self) -> int:
        return 5 - int(os.environ[RANK])


class Stateful:
    """Batches for ever, each rank its own, from where their state says."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        while True:
            generator = torch.Generator().manual_seed(self.drawn * 2 + int(os.environ[RANK]))
            self.drawn += 1
            features = torch.randn(2, 4, generator=generator)
            yield features, features.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "rank": int(os.environ[RANK])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == int(os.environ[RANK])
        self.drawn = state["drawn"]


def part(kind: str) -> Any:
    rank = int(os.environ[RANK])
    if kind == "iterable":
        return DataLoader(Part(), batch_size=4)
    if kind == "short":
        return DataLoader(Part(5), batch_size=4)
    if kind == "nothing":
        return DataLoader(Part(0), batch_size=4)
    if kind == "sampler":
        sampler = DistributedSampler(NUMBERED, num_replicas=2, rank=rank)
        return DataLoader(NUMBERED, batch_size=4, sampler=sampler)
    if kind == "buckets":
        return DataLoader(NUMBERED, batch_sampler=Buckets())  # type: ignore[arg-type]
    if kind == "dataset":
        return DataLoader(TensorDataset(*NUMBERED[rank::2]), batch_size=4, shuffle=True)
    return list(DataLoader(TensorDataset(*NUMBERED[rank:8:2] if rank else NUMBERED[0::2]), batch_size=4))


class Seen(Callback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.numbers: list[int] = []
        self.stop_at = stop_at

    def on_step_end(self, run: Any) -> None:
        for each in run.window.micro_batches:
            self.numbers += [] if each.is_placeholder else (each.batch[0][:, 0] * 24).round().int().tolist()
        if run.progress.updates == self.stop_at:
            run.stop("for the test")


def strategy() -> Any:
    return DDP(world_size=2)


def fit(kind: str) -> Any:
    seen = Seen()
    task = Regression()
    data = already_split(part(kind))
    result = quiet(max_epochs=1, strategy=strategy(), devices=2, callbacks=[seen]).fit(task, data)
    return sorted(seen.numbers), result.progress.samples, result.progress.updates, task.line.weight.tolist()


@pytest.mark.parametrize(
    ("kind", "own", "updates"),
    [
        ("iterable", list(range(1, 24, 2)), 3),
        ("dataset", list(range(1, 24, 2)), 3),
        ("short", [1, 3, 5, 7, 9], 3),
        ("nothing", [], 3),
        ("list", [1, 3, 5, 7], 3),
    ],
)
def test_every_rank_reads_its_own_part_once(kind: str, own: list[int], updates: int) -> None:
    first, second = run_distributed(fit, kind)
    assert first[0] == list(range(0, 24, 2))
    assert second[0] == own
    assert first[1] == second[1] == 12 + len(own)
    assert first[2] == second[2] == updates
    assert first[3] == second[3]


def test_a_sampler_that_divides_the_data_is_taken_at_its_word() -> None:
    first, second = run_distributed(fit, "sampler")
    assert sorted(first[0] + second[0]) == list(range(24))


def test_the_gradient_is_the_mean_over_what_the_ranks_have() -> None:
    alone = Regression()
    rounds = [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9], [16, 18, 20, 22]]
    quiet(max_epochs=1).fit(alone, [NUMBERED[indices] for indices in rounds])
    for _, _, _, weight in run_distributed(fit, "short"):
        assert weight[0] == pytest.approx(alone.line.weight.tolist()[0], rel=1e-5)


def interrupted(kind: str, directory: str) -> Any:
    """A fit, and one that stops after an update and is resumed."""

    def go(name: str, stop_at: int | None, resume: str | None) -> Any:
        task, seen = Regression(dropout=0.2), Seen(stop_at)
        data: Any = Stateful() if kind == "stateful" else part(kind)
        options: dict[str, Any] = {"max_steps": 5, "checkpoint": True, "run_dir": f"{directory}/{name}"}
        trainer = quiet(strategy=strategy(), devices=2, callbacks=[seen], **options)
        trainer.fit(task, already_split(data), resume=resume)
        return seen.numbers, task.line.weight.tolist()

    whole = go("whole", None, None)
    begun = go("parts", 2, None)
    resumed = go("parts", None, "auto")
    return whole, (begun[0] + resumed[0], resumed[1])


@pytest.mark.parametrize("kind", ["dataset", "list", "sampler", "buckets", "stateful"])
def test_each_rank_goes_on_where_it_was(kind: str, tmp_path: Any) -> None:
    for whole, parts in run_distributed(interrupted, kind, str(tmp_path)):
        assert whole == parts


def other_number(directory: str, data: str) -> None:
    options: dict[str, Any] = {"max_steps": 5, "checkpoint": True, "run_dir": directory}
    trainer = quiet(strategy=strategy(), devices=2, callbacks=[Seen(2)], **options)
    trainer.fit(Regression(), already_split(part(data)))


def test_in_the_middle_of_an_epoch_the_division_must_be_the_same(tmp_path: Any) -> None:
    run_distributed(other_number, str(tmp_path), "dataset")
    again = quiet(max_steps=5, checkpoint=True, run_dir=str(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"was already split over 2 ranks and this run's is not already split.*end of an epoch",
    ):
        again.fit(Regression(), pairs(24, batch_size=4), resume="auto")


def evaluated() -> Any:
    trainer = quiet(strategy=strategy(), devices=2)
    named = trainer.validate(Regression(), already_split({"short": part("short"), "list": part("list")}))
    predicted = trainer.predict(Regression(), already_split(part("short")))
    return named, sum(len(each) for each in predicted)


def test_evaluation_counts_every_rank_s_samples_once() -> None:
    part_of_both = NUMBERED[[*range(0, 24, 2), 1, 3, 5, 7, 9]]
    expected = quiet().validate(Regression(), [part_of_both])["validation/loss"]
    for named, predictions in run_distributed(evaluated):
        assert named["validation/short/loss"] == pytest.approx(expected)
        assert predictions == 17


def test_one_process_reads_it_like_other_data() -> None:
    data = pairs(8, shuffle=True)
    read = [
        [batch[0].tolist() for batch, *_ in as_source(each, "training", 3).batches(0, 0)]
        for each in (data, already_split(data))
    ]
    assert read[0] == read[1]
    ((name, source),) = evaluation_sources(already_split({"some": data}), "test", 3)
    assert name == "some"
    assert Feed(source, Transfer(torch.device("cpu"))).batches_per_epoch == 4


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), *[float(int(os.environ[RANK]))] * 3]), torch.zeros(1)


class Draws(Callback):
    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, run: Any) -> None:
        self.drawn += run.window.micro_batches[0].batch[0][:, 0].tolist()


def noise() -> Any:
    draws = Draws()
    trainer = quiet(max_epochs=1, strategy=strategy(), devices=2, callbacks=[draws])
    trainer.fit(Regression(), already_split(DataLoader(Noisy(), batch_size=4)))
    return draws.drawn


def test_ranks_augment_their_own_samples_differently() -> None:
    first, second = run_distributed(noise)
    assert not set(first) & set(second)


def own_loop() -> Any:
    engine = Engine(strategy=strategy(), devices=2)
    model, optimizer = engine.prepare(Regression().line, lambda each: torch.optim.SGD(each, lr=0.05))
    for features, target in engine.prepare_data(already_split(part("short"))):
        engine.backward(F.mse_loss(model(features), target))
        engine.step(optimizer)
    weight = next(iter(model.parameters())).tolist()
    engine.teardown()
    return weight


def test_a_loop_of_ones_own_makes_the_same_updates() -> None:
    expected = run_distributed(fit, "short")[0][3]
    for weight in run_distributed(own_loop):
        assert weight[0] == pytest.approx(expected[0], rel=1e-6)
