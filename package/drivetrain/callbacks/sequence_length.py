"""The length of training sequences by schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.core.containers import opened
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.int_schedule import IntSchedule
from drivetrain.core.types import Batch
from drivetrain.core.validation import by_name
from drivetrain.run.settings import check_samples, scheduled_numbers

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy


@by_name
class SequenceLength(Callback):
    """Cuts the sequences of training batches to a length that changes during the run.

    Short sequences at first make early steps cheaper and steadier (Li et al., "The Stability-Efficiency
    Dilemma: Investigating Sequence Length Warmup for Training GPT Models", 2022). Each batch is cut at its
    end, on the host, before its tokens and the weight of its loss are counted. Evaluations are not cut.

    Args:
        lengths: The longest sequence in tokens, by points of the run: ``{0: 64, "1000 steps": 256}`` or the
            result of `ramp`; or one number. Points are in steps, whole epochs, or samples or tokens of all
            processes.
        fields: All tensors to cut with the tokens: names of the batch's fields, such as ``("input_ids",
            "labels", "attention_mask")``, or positions in a tuple. Or a mapping from these to the dimension
            to cut, or several dimensions: ``{"tokens": 1, "mask": (2, 3)}``. By default dimension 1 is cut.

    Raises:
        ConfigError: An argument that is not allowed; or, at the first batch, a tensor to cut is not found, or
            nothing can be cut.
    """

    def __init__(
        self,
        lengths: int | Mapping[Any, int],
        fields: str | Sequence[str | int] | Mapping[Any, int | Sequence[int]],
    ) -> None:
        self.lengths = IntSchedule("SequenceLength", lengths)
        self.fields = _checked(fields)
        self._is_checked = self._is_resumed = False

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that no sample can be left out, if the points are in samples.

        Raises:
            ConfigError: The Trainer may leave samples out.
        """
        check_samples(trainer, "SequenceLength", self.lengths)
        others = [trainer.gradient_accumulation_steps, *scheduled_numbers(trainer).values()]
        if any(getattr(each, "unit", "") == "tokens" for each in others):
            raise ConfigError(
                "SequenceLength changes the tokens of a sample, so gradient_accumulation_steps and batch_size"
                " cannot count them beforehand. Give these in samples or steps"
            )

    def on_fit_start(self, run: Run) -> None:
        """Have the training data cut each batch."""
        assert run.train_feed is not None
        self._is_checked, self._is_resumed = False, run.progress.steps + run.progress.skipped > 0
        run.train_feed.cut(self.lengths, self._cut, "SequenceLength")

    def _cut(self, batch: Batch, length: int) -> Batch:
        """Return a batch with sequences of at most `length` tokens."""
        container = None if isinstance(batch, Tensor) else opened(batch)
        names: Sequence[Any] = [0] if container is None else container.names
        entries = [batch] if container is None else list(container.entries)
        if not self._is_checked:
            self._check(dict(zip(names, entries, strict=True)), length)
            self._is_checked = True
        for index, name in enumerate(names):
            for dimension in self.fields.get(name, ()):
                if entries[index].shape[dimension] > length:
                    # Whole, because a loss may call `view`.
                    entries[index] = entries[index].narrow(dimension, 0, length).contiguous()
        return entries[0] if container is None else container.rebuild(entries)

    def _check(self, batch: Mapping[Any, Any], length: int) -> None:
        """Check the fields of the first batch of this program, and that the first of the run is cut."""
        tensors = {name: each for name, each in batch.items() if isinstance(each, Tensor)}
        shown = ", ".join(f"{name}: {tuple(each.shape)}" for name, each in tensors.items()) or "no tensors"
        for name, dimensions in self.fields.items():
            if name not in tensors:
                raise ConfigError(
                    f"SequenceLength(fields=...) has {name!r}, which is no tensor of the batch ({shown})."
                    f" {nearest(str(name), map(str, tensors))}"
                )
            if max(dimensions) >= tensors[name].ndim:
                raise ConfigError(
                    f"SequenceLength cuts dimension {max(dimensions)} of {name!r}, which has the shape"
                    f" {tuple(tensors[name].shape)}. Give another: fields={{'tokens': 1, 'mask': (2, 3)}}"
                )
        longest = max(tensors[name].shape[each] for name, cut in self.fields.items() for each in cut)
        if not self._is_resumed and longest <= length:
            raise ConfigError(
                f"SequenceLength has nothing to cut in the first batch: its sequences have {longest} tokens,"
                f" and the first length is {length} ({shown}). Give a shorter first length, or name the right"
                " tensors"
            )
        mask = tensors.get("attention_mask")
        if mask is not None and mask.ndim == 2 and not mask[:, 0].all():
            raise ConfigError(
                "SequenceLength cuts sequences at their end, and this batch has padding at their beginning"
                " (attention_mask). Pad on the right: tokenizer.padding_side = 'right'"
            )


def _checked(fields: Any) -> dict[Any, tuple[int, ...]]:
    """Return the dimensions to cut by field."""
    if isinstance(fields, (str, int)):
        fields = (fields,)
    if not isinstance(fields, Mapping):
        if not isinstance(fields, Collection) or not all(isinstance(each, (str, int)) for each in fields):
            raise ConfigError(
                "SequenceLength(fields=...) takes names of the batch's tensors, or positions in a tuple, such"
                f" as ('tokens', 'labels'), not {fields!r}"
            )
        fields = dict.fromkeys(fields, 1)
    found = {
        name: (each,) if isinstance(each, int) else tuple(each) if isinstance(each, Sequence) else ()
        for name, each in fields.items()
    }
    for name, dimensions in found.items():
        if not dimensions or not all(isinstance(each, int) and each >= 1 for each in dimensions):
            raise ConfigError(
                f"SequenceLength(fields=...) has {fields[name]!r} for {name!r}; allowed are dimensions from 1"
                " on, such as 1 or (2, 3). Dimension 0 counts samples"
            )
    if not found:
        raise ConfigError("SequenceLength(fields=...) is empty. Name the tensors to cut")
    return found
