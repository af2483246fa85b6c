"""The cross entropy of a linear head, computed for a part of the tokens at a time.

A language model's logits are its largest tensor: 1.6 GB for 8,192 tokens of GPT-2 in float32, and their
gradient is as large. torch 2.13's `linear_cross_entropy` holds all of them where labels are smoothed, has
neither a z-loss nor a soft cap, and takes no shards. The kernels of Liger and of cut-cross-entropy need
Triton and a GPU. As Liger's (https://arxiv.org/abs/2410.10989), this one computes the gradients of each part
in the forward, while its logits are there. Backward then needs neither the logits nor the head.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import count, number

_PARTS = 8
"""The least number of parts, so that a short batch is divided too."""


def cross_entropy(
    hidden: Tensor,
    head: nn.Linear | nn.Embedding,
    targets: Tensor,
    *,
    chunk: int = 8192,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Return the mean cross entropy of `head(hidden)` without ever holding all logits.

    It equals torch's `cross_entropy(head(hidden).flatten(0, -2), targets.flatten(), ...)`, and so do its
    gradients. It reads the head's weight and bias and does not call the head. A head that FSDP has sharded is
    gathered for it; one that tensor parallelism has split over the vocabulary is not.

    Args:
        hidden: The inputs of the head, of shape (..., features).
        head: The linear layer, or the embedding whose weight is the head's, with a row for each word.
        targets: The indices of the words, of shape (...).
        chunk: The most tokens whose logits exist at once; an eighth of the tokens if that is less.
        z_loss: The factor of the mean of logsumexp(logits)^2, which keeps logits small (PaLM, 2022).
        soft_cap: Replaces the logits by soft_cap * tanh(logits / soft_cap) (Gemma 2, 2024); None disables it.
        label_smoothing: The share of each target that is spread over all words, from 0 to 1.
        ignore_index: The target of tokens that do not count.

    Returns:
        A scalar, the mean over the targets that count; NaN if there are none.

    Raises:
        ConfigError: An option is out of its range, the head is of another kind, has its own forward or is
            split over its features, shapes do not fit, or a second derivative is asked for.
    """
    chunk = count("cross_entropy(chunk=...)", chunk, at_least=1)
    number("cross_entropy(z_loss=...)", z_loss, at_least=0)
    number("cross_entropy(label_smoothing=...)", label_smoothing, at_least=0, at_most=1)
    if soft_cap is not None:
        number("cross_entropy(soft_cap=...)", soft_cap, above=0)
    if not isinstance(head, (nn.Linear, nn.Embedding)):
        raise ConfigError(
            "cross_entropy(head=...) must be an nn.Linear or an nn.Embedding, whose weight it reads, not a"
            f" {type(head).__module__}.{type(head).__qualname__}"
        )
    if isinstance(head, nn.Linear) and any(map(_is_other, (type(head).forward, vars(head).get("forward")))):
        raise ConfigError(
            f"cross_entropy(head=...) reads the head's weight and does not call its forward, and a"
            f" {type(head).__module__}.{type(head).__qualname__} has a forward of its own. Leave the head out"
            " of what has replaced it, or use torch.nn.functional.cross_entropy(head(hidden), ...)"
        )
    sharded: Any = head if hasattr(head, "unshard") else None
    if sharded is not None:
        sharded.unshard()
    weight, bias, words = head.weight, getattr(head, "bias", None), len(head.weight)
    _check(hidden, weight, targets, ignore_index)
    weight, first, group = _local(weight)
    bias = None if bias is None else _local(bias)[0]
    if hasattr(hidden, "full_tensor"):
        hidden = hidden.full_tensor()
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    rows = max(1, min(chunk, -(-len(flat) // _PARTS)))
    needs = [
        torch.is_grad_enabled() and each is not None and each.requires_grad for each in (flat, weight, bias)
    ]
    options = _Options(rows, z_loss, soft_cap, label_smoothing, ignore_index, first, words, group, needs)
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _HeadLoss.apply(flat, weight, bias, wanted, options)  # type: ignore[no-untyped-call]
    if sharded is not None:
        sharded.reshard()
    return loss


def _is_other(forward: Any) -> bool:
    """Return whether a function is not the forward of a linear layer; our compiled ones are no functions."""
    is_function = isinstance(forward, (FunctionType, MethodType, partial))
    return is_function and getattr(forward, "__func__", forward) is not nn.Linear.forward


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int) -> None:
    if hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != targets.shape or not targets.ndim:
        raise ConfigError(
            f"cross_entropy: hidden of shape {tuple(hidden.shape)}, a head's weight of shape"
            f" {tuple(weight.shape)} and targets of shape {tuple(targets.shape)} do not fit; they are (...,"
            " features), (words, features) and (...)"
        )
    if targets.dtype is not torch.int64:
        raise ConfigError(f"cross_entropy(targets=...) must be int64 indices of words, not {targets.dtype}")
    if (
        type(targets) is Tensor and targets.device.type == "cpu"
    ):  # a fake one has no values; others would wait
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))]
        if wrong.numel():
            raise ConfigError(
                f"cross_entropy: the target {wrong[0].item()} is neither one of the head's {len(weight)}"
                f" words nor ignore_index={ignore_index}"
            )


def _local(parameter: Any) -> tuple[Tensor, int, Any]:
    """Return this rank's rows of a parameter, the number of the first, and the group that has all of them.

    The group is None if this rank has them all.
    """
    split = [at for at, each in enumerate(getattr(parameter, "placements", ())) if not each.is_replicate()]
    if not hasattr(parameter, "to_local"):
        return parameter, 0, None
    if not split:
        return parameter.to_local(), 0, None
    (at, *more), mesh = split, parameter.device_mesh
    if more or not parameter.placements[at].is_shard(0):
        raise ConfigError(
            f"cross_entropy: the head is split as {list(parameter.placements)}; it may be split once, over"
            " its words, as by ColwiseParallel() in the parallel_plan"
        )
    return (
        parameter.to_local(),
        mesh.get_local_rank(at) * -(-len(parameter) // mesh.size(at)),
        mesh.get_group(at),
    )


class _Options(NamedTuple):
    rows: int
    z_loss: float
    soft_cap: float | None
    smoothing: float
    ignore_index: int
    first: int
    words: int
    group: Any
    needs: list[bool]

    def summed(self, tensor: Tensor, operation: Any = None) -> Tensor:
        """Reduce a tensor in place over the ranks that share the vocabulary; add it up by default."""
        if self.group is not None:
            distributed.all_reduce(tensor, operation or distributed.ReduceOp.SUM, group=self.group)
        return tensor


class _HeadLoss(torch.autograd.Function):
    """The mean loss; its forward computes the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        counted = targets != options.ignore_index
        share = counted.to(wide) / counted.sum().clamp(min=1)
        share = share.where(~counted | (targets >= 0) & (targets < options.words), torch.nan)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each, dtype=wide) if needed and each is not None else None
            for each, needed in zip((hidden, weight, bias), options.needs, strict=True)
        )
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, len(hidden), options.rows):
            part = slice(start, start + options.rows)
            logits = nn.functional.linear(hidden[part], weight, bias).to(wide)
            loss, gradient = _part(logits, targets[part], share[part], options, any(options.needs))
            total += loss
            gradient = gradient.to(weight.dtype)
            if of_hidden is not None:
                of_hidden[part] = gradient @ weight
            if of_weight is not None:
                of_weight += gradient.mT @ hidden[part]
            if of_bias is not None:
                of_bias += gradient.sum(0)
        if of_hidden is not None:
            options.summed(of_hidden)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total.where(counted.any(), torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "cross_entropy has no second derivative, which create_graph=True asks for. Use"
                " torch.nn.functional.cross_entropy"
            )
        (given,), (of_inputs, of_head) = gradients, ctx.dtypes
        found = zip(ctx.saved_tensors, (of_inputs, of_head, of_head), strict=True)
        return *(None if each is None else (each * given).to(dtype) for each, dtype in found), None, None


def _part(
    logits: Tensor, targets: Tensor, share: Tensor, options: _Options, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of a part, and the gradient of its logits, which take their memory.

    Args:
        logits: This rank's, of shape (tokens, words).
        targets: Indices in the whole vocabulary.
        share: The weight of each token in the mean.
    """
    smoothing, cap = options.smoothing, options.soft_cap
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    largest = options.summed(logits.amax(1), distributed.ReduceOp.MAX)
    place = targets - options.first
    is_here = (place >= 0) & (place < logits.shape[1]) & (share > 0)
    place = place.where(is_here, 0)[:, None]
    target = logits.gather(1, place)[:, 0] * is_here
    slope = 1 - (logits / cap) ** 2 if cap is not None and with_gradient else None
    mean = logits.sum(1) / options.words if smoothing else torch.zeros_like(target)
    powers = logits.sub_(largest[:, None]).exp_()
    total, target, mean = options.summed(torch.stack([powers.sum(1), target, mean]))
    level = total.log() + largest
    loss = level - (1 - smoothing) * target - smoothing * mean + options.z_loss * level**2
    loss = (loss * share).sum()
    if not with_gradient:
        return loss, powers
    gradient = powers.mul_(((1 + 2 * options.z_loss * level) / total)[:, None])
    if smoothing:
        gradient -= smoothing / options.words
    gradient.scatter_add_(1, place, (is_here.to(gradient.dtype) * (smoothing - 1.0))[:, None])
    gradient *= share[:, None]
    return loss, gradient if slope is None else gradient.mul_(slope)
