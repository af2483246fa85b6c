"""The table of promises in docs/how-to/streams.md, with Hugging Face's own datasets."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import CheckpointError, DataError, LambdaCallback, TaskModule
from drivetrain.strategies.ddp import DDP

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:  # before a test's own environment is noted, which it changes
    os.environ["KMP_DUPLICATE_LIB_OK"] = "True"
    pytest.importorskip("datasets").disable_progress_bars()
    tqdm.tqdm.monitor_interval = 0  # whose thread would outlive a test


READ: list[int] = []
"""The samples that were decoded in this process."""


def decoded(files: list[list[int]]) -> Any:
    for file in files:
        for each in file:
            READ.append(each)
            yield {"id": each}


def hugging_face(samples: int = 46, first: int = 0) -> Any:
    datasets = pytest.importorskip("datasets")
    numbers = list(range(first, first + samples))
    files = {"files": [numbers[index::5] for index in range(5)]}
    return datasets.IterableDataset.from_generator(decoded, gen_kwargs=files)


def interleaved() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.interleave_datasets(
        [hugging_face(23), hugging_face(23, 23)], stopping_strategy="all_exhausted"
    )


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        return self.weight * batch["id"].double().mean()


def fit(
    make: Callable[[], Any], stop: int | None, run_dir: str, ranks: int = 1, epochs: int = 1
) -> tuple[list[int], list[int]]:
    """Return the samples that were used, and those that were decoded."""
    seen: list[int] = []
    READ.clear()

    def note(run: Any) -> None:
        own = (each for each in run.window.micro_batches if not each.is_placeholder)
        seen.extend(sample for each in own for sample in each.batch["id"].tolist())
        if run.progress.steps == stop:
            run.stop("for the test")

    data = make()
    options: dict[str, Any] = {"strategy": DDP(world_size=2), "devices": 2} if ranks == 2 else {}
    options["batch_size"] = None if isinstance(data, DataLoader) else 3
    callbacks = [LambdaCallback(on_step_end=note)]
    trainer = quiet(max_epochs=epochs, checkpoint=True, run_dir=run_dir, callbacks=callbacks, **options)
    trainer.fit(Task(), data, resume="auto")
    return seen, [*READ]


def in_parts(make: Callable[[], Any], ranks: int, name: str) -> tuple[list[int], list[int], list[int], str]:
    with heard() as texts:
        whole, used = fit(make, None, f"{name}-whole", ranks)[0], fit(make, 3, f"{name}-parts", ranks)[0]
        rest, read = fit(make, None, f"{name}-parts", ranks)
    return whole, used + rest, [each for each in read if each in used], " ".join(texts)


BARE = {
    "datasets": hugging_face,
    "shards shuffled": lambda: hugging_face().shuffle(seed=3, buffer_size=1),
    "interleaved": interleaved,
}
DRAWN_AGAIN: dict[str, Callable[[], Any]] = {
    "in a DataLoader": lambda: DataLoader(hugging_face(), 3),
    "a buffer, in a DataLoader": lambda: DataLoader(hugging_face().shuffle(seed=3, buffer_size=8), 3),
}


@pytest.mark.parametrize("kind", [*BARE, *DRAWN_AGAIN])
def test_each_sample_comes_once_and_a_resume_goes_on_exactly(kind: str) -> None:
    make = BARE.get(kind) or DRAWN_AGAIN[kind]
    for ranks in (1, 2):
        found = [in_parts(make, 1, "1")] if ranks == 1 else on_two_ranks(in_parts, make, 2, "2")
        for whole, parts, skipped, said in found:
            assert (whole, "drawn again" in said) == (parts, kind in DRAWN_AGAIN), said
            assert skipped if kind in DRAWN_AGAIN else len(skipped) < 30, "those of the shards that are open"
        samples = sorted(each for whole, *_ in found for each in whole)
        assert ({*samples} if kind == "interleaved" else samples) == (
            {*range(46)} if kind == "interleaved" else [*range(46)]
        )


def test_another_number_of_ranks_within_an_epoch_is_refused_and_a_lost_buffer_is_named() -> None:
    on_two_ranks(lambda: fit(hugging_face, 2, "ranks", 2) and None)
    with pytest.raises(CheckpointError, match="divided over 2 ranks and this run's is not divided"):
        fit(hugging_face, None, "ranks")
    on_two_ranks(lambda: fit(hugging_face, None, "epoch", 2) and None)
    assert sorted(fit(hugging_face, None, "epoch", epochs=2)[0]) == [*range(46)]
    whole, parts, _, said = in_parts(lambda: hugging_face().shuffle(seed=3, buffer_size=8), 1, "buffer")
    assert len({*whole}) == 46 > len({*parts})
    assert "another order" in said


@pytest.mark.parametrize("change", ["missing", "cut"])
def test_a_shard_that_cannot_be_read_ends_the_run_with_its_position(change: str) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    paths = [Path(f"{shard}.parquet") for shard in range(2)]
    for shard, path in enumerate(paths):
        rows = datasets.Dataset.from_dict({"id": [*range(shard * 20, shard * 20 + 20)]})
        parquet.write_table(rows.data.table, path)

    stream = datasets.load_dataset("parquet", data_files=[*map(str, paths)], split="train", streaming=True)
    if change == "missing":
        paths[1].unlink()
    else:
        paths[1].write_bytes(paths[1].read_bytes()[:100])
    with pytest.raises(DataError, match=r"raised at batch [67] of epoch 0 .*'shard_idx': [01]"):
        fit(lambda: stream, None, "run")
