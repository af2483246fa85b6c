"""The checks of a program's first step, which would cost something in every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError
from drivetrain.engine.context import StepContext
from drivetrain.engine.updater import checking_gradients
from drivetrain.task.task import overrides


@contextmanager
def checking_first_step(engine: StepContext) -> Iterator[None]:
    """Run the block, the first step of a program, with a look at gradients and at what `training_step` does.

    Raises:
        ConfigError: `training_step` runs backward, clears gradients or steps an optimizer of the parameters,
            and the task has no `optimize` of its own.
    """
    with checking_gradients(engine.updaters.values()):
        if overrides(engine.task, "optimize"):
            yield
            return
        run_step, parameters = engine.run_step, engine.parameters
        trained = {id(each) for each in parameters}

        def refuse(optimizer: Optimizer, *_: Any) -> None:
            if any(id(each) in trained for group in optimizer.param_groups for each in group["params"]):
                raise _own_update(engine, f"steps an optimizer ({type(optimizer).__name__})")

        def checked(*given: Any) -> Any:
            before = [(each.grad, _version(each.grad)) for each in parameters]
            handle = register_optimizer_step_pre_hook(refuse)
            try:
                output = run_step(*given)
            finally:
                handle.remove()
            for parameter, (gradient, version) in zip(parameters, before, strict=True):
                now = parameter.grad  # a wrapper may have replaced it by a view of its bucket
                if (now is None) != (gradient is None) or (now is gradient and _version(now) != version):
                    name = {id(each): clean_name(name) for name, each in engine.task.named_parameters()}
                    raise _own_update(
                        engine,
                        f"changes the gradient of {name.get(id(parameter))!r} by backward() or zero_grad()",
                    )
            return output

        engine.run_step = checked
        try:
            yield
        finally:
            engine.run_step = run_step


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else gradient._version


def _own_update(engine: StepContext, what: str) -> ConfigError:
    return ConfigError(
        f"{type(engine.task).__name__}.training_step {what}. It only returns the loss; the fit runs backward,"
        " steps the optimizer and clears the gradients. Take the gradient of an input by"
        " torch.autograd.grad(loss, input). Yield the loss of each of several optimizers"
        " (docs/how-to/several-optimizers.md). For a step of another order, override `optimize`, or write the"
        " loop with drivetrain.Engine"
    )
