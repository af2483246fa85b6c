"""From samples to a batch, without the columns that a model does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import DataCollatorWithPadding, default_data_collator
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drivetrain.core.errors import ConfigError
from drivetrain.integrations.transformers.batch.columns import Columns


@dataclass
class Collation:
    """Leaves out unused columns, then makes a batch.

    Args:
        columns: The model's columns.
        collate: Makes a batch of samples.
    """

    columns: Columns
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        if samples and isinstance(samples[0], Mapping):
            kept = self.columns.of_samples(samples[0])
            samples = [{name: each[name] for name in each if name in kept} for each in samples]
        return self.collate(samples)


def default_collate(processing_class: Any, multiple: int | None = None) -> Callable[[list[Any]], Any]:
    """Return the collation that transformers chooses: padding if there is something that can pad.

    Args:
        processing_class: The tokenizer or another processor.
        multiple: Sequences are padded to a multiple of this length; None pads to the longest.

    Raises:
        ConfigError: `multiple` without a tokenizer that has a token for padding.
    """
    if isinstance(processing_class, PreTrainedTokenizerBase) and processing_class.pad_token is not None:
        padding: Callable[[list[Any]], Any] = DataCollatorWithPadding(
            processing_class, pad_to_multiple_of=multiple
        )
        return padding
    if multiple is not None:
        raise ConfigError(
            f"pad_to_multiple_of={multiple} needs a tokenizer that has a pad_token as processing_class. With"
            " another collation, leave it out and give the multiple to that:"
            f" Trainer(collate=DataCollator...(..., pad_to_multiple_of={multiple}))"
        )
    collate: Callable[[list[Any]], Any] = default_data_collator
    return collate
