"""A module in a run: what its hooks, its `self.trainer` and its manual optimization share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.calendar import RunLength
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.data.batch import map_tensors
from drivetrain.integrations.lightning.kinds import has_hook, is_overridden
from drivetrain.integrations.lightning.logs import Logs, NamedLogs
from drivetrain.integrations.lightning.optimizers import ScheduleConfig
from drivetrain.run.run import Run
from drivetrain.strategies.sparse import clip_grad_value

_VERBS = {"train": "fit", "validation": "validate", "test": "test", "predict": "predict"}

_NOT_LOGGING = frozenset(
    (
        *("on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "on_test_end", "predict_step"),
        *(f"on_predict_{each}" for each in ("start", "epoch_start", "batch_start", "batch_end")),
        *("on_predict_epoch_end", "on_predict_end"),
    )
)
"""The methods that have no log point after them."""


def _in_turn(functions: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return [each(*args, **options) for each in functions][-1]

    return call


class ModuleState:
    """A module in a run.

    Args:
        task: The task.
        module: Its module.
        stage: The stage of the run.

    Attributes:
        run: The run, once it has begun.
        stage: What goes on: training, or an evaluation in it.
        verb: "fit", "validate", "test" or "predict".
        device: The device, before the run has begun.
        next_index: The number of the next batch in its epoch.
        epoch_values: The epoch's values so far, while its `on_train_epoch_end` runs.
        manual: The optimization of a module that steps its optimizers itself, or None.
        optimizers: The module's optimizers.
        schedules: Its schedules.
        optimizer_steps: The steps that a module has made that steps its optimizers itself.
        clipping: The limit of the gradient and its kind, of the Trainer.
        has_loggers: Whether the run logs.
        training_logs: What is logged in training.
        logs: What is logged now, in training or in an evaluation.
        ended: 1 while hooks of an epoch run that is counted already.
        callbacks: Lightning's callbacks whose hooks are called.
        view: The `self.trainer` of the module and of the callbacks.
        unknown: The newest error of a name that `self.trainer` or `self.logger` lacks.
        read_by: The code of the functions that were running then.
    """

    def __init__(self, task: Any, module: Any, stage: str) -> None:
        self.task = task
        self.module = module
        self.stage = stage
        self.verb = _VERBS[stage]
        self.device = torch.device("cpu")
        self.next_index = 0
        self.epoch_values: dict[str, Any] = {}
        self.manual: Any = None
        self.run: Run | None = None
        self.optimizers: list[Optimizer] = []
        self.schedules: list[ScheduleConfig] = []
        self.optimizer_steps = 0
        self.clipping: tuple[float | None, str | None] = (None, None)
        self.has_loggers = False
        self.is_manual = not module.automatic_optimization
        self._logs_of = NamedLogs if is_overridden(module, "log") else Logs
        self.training_logs = self.new_logs()
        self.training_logs.steps_by_default = True
        self.logs = self.training_logs
        self.ended = 0
        self.callbacks: list[Any] = []
        self.view: Any = None
        self.unknown: AttributeError | None = None
        self.read_by: set[Any] = set()
        self._hooks: dict[str, Callable[..., Any] | None] = {}

    def hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook of Lightning's callbacks and of the module, in this order, as one function that
        returns what the last of them returns; None if neither overrides it.
        """
        if name not in self._hooks:
            found: list[Callable[..., Any]] = [
                functools.partial(getattr(each, name), self.view, self.module)
                for each in self.callbacks
                if has_hook(each, name)
            ]
            if is_overridden(self.module, name):
                found.append(getattr(self.module, name))
            self._hooks[name] = found[0] if len(found) == 1 else _in_turn(found) if found else None
        return self._hooks[name]

    def new_logs(self) -> Logs:
        """Return logs for another part of the loop."""
        return self._logs_of(self.module)

    def forget_hooks(self) -> None:
        """Look each hook up anew."""
        self._hooks = {}

    def tell(self, error: AttributeError) -> None:
        """Say what a property of the module could not read of `self.trainer`, if an error hides that.

        Python asks `nn.Module.__getattr__` for a property whose code raises an AttributeError, and that
        raises another one, which names the property alone.

        Raises:
            AttributeError: It is such an error.
        """
        unknown, self.unknown = self.unknown, None
        found = inspect.getattr_static(type(error.obj), str(error.name), None)
        code = getattr(getattr(found, "fget", None) or getattr(found, "func", None), "__code__", None)
        if unknown is None or code not in self.read_by:
            return
        raise AttributeError(f"{error.name} cannot be read: {unknown}") from unknown

    @property
    def length(self) -> RunLength:
        """The planned length of the fit."""
        found: RunLength = self.task.run_length if self.run is None else self.run.length
        return found

    @property
    def steps(self) -> int:
        """The steps of optimizers so far."""
        if self.is_manual or self.run is None:
            return self.optimizer_steps
        return self.run.progress.steps

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; during its last hooks too."""
        if self.run is None:
            return 0
        return self.run.progress.epoch - self.ended

    def values(self) -> dict[str, float]:
        """Return the latest value of each logged name."""
        found = {} if self.run is None else dict(self.run.metrics)
        for each in self.training_logs.entries.values():
            if each.latest is not None:
                found[each.full_name(of_step=True)] = float(each.latest)
        if self.epoch_values:  # those of this hook are newer
            found |= self.epoch_values
            for (hook, name), each in self.logs.entries.items():
                if hook == self.logs.hook and each.value is not None:
                    found[name] = float(each.value) / (each.weight if each.reduction == "mean" else 1)
        return found

    @contextmanager
    def inside(self, name: str, batch: Any = None, is_batch: bool = False) -> Iterator[None]:
        """Run the block, a method of the module, which logs under its name if Lightning lets it log."""
        logs = self.logs
        if name in _NOT_LOGGING:
            name = ""
        before = logs.hook, logs.batch, logs.is_batch, logs.steps_by_default
        logs.hook, logs.batch, logs.is_batch = name, batch, is_batch
        logs.steps_by_default = is_batch and logs is self.training_logs
        try:
            yield
        except AttributeError as error:
            self.tell(error)
            raise
        finally:
            logs.hook, logs.batch, logs.is_batch, logs.steps_by_default = before

    def call(self, name: str, *args: Any, batch: Any = None, is_batch: bool = False) -> None:
        """Call a hook of the module, if the module has it."""
        hook = self.hook(name)
        if hook is not None:
            with self.inside(name, batch, is_batch):
                hook(*args)

    # The methods that the module calls.

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked; without gradients."""
        if group is not None or sync_grads:
            raise ConfigError("self.all_gather with group or sync_grads is not offered: give the data alone")
        assert self.run is not None
        ranks, device = self.run.engine.ranks, self.run.engine.device

        def gather(tensor: Tensor) -> Tensor:
            if ranks.size == 1:
                return tensor.detach()
            return torch.stack([each.to(device) for each in ranks.all_gather(tensor.detach().cpu())])

        if isinstance(data, (int, float)):
            data = torch.tensor(data, device=device)
        return map_tensors(gather, data)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters, by the Trainer's limit unless one is given.

        Raises:
            ConfigError: An unknown way of clipping.
            StrategyError: The gradients are scaled.
        """
        value = self.clipping[0] if gradient_clip_val is None else gradient_clip_val
        kind = str(gradient_clip_algorithm or self.clipping[1] or "norm").rpartition(".")[2].lower()
        if kind not in ("norm", "value"):
            raise ConfigError(
                f"gradient_clip_algorithm={gradient_clip_algorithm!r}. Allowed: 'norm', 'value'"
            )
        if not value:
            return
        assert self.run is not None
        strategy = self.run.engine.strategy
        if self.is_manual and self.run.engine.precision.loss_scaling:
            raise StrategyError(
                "self.clip_gradients in manual optimization with precision '16-mixed': the gradients are"
                " scaled. Use 'bf16-mixed'"
            )
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if kind == "norm":
            strategy.clip_grad_norm(parameters, float(value))
        else:
            clip_grad_value(parameters, float(value))

    def manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Run backward in manual optimization."""
        if self.manual is None:
            raise ConfigError(
                "self.manual_backward is for manual optimization: set self.automatic_optimization = False"
            )
        self.manual.backward(loss, *args, **options)

    def optimizer_views(self) -> list[Any]:
        """Return the optimizers as the module gets them."""
        return [*self.optimizers]
