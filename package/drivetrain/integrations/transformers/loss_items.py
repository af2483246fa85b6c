"""How many items the loss of a model is a mean over, so that any split of a batch gives the same gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.data.batch import batch_size

IGNORED = -100
"""The label that a model's loss ignores."""

Items = Callable[[Mapping[str, Any]], float | Tensor]
"""Counts the items of a batch."""

UNSHIFTED = frozenset(
    {
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "MBartForCausalLM",
        "MarianForCausalLM",
        "MusicgenMelodyForCausalLM",
        "PLBartForCausalLM",
        "PegasusForCausalLM",
        "WhisperForCausalLM",
    }
)
"""The causal language models that compare each position's logits with the label of the same position."""

_GENERATING = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_TOKENS = ("MASKED_LM", "TOKEN_CLASSIFICATION")
_CLASSES = (
    "SEQUENCE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION",
)
_KINDS = (*_GENERATING, *_TOKENS, *_CLASSES, "QUESTION_ANSWERING", "CTC", "SEMANTIC_SEGMENTATION")


@dataclass(frozen=True)
class LossItems:
    """The items of a model's loss.

    Attributes:
        count: Counts the items of a batch.
        shifts: Whether position t of the logits belongs to label t + 1.
        problem: Why the count is not exact; "" if it is.
    """

    count: Items
    shifts: bool = False
    problem: str = ""


def items_of(model: nn.Module) -> LossItems:
    """Return the items of a model's own loss, by the table of transformers that lists the model's class.

    A loss over tokens counts the labels other than -100, without the first of each sequence if the model
    shifts them. Other losses count samples.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None:
        return LossItems(samples, problem="it is no model of transformers: what its loss counts is unknown")
    kind = _kind(model)
    auxiliary = getattr(config, "output_router_logits", False)
    if auxiliary:
        problem = "the loss of the router (output_router_logits=True) is not a mean over tokens"
    elif kind is None and type(model).forward is not nn.Module.forward:
        problem = "transformers lists it under no kind of loss that can be counted"
    else:
        problem = ""
    if kind in _GENERATING:
        shifts = not config.is_encoder_decoder and name not in UNSHIFTED
        return LossItems(shifted_tokens if shifts else tokens, shifts, problem)
    if kind in _TOKENS:
        return LossItems(tokens, problem=problem)
    if kind in _CLASSES:
        return LossItems(_class_counter(config), problem=problem)
    if kind == "QUESTION_ANSWERING":
        return LossItems(spans)
    if kind == "SEMANTIC_SEGMENTATION":
        ignored = getattr(config, "semantic_loss_ignore_index", 255)
        return LossItems(lambda batch: _labels_other_than(ignored, batch))
    if kind == "CTC" and config.ctc_loss_reduction != "mean":
        problem = (
            f"it sums its loss over the samples (ctc_loss_reduction={config.ctc_loss_reduction!r}); for a"
            ' mean set model.config.ctc_loss_reduction = "mean"'
        )
    return LossItems(samples, problem=problem)


def _kind(model: nn.Module) -> str | None:
    for cls in type(model).__mro__:
        for kind in _KINDS:
            for named in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
                if cls.__name__ == named or (not isinstance(named, str) and cls.__name__ in named):
                    return kind
    return None


def labels_of(batch: Mapping[str, Any]) -> Any:
    """Return a batch's labels, or None; transformers' collators call them "labels".

    Raises:
        DataError: They are those of one sample.
    """
    for name in ("labels", "label", "label_ids"):
        if name in batch:
            labels = batch[name]
            if not isinstance(labels, Tensor) or not labels.ndim:
                raise DataError(
                    f"{name!r} of a batch is {labels!r}, not a tensor with a row for each sample. If the data"
                    " gives single samples, pass a dataset with Trainer(batch_size=...), or"
                    " DataLoader(data, batch_size=..., collate_fn=task.collate_function())"
                )
            return labels
    return None


def samples(batch: Mapping[str, Any]) -> float:
    """Count samples."""
    return batch_size(batch) or 1


def _count(chosen: Tensor) -> Tensor:
    return chosen.sum()


def _labels_other_than(ignored: int, batch: Mapping[str, Any]) -> float | Tensor:
    labels = labels_of(batch)
    return samples(batch) if labels is None else _count(labels != ignored)


def tokens(batch: Mapping[str, Any]) -> float | Tensor:
    """Count the labels other than -100."""
    return _labels_other_than(IGNORED, batch)


def shifted_tokens(batch: Mapping[str, Any]) -> float | Tensor:
    """Count the labels other than -100, without the first of each sequence."""
    if "shift_labels" in batch:
        return _count(batch["shift_labels"] != IGNORED)
    labels = labels_of(batch)
    return samples(batch) if labels is None else _count(labels[..., 1:] != IGNORED)


def spans(batch: Mapping[str, Any]) -> float | Tensor:
    """Count the samples whose answer lies in the text; the loss leaves out the others."""
    starts, ends = batch.get("start_positions"), batch.get("end_positions")
    if starts is None or ends is None:
        return samples(batch)
    length = batch["input_ids"].shape[1] if "input_ids" in batch else batch["inputs_embeds"].shape[1]
    return (_count(starts < length) + _count(ends < length)) / 2


def _class_counter(config: Any) -> Items:
    """Return the counter of a classification: class numbers of -100 are left out, other labels never."""

    def count(batch: Mapping[str, Any]) -> float | Tensor:
        labels = labels_of(batch)
        problem = getattr(config, "problem_type", None)
        numbered = problem == "single_label_classification" or (problem is None and config.num_labels > 1)
        if not numbered or labels is None or labels.is_floating_point():
            return samples(batch)
        if labels.device.type == "cpu" and labels.ndim == 1:
            ignored: int = labels.tolist().count(IGNORED)  # quicker than two operations of torch
            return len(labels) - ignored
        return _count(labels != IGNORED)

    return count


def check_smoothed(logits: Tensor, labels: Tensor) -> None:
    """Check that logits have one label each.

    Raises:
        ConfigError: The labels are not numbers of classes.
    """
    if labels.is_floating_point() or labels.shape != logits.shape[:-1] or logits.shape[-1] == 1:
        raise ConfigError(
            "label_smoothing is for classes, one label for each row of logits; here labels are"
            f" {tuple(labels.shape)} {str(labels.dtype).removeprefix('torch.')} and logits"
            f" {tuple(logits.shape)}. Leave it out, or give compute_loss_func"
        )


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, shifts: bool) -> Tensor:
    """Return the mean cross-entropy with label smoothing, over the labels other than -100.

    A share `smoothing` of each target is spread evenly over all classes (Szegedy et al., "Rethinking the
    Inception Architecture for Computer Vision", CVPR 2016).

    Args:
        logits: [..., classes].
        labels: [...].
        smoothing: The share.
        shifts: Whether position t of the logits belongs to label t + 1.
    """
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def as_tensor(items: float | Tensor, batch: Any) -> Tensor:
    """Return the number of items of a batch as transformers passes it, a tensor on the batch's device."""
    columns = batch.values() if isinstance(batch, Mapping) else ()
    device = next((each.device for each in columns if isinstance(each, Tensor)), None)
    return torch.as_tensor(items, dtype=torch.float32, device=device)


@contextmanager
def counted_targets() -> Iterator[list[int]]:
    """Count the targets of each mean of a classification loss while the block runs; yields the counts."""
    with _Counting() as counting:
        yield counting.targets


class _Counting(TorchFunctionMode):
    """Counts the targets of each mean of a classification loss."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):  # torch gives the other arguments by name here
            target = args[1]
            means = given["reduction"] == "mean" and given["weight"] is None
            if means and not target.is_floating_point():  # else it holds probabilities, and all count
                self.targets.append(int((target != given["ignore_index"]).sum()))
        return func(*args, **given)
