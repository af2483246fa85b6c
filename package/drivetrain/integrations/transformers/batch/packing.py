"""Whether a model keeps the documents of a packed batch apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.devices import has_values
from drivetrain.core.errors import DataError
from drivetrain.task.without_trace import without_trace

_PARALLEL = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def check_packed(model: Any, columns: Mapping[str, Any]) -> None:
    """Check that no token of a packed batch attends to another document.

    A batch is packed if its `position_ids` begin anew within a row, as `drivetrain.data.packed` makes them.
    The model runs twice on one row, the second time with other tokens in the row's first document: the
    outputs of the document after it must not change.

    Args:
        model: The model; its shards are gathered, so all ranks call this with their first batch.
        columns: What its forward is given.

    Raises:
        DataError: Attention crosses the documents. The message says what to give.
    """
    positions, ids = columns.get("position_ids"), columns.get("input_ids")
    if not (isinstance(positions, Tensor) and isinstance(ids, Tensor) and positions.shape == ids.shape):
        return
    if positions.ndim != 2 or not has_values(positions):
        return
    starts = (positions[:, 1:] != positions[:, :-1] + 1).nonzero()[:2].tolist()
    # Without a border the model runs too: another rank's batch may have one, and all gather the shards.
    row, start, stop = (*starts[0], ids.shape[1]) if starts else (0, 0, 0)
    if len(starts) == 2 and starts[1][0] == row:
        stop = starts[1][1] + 1
    start, count = start + 1, len(ids)
    inputs = {
        name: each[row : row + 1] if isinstance(each, Tensor) and each.shape[:1] == (count,) else each
        for name, each in columns.items()
        if name != "labels" and (count == 1 or name not in _PARALLEL)
    }
    other = inputs["input_ids"].clone()
    other[:, :start] = (other[:, :start] + 1) % model.get_input_embeddings().num_embeddings
    with without_trace(model, device=ids.device), torch.no_grad():
        model.eval()
        found = [_outputs(model(**{**inputs, "input_ids": each})) for each in (inputs["input_ids"], other)]
    one, two = (each[:, start:stop].float() for each in found)
    if starts and (one - two).abs().max() > 1e-5 * one.abs().max():
        raise DataError(_advice(model, inputs.get("attention_mask"), inputs.get("use_cache")))


def _outputs(found: Any) -> Tensor:
    logits = found.get("logits") if isinstance(found, Mapping) else None
    first: Tensor = found[0] if logits is None else logits
    return first


def _advice(model: Any, mask: Any, uses_cache: Any) -> str:
    what = (
        "the position_ids of the first batch begin anew within a row, so that documents are packed, but"
        f" {type(model).__name__} lets tokens attend to the document before theirs"
    )
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return f"{what}: with a 2-D attention_mask it does not read the borders. Leave attention_mask out"
    if uses_cache:
        return f"{what}: with use_cache=True it does not read the borders. Leave use_cache out"
    if isinstance(mask, Tensor):
        kind = getattr(model.config, "_attn_implementation", None)
        return (
            f"{what}, although attention_mask has {mask.ndim} dimensions: attn_implementation={kind!r} does"
            ' not take a mask of bool. Give packed(boundary="positions"), or attn_implementation="sdpa"'
        )
    return (
        f'{what}. Give packed(boundary="mask"), if its attention takes a mask of four dimensions; a model'
        " without borders, such as one with a recurrent state, needs rows of one document"
    )
