"""Lightning's data modules, and modules with loaders of their own, as data for a Trainer."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.validation import count
from drivetrain.data.orders.order import refuse_divided, undivided
from drivetrain.distributed.processes import once_per_machine
from drivetrain.integrations.lightning.kinds import is_kind, is_overridden

_LOADERS = {
    "train_data": "train_dataloader",
    "validation_data": "val_dataloader",
    "test_data": "test_dataloader",
    "predict_data": "predict_dataloader",
}


class LightningData:
    """A data object for `fit`, `validate`, `test` and `predict`; made by `as_data`.

    It has those of `train_data()`, `validation_data()`, `test_data()` and `predict_data()` whose loader the
    module has.

    Attributes:
        module: The data module, or the module whose loaders are used.

    Args:
        module: As for `as_data`.
    """

    def __init__(self, module: Any, reload_every_n_epochs: int = 0) -> None:
        self.module = module
        self.is_data_module = is_kind(module, "LightningDataModule")
        for name, theirs in _LOADERS.items():
            if is_overridden(module, theirs):
                ask: Callable[[], Any] = _Loaders(module, theirs)
                if name == "train_data" and reload_every_n_epochs:
                    ask = functools.partial(_Reloaded, ask, reload_every_n_epochs)
                setattr(self, name, ask)
        if self.is_data_module and is_overridden(module, "state_dict"):
            self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict

    def begin(self, verb: str, task: Any) -> None:
        """Prepare the data: `prepare_data` in one process of each machine, then `setup` in every one.

        A module with its own loaders is left alone: its task calls both.

        Args:
            verb: "fit", "validate", "test" or "predict".
            task: The task.
        """
        if not self.is_data_module:
            return
        take = getattr(task, "take_data_module", None)
        if callable(take):  # of `as_task`; the module finds the data module as self.trainer.datamodule
            take(self.module)
        if is_overridden(self.module, "prepare_data"):
            once_per_machine(self.module.prepare_data, once=not self.module.prepare_data_per_node)
        self.module.setup(stage=verb)

    def end(self, verb: str) -> None:
        """Call `teardown`."""
        if self.is_data_module:
            self.module.teardown(stage=verb)
            self.module.trainer = None


def as_data(module: Any, *, reload_every_n_epochs: int = 0) -> LightningData:
    """Return a data module of Lightning, or a module with its own loaders, as data.

    ::

        trainer.fit(as_task(LitModel()), as_data(LitData()))

    `prepare_data`, `setup(stage)` and `teardown(stage)` are called as in Lightning, and the state of a data
    module is in the checkpoints. A `DistributedSampler` in a loader is replaced by a sampler of the whole
    dataset, which the ranks divide among them, so that every sample counts once. Evaluation takes a list of
    loaders, whose names are "dataloader_idx_0" and so on, or a mapping. A list or mapping of training loaders
    gives lists or mappings of batches, until the longest one ends; shorter ones begin again.

    Args:
        module: A `LightningDataModule` or `LightningModule` of `lightning` or `pytorch_lightning`.
        reload_every_n_epochs: The epochs after which `train_dataloader` is asked for another loader, as by
            Lightning's `reload_dataloaders_every_n_epochs`; 0 keeps the first one.

    Raises:
        ConfigError: It is neither; or it has no loader; or the number of epochs is negative or not whole.
    """
    name = module.__name__ if isinstance(module, type) else type(module).__name__
    if not is_kind(module, "LightningDataModule", "LightningModule"):
        raise ConfigError(
            f"as_data takes a LightningDataModule or a LightningModule, not {name}. "
            + (
                f"Pass an instance: as_data({name}(...))"
                if isinstance(module, type)
                else "Other data is given to the Trainer as it is"
            )
        )
    if not any(is_overridden(module, each) for each in _LOADERS.values()):
        raise ConfigError(
            f"{name} has no loader: override one of {', '.join(_LOADERS.values())}, or pass a loader to the"
            " Trainer"
        )
    return LightningData(module, count("reload_every_n_epochs", reload_every_n_epochs, at_least=0))


class _Reloaded:
    """Training data whose loader is made anew after some epochs.

    Args:
        ask: Returns a new loader.
        every: The number of epochs.
    """

    def __init__(self, ask: Callable[[], Any], every: int) -> None:
        self._ask = ask
        self._every = every
        self._epoch = 0
        self._turn = -1
        self._loader: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Take note of the epoch, and pass it to the loader's sampler."""
        self._epoch = epoch
        set_epoch = getattr(getattr(self._now(), "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _now(self) -> Any:
        turn = self._epoch // self._every
        if turn != self._turn:
            self._loader, self._turn = self._ask(), turn
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


class _Loaders:
    """A method of a data object: the loaders that one of the module's methods returns."""

    def __init__(self, module: Any, method: str) -> None:
        self._module = module
        self._method = method

    def __call__(self) -> Any:
        given = getattr(self._module, self._method)()
        source = f"{type(self._module).__name__}.{self._method}()"
        if given is None or (isinstance(given, (list, tuple)) and not given):
            if self._method == "val_dataloader":
                return None  # no validation, as in Lightning
            raise DataError(f"{source} returned {given!r}; return a loader")
        if self._method == "train_dataloader":
            return _training(given, source)
        return _evaluation(given, source)


def _evaluation(given: Any, source: str) -> Any:
    """Return one loader, or a mapping of named ones."""
    if _is_combined(given):
        return _Batches(given)
    if not _is_collection(given):
        return _counting_once(given, source)
    if isinstance(given, Mapping):
        return {str(name): _counting_once(each, f"{source}[{name!r}]") for name, each in given.items()}
    if len(given) == 1:
        return _counting_once(given[0], source)
    return {f"dataloader_idx_{index}": _counting_once(each, source) for index, each in enumerate(given)}


def _training(given: Any, source: str) -> Any:
    if _is_combined(given):
        return _Batches(given)
    if not _is_collection(given):
        return _counting_once(given, source)
    named = given if isinstance(given, Mapping) else dict(enumerate(given))
    loaders = {name: _counting_once(each, f"{source}[{name!r}]") for name, each in named.items()}
    for name, each in loaders.items():
        if (
            not isinstance(each, DataLoader)
            or type(each).__iter__ is not DataLoader.__iter__
            or each.batch_sampler is None
            or isinstance(each.dataset, IterableDataset)
        ):
            raise DataError(
                f"{source}[{name!r}] is a {type(each).__name__} that cannot be read together with others:"
                " that needs DataLoaders over datasets with a length. Return"
                " lightning.pytorch.utilities.CombinedLoader(loaders, mode), which is iterated as it is"
            )
    return _together(loaders, isinstance(given, Mapping))


def _is_collection(given: Any) -> bool:
    """Return whether the loaders are several: a list or tuple of ready batches has tensors."""
    if isinstance(given, Mapping):
        return True
    loaders = (DataLoader, IterableDataset)
    return isinstance(given, (list, tuple)) and all(
        isinstance(each, loaders) or not isinstance(each, (torch.Tensor, Mapping, list, tuple))
        for each in given
    )


def _is_combined(given: Any) -> bool:
    return is_kind(given, "CombinedLoader")


class _Batches:
    """The batches of Lightning's CombinedLoader, which gives (batch, its number, the loader's number)."""

    def __init__(self, combined: Any) -> None:
        self._combined = combined

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._combined)


def _counting_once(loader: Any, source: str) -> Any:
    """Return a loader whose sampler gives the whole dataset.

    Raises:
        DataError: A sampler of another kind gives each process a part.
    """
    if not isinstance(loader, DataLoader):
        return loader
    if type(loader).__iter__ is not DataLoader.__iter__:
        return _read_to_its_length(loader)
    if isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    described: Any = batches if type(batches) is BatchSampler else loader
    if described is loader and batches is not None:
        refuse_divided(batches, source)
    sampler = _whole(described.sampler, source)
    if sampler is described.sampler:
        return loader
    # A copy, with everything else that its class may have; torch refuses to set these on a loader in use.
    found = copy.copy(loader)
    changes: dict[str, Any] = {}
    if batches is None or loader.batch_size is not None:
        changes["sampler"] = sampler
    if batches is not None:
        changes["batch_sampler"] = BatchSampler(sampler, described.batch_size, described.drop_last)
    vars(found).update(changes)
    return found


def _read_to_its_length(loader: DataLoader[Any]) -> Any:
    """Return a loader that iterates by itself, cut to the number of batches that its length gives.

    Lightning reads no further, and what such a loader does then may be an error: it may cycle one of several.
    """
    kind = type(loader)
    try:
        len(loader)
    except TypeError:
        return loader
    found = copy.copy(loader)
    ends = {"__iter__": lambda self: itertools.islice(kind.__iter__(self), len(self))}
    found.__class__ = type(kind.__name__, (kind,), {**ends, "__module__": kind.__module__})
    return found


def _whole(sampler: Any, source: str) -> Any:
    if is_kind(sampler, "DistributedSamplerWrapper", "UnrepeatedDistributedSamplerWrapper"):
        return _Unwrapped(sampler)
    if is_kind(sampler, "UnrepeatedDistributedSampler"):
        return RandomSampler(sampler.dataset) if sampler.shuffle else SequentialSampler(sampler.dataset)
    return undivided(sampler, source)


class _Unwrapped(torch.utils.data.Sampler[Any]):
    """The sampler that one of Lightning's wrappers divides.

    Args:
        wrapper: Its `dataset` has one index of that sampler after the other.
    """

    def __init__(self, wrapper: Any) -> None:
        self._indices = wrapper.dataset
        self.set_epoch: Callable[[int], None] = wrapper.set_epoch

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        self._indices.reset()
        return (self._indices[index] for index in range(len(self)))


def _together(loaders: Mapping[Any, DataLoader[Any]], is_named: bool) -> DataLoader[Any]:
    """Return a loader whose batches have one of each loader.

    Its indices are the batches of indices of all loaders. So they are a function of the seed and the epoch,
    are divided among ranks, and are made by workers, like those of any dataset.
    """
    each = list(loaders.values())
    workers = max(loader.num_workers for loader in each)
    longest = max(each, key=lambda loader: loader.num_workers)
    options: dict[str, Any] = {}
    if workers:
        options = {
            "prefetch_factor": longest.prefetch_factor,
            "persistent_workers": longest.persistent_workers,
            "multiprocessing_context": longest.multiprocessing_context,
            "worker_init_fn": longest.worker_init_fn,
            "timeout": longest.timeout,
        }
    samplers = [loader.batch_sampler for loader in each]
    return DataLoader(
        _Groups(loaders, is_named),  # type: ignore[arg-type]
        batch_size=None,
        sampler=_GroupSampler(samplers),
        num_workers=workers,
        collate_fn=_unchanged,
        **options,
    )


def _unchanged(batch: Any) -> Any:
    return batch


class _Groups:
    """Ready batches: a list or mapping with one batch of each loader.

    Args:
        loaders: The loaders.
        is_named: Whether a batch is a mapping.
    """

    def __init__(self, loaders: Mapping[Any, DataLoader[Any]], is_named: bool) -> None:
        self._length = max(len(each) for each in loaders.values())
        self._parts = [(name, each.dataset, each.collate_fn) for name, each in loaders.items()]
        self._is_named = is_named

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, indices: Sequence[Sequence[Any]]) -> Any:
        batches = {
            name: collate(_samples(dataset, chosen))
            for (name, dataset, collate), chosen in zip(self._parts, indices, strict=True)
        }
        return batches if self._is_named else list(batches.values())


def _samples(dataset: Any, indices: Sequence[Any]) -> Any:
    many = getattr(dataset, "__getitems__", None)
    return [dataset[each] for each in indices] if many is None else many(list(indices))


class _GroupSampler(torch.utils.data.Sampler[Any]):
    """The indices of one batch of each loader; a shorter loader begins again.

    Args:
        samplers: Their batch samplers.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = samplers

    def __len__(self) -> int:
        return max(map(len, self._samplers))

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the samplers that take it."""
        for each in self._samplers:
            for owner in (each, getattr(each, "sampler", None)):
                set_epoch = getattr(owner, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        for each in self._samplers:
            generator = getattr(getattr(each, "sampler", None), "generator", None)
            if isinstance(generator, torch.Generator):
                # So that it is a function of the epoch, as the order of one loader is.
                generator.manual_seed(int(torch.randint(2**63 - 1, ())))
        drawn = [iter(each) for each in self._samplers]
        for _ in range(len(self)):
            group = []
            for index, sampler in enumerate(self._samplers):
                batch = next(drawn[index], None)
                if batch is None:
                    drawn[index] = iter(sampler)
                    batch = next(drawn[index])
                group.append(list(batch))
            yield tuple(group)
