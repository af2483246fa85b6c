"""What a loop of one's own needs beside the engine: preparing any module, and windows of unknown weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.agreement import check_module_alike, check_optimizer_alike
from drivetrain.data import MicroBatch
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import ConfigError
from drivetrain.precision_in_use import PrecisionInUse
from drivetrain.strategies import Prepared, Strategy
from drivetrain.task import StepModule
from drivetrain.updates import DEFAULT, made_by
from drivetrain.window import StepResult

if TYPE_CHECKING:
    from drivetrain.engine import Engine


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


class OpenWindow:
    """Adds up sum(weight x loss) / sum(weight) over backwards of which each may be the last.

    Gradients are kept relative to the first weight: a window of one backward, the usual one, is never
    rescaled. Not so with several processes, of which each has weights of its own.

    Args:
        ranks: The processes whose backwards make up a window together.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self.handed: MicroBatch | None = None
        self._open = False
        self._doubtful = False
        self._first: float | Tensor | None = None
        self._total: float | Tensor = 0.0

    def _own(self, weight: float | Tensor | None) -> float | Tensor:
        """The weight that was given, or that of the batch that was handed out last: what stands in for one
        that this process does not have weighs nothing.
        """
        if self.handed is not None and self.handed.stand_in:
            return 0.0
        if weight is None:
            return self.handed.samples if self.handed is not None and self._ranks.size > 1 else 1.0
        return weight

    def backward(self, strategy: Strategy, loss: Tensor, weight: float | Tensor | None) -> None:
        """Add a micro-batch's gradients; one of weight zero has none to add, and its mean loss is usually 0 /
        0.

        Raises:
            ConfigError: A weight below zero, or none.
        """
        weight = self._own(weight)
        if not isinstance(weight, Tensor) or weight.device.type == "cpu":  # reading another would wait for it
            weight = float(weight)
            if not weight >= 0:
                raise ConfigError(
                    f"engine.backward(loss, weight): a weight counts samples or tokens, not {weight}"
                )
        self._open = True
        if self._ranks.size > 1:
            # All go through backward together, also with a loss of no weight. That is usually 0 / 0, and
            # cross_entropy's has no gradient then; that of a division has, and it is NaN.
            if not isinstance(weight, Tensor) and weight == 0 and not loss.isfinite():
                self._doubtful = True
                loss = torch.nan_to_num(loss)
            self._first = 1.0
            self._total = self._total + weight
            strategy.backward(loss, weight)
            return
        if not isinstance(weight, Tensor) and weight == 0:
            return
        if self._first is None:
            self._first = self._total = weight
            strategy.backward(loss)
        else:
            self._total = self._total + weight
            strategy.backward(loss, weight / self._first)

    def check_closed(self) -> None:
        """See that there is something to save.

        Raises:
            ConfigError: Gradients were added since the last step.
        """
        if self._open:
            raise ConfigError(
                "engine.save() between engine.backward() and engine.step(): make the step first"
            )

    def close(self, strategy: Strategy, parameters: Sequence[Tensor]) -> None:
        """Bring the gradients to their mean; the next backward opens a new window.

        There may be none, when every weight was zero; optimizers pass parameters without a gradient over.

        Raises:
            ConfigError: No backward came before; or a loss of weight zero was not finite, and its gradient is
                not zero.
        """
        if not self._open:
            raise ConfigError("engine.step() without engine.backward(loss) before it: there is no gradient")
        if self._first is not None and self._total is not self._first:
            total = self._total
            if self._ranks.size > 1:
                # Strategies average over the processes.
                summed, doubtful = self._ranks.total([float(total), self._doubtful])
                total = summed / self._ranks.size
                if doubtful:
                    self._check_finite(parameters)
            if total != 0:
                strategy.scale_gradients(parameters, self._first / total)
        self._open, self._doubtful, self._first, self._total = False, False, None, 0.0

    def _check_finite(self, parameters: Sequence[Tensor]) -> None:
        """See that a loss of no weight has left no NaN; of shards, each process looks at its own."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
        locals_ = [each.coalesce().values() if each.is_sparse else each for each in locals_]
        bad = not all(bool(each.isfinite().all()) for each in locals_)
        if self._ranks.total([bad])[0]:
            raise ConfigError(
                "a backward of weight 0 had a loss that is not finite, such as a mean over nothing, and its"
                " gradient is NaN where it must be 0. With several processes it cannot be left out: make the"
                " loss finite, such as loss_sum / max(count, 1)"
            )


def step_of_own_loop(
    engine: Engine, window: OpenWindow, optimizer: Optimizer, max_grad_norm: float | None
) -> StepResult:
    """See `Engine.step`."""
    strategy, progress = engine.strategy, engine.progress
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    window.close(strategy, parameters)
    if engine.precision.loss_scaling:
        strategy.unscale(optimizer)
    norm = None if max_grad_norm is None else strategy.clip_grad_norm(parameters, max_grad_norm)
    applied = strategy.optimizer_step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    update = progress.updates
    progress.updates += applied
    progress.skipped += not applied
    engine.streams.seed_update(progress.updates)
    return StepResult([], applied, norm, update)
