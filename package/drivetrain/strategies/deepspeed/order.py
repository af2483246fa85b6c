"""The order in which ranks gather weights and get gradients under DeepSpeed's ZeRO.

DeepSpeed matches gathered weights, and the gradients in its buckets, by their order alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.distributed.ranks import Ranks
from drivetrain.strategies.unused import check_all_used, part_order


class ZeroOrder:
    """Checks that all ranks use the same parameters, in the same order, and that every step uses all.

    Make it before DeepSpeed's engine, whose hooks begin the exchange of a gradient.

    Args:
        module: The step module.
        ranks: All ranks.
        stage: ZeRO's stage, from 1.
        in_backward: Whether gradients are reduced in backward; otherwise at the step.
        optimizers: The optimizers.
    """

    def __init__(
        self,
        module: Any,
        ranks: Ranks,
        stage: int,
        in_backward: bool,
        optimizers: Collection[Optimizer],
    ) -> None:
        self._order = part_order(ranks, needs_all=True)
        self._optimizers, self._stage = optimizers, stage
        self._module = module
        self._names = {each: name for name, each in module.task.named_parameters() if each.requires_grad}
        self._used: set[Tensor] = set()
        self._in_backward, self._each = in_backward, in_backward and stage > 1
        self._is_last = self._is_queued = False
        self._in_leaves: set[Tensor] = set()
        self._texts: dict[Tensor, str] = {}
        self._handles: list[Any] = []
        for each, name in self._names.items():
            hooked: Any = each
            self._texts[each] = f"has the gradient of {name!r}"
            self._handles.append(hooked.register_post_accumulate_grad_hook(self._add))
        if stage == 3:
            self._handles.append(module.register_forward_hook(self._end_forward))

    def watch_forwards(self) -> None:
        """Check the order of the modules whose weights stage 3 gathers, once DeepSpeed has hooked them."""
        from deepspeed.utils import z3_leaf_module

        inside: set[nn.Module] = set()
        for name, each in self._module.task.named_modules():
            if each in inside:
                continue
            if z3_leaf_module(each):  # gathered and reduced as a whole, whatever it uses
                inside.update(each.modules())
                self._in_leaves.update(each.parameters())
            elif next(each.parameters(recurse=False), None) is None:
                continue
            text = f"runs {name!r}" if name else "runs the task"

            def before(*_: Any, text: str = text) -> None:
                self._order.next(text)

            self._handles.append(each.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self._module.register_forward_pre_hook(self._begin_forward, prepend=True))

    def _begin_forward(self, *_: Any) -> None:
        self._order.begin("forward" if torch.is_grad_enabled() else "evaluation")

    def _end_forward(self, *_: Any) -> None:
        self._order.next("ends the forward")

    def begin_backward(self, last: bool) -> None:
        """Note that a backward begins.

        Args:
            last: Whether it is the last one of its step.
        """
        self._is_last = last
        self._order.begin(("backward", last))
        self._order.next("begins the backward")
        self._is_queued = False

    def _add(self, parameter: Tensor) -> None:
        self._used.add(parameter)
        if not self._in_backward:
            return
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self._each and parameter not in self._in_leaves:
            self._order.next(self._texts[parameter])

    def _end_backward(self) -> None:
        """Compare what has got gradients, between backward and the reduction of the last bucket."""
        self._is_queued = False
        if self._each or self._is_last:
            self._compare()

    def _compare(self) -> None:
        missing = [
            name
            for each, name in self._names.items()
            if each not in self._used and each not in self._in_leaves
        ]
        without = f", without those of {', '.join(map(repr, missing))}" if missing else ""
        self._order.next(f"reduces the gradients{without}")

    def check(self) -> None:
        """Check that the step has used all parameters; called before it is made.

        Raises:
            ConfigError: No rank has used some of them; names them.
        """
        if not self._in_backward:
            self._compare()
        check_all_used(self._names, self._used, self._optimizers, self._stage)
        # DeepSpeed completes the gradients of its leaf modules, whose experts a later step may leave out.
        self._used &= self._in_leaves

    def close(self) -> None:
        """End the check, and remove its hooks."""
        self._order.close()
        for each in self._handles:
            each.remove()
