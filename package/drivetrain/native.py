"""Preparing any module for a loop of your own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from drivetrain.agreement import check_module_alike, check_optimizer_alike
from drivetrain.precision_in_use import PrecisionInUse
from drivetrain.strategies import Prepared, Strategy
from drivetrain.task import StepModule
from drivetrain.updates import DEFAULT, made_by


def prepare_module(
    strategy: Strategy,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    in_use: PrecisionInUse,
) -> Prepared:
    """A module placed and wrapped by a strategy, and its optimizer if one is wanted; see `Engine.prepare`.

    Raises:
        ConfigError: The processes have different strategies or optimizers.
        StrategyError: They have different modules.
    """
    check_module_alike(strategy, model)

    def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
        assert make_optimizer is not None
        return {DEFAULT: made_by(make_optimizer, model, in_use.updates)[0]}

    in_use.note(model)
    making = make_optimizers if make_optimizer else None
    prepared = strategy.prepare(StepModule(model), making, in_use.precision)
    if make_optimizer:
        check_optimizer_alike(model, prepared.optimizer, strategy.ranks)
    if strategy.sharded and strategy.world_size > 1 and any(True for _ in model.buffers()):
        prepared.model.register_forward_pre_hook(_SharedBuffers(strategy))
    for name in ("state_dict", "load_state_dict"):  # by the names that the module itself has
        object.__setattr__(prepared.model, name, getattr(model, name))
    return prepared


class _SharedBuffers:
    """Tells a sharded strategy of each forward, before which it gives all processes rank 0's buffers.

    Of an evaluation, in which no buffer changes, before the first alone. All processes run every forward.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._changed = True

    def __call__(self, model: nn.Module, _: object) -> None:
        if model.training or self._changed:
            self._strategy.microbatch(model, True)
        self._changed = model.training
