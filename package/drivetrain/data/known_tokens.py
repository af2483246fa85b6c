"""The tokens of samples and of batches, where they are known before any is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from drivetrain.core.validation import count


def tokens_per_sample(data: Any) -> int | None:
    """Return the tokens, padding included, that each sample of a dataset or a stream has.

    The attribute `tokens_per_sample` of the data says so. None if there is none, or if parts of the data
    differ.
    """
    if isinstance(data, Subset):
        return tokens_per_sample(data.dataset)
    if isinstance(data, ConcatDataset):
        return tokens_in_common(data.datasets)
    each = getattr(data, "tokens_per_sample", None)
    return None if each is None else count(f"{type(data).__name__}.tokens_per_sample", each, at_least=1)


def tokens_in_common(sources: Iterable[Any]) -> int | None:
    """Return the tokens that each sample of all sources has; None if they differ."""
    found = set(map(tokens_per_sample, sources))
    return found.pop() if len(found) == 1 else None


def tokens_per_batch(loader: Any, size: int | None) -> int | None:
    """Return the tokens of a full batch: of so many samples, or of the loader's batch sampler.

    The attribute `tokens_per_batch` of a batch sampler, such as `by_tokens`, or of an iterable of batches
    says how many tokens fit. None if that is unknown.
    """
    sampler = getattr(loader, "batch_sampler", None)
    fits = getattr(loader if sampler is None else sampler, "tokens_per_batch", None)
    if fits is not None:
        return count("tokens_per_batch", fits, at_least=1)
    each = tokens_per_sample(getattr(loader, "dataset", None))
    return None if each is None or not size else each * size
