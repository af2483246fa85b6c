"""Manual optimization: a module that runs backward and steps its optimizers itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.integrations.lightning.optimizers import OptimizerView
from drivetrain.integrations.lightning.state import ModuleState
from drivetrain.run.run import Run
from drivetrain.strategies.zero_gradients import zero_gradients

_SERVED = ("single", "ddp")


class Manual:
    """`self.manual_backward` and the optimizers of a module with `automatic_optimization = False`.

    Args:
        state: The module in its run.

    Attributes:
        views: The optimizers that the module gets.
        current: The optimizer whose step is being made.
        is_placeholder: Whether the batch counts for nothing: other ranks wait for its gradients.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self.views: list[OptimizerView] = []
        self.current: Optimizer | None = None
        self.is_placeholder = False
        self._pending: set[int] = set()  # optimizers with gradients since their last step

    def begin(self, run: Run) -> None:
        """Take over a fit that begins.

        Raises:
            ConfigError: The Trainer accumulates or clips gradients.
            StrategyError: The strategy shards parameters.
        """
        engine = run.engine
        name = type(self._state.module).__name__
        if engine.strategy.name not in _SERVED:
            raise StrategyError(
                f"{name} steps its optimizers itself (automatic_optimization = False), which strategy"
                f" {engine.strategy.name!r} cannot run: it steps them with the backward of the whole step."
                f" Use one of {', '.join(map(repr, _SERVED))}"
            )
        if (run.length.gradient_accumulation_steps or 1) > 1:
            raise ConfigError(
                f"{name} steps its optimizers itself: gradient_accumulation_steps would have no effect. Step"
                " them after every few batches in training_step"
            )
        if self._state.clipping[0] is not None:
            raise ConfigError(
                f"{name} steps its optimizers itself: max_grad_norm and max_grad_value would have no effect."
                " Call self.clip_gradients in training_step"
            )
        for number, optimizer in enumerate(self._state.optimizers):
            view = OptimizerView(optimizer, lambda number=number: self._step(number))  # type: ignore[misc]
            view.toggle = self._toggle
            self.views.append(view)

    def backward(self, loss: Tensor, *args: Any, retain_graph: bool = False, **options: Any) -> None:
        """Add the gradients of a loss, averaged over the ranks.

        Raises:
            StrategyError: A graph is retained with a loss scale, or there are other arguments, or the module
                has its own `backward`, and this is not one device without a loss scale.
        """
        run, call = self._state.run, self._state.call
        assert run is not None
        batch = self._state.training_logs.batch
        call("on_before_backward", loss, batch=batch, is_batch=True)
        strategy = run.engine.strategy
        trained = [each for each in run.engine.parameters if each.requires_grad]
        own = self._state.hook("backward")
        if own is not None or args or options:
            if strategy.name != "single" or run.engine.precision.loss_scaling:
                raise StrategyError(
                    "self.manual_backward with arguments of Tensor.backward, or with a backward of the"
                    " module's own, is for one device without a loss scale"
                )
            options |= {"retain_graph": True} if retain_graph else {}
            run_backward: Any = loss.backward if own is None else functools.partial(own, loss)
            run_backward(*args, **options)
        elif retain_graph:
            if run.engine.precision.loss_scaling:
                raise StrategyError(
                    "self.manual_backward(retain_graph=True) needs another precision than '16-mixed'"
                )
            loss.backward(inputs=trained, retain_graph=True)  # type: ignore[no-untyped-call]
        elif self.is_placeholder:
            with zero_gradients(loss):
                strategy.backward(loss, None, trained)
        else:
            strategy.backward(loss, None, trained)
        strategy.synchronize(trained)
        self._pending = set(range(len(self._state.optimizers)))
        call("on_after_backward", batch=batch, is_batch=True)

    def _step(self, number: int) -> None:
        run = self._state.run
        assert run is not None
        self.current = self._state.optimizers[number]
        # The gradients stay: the module clears them itself.
        applied, _ = run.engine.update(run.engine.updaters[str(number)], (), ())
        self._pending.discard(number)
        self._state.optimizer_steps += applied
        self.current = None

    def _toggle(self, view: Any, on: bool) -> None:
        module = self._state.module
        if on:
            module.toggle_optimizer(view.optimizer)
        else:
            module.untoggle_optimizer(view.optimizer)

    def pending_gradients(self) -> dict[str, Tensor]:
        """Return the gradients that a later batch adds to, by parameter."""
        optimizers = self._state.optimizers
        waiting = {
            id(p)
            for number in self._pending
            for group in optimizers[number].param_groups
            for p in group["params"]
        }
        return {
            name: each.grad.detach().clone()
            for name, each in self._state.module.named_parameters()
            if id(each) in waiting and each.grad is not None
        }

    def load_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Restore what `pending_gradients` returned."""
        for name, each in self._state.module.named_parameters():
            if name in gradients:
                each.grad = gradients[name].to(each.device, each.dtype)
        self._pending = set(range(len(self._state.optimizers))) if gradients else set()
