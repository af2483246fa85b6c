"""Optimizers that evaluate the loss themselves, such as LBFGS, and modules that train nothing or run backward
themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import StrategyError
from drivetrain.engine.generator_step import Returned, returned_rows
from drivetrain.task.output import Optimized

_SERVED = ("single", "ddp")

_LISTS = ("old_dirs", "old_stps", "ro")
"""The lists of tensors in the state of `torch.optim.LBFGS`."""


class NoOptimizer(Optimizer):
    """The optimizer of a module whose `configure_optimizers` returns None: it changes nothing.

    Args:
        parameters: The module's parameters; a module may have none.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters or [torch.zeros(())], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return the loss of the closure."""
        return None if closure is None else closure()


def collect(engine: Any, weighted_batches: Any) -> Optimized:
    """Run the training steps of a module that trains nothing, without backward."""
    returned: list[Any] = []
    kept = []
    with torch.set_grad_enabled(engine.strategy.name == "single"):  # a wrapper would wait for a backward
        for micro_batch, share in list(engine.transfer.moving(weighted_batches)):
            if micro_batch.is_placeholder:
                continue
            engine.passes += 1
            loss = engine.run_step(micro_batch.batch)
            returned.append(Returned({"loss": loss.detach() if isinstance(loss, Tensor) else 0.0}))
            kept.append((micro_batch, share))
    return Optimized(returned_rows(returned, kept), applied=True)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the `step` of an optimizer's class cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class ClosureSteps:
    """The steps of an optimizer that evaluates the loss of a window as often as it needs.

    Each evaluation is a forward and backward of all micro-batches, averaged over the ranks like any other, so
    that all ranks have the same loss and evaluate it equally often.

    Args:
        hooks: The module in its run.
        optimizer: The optimizer; its `step` takes no closure from now on.
    """

    def __init__(self, hooks: Any, optimizer: Optimizer) -> None:
        self._hooks = hooks
        self._optimizer = optimizer
        self._step = optimizer.step
        self._evaluate: Callable[[], Tensor] | None = None

        def step() -> Any:
            assert self._evaluate is not None
            self._unpack()  # a checkpoint's
            return self._step(self._evaluate)  # type: ignore[arg-type]

        vars(step).update({name: each for name, each in vars(self._step).items() if name != "__wrapped__"})
        vars(optimizer)["step"] = step

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Run the block with each list of tensors in the optimizer's state as one tensor, for checkpoints."""
        before = {slots_of: dict(slots) for slots_of, slots in self._optimizer.state.items()}
        for slots in self._optimizer.state.values():
            slots.pop("al", None)  # which each step makes anew
            for name in [name for name, each in slots.items() if isinstance(each, list)]:
                listed = slots.pop(name)
                if listed:
                    slots[name] = torch.stack([torch.as_tensor(each) for each in listed])
        try:
            yield
        finally:
            self._optimizer.state.update(before)

    def _unpack(self) -> None:
        for slots in self._optimizer.state.values():
            for name in _LISTS if slots else ():
                if not isinstance(slots.get(name), list):
                    # Copies, because the last bit of a product depends on where a tensor begins in memory.
                    slots[name] = [each.clone() for each in slots[name]] if name in slots else []

    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        """Make one step of the optimizer.

        Raises:
            StrategyError: The strategy or the precision steps optimizers itself.
        """
        if engine.strategy.name not in _SERVED or engine.precision.loss_scaling:
            raise StrategyError(
                f"{type(engine.optimizer.optimizer).__name__} evaluates the loss several times in a step,"
                f" and strategy {engine.strategy.name!r} with precision {engine.precision.name!r} cannot do"
                f" that. Use one of {', '.join(_SERVED)}, without a loss scale"
            )
        weighted_batches = list(engine.transfer.moving(weighted_batches))
        step_values, metric_inputs = engine.accumulate(weighted_batches)
        losses = [_mean(engine, step_values)]

        def evaluate() -> Tensor:
            if losses:
                return losses.pop()
            for parameter in engine.parameters:
                parameter.grad = None
            self._hooks.repeat(len(weighted_batches))
            again, _ = engine.accumulate(weighted_batches)
            if engine.before_optimizer_step is not None:
                engine.before_optimizer_step()
            updater = engine.optimizer
            if updater.max_grad_norm is not None:
                engine.strategy.clip_grad_norm(updater.parameters, updater.max_grad_norm)
            return _mean(engine, again)

        self._evaluate = evaluate
        applied, norm = engine.update(engine.optimizer, step_values, engine.parameters)
        self._evaluate = None
        return Optimized(step_values, applied, norm, metric_inputs)


def _mean(engine: Any, step_values: Any) -> Tensor:
    """Return the loss of a window over all ranks."""
    if len(step_values) == 1 and engine.data_ranks.size == 1:
        # To the last bit, which a line search may turn on.
        ((names, values, _),) = step_values
        loss: Tensor = values.reshape(-1)[names.index("loss")]
        return loss
    weights = torch.stack(
        [torch.as_tensor(weight, dtype=torch.float64).cpu() for _, _, weight in step_values]
    )
    losses = [values.reshape(-1)[names.index("loss")].double().cpu() for names, values, _ in step_values]
    sums = torch.stack([(weights * torch.stack(losses)).sum(), weights.sum()])
    if engine.data_ranks.size > 1:
        sums = torch.stack(engine.data_ranks.all_gather(sums)).sum(0)
    found: Tensor = (sums[0] / sums[1]).to(engine.device, torch.get_default_dtype())
    return found


class _Backward(torch.autograd.Function):
    """A loss whose backward is the module's own method."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: list[Tensor], backward: Callable[[Tensor], Any]) -> Tensor:
        """Return the value of the loss."""
        ctx.loss, ctx.run = loss[0], backward
        return loss[0].detach().clone() + anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Call the method with the loss times its gradient: its share of the window, and the loss scale."""
        with torch.enable_grad():
            ctx.run(ctx.loss * gradients[0])
        return None, None, None


def with_own_backward(loss: Tensor, backward: Callable[[Tensor], Any]) -> Tensor:
    """Return a loss whose backward calls the module's own `backward`."""
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    found: Tensor = _Backward.apply(anchor, [loss], backward)  # type: ignore[no-untyped-call]
    return found
