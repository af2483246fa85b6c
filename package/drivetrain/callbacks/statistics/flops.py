"""The floating-point operations of a step, counted as torch runs them.

They are those of the forward and backward as model FLOPs utilisation counts them (Chowdhery et al., "PaLM",
arXiv 2204.02311, appendix B): without what activation checkpointing and the backward of fused attention
compute again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_ATTENTION = tuple(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    for kind in ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""Fused attention. Torch's own table lacks the CPU's, and its formulas of backward are not told apart."""


class _NoModules(contextlib.nullcontext[None]):
    """A counter's tracker of modules that tracks none, because operations are not counted by module.

    Torch's tracker hooks the inputs of modules, and its hook raises in `autograd.grad` of such an input.
    """

    parents = ("Global",)

    def __exit__(self, *_: object) -> None:
        pass


class FlopCount:
    """Counts the operations that torch dispatches until it is closed.

    Attributes:
        read_at: The count at the last `read`.
        failed: What the formula of an operation raised, if one did; the count is then incomplete.
    """

    def __init__(self) -> None:
        self.read_at: float | None = None
        self.failed: Exception | None = None
        self._forgotten = 0
        self._stack = contextlib.ExitStack()
        # The counter does not see into compiled code, and code that is first called under it is never
        # compiled at all. Nothing is compiled as long as nobody imported the compiler, whose import takes a
        # second.
        if "torch._dynamo" in sys.modules:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        formulas = {each: self._noting(formula) for each, formula in flop_registry.items()}
        formulas |= dict.fromkeys(_ATTENTION, self._noting(_attention))
        backward = self._noting(_attention_backward)
        for each in _ATTENTION:
            formulas[getattr(torch.ops.aten, f"{each.__name__}_backward")] = backward
        self._counter = FlopCounterMode(display=False, custom_mapping=formulas)
        self._counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._stack.enter_context(self._counter)

    def _noting(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """Return a formula that counts no operation of a recomputation.

        It never raises, because a statistic must not end the training.
        """

        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                flops = formula(*args, **kwargs)
            except Exception as error:
                self.failed = error
                return 0
            return 0 if _recomputes() else flops

        counted._get_raw = True  # type: ignore[attr-defined] # torch then passes tensors, not shapes
        return counted

    def read(self) -> None:
        """Store the count so far."""
        self.read_at = self._counter.get_total_flops() - self._forgotten

    def forget(self) -> None:
        """Restart the count: the operations so far were of an attempt that is repeated."""
        self._forgotten = self._counter.get_total_flops()

    def close(self) -> None:
        self._stack.close()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    batch, heads, queries, depth = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (depth + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations without those of the scores, which are computed again."""
    return 2 * _attention(query, key, value)


def _recomputes() -> bool:
    """Return whether an operation belongs to a forward that backward runs again.

    The operations of backward itself run without gradients, unless its graph is kept for a second derivative.
    Then no saved tensors are hooked, as torch's `checkpoint` does during a recomputation.
    """
    if torch._C._current_graph_task_id() < 0 or not torch.is_grad_enabled():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    node = torch._C._current_autograd_node()
    return node is not None and "Checkpoint" in node.name()
