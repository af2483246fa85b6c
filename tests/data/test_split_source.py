"""Data that was divided by rank before: each rank reads its own, all of it, once, and goes on from there."""

import random
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import drivetrain
from drivetrain import Callback, CheckpointError, Engine, already_split
from drivetrain.strategies.ddp import DDP

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FEATURES = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
INPUTS = torch.cat([torch.arange(24.0)[:, None], FEATURES[:, 1:]], 1) / 24
NUMBERED = TensorDataset(INPUTS, FEATURES.sum(1, True))


class Part(IterableDataset[Any]):
    """Every second sample; of rank 1 only the first few, where a number is given."""

    def __init__(self, short: int | None = None) -> None:
        self.short = short

    def __iter__(self) -> Any:
        rank = drivetrain.rank()
        return (NUMBERED[index] for index in list(range(rank, 24, 2))[: self.short if rank else None])


class Stateful:  # batches for ever, each rank its own, from where their state says
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Any:
        while True:
            generator = torch.Generator().manual_seed(self.drawn * 2 + drivetrain.rank())
            self.drawn += 1
            features = torch.randn(2, 4, generator=generator)
            yield features, features.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "rank": drivetrain.rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == drivetrain.rank()
        self.drawn = state["drawn"]


def part(kind: str) -> Any:
    rank = drivetrain.rank()
    if kind == "stateful":
        return Stateful()
    if kind in ("iterable", "short", "nothing"):
        return DataLoader(Part({"iterable": None, "short": 5, "nothing": 0}[kind]), batch_size=4)
    if kind == "sampler":
        sampler = DistributedSampler(NUMBERED, num_replicas=2, rank=rank)
        return DataLoader(NUMBERED, batch_size=4, sampler=sampler)
    if kind == "buckets":
        own, buckets = TensorDataset(*NUMBERED[rank::2]), [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9], [10, 11]]
        return DataLoader(own, batch_sampler=buckets)
    if kind in ("dataset", "no dataset"):
        own = TensorDataset(*NUMBERED[rank : 0 if rank and kind == "no dataset" else None : 2])
        return DataLoader(own, batch_size=4, shuffle=len(own) > 0)
    if kind == "no list" and rank:
        return []
    return list(DataLoader(TensorDataset(*NUMBERED[rank:8:2] if rank else NUMBERED[0::2]), batch_size=4))


class Seen(Callback):  # the numbers of the samples that this rank has had
    def __init__(self, stop_at: int | None = None) -> None:
        self.numbers: list[int] = []
        self.stop_at = stop_at

    def on_step_end(self, run: Any) -> None:
        for each in run.window.micro_batches:
            self.numbers += [] if each.is_placeholder else (each.batch[0][:, 0] * 24).round().int().tolist()
        if run.progress.steps == self.stop_at:
            run.stop("for the test")


def on_both(*callbacks: Any, **options: Any) -> Any:
    return quiet(strategy=DDP(world_size=2), devices=2, callbacks=callbacks, **options)


def fit(kind: str) -> Any:
    seen, task = Seen(), Regression()
    progress = on_both(seen, max_epochs=1).fit(task, already_split(part(kind))).progress
    return sorted(seen.numbers), progress.samples, progress.steps, task.line.weight.tolist()


OWN = {
    "iterable": list(range(1, 24, 2)),
    "dataset": list(range(1, 24, 2)),
    "short": [1, 3, 5, 7, 9],
    "nothing": [],
    "list": [1, 3, 5, 7],
    "no list": [],
    "no dataset": [],
}


def test_every_rank_reads_its_own_part_once() -> None:
    both = on_two_ranks(lambda: {kind: fit(kind) for kind in (*OWN, "sampler")})
    sampled = both[0].pop("sampler")[0] + both[1].pop("sampler")[0]
    assert sorted(sampled) == list(range(24)), "a sampler that divides the data is taken at its word"
    for kind, own in OWN.items():
        first, second = both[0][kind], both[1][kind]
        assert (kind, first[0]) == (kind, list(range(0, 24, 2)))
        assert (kind, second[0]) == (kind, own)
        assert first[1:] == second[1:]
        assert first[1:3] == (12 + len(own), 3)


def own_loop() -> Any:
    engine = Engine(strategy=DDP(world_size=2), devices=2)
    model, optimizer = engine.prepare(Regression().line, lambda each: torch.optim.SGD(each, lr=0.05))
    for features, target in engine.prepare_data(already_split(part("short"))):
        engine.backward(F.mse_loss(model(features), target))
        engine.step(optimizer)
    weight = next(iter(model.parameters())).tolist()
    engine.teardown()
    return weight


def test_the_gradient_is_the_mean_over_what_the_ranks_have_also_in_a_loop_of_ones_own() -> None:
    alone = Regression()
    rounds = [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9], [16, 18, 20, 22]]
    quiet(max_epochs=1).fit(alone, [NUMBERED[indices] for indices in rounds])
    for found in on_two_ranks(lambda: (fit("short")[3], own_loop())):
        for weight in found:
            assert weight[0] == pytest.approx(alone.line.weight.tolist()[0], rel=1e-5)


def interrupted(kind: str) -> Any:  # A fit, and one that stops after a step and is resumed

    def go(name: str, stop_at: int | None, resume: str | None) -> Any:
        task, seen = Regression(dropout=0.2), Seen(stop_at)
        trainer = on_both(seen, max_steps=5, checkpoint=True, run_dir=f"{kind}-{name}")
        trainer.fit(task, already_split(part(kind)), resume=resume)
        return seen.numbers, task.line.weight.tolist()

    whole, begun, resumed = go("whole", None, None), go("parts", 2, None), go("parts", None, "auto")
    return whole, (begun[0] + resumed[0], resumed[1])


@pytest.mark.parametrize("kind", ["dataset", "list", "buckets", "stateful"])
def test_a_resumed_fit_goes_on_where_each_rank_was(kind: str) -> None:
    for whole, parts in on_two_ranks(interrupted, kind):
        assert whole == parts


def test_a_resume_in_the_middle_of_an_epoch_needs_the_same_division() -> None:
    options: dict[str, Any] = {"max_steps": 5, "checkpoint": True, "run_dir": "run"}
    fits = lambda: on_both(Seen(2), **options).fit(Regression(), already_split(part("dataset")))  # noqa: E731
    on_two_ranks(lambda: fits() and None)
    message = r"was divided over 2 ranks and this run's is not divided.*end of an epoch"
    with pytest.raises(CheckpointError, match=message):
        quiet(**options).fit(Regression(), pairs(24, batch_size=4), resume="auto")


def evaluated() -> Any:
    trainer = on_both()
    named = trainer.validate(Regression(), already_split({"short": part("short"), "list": part("list")}))
    predicted = trainer.predict(Regression(), already_split(part("short")))
    return named, sum(len(each) for each in predicted)


def test_evaluation_counts_every_rank_s_samples_once() -> None:
    part_of_both = NUMBERED[[*range(0, 24, 2), 1, 3, 5, 7, 9]]
    expected = quiet().validate(Regression(), [part_of_both])["validation/loss"]
    for named, predictions in on_two_ranks(evaluated):
        assert named["validation/short/loss"] == pytest.approx(expected)
        assert predictions == 17


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), *[float(drivetrain.rank())] * 3]), torch.zeros(1)


def test_ranks_augment_their_own_samples_differently() -> None:
    def noise() -> set[float]:
        drawn: set[float] = set()

        def note(run: Any) -> None:
            drawn.update(run.window.micro_batches[0].batch[0][:, 0].tolist())

        noting = drivetrain.LambdaCallback(on_step_end=note)
        on_both(noting, max_epochs=1).fit(Regression(), already_split(DataLoader(Noisy(), batch_size=4)))
        return drawn

    first, second = on_two_ranks(noise)
    assert len(first) == len(second) == 8
    assert not first & second
