"""Batches of as many samples as fit into a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from drivetrain.core.errors import DataError
from drivetrain.core.validation import count
from drivetrain.data.orders.length_grouped import lengths_of


def by_tokens(
    dataset: Any, tokens: int, *, lengths: str | Callable[[Any], int] | Sequence[int] | Tensor = "input_ids"
) -> TokenBatches:
    """Return a batch sampler, for `DataLoader(batch_sampler=...)`, of batches with about as many tokens each.

    The samples are sorted by length and cut into batches: each has as many as fit when all are padded to its
    longest. So a batch of short samples has more of them, and little of a batch is padding. In each epoch the
    samples of one length and the batches come in another random order, a function of (seed, epoch). The
    number of batches is the same in all epochs. Each sample comes once in an epoch, on any number of
    processes; a process that the last batches leave without one runs a placeholder of weight zero.

    The gradient of a step is exact if the task has a `loss_weight`, such as its number of tokens: batches
    have different numbers of samples.

    Args:
        dataset: The dataset of the loader, with a length and an index.
        tokens: The most tokens of a batch, padding included.
        lengths: The tokens of each sample: a column that holds their number or the tokens, a function of a
            sample, or the numbers themselves. A column and a function are read once, before training.

    Raises:
        ConfigError: `tokens` is less than 1.
        DataError: A sample is longer than a batch, or the lengths are not those of the dataset.
    """
    most = count("by_tokens(tokens=)", tokens, at_least=1)
    if not hasattr(dataset, "__len__"):
        raise DataError(f"by_tokens() needs a dataset with a length, not a {type(dataset).__name__}")
    if isinstance(lengths, str) or callable(lengths):
        lengths = lengths_of(dataset, lengths, "training", argument="by_tokens(): lengths")
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"by_tokens(lengths=) takes a column, a function or whole numbers, not {lengths!r:.60}"
        ) from None
    is_whole = not found.is_floating_point() and found.dtype != torch.bool
    if found.shape != (len(dataset),) or not len(found) or not is_whole or found.min() < 0:
        raise DataError(
            f"by_tokens(): lengths must have a whole number for each of the {len(dataset)} samples, and are"
            f" {found.dtype} of shape {list(found.shape)}"
        )
    longest = int(found.argmax())
    if found[longest] > most:
        raise DataError(
            f"by_tokens(): sample {longest} has {int(found[longest]):,} tokens, and a batch at most {most:,}."
            " Cut it, leave it out, or give more tokens"
        )
    return TokenBatches(found, most)


class TokenBatches(Sampler[list[int]]):
    """The batches of an epoch; see `by_tokens`.

    Args:
        lengths: The length of each sample, of shape [samples].
        tokens_per_batch: The most tokens of a batch.
    """

    def __init__(self, lengths: Tensor, tokens_per_batch: int) -> None:
        self.lengths = lengths
        self.tokens_per_batch = tokens_per_batch
        self._sizes: list[int] = []
        sorted_lengths = lengths.sort(descending=True).values.tolist()
        done = 0
        while done < len(sorted_lengths):
            size = min(tokens_per_batch // max(1, sorted_lengths[done]), len(sorted_lengths) - done)
            self._sizes.append(size)
            done += size

    def __len__(self) -> int:
        return len(self._sizes)

    def order_settings(self) -> str:
        """Return what the order depends on beside the seed and the lengths."""
        return f"by_tokens() of {self.tokens_per_batch} tokens, in {len(self)} batches"

    def __iter__(self) -> Iterator[list[int]]:
        shuffled = torch.randperm(len(self.lengths))
        ordered = shuffled[self.lengths[shuffled].argsort(descending=True, stable=True)]
        batches = torch.split(ordered, self._sizes)
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number].tolist()


def check_batches_by_tokens(loader: DataLoader[Any]) -> None:
    """Check that a loader takes such batches as its batches, and that they were made of its dataset.

    Raises:
        DataError: It takes them as its sampler, or has a dataset of another length.
    """
    for own in (loader.sampler, loader.batch_sampler):
        if not isinstance(own, TokenBatches):
            continue
        count, made = len(loader.dataset), len(own.lengths)  # type: ignore[arg-type]
        if own is loader.sampler or count != made:
            raise DataError(
                f"by_tokens() has made batches of {made} samples, and the loader's dataset has {count}. Give"
                " both the same dataset: DataLoader(dataset, batch_sampler=by_tokens(dataset, ...))"
            )
