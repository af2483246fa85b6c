"""Choose the source that reads a user's data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, StackDataset

from drivetrain.core.containers import opened
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import mix
from drivetrain.core.types import Batch
from drivetrain.data.indexed import IndexedSource
from drivetrain.data.orders.length_grouped import LengthGroupedSampler, lengths_of
from drivetrain.data.orders.order import generators_of
from drivetrain.data.shard import WHOLE, Shard
from drivetrain.data.sources import BatchSource, IterableSource, Source
from drivetrain.data.split_source import AlreadySplit, SplitSource, divided
from drivetrain.data.streams.samples import SampleStream
from drivetrain.distributed.ranks import ALONE, Ranks

_LOG = logger(__name__)


def as_source(
    data: Any,
    name: str,
    seed: int,
    *,
    batch_size: int | None = None,
    num_workers: int = 0,
    shuffle: bool = False,
    in_order: bool = False,
    every_sample: bool = False,
    divides: bool = False,
    pin_memory: bool = False,
    shard: Shard = WHOLE,
    ranks: Ranks = ALONE,
    changes: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    task_collate: Callable[[list[Any]], Any] | None = None,
    group_by_length: str | Callable[[Any], int] | None = None,
    accumulation: int = 1,
) -> Source:
    """Return the source that reads a user's data.

    Args:
        data: A DataLoader, a dataset (see `is_dataset`), a list or tuple of batches, or any other iterable of
            batches.
        name: The data's name ("training", "validation", ...), for messages.
        seed: The run's seed. If a DataLoader or its samplers have generators, their seeds are added to it.
        batch_size: For a bare Dataset without its own `batch_size`. An IterableDataset without it gives
            ready batches.
        num_workers: Worker processes for a bare Dataset, each with a copy of it.
        shuffle: Whether a bare Dataset is shuffled.
        in_order: Read in the dataset's own order even if the loader shuffles.
        every_sample: Read the last, short batch even if the loader drops it.
        divides: Divide streams that have a method `shard` by it, so that no process reads them whole.
        pin_memory: Pin batches for copies to an accelerator.
        shard: The shard that this process reads.
        ranks: The processes that read it, for data that is already split.
        changes: Whether a bare Dataset may change between epochs, so that each needs new workers.
        collate: Makes a batch from the samples of a bare Dataset; None takes the dataset's own `collate_fn`.
        task_collate: Makes a batch where neither is there; None takes torch's default.
        group_by_length: What gives the length of a bare Dataset's sample; see `lengths_of`. None does not
            group.
        accumulation: Micro-batches of a step in one process, for the groups.

    Raises:
        ConfigError: `group_by_length` for data that is no bare Dataset with a length.
        DataError: The data is of a kind that cannot be read, is empty, or is a Dataset without a batch size.
    """
    split, whole, reader = None, shard, 0
    data = divided(data, name, shard, divides)
    may_be_empty = isinstance(data, AlreadySplit) and shard.size > 1  # if another rank's part is not
    if isinstance(data, AlreadySplit):
        split, data, shard, reader = data, data.part(shard), WHOLE, shard.rank
    loader = data
    if is_dataset(data):
        size = _batch_size_of(data, name, batch_size)
        group_size = (size or 1) * shard.size * accumulation
        loader = _as_loader(
            data,
            name,
            size,
            num_workers,
            shuffle,
            changes,
            collate or getattr(data, "collate_fn", None) or task_collate,
            group_by_length,
            group_size,
        )
    if group_by_length is not None and (loader is data or isinstance(loader, SampleStream)):
        raise ConfigError(
            f"group_by_length is for data that is given as a dataset with a length, but the {name} data is a"
            f" {type(data).__name__}. Pass the dataset itself with batch_size=..., or"
            " DataLoader(..., sampler=drivetrain.data.LengthGroupedSampler(lengths, group_size))"
        )
    for own in _own_seeds(loader):
        seed = mix(seed, own)
    _check_kind(loader, name, type(data).__name__, may_be_empty, warns=shard.rank == 0)
    if _is_indexed(loader):
        source: Source = IndexedSource(
            name,
            loader,
            seed,
            in_order=in_order,
            every_sample=every_sample,
            pin_memory=pin_memory,
            shard=shard,
            reader=reader,
        )
    elif isinstance(loader, (list, tuple)):
        source = BatchSource(name, loader, shard)
    else:
        source = IterableSource(name, loader, seed, shard)
    source.loader = loader
    if split is None:
        source.ranks, source.seed = ranks, seed
    elif whole.size > 1:
        return SplitSource(source, whole, ranks, split)
    return source


def _as_loader(
    dataset: Any,
    name: str,
    size: int | None,
    num_workers: int,
    shuffle: bool,
    changes: bool,
    collate: Callable[[list[Any]], Any] | None,
    group_by_length: str | Callable[[Any], int] | None,
    group_size: int,
) -> Any:
    """Return a bare Dataset's loader, or itself if it gives ready batches; see `as_source`."""
    if size is None:
        return dataset
    if isinstance(dataset, IterableDataset):
        _check_no_workers(dataset, name, num_workers)
        return SampleStream(dataset, size, collate)
    sampler = None
    if group_by_length is not None:
        sampler = LengthGroupedSampler(lengths_of(dataset, group_by_length, name), group_size)
    return DataLoader(
        dataset,
        batch_size=size,
        shuffle=shuffle and sampler is None and len(dataset) > 0,
        sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0 and not changes,
    )


def _check_kind(loader: Any, name: str, kind: str, may_be_empty: bool, warns: bool) -> None:
    """Refuse data that gives no batches."""
    if _is_indexed(loader):
        if not may_be_empty:
            _check_samples(loader.dataset, name)
    elif isinstance(loader, (list, tuple)):
        if loader or not may_be_empty:
            _check_batches(loader, name, warns)
    elif isinstance(loader, Tensor):
        raise DataError(f"the {name} data is a Tensor. For inputs x and targets y: {AS_DATASET}")
    elif not _gives_batches(loader):
        raise DataError(
            f"the {name} data is a {kind}, which gives no batches. Allowed: a DataLoader, a Dataset, a list"
            " of batches, any iterable of batches, or an object with train_data() and so on"
        )


def _own_seeds(loader: Any) -> list[int]:
    """Return the seeds that a user gave a loader and its samplers: those of generators, and that of torch's
    DistributedSampler unless it is 0, the default.
    """
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    found = [
        each.initial_seed()
        for each in generators_of((loader, sampler, batches, getattr(batches, "sampler", None)))
    ]
    return [*found, sampler.seed] if isinstance(sampler, DistributedSampler) and sampler.seed else found


def _is_indexed(loader: object) -> bool:
    """Return whether batches can be made by index as a loader would make them."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return not isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__")


AS_DATASET = "give them as a tuple, (x, y), and the Trainer a batch_size"
"""How tensors of all samples are given as data."""


def as_samples(data: Any, name: str) -> Any:
    """Return columns as the dataset of their samples, and all other data as it is.

    Columns are a tuple of at least two tensors or arrays of one length, or a mapping of names to them. A
    tuple of other things, and any list, has ready batches.

    Raises:
        DataError: The columns of a mapping have different lengths.
    """
    if isinstance(data, Mapping):
        if not data or not all(map(_is_column, data.values())):  # of loaders
            pairs = {key: as_samples(each, name) for key, each in data.items() if type(each) is tuple}
            return {**data, **pairs}
        if len({len(each) for each in data.values()}) > 1:
            found = ", ".join(f"{key!r} has {len(each)}" for key, each in data.items())
            raise DataError(f"the {name} data is a mapping of columns of different lengths: {found}")
        return StackDataset(**data)
    if type(data) is tuple and len(data) > 1 and all(map(_is_column, data)):
        return StackDataset(*data) if len({len(each) for each in data}) == 1 else data
    return data


def _is_column(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def is_dataset(data: object) -> bool:
    """Return whether data holds single samples: a torch Dataset, or any object with a length and an index.

    A list or a tuple has ready batches.
    """
    if isinstance(data, Dataset):
        return True
    if isinstance(data, (DataLoader, list, tuple, str, bytes, Mapping, Tensor)):
        return False
    return hasattr(type(data), "__len__") and hasattr(type(data), "__getitem__")


def _gives_batches(data: object) -> bool:
    return hasattr(data, "__iter__") and not isinstance(data, (str, bytes, Mapping, Tensor))


def _batch_size_of(dataset: Any, name: str, batch_size: int | None) -> int | None:
    """Return the batch size of a bare Dataset; None for an iterable one that gives ready batches."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return batch_size
    size = getattr(dataset, "batch_size", None) or batch_size
    if not isinstance(size, int) or size < 1:
        raise DataError(
            f"the {name} data is a dataset ({kind}, which has a length and is indexed) without a batch size."
            " Give Trainer(batch_size=32), give the dataset a batch_size attribute, or pass"
            " DataLoader(dataset, batch_size=32). If its items are ready batches, pass list(data)"
        )
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"the {name} data is a Dataset ({kind}) without a length. Give it __len__, pass"
            " DataLoader(dataset, sampler=...), or make it an IterableDataset"
        )
    return size


def _check_no_workers(dataset: Any, name: str, num_workers: int) -> None:
    if num_workers:
        raise DataError(
            f"the {name} data is an IterableDataset ({type(dataset).__name__}), and num_workers={num_workers}"
            " was given, but only the dataset itself can divide its samples among workers. Leave num_workers"
            f" out, or pass DataLoader(dataset, batch_size=..., num_workers={num_workers})"
        )


def _check_batches(batches: Sequence[Batch], name: str, warns: bool) -> None:
    kind = type(batches).__name__
    if not batches:
        raise DataError(f"the {name} data is empty: its {kind} has no batches")
    if isinstance(batches[0], (DataLoader, Dataset)):
        raise DataError(
            f"the {name} data is a {kind} of loaders. For evaluation on several, give them names:"
            ' {"first": loader, "second": other}; training takes one loader'
        )
    if _are_columns(batches):
        raise DataError(
            f"the {name} data is a {kind} of 2 items of {len(batches[0])} rows each. They would be read as"
            f" ready batches, but look like the inputs and the targets of all samples: {AS_DATASET}"
        )
    if warns and (label := _label_of_a_sample(batches)) is not None:
        _LOG.warning(
            f"the {name} data is a {kind} of {len(batches)} items, which are read as ready batches, but they"
            f" look like single samples: entry {label!r} of each is one number. If they are samples, pass"
            " DataLoader(data, batch_size=32)"
        )


def _are_columns(batches: Sequence[Batch]) -> bool:
    """Return whether two batches look like the inputs and the targets of all samples."""
    of_rows = [
        getattr(each, "ndim", 0) or (isinstance(each, list) and _is_number(each[0])) for each in batches
    ]
    if len(batches) != 2 or not all(of_rows) or len(batches[0]) != len(batches[1]):
        return False
    kinds = {(getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in batches}
    return len(kinds) > 1


def _label_of_a_sample(batches: Sequence[Batch]) -> Any:
    """Return the name or index of an entry that looks like a sample's label, or None.

    It is one number beside tensors with dimensions, and it differs between the items: a number that holds for
    every sample, such as a scale, would be equal in all batches. Tensors of a batch agree in their first
    dimension, so two tensors of equal length count as a batch.
    """
    looked_at = batches[:: -(-len(batches) // 100)]
    items = [each for each in map(opened, looked_at) if each is not None]
    lengths = [each.shape[0] for each in items[0].entries if getattr(each, "ndim", 0)] if items else []
    if not lengths or (len(lengths) > 1 and len(set(lengths)) == 1):
        return None
    for name, *values in zip(items[0].names, *(each.entries for each in items), strict=False):
        if all(_is_number(each) for each in values) and len(set(map(str, values))) > 1:
            return name
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0


def _check_samples(dataset: Any, name: str) -> None:
    if len(dataset) == 0:
        raise DataError(f"the {name} data is empty: its dataset ({type(dataset).__name__}) has no samples")


def evaluation_sources(data: Any, name: str, seed: int, **options: Any) -> list[tuple[str | None, Source]]:
    """Return the sources of evaluation data: one without a name, or one for each named loader.

    Raises:
        DataError: There are no loaders, or one cannot be read.
    """
    if isinstance(data, AlreadySplit) and isinstance(data.data, Mapping):
        data = {key: AlreadySplit(each, data.divided_for_one) for key, each in data.data.items()}
    if not isinstance(data, Mapping):
        return [(None, as_source(data, name, seed, **options))]
    if not data:
        raise DataError(f"the {name} data is a mapping without any loader")
    sources: list[tuple[str | None, Source]] = []
    for key, loader in data.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise DataError(f"the name {key!r} of a {name} loader must be a non-empty string without '/'")
        sources.append((key, as_source(loader, f"{name} ({key})", seed, **options)))
    return sources


def check_settings_used(
    train: Any,
    evaluation: Any,
    batch_size: int | None,
    num_workers: int,
    evaluation_batch_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Refuse settings for a bare Dataset if no data is one and the loader has other settings."""
    given = [train, *(evaluation.values() if isinstance(evaluation, Mapping) else [evaluation])]
    loader, *others = [each.data if isinstance(each, AlreadySplit) else each for each in given]
    streams = [each for each in (loader, *others) if isinstance(each, IterableDataset)]
    if collate is not None and streams and (evaluation_batch_size or batch_size) is None:
        raise ConfigError(
            "Trainer(collate=...) makes a batch of samples, but without batch_size an IterableDataset"
            f" ({type(streams[0]).__name__}) is read as ready batches. Give Trainer(batch_size=...)"
        )
    check_evaluation_size(others, "validation", evaluation_batch_size)
    if not any(map(is_dataset, (loader, *others))) and _gives_batches(loader):
        _refuse_for_batches(loader, batch_size, num_workers, collate)


def _refuse_for_batches(loader: Any, batch_size: int | None, num_workers: int, collate: Any) -> None:
    if collate is not None and getattr(loader, "collate_fn", None) is not collate:
        raise ConfigError(
            "Trainer(collate=...) is for data that is given as a dataset, but the training data is a"
            f" {type(loader).__name__}. Pass DataLoader(..., collate_fn=...), or the dataset itself"
        )
    is_loader = isinstance(loader, DataLoader)
    for name, value in (("batch_size", batch_size), ("num_workers", num_workers or None)):
        own = getattr(loader, name) if is_loader else None
        if value is None or value == own:
            continue
        what = ", which is read as ready batches"
        instead = f"Leave {name} out, or, if its items are samples, pass DataLoader(data, {name}={value})"
        if type(loader) is tuple and all(map(_is_column, loader)) and len(loader) > 1:
            what = f" of tensors of different lengths: {', '.join(str(len(each)) for each in loader)}"
            instead = f"Give tensors of one length, or, if they are ready batches, leave {name} out"
        if is_loader:
            what = f" with {name}={own}"
            instead = f"Pass DataLoader(..., {name}={value}), or the dataset itself"
        if is_loader and own is None:
            what = " whose batches its batch_sampler or its dataset makes"
            instead = f"Leave {name} out, and give the size there"
        raise ConfigError(
            f"Trainer({name}={value}) is for data that is given as a dataset, but the training data is a"
            f" {type(loader).__name__}{what}. {instead}"
        )


def check_evaluation_size(loaders: Collection[Any], stage: str, size: int | None) -> None:
    """Refuse a batch size of evaluations if all data of a stage is in loaders with another one."""
    sizes = {getattr(each, "batch_size", None) for each in loaders if isinstance(each, DataLoader)}
    if size is None or sizes in (set(), {size}) or any(map(is_dataset, loaders)):
        return
    raise ConfigError(
        f"Trainer(evaluation_batch_size={size}) is for data that is given as a dataset, but the {stage} data"
        f" is a DataLoader. Pass DataLoader(..., batch_size={size}), or the dataset itself"
    )


def pin_memory_for(device: torch.device) -> bool:
    """Return whether batches for a device should be in pinned memory."""
    return device.type == "cuda"
