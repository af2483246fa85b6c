"""Mixtures keep their shares at every point, read each source pass by pass, and resume anywhere."""

import copy
from collections import Counter
from itertools import islice

import pytest
import torch
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from drivetrain import LambdaCallback, TaskModule
from drivetrain.data import mixture, packed
from drivetrain.errors import ConfigError, DataError


class Numbers(Dataset):
    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"id": torch.tensor(self.name * 1000 + index), "n": 1 + index * 7 % 9}


class Stream(IterableDataset):
    """The same with a position."""

    def __init__(self, name, size):
        self.data, self.at = Numbers(name, size), 0

    def __iter__(self):
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def sources(kind=Numbers, sizes=(40, 30, 20)):
    return {name: kind(index, size) for index, (name, size) in enumerate(zip("abc", sizes, strict=True))}


class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight * batch["id"].double().mean()


def order(data):
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return iter(data.sampler_for(loader, "training", 3, is_training=True))


def drawn(data, stop=None, epochs=1, **options):
    """Train, and return the samples of each step."""
    steps = []

    def note(run):
        steps.append(run.window.micro_batches[0].batch["id"].tolist())
        if run.progress.steps == stop:
            run.stop("enough")

    trainer = quiet(max_epochs=epochs, batch_size=4, callbacks=[LambdaCallback(on_step_end=note)], **options)
    trainer.fit(Task(), data, resume="auto" if "run_dir" in options else None)
    return [sample for step in steps for sample in step]


@pytest.mark.parametrize("weights", [(0.7, 0.3, 0.0), (1, 1, 1), (0.5, 0.49, 0.01), (3, 5, 9)])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_shares_are_exact_to_one_sample_at_every_point(weights, kind):
    data = mixture(sources(kind), dict(zip("abc", weights, strict=True)), until="forever")
    found = order(data) if kind is Numbers else iter(data)
    counts, ends = [0, 0, 0], [40, 70, 90]
    for total, each in enumerate(islice(found, 400), start=1):
        source = each["source"] if kind is Stream else sum(each >= end for end in ends)
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - total * weight / sum(weights)) <= 1


def test_shares_are_exact_under_weights_that_change_at_every_sample():
    points = {each: {"a": 0.5, "b": 0.3 + each / 500, "c": 0.2} for each in range(100)}
    found, due, counts = order(mixture(sources(), points, until="forever")), [0.0] * 3, [0] * 3
    for weights, each in zip(points.values(), found, strict=False):
        counts[sum(each >= end for end in (40, 70))] += 1
        due = [old + new / sum(weights.values()) for old, new in zip(due, weights.values(), strict=True)]
        assert all(abs(count - share) <= 1 for count, share in zip(counts, due, strict=True))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_an_epoch_ends_with_the_first_or_with_all_and_sources_go_on(kind):
    first = drawn(mixture(sources(kind), {"a": 1, "b": 1, "c": 2}, until="first"), epochs=2)
    counts = Counter(each // 1000 for each in first)
    assert counts[2] in (40, 41)
    assert {each for each in first if each >= 2000} == {2000 + each for each in range(20)}, "c is read twice"
    assert max(Counter(each for each in first if each < 2000).values()) == 1, "a and b went on"
    everything = Counter(drawn(mixture(sources(kind), {"a": 1, "b": 1, "c": 2}, until="all")))
    assert {each // 1000: set() for each in everything}.keys() == {0, 1, 2}
    assert sum(each < 1000 for each in everything) == 40
    passes = [times for each, times in everything.items() if each >= 2000]
    assert max(passes) - min(passes) <= 1, "each pass has every sample"


@pytest.mark.parametrize("options", [{}, {"by": "tokens", "tokens": "n"}])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_mixture_stopped_anywhere_is_the_one_that_was_not(tmp_path, kind, options):
    def make():
        weights = {0: {"a": 0.7, "b": 0.3, "c": 0.0}, 50: {"a": 0.2, "b": 0.3, "c": 0.5}}
        return mixture(sources(kind), weights, until="all", **options)

    whole = drawn(make(), epochs=2)
    for stop in (1, 9, 14, 26, len(whole) // 8):
        directory = tmp_path / str(stop)
        parts = [drawn(make(), stop, 2, checkpoint=True, run_dir=directory)]
        parts.append(drawn(make(), None, 2, checkpoint=True, run_dir=directory))
        assert parts[0] + parts[1] == whole, stop
    seeds = [drawn(make(), seed=seed) for seed in (1, 2)]
    assert (seeds[0] == seeds[1]) == (kind is Stream), "datasets are shuffled by the run's seed"


HALVES = {"a": 1, "b": 1}


@pytest.mark.parametrize("weights", [HALVES, {0: {"a": 1, "b": 0}, 30: HALVES}])
def test_streams_go_on_under_other_shares(weights):
    first = mixture(sources(Stream), {"a": 8, "b": 1, "c": 1}, until="forever")
    assert len([*islice(first, 30)]) == 30
    second = mixture({"b": Stream(1, 30), "a": Stream(0, 40)}, weights, until="forever")
    second.load_state_dict(first.state_dict())
    found = [int(each["id"]) for each in islice(second, 10)]
    assert sorted(found) == [*range(24, 29), *range(1003, 1008)]


def test_shares_of_tokens():
    data = mixture(sources(), {"a": 0.5, "b": 0.25, "c": 0.25}, by="tokens", tokens="n", until="forever")
    spent = [0, 0, 0]
    for index in islice(order(data), 500):
        sample = data[index]
        spent[sample["source"]] += sample["n"]
    for share, weight in zip(spent, (0.5, 0.25, 0.25), strict=True):
        assert abs(share - sum(spent) * weight) <= 18, "two of the longest samples"


def test_rows_that_were_packed_keep_their_collation():
    data = mixture(
        {"a": packed([[1, 2], [3]], 4, boundary="varlen"), "b": packed([[4]], 4)}, {"a": 1, "b": 1}
    )
    batch = data.collate_fn([data[0], data[0]])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 3, 5, 6]
    assert batch["source"].tolist() == [0, 0]


EQUAL = {"a": 1, "b": 1, "c": 1}
REFUSED = [
    ({"a": 1, "d": 1}, {}, "'d', which is no source"),
    ({"a": 1, "b": 1}, {}, "no share of 'c'"),
    ({"a": 0, "b": 0, "c": 0}, {}, "all weights are 0"),
    ({"a": -1, "b": 1, "c": 1}, {}, "weight of 'a'"),
    ({"a": 1, "b": 1, "c": 0}, {"until": "all"}, "'c' has weight 0"),
    ({5: {"a": 1, "b": 1, "c": 1}}, {}, "begin at 0"),
    ({0: EQUAL, "1 epoch": EQUAL}, {}, "change after samples, not at '1 epoch'"),
    ({0: EQUAL, "9 tokens": EQUAL}, {}, "change after samples"),
    ({0: EQUAL, 5: EQUAL, "5 samples": EQUAL}, {}, "each once"),
    ({0: EQUAL, "a": 1}, {}, "shares by name, or such shares by points"),
    ([1, 1, 1], {}, "shares by name"),
    (EQUAL, {"tokens": "ids"}, 'is for by="tokens"'),
    ({"a": 1, "b": 1, "c": 1}, {"by": "token"}, "tokens"),
    ({"a": 1, "b": 1, "c": 1}, {"by": "tokens", "tokens": "ids"}, "tokens='ids'"),
]


@pytest.mark.parametrize(("weights", "options", "words"), REFUSED)
def test_what_cannot_be_mixed_is_refused(weights, options, words):
    with pytest.raises((ConfigError, DataError), match=words):
        mixture(sources(), weights, **options)


def test_a_mixture_is_for_training_and_keeps_its_order():
    data, equal = sources(), EQUAL
    for given, words in (
        (torch.utils.data.DataLoader(Stream(0, 3)), "'a' of the mixture is a DataLoader. Give its dataset"),
        (mixture(data, equal), "is a Mixture, whose order would be lost"),
        ("a path", "is a str. Give a dataset"),
        (None, "is a NoneType. Give a dataset"),
    ):
        with pytest.raises(DataError, match=words):
            mixture({**data, "a": given}, equal)
    with pytest.raises(ConfigError, match="'b' has a length"):
        mixture({**data, "a": Stream(0, 3)}, equal)
    with pytest.raises(DataError, match=r"Give the sources by name: \{'a': "):
        quiet(batch_size=4).validate(Task(), mixture(data, equal))
    with pytest.raises(DataError, match="LengthGroupedSampler"):
        quiet(batch_size=4, max_steps=1, group_by_length="n").fit(Task(), mixture(data, equal))
    for wrapped in (Subset(mixture(data, equal), range(20)), ConcatDataset([mixture(data, equal)])):
        with pytest.raises(DataError, match="of a mixture of sources, whose order would be lost"):
            quiet(batch_size=4, max_steps=1).fit(Task(), wrapped)
    for endless in (mixture(data, equal, until="forever"), mixture(sources(Stream), equal, until="forever")):
        with pytest.raises(ConfigError, match="max_steps, max_tokens or max_time"):
            quiet(batch_size=4, max_epochs=1).fit(Task(), endless)
    loader = torch.utils.data.DataLoader(mixture(data, equal), batch_size=4, shuffle=True)
    counts = Counter(each // 1000 for each in drawn(copy.deepcopy(loader))[:30])
    assert set(counts.values()) == {10}, "a loader's shuffle does not touch the shares"
    with pytest.raises(DataError, match="'c' of the mixture"):
        list(mixture({**sources(Stream), "c": Stream(2, 0)}, equal, until="forever"))
