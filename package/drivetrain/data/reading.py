"""Which source reads a user's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.data.indexed import IndexedSource
from drivetrain.data.share import WHOLE, Share
from drivetrain.data.sources import BatchSource, IterableSource, Source
from drivetrain.data.split import AlreadySplit, SplitSource
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import ConfigError, DataError
from drivetrain.types import Batch


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
    pin_memory: bool = False,
    share: Share = WHOLE,
    ranks: Ranks = ALONE,
    changes: bool = False,
) -> Source:
    """The source that reads a user's data.

    Args:
        data: A DataLoader, a dataset (see `is_dataset`), a list or tuple of batches, or any other iterable of
            batches.
        name: Whose data it is ("training", "validation", ...), for messages.
        seed: The run's seed.
        batch_size: For a bare Dataset that has no `batch_size` of its own.
        num_workers: Worker processes for a bare Dataset, each with a copy of it.
        shuffle: Whether a bare Dataset is shuffled.
        in_order: Read in the dataset's own order even when the loader shuffles.
        every_sample: Read the last, short batch too when the loader would drop it.
        pin_memory: For copies to an accelerator.
        share: Which part of it this process reads.
        ranks: The processes that read it, for data that they have divided themselves.
        changes: Whether a bare Dataset may be changed between two epochs, so that each needs new workers.

    Raises:
        DataError: Data of a kind that cannot be read, empty data, or a Dataset without a batch size.
    """
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "num_workers": num_workers,
        "shuffle": shuffle,
        "in_order": in_order,
        "every_sample": every_sample,
        "pin_memory": pin_memory,
        "changes": changes,
    }
    if not isinstance(data, AlreadySplit):
        return _source(data, name, seed, share=share, **options)
    own = _source(data.data, name, seed, reader=share.rank, **options)
    return own if share.size == 1 else SplitSource(own, share, ranks)


def _source(
    data: Any,
    name: str,
    seed: int,
    *,
    batch_size: int | None,
    num_workers: int,
    shuffle: bool,
    in_order: bool,
    every_sample: bool,
    pin_memory: bool,
    changes: bool,
    share: Share = WHOLE,
    reader: int = 0,
) -> Source:
    loader = data
    bare = is_dataset(data)
    if bare:
        size = _batch_size_of(data, name, batch_size)
        if size is not None:
            loader = DataLoader(
                data,
                batch_size=size,
                shuffle=shuffle,
                num_workers=num_workers,
                persistent_workers=num_workers > 0 and not changes,
            )
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        if not isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "__len__"):
            _check_samples(loader.dataset, name)
            return IndexedSource(
                name,
                loader,
                seed,
                in_order=in_order,
                every_sample=every_sample,
                pin_memory=pin_memory,
                share=share,
                reader=reader,
                bare=bare,
            )
    elif isinstance(loader, (list, tuple)):
        return BatchSource(name, _ready_batches(loader, name), share)
    if not _gives_batches(loader):
        raise DataError(
            f"the {name} data is a {type(data).__name__}, which gives no batches. Allowed: a DataLoader, a"
            " Dataset, a list of batches, any iterable of batches, or an object with train_data() and so on"
        )
    return IterableSource(name, loader, seed, share)


def is_dataset(data: object) -> bool:
    """Whether data are samples to be batched: a torch Dataset, or any object with a length that is indexed.

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
    """The batch size of a bare Dataset; None for one that is iterated and gives ready batches."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        if batch_size is None:
            return None
        raise DataError(
            f"the {name} data is an IterableDataset ({kind}), which is read as ready batches, but"
            f" batch_size={batch_size} was given. Pass DataLoader(dataset, batch_size={batch_size})"
        )
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
    _check_samples(dataset, name)
    return size


def _ready_batches(batches: list[Batch] | tuple[Batch, ...], name: str) -> list[Batch] | tuple[Batch, ...]:
    kind = type(batches).__name__
    if not batches:
        raise DataError(f"the {name} data is empty: its {kind} has no batches")
    if isinstance(batches[0], (DataLoader, Dataset)):
        raise DataError(
            f"the {name} data is a {kind} of loaders. For evaluation on several, give them names:"
            ' {"first": loader, "second": other}; training takes one loader'
        )
    return batches


def _check_samples(dataset: Any, name: str) -> None:
    if len(dataset) == 0:
        raise DataError(f"the {name} data is empty: its dataset ({type(dataset).__name__}) has no samples")


def evaluation_sources(data: Any, name: str, seed: int, **options: Any) -> list[tuple[str | None, Source]]:
    """The sources of evaluation data: one without a name, or one for each named loader.

    Raises:
        DataError: No loaders, or a loader that cannot be read.
    """
    if isinstance(data, AlreadySplit) and isinstance(data.data, Mapping):
        data = {key: AlreadySplit(each) for key, each in data.data.items()}
    if not isinstance(data, Mapping):
        return [(None, as_source(data, name, seed, **options))]
    if not data:
        raise DataError(f"the {name} data is a mapping without any loader")
    sources: list[tuple[str | None, Source]] = []
    for key, loader in data.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise DataError(f"the name {key!r} of a {name} loader must be a non-empty text without '/'")
        sources.append((key, as_source(loader, f"{name} ({key})", seed, **options)))
    return sources


def check_settings_used(train: Any, evaluation: Any, batch_size: int | None, num_workers: int) -> None:
    """Refuse settings for a bare Dataset where there is none, and the loader says otherwise.

    Args:
        train: The training data.
        evaluation: The validation data, if there is any: for that the settings may be meant.
        batch_size: The Trainer's.
        num_workers: Likewise.

    Raises:
        ConfigError: They would not be used.
    """
    given = [train, *(evaluation.values() if isinstance(evaluation, Mapping) else [evaluation])]
    loader, *others = [each.data if isinstance(each, AlreadySplit) else each for each in given]
    if is_dataset(loader) or any(is_dataset(each) for each in others) or not _gives_batches(loader):
        return
    own: dict[str, int | None] = {"batch_size": None, "num_workers": None}
    if isinstance(loader, DataLoader):
        own = {"batch_size": loader.batch_size, "num_workers": loader.num_workers}
    for name, value in (("batch_size", batch_size), ("num_workers", num_workers or None)):
        if value is None or value == own[name]:
            continue
        if isinstance(loader, DataLoader):
            if own[name] is not None:
                raise ConfigError(
                    f"Trainer({name}={value}) is for data that is given as a dataset, but the training data"
                    f" is a DataLoader, which has its own {name}={own[name]}. Pass DataLoader(...,"
                    f" {name}={value}), or the dataset itself"
                )
        else:
            raise ConfigError(
                f"Trainer({name}={value}) is for data that is given as a dataset, but the training data is a"
                f" {type(loader).__name__}, which is read as ready batches. Leave {name} out, or, if its"
                f" items are samples, pass DataLoader(data, {name}={value})"
            )


def pin_memory_for(device: torch.device) -> bool:
    """Whether batches for a device are worth putting into page-locked memory."""
    return device.type == "cuda"
