"""The table of promises in docs/how-to/streams.md, with the packages themselves."""

import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import tqdm
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import CheckpointError, DataError, LambdaCallback, TaskModule, already_split
from drivetrain.data import shuffled
from drivetrain.data.split_source import AlreadySplit
from drivetrain.strategies.ddp import DDP
from drivetrain.testing import run_distributed

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:  # before a test's own environment is noted, which it changes
    os.environ["KMP_DUPLICATE_LIB_OK"] = "True"
    pytest.importorskip("datasets").disable_progress_bars()
    tqdm.tqdm.monitor_interval = 0  # whose thread would outlive a test


SAMPLES = 47
"""The samples of WebDataset, litData and MosaicML, which neither shards nor ranks divide evenly."""

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


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter without CUDA
        pytest.skip(f"{name} cannot be imported: {error}")


def webdataset(batch_size: int, workers: int) -> Any:
    package("webdataset")
    import webdataset as wds

    for shard in range(0 if Path("shard4.tar").exists() else 5):
        with wds.TarWriter(f"shard{shard}.tar") as tar:
            for number in range(shard, SAMPLES, 5):
                tar.write({"__key__": f"{number:04d}", "id.cls": number})
    urls = [str(Path(f"shard{shard}.tar").resolve()) for shard in range(5)]
    stream = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node, empty_check=False)
    return DataLoader(stream.decode().to_tuple("id.cls"), batch_size, num_workers=workers)


def item(number: int) -> dict[str, int]:
    return {"id": number}


def litdata(batch_size: int, workers: int, loader: str = "StreamingDataLoader") -> Any:
    lit = package("litdata")
    if not Path("lit").exists():
        writer = lit.streaming.writer.BinaryWriter("lit", chunk_size=10)
        for number in range(SAMPLES):
            writer[number] = item(number)
        writer.done()
        writer.merge(1)
    stream = lit.StreamingDataset(str(Path("lit").resolve()), shuffle=False, drop_last=False)
    return getattr(lit, loader, DataLoader)(stream, batch_size=batch_size, num_workers=workers)


def mosaicml(batch_size: int, workers: int) -> Any:
    streaming = package("streaming")
    if not Path("mds").exists():
        with streaming.MDSWriter(out="mds", columns={"id": "int"}, size_limit=100) as writer:
            for number in range(SAMPLES):
                writer.write(item(number))
    streaming.base.util.clean_stale_shared_memory()
    warnings.filterwarnings("ignore", "divide by zero", RuntimeWarning)  # of its own, in the ranks too
    stream = streaming.StreamingDataset(
        local=str(Path("mds").resolve()), shuffle=False, batch_size=batch_size
    )
    return streaming.StreamingDataLoader(stream, batch_size=batch_size, num_workers=workers)


def ids(batch: Any) -> Any:
    return (batch["id"] if isinstance(batch, dict) else batch[0]).flatten()


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        return self.weight * ids(batch).double().mean()


def fit(
    make: Callable[[], Any],
    stop: int | None,
    run_dir: str,
    ranks: int = 1,
    epochs: int = 1,
    bad: str = "raise",
) -> tuple[list[int], list[int]]:
    """Return the samples that were used, and those that were decoded."""
    seen: list[int] = []
    READ.clear()

    def note(run: Any) -> None:
        own = (each for each in run.window.micro_batches if not each.is_placeholder)
        seen.extend(sample for each in own for sample in ids(each.batch).tolist())
        if run.progress.steps == stop:
            run.stop("for the test")

    data = make()
    options: dict[str, Any] = {"strategy": DDP(world_size=2), "devices": 2} if ranks == 2 else {}
    is_loader = isinstance(data, (DataLoader, AlreadySplit))
    options["batch_size"] = None if is_loader else 3
    options |= {"callbacks": [LambdaCallback(on_step_end=note)], "on_bad_batch": bad}
    trainer = quiet(max_epochs=epochs, checkpoint=True, run_dir=run_dir, **options)
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


LOADERS: dict[str, Callable[[int, int], Any]] = {
    "webdataset": webdataset,
    "litdata": litdata,
    "litdata in a DataLoader": partial(litdata, loader="DataLoader"),
    "mosaicml": mosaicml,
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_of_packages_give_each_sample_once_and_resume_exactly(kind: str, workers: int) -> None:
    make = partial(LOADERS[kind], 3, workers)
    make()  # writes the files
    for ranks in (1, 2):
        if ranks == 1:
            found = run_distributed(in_parts, make, 1, "1", world_size=1)  # packages leave files open
        else:
            found = on_two_ranks(lambda: in_parts(lambda: already_split(lambda *_: make()), 2, "2"))
        has_state = kind in ("litdata", "mosaicml")
        for whole, parts, _, said in found:
            assert (whole, "drawn again" in said) == (parts, not has_state), said
        samples = sorted(each for whole, *_ in found for each in whole)
        if kind == "mosaicml" and ranks == 2:  # which fills the ranks with samples that come twice
            assert len(samples) == SAMPLES + 1
            samples = sorted({*samples})
        assert samples == [*range(SAMPLES)]
    alone = run_distributed(lambda: fit(make, None, "2-whole", epochs=2)[0], world_size=1)[0]
    assert sorted(alone) == [*range(SAMPLES)], "the second epoch, on another number of ranks"


def test_a_buffer_of_ours_over_a_stream_of_datasets_resumes_exactly() -> None:
    make = lambda: shuffled(hugging_face(), 8)  # noqa: E731
    found = [in_parts(make, 1, "1"), *on_two_ranks(in_parts, make, 2, "2")]
    for whole, parts, *_ in found:
        assert whole == parts
    assert sorted(found[0][0]) == sorted(found[1][0] + found[2][0]) == [*range(46)] != found[0][0]


def failing(example: Any) -> Any:
    if example["id"] in (5, 17):
        raise OSError(f"sample {example['id']} is cut short")
    return example


def test_bad_samples_of_datasets_are_left_out_by_the_state() -> None:
    found = on_two_ranks(lambda: fit(lambda: hugging_face().map(failing), None, "run", 2, bad="skip")[0])
    assert sorted(found[0] + found[1]) == [each for each in range(46) if each not in (5, 17)]


class Busy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(503)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def dies(samples: Any) -> Any:
    os._exit(3)


def broken(change: str, url: str) -> Any:
    """Return a loader of WebDataset, or of datasets for a store, of which something fails."""
    datasets = package("datasets")
    if change == "a store":
        return datasets.load_dataset("json", data_files=[f"{url}/a.jsonl"], split="train", streaming=True)
    loader = webdataset(3, 0)
    if change == "a shard that is missing":
        Path("shard3.tar").unlink()
    elif change == "a shard that is cut off":
        Path("shard3.tar").write_bytes(Path("shard3.tar").read_bytes()[:700])
    elif change == "a worker":
        return DataLoader(loader.dataset, 3, num_workers=2, collate_fn=dies)
    else:
        wds = package("webdataset")
        return DataLoader(wds.WebDataset([f"pipe:curl -sf {url}/a.tar"], shardshuffle=False), 3)
    return loader


def of_broken(change: str, url: str) -> None:
    fit(lambda: broken(change, url), None, "run")


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "a shard that is missing": "raised at batch .* of epoch 0: FileNotFoundError.*shard3.tar",
        "a shard that is cut off": "raised at batch .* of epoch 0: ReadError.*shard3.tar",
        "a worker": r"batch 0 of epoch 0 never came: worker [01] .* exit code 3",
        "a store": "FileNotFoundError.*http://127.0.0.1",
        "a store behind a pipe": "raised at batch 0 of epoch 0: (OSError|ReadError).*curl -sf http://127.0.0.1",
    }.items(),
)
def test_what_fails_is_named(change: str, words: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=words):
            run_distributed(of_broken, change, f"http://127.0.0.1:{server.server_port}", world_size=1)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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
