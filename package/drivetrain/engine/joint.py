"""Several optimizers that make one step together, from one loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.weights.module_state import parameter_names
from drivetrain.core.errors import ConfigError
from drivetrain.engine.updater import Updater
from drivetrain.strategies.optimizer_step import step


class JointOptimizer(Optimizer):
    """Optimizers as one: their gradients are unscaled, clipped, applied and skipped together.

    Args:
        optimizers: The optimizers, which keep their parameters, states and settings.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # without super().__init__, which would take over the parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them, as they are now: loading a state replaces them."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The states of all of them."""
        return {parameter: slots for each in self.optimizers for parameter, slots in each.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for each in self.optimizers:
            step(each)


def joint_updater(updaters: Sequence[Updater], max_grad_norm: float | None) -> Updater:
    """Return the only updater, or one that steps the optimizers of all.

    Args:
        max_grad_norm: The limit of the norm of all gradients together.
    """
    if len(updaters) == 1:
        return updaters[0]
    name = ", ".join(each.name for each in updaters)
    joint = Updater(name, JointOptimizer([each.optimizer for each in updaters]), max_grad_norm=max_grad_norm)
    joint.parameters = [
        parameter for each in updaters for parameter in each.parameters
    ]  # without frozen ones
    return joint


def check_joint(task: nn.Module, updaters: Sequence[Updater], max_grad_norm: float | None) -> None:
    """Check that one loss can train by all of these optimizers together.

    Raises:
        ConfigError: Two of them have the same parameter, or one has a clipping of its own.
    """
    owners: dict[Tensor, str] = {}
    names: dict[Any, str] = parameter_names(task)
    for each in updaters if len(updaters) > 1 else ():
        if each.max_grad_norm != max_grad_norm:
            raise ConfigError(
                f"optimizer {each.name!r} has max_grad_norm={each.max_grad_norm}, and one loss trains by all"
                " optimizers together, so the gradient is clipped by its global norm: give the limit to the"
                " Trainer. To clip each by itself, write a training_step that yields to each"
            )
        for parameter in each.parameters:
            if (other := owners.setdefault(parameter, each.name)) != each.name:
                raise ConfigError(
                    f"the optimizers {other!r} and {each.name!r} both have"
                    f" {names.get(parameter, 'a parameter')!r}, and one loss trains by all"
                    " optimizers together: it would be updated twice in each step. Give it to one of them,"
                    " by OptimizerConfig(parameters=...)"
                )
