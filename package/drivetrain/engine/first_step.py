"""The checks of a program's first step, which would cost something in every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError
from drivetrain.engine.context import StepContext
from drivetrain.engine.updater import checking_gradients
from drivetrain.task.task import overrides


@contextmanager
def checking_first_step(engine: StepContext) -> Iterator[None]:
    """Run the block, the first step of a program, with a look at what `training_step` does to gradients.

    Raises:
        ConfigError: `training_step` runs backward or clears gradients, and the task has no `optimize` of its
            own.
    """
    with checking_gradients(engine.updaters.values()):
        if overrides(engine.task, "optimize"):
            yield
            return
        run_step, parameters = engine.run_step, engine.parameters

        def checked(*given: Any) -> Any:
            before = [(each.grad, _version(each.grad)) for each in parameters]
            output = run_step(*given)
            for parameter, (gradient, version) in zip(parameters, before, strict=True):
                now = parameter.grad  # a wrapper may have replaced it by a view of its bucket
                if (now is None) != (gradient is None) or (now is gradient and _version(now) != version):
                    name = {id(each): clean_name(name) for name, each in engine.task.named_parameters()}
                    raise ConfigError(
                        f"{type(engine.task).__name__}.training_step changes the gradient of"
                        f" {name.get(id(parameter))!r} by backward() or zero_grad(). It only returns the"
                        " loss; the fit runs backward, steps the optimizer and clears the gradients. Take the"
                        " gradient of an input by torch.autograd.grad(loss, input). Yield the loss of each of"
                        " several optimizers (docs/how-to/several-optimizers.md). For a step of another"
                        " order, override `optimize`, or write the loop with drivetrain.Engine"
                    )
            return output

        engine.run_step = checked
        try:
            yield
        finally:
            engine.run_step = run_step


def _version(gradient: Tensor | None) -> int | None:
    return None if gradient is None else gradient._version
