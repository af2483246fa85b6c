"""Combined sources: each batch has samples of every one, in passes of their own; a fit resumes anywhere."""

from collections import Counter

import pytest
import torch
from tests.data.orders.test_mixing import Numbers, Stream, sources
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import LambdaCallback, TaskModule
from drivetrain.data import as_source, combined, mixture, packed
from drivetrain.data.shard import Shard
from drivetrain.errors import CheckpointError, ConfigError, DataError


class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return self.weight * sum(part["id"].double().mean() for part in batch.values())


def drawn(data, stop=None, **options):
    """Train, and return the samples of each step by source."""
    steps = []

    def note(run):
        batch = run.window.micro_batches[0].batch
        steps.append({name: part["id"].tolist() for name, part in batch.items()})
        if run.progress.steps == stop:
            run.stop("enough")

    settings = {"max_epochs": 2, "batch_size": 3, "callbacks": [LambdaCallback(on_step_end=note)]}
    trainer = quiet(**(settings | options))
    result = trainer.fit(Task(), data, resume="auto" if "run_dir" in options else None)
    return steps, result


@pytest.mark.parametrize(("until", "length"), [("longest", 20), ("shortest", 10), ("a", 20), ("c", 10)])
def test_an_epoch_is_as_long_as_the_source_that_decides(until, length):
    data = combined(sources(sizes=(40, 18, 20)), samples={"a": 2, "c": 2}, until=until)
    steps, result = drawn(data, max_epochs=1)
    assert result.progress.samples == length
    assert {name: len(part) for name, part in steps[0].items()} == {"a": 6, "b": 3, "c": 6}
    for name, size in zip("abc", (40, 18, 20), strict=True):
        times = Counter(sample for step in steps for sample in step[name])
        assert max(times.values()) - min(times.values()) <= (len(times) == size), "each once, then anew"


def test_a_mapping_of_datasets_is_combined_and_sources_go_on_in_the_next_epoch():
    data = sources(sizes=(4, 8, 6))
    steps, _ = drawn(data)
    assert steps == drawn(combined(data))[0] == drawn(data, num_workers=1)[0]
    assert len({sample for step in steps[:3] for sample in step["b"]}) == 8
    first = [sample for step in steps for sample in step["c"]]
    assert sorted(first[6:12]) == sorted(first[:6]), "the second pass begins within the first epoch"
    assert first[6:12] != first[:6]
    assert steps != drawn(data, seed=9)[0]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_fit_stopped_anywhere_is_the_one_that_was_not(tmp_path, stop):
    data = sources(sizes=(4, 8, 6))
    before, _ = drawn(data, stop, checkpoint=True, run_dir=tmp_path)
    assert before + drawn(data, checkpoint=True, run_dir=tmp_path)[0] == drawn(data)[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (combined(sources(), until="a"), combined(sources(), samples={"b": 2}, until="a")),
        (combined(sources(), until="a"), combined({**sources(), "b": Numbers(1, 29)}, until="a")),
        (
            mixture(sources(), dict(zip("abc", (1, 1, 1), strict=True))),
            mixture(sources(), dict(zip("abc", (1, 1, 2), strict=True))),
        ),
    ],
)
def test_another_order_within_an_epoch_is_refused(tmp_path, first, second):
    class Mixed(Task):
        def training_step(self, batch):
            return self.weight

    def fit(data, steps):
        quiet(max_steps=steps, batch_size=3, checkpoint=True, run_dir=tmp_path).fit(
            Mixed(), data, resume="auto"
        )

    fit(first, 2)
    with pytest.raises(CheckpointError, match=r"its order was .*new_data=True"):
        fit(second, 4)
    fit(first, 4)


def test_ranks_read_each_sample_once():
    data, whole = combined(sources(sizes=(7, 7, 7))), []
    for rank in (0, 1):
        source = as_source(data, "training", 0, batch_size=2, shuffle=True, shard=Shard(rank, 2))
        whole += [each for each in source.batches(0, 0) if not each.is_placeholder]
    assert sorted(sample for each in whole for sample in each.batch["b"]["id"].tolist()) == [
        *range(1000, 1007)
    ]


def test_what_cannot_be_combined_is_refused():
    for given, words in (
        (
            {"a": DataLoader(Numbers(0, 3)), "b": Numbers(1, 3)},
            "'a' of the combination is a DataLoader. Give its dataset",
        ),
        ({"a": mixture(sources(), {"a": 1, "b": 1, "c": 1})}, "is a Mixture, whose order would be lost"),
        ({"a": Stream(0, 3)}, "'a' is no dataset with a length"),
        ({"a": Numbers(0, 0)}, "'a' has no samples"),
        ({}, "needs sources by name"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            quiet(max_epochs=1, batch_size=2).fit(Task(), given)
    for options, words in (
        ({"samples": {"d": 1}}, "'d', which is no source"),
        ({"samples": {"a": 0}}, "samples of 'a'"),
        ({"samples": 3}, "numbers by source: {'a': 7}, not 3"),
        ({"until": "first"}, "longest"),
        ({"samples": {"a": 41}, "until": "shortest"}, "fewer samples"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            combined(sources(), **options)
    with pytest.raises(DataError, match="is a combination of sources, and only training takes one"):
        quiet(batch_size=2).validate(Task(), combined(sources()))
    rows = [packed([[1, 2, 3]], 4, boundary=boundary)[0] for boundary in ("positions", "mask")]
    with pytest.raises(DataError, match="the same boundary"):
        packed([[1]], 4).collate_fn(rows)
