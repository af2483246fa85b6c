"""The norms of gradients, of the whole task and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.weights.module_state import parameter_names
from drivetrain.core.validation import by_name, flag
from drivetrain.strategies.base import check_supported

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy


@by_name
class GradientNorms(Callback):
    """Logs the 2-norm of the gradient of the last step, before clipping, at log points.

    With `log_every` in steps, norms are computed only in the steps of that interval, the first step and the
    last. With other intervals every step computes norms.

    The names are "gradients/norm", and with `per_layer` also "gradients/norm/<module>" for each module with
    parameters of its own. Norms are those of the whole gradient, over all ranks and shards. They stay on the
    device, and are read at log points only.

    Args:
        per_layer: Whether to log each module's norm too.

    Raises:
        StrategyError: When a Trainer is made: DeepSpeed, which keeps gradients of its own.
    """

    def __init__(self, *, per_layer: bool = False) -> None:
        self.per_layer = flag("GradientNorms(per_layer=)", per_layer)
        self._parameters: list[nn.Parameter] = []
        self._layers: list[str] = []
        self._layer_of: list[int] = []
        self._norms: list[tuple[Sequence[Tensor], list[tuple[int, float]]]] = []
        self._taken_at = -1

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the parameters' gradients are those of the step.

        Raises:
            StrategyError: They are not.
        """
        for feature in ("value_clipping", "local_parts"):
            instead = "Use another one, such as 'ddp' or 'fsdp', or leave the callback out"
            check_supported(strategy, feature, "GradientNorms", instead)

    def on_fit_start(self, run: Run) -> None:
        """Look up the trained parameters and their layers."""
        trainable = set(run.engine.trainable)  # with those that are frozen for now
        named = [(each, name) for each, name in parameter_names(run.task).items() if each in trainable]
        self._parameters = [each for each, _ in named]
        layers = [name.rpartition(".")[0] or "(own)" for _, name in named]
        self._layers = list(dict.fromkeys(layers))
        self._layer_of = [self._layers.index(each) for each in layers]
        self._norms = []

    def on_before_optimizer_step(self, run: Run) -> None:
        """Take the norm of this process's part of each gradient, on the device, if it may be logged."""
        if self._taken_at != run.progress.micro_batches:  # else another optimizer of the same step
            self._norms, self._taken_at = [], run.progress.micro_batches
        if not _may_be_logged(run):
            return
        strategy = run.engine.strategy
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[tuple[int, float]]]] = {}
        for parameter, layer in zip(self._parameters, self._layer_of, strict=True):
            if parameter.grad is None:
                continue
            local, share = strategy.local_part(parameter.grad)
            local = local.coalesce().values() if local.is_sparse else local
            gradients, shares = kinds.setdefault((local.device, local.dtype), ([], []))
            gradients.append(local)
            shares.append((layer, share))
        self._norms += [
            (torch._foreach_norm(gradients, 2, dtype=torch.promote_types(dtype, torch.float32)), shares)
            for (_, dtype), (gradients, shares) in kinds.items()
        ]

    def on_log(self, run: Run) -> None:
        """Sum the parts of all ranks, and log the norms of the last step."""
        if not self._norms:
            return
        squares = [0.0] * len(self._layers)
        for norms, shares in self._norms:
            for norm, (layer, share) in zip(torch.stack(list(norms)).tolist(), shares, strict=True):
                squares[layer] += norm * norm * share
        self._norms = []
        squares = run.engine.ranks.total(squares)
        run.log("gradients/norm", sum(squares) ** 0.5)
        if self.per_layer:
            for name, square in zip(self._layers, squares, strict=True):
                run.log(f"gradients/norm/{name}", square**0.5)


def _may_be_logged(run: Run) -> bool:
    """Return whether a log point may follow the step that is being made."""
    every, step = run.triggers.log.every, run.progress.steps + 1
    ends_epoch = run.window is not None and bool(run.window.last)
    if every is None:
        due = False
    elif every.unit == "steps":
        due = step % int(every.amount) == 0 or (run.triggers.log.ends_epochs and ends_epoch)
    else:
        due = every.unit != "epochs" or every.amount < 1 or ends_epoch
    return due or step in (1, run.length.steps) or run.length.steps is None
