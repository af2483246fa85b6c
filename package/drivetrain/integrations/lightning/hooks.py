"""The callback that runs a module's steps and hooks, in Lightning's order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.callbacks.early_stopping import EarlyStopping
from drivetrain.callbacks.lambda_callback import LambdaCallback
from drivetrain.callbacks.progress.progress_bar import ProgressBar
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.types import Batch
from drivetrain.distributed.processes import once_per_machine
from drivetrain.engine.metrics.declared import DeclaredMetrics
from drivetrain.engine.placeholder import has_zero_weight
from drivetrain.integrations.lightning.arguments_objects import warn_of_default_mode
from drivetrain.integrations.lightning.closures import (
    ClosureSteps,
    NoOptimizer,
    needs_closure,
    with_own_backward,
)
from drivetrain.integrations.lightning.kinds import has_hook, is_kind, is_overridden
from drivetrain.integrations.lightning.logs import LoggedEntry, Logs
from drivetrain.integrations.lightning.manual import Manual
from drivetrain.integrations.lightning.methods import check_state_dict, takes
from drivetrain.integrations.lightning.optimizers import OptimizerView, read_optimizers
from drivetrain.integrations.lightning.skipping import Skipped
from drivetrain.integrations.lightning.state import ModuleState
from drivetrain.integrations.lightning.trainer_view import TrainerView
from drivetrain.run.run import Run
from drivetrain.task.optim.torch_schedule import kind_of

_PLAIN = ("single", "ddp", "fsdp")
"""The strategies that call the optimizer's own step."""


class ModuleHooks(ModuleState, Callback):
    """Calls the steps and hooks of a module in one run.

    The drawing of `Callback` shows where ours are called. Lightning's are called there:

    ::

        on_fit_start                 on_fit_start
        on_epoch_start               on_train_start once, on_train_epoch_start
        for each micro-batch:
            its forward              on_train_batch_start, training_step, on_before_zero_grad,
                                     optimizer_zero_grad, on_before_backward
            its backward             on_after_backward
                                     on_train_batch_end, but for the window's last one
        on_before_optimizer_step     on_before_optimizer_step, configure_gradient_clipping
            optimizer step           optimizer_step
        on_step_end                  lr_scheduler_step, on_train_batch_end
        on_evaluation_start          on_validation_start, on_validation_epoch_start
            each batch               on_validation_batch_start, validation_step, on_validation_batch_end
        on_evaluation_end            on_validation_epoch_end, on_validation_end
        on_epoch_end                 on_train_epoch_end, lr_scheduler_step
        on_save                      lr_scheduler_step of a plateau by step
        on_fit_end                   on_train_end, on_fit_end, teardown

    Args:
        task: The task.
        module: Its module.
        stage: The stage of the run.
        callbacks: Lightning's callbacks, whose hooks are called too.
    """

    changes_data = True

    def __init__(self, task: Any, module: Any, stage: str, callbacks: Sequence[Any] = ()) -> None:
        super().__init__(task, module, stage)
        self.view = TrainerView(self)
        self.loss: Tensor | None = None
        self._has_started = False
        self._before_check: dict[str, Any] | None = None
        self.manual = Manual(self) if self.is_manual else None
        self._outputs: Any = None
        self._batch: Any = None
        self._left = 0  # batches of the window that are still to come
        self._is_first = True  # whether the window's first batch is still to come
        self._skips_log = False
        self._is_watched = False  # whether another callback may read logged values by their names
        self._is_cut = False  # whether on_train_batch_start has ended the epoch
        self._modes: list[tuple[Any, bool]] = []  # that on_validation_model_train has set
        self.closures: ClosureSteps | None = None
        self.trains_nothing = False
        self._is_repeated = False  # whether a window is evaluated once more
        self.skipped: Skipped | None = None  # of the newest step, if `training_step` may return None
        self._shown: list[str] = []
        self._evaluated: tuple[Any, Any, int] | None = None
        self._kept: Mapping[str, Any] = {}
        self._step = module.training_step
        self._takes_index = takes(self._step, "batch_idx", 2)
        self.callbacks = [*callbacks]
        self._bind()
        self._attach()
        self._set_up()

    def _bind(self) -> None:
        """Look up the hooks that are called in each step."""
        self.forget_hooks()
        self._transfer = self._transfers()
        self._batch_start = self.hook("on_train_batch_start")
        self._batch_end = self.hook("on_train_batch_end")
        self._zero = self.hook("optimizer_zero_grad")
        self._before_backward = self.hook("on_before_backward")
        self._after_backward = self.hook("on_after_backward")
        self._before_step = self.hook("on_before_optimizer_step")
        self._clips = self.hook("configure_gradient_clipping")
        self._backward = self.hook("backward")
        if self.stage == "train" and not self.is_manual:
            if self._after_backward or self._batch_end:
                self.on_micro_batch_end = self._micro_batch_end  # type: ignore[method-assign]
            if self._after_backward or self._before_step or self._clips:
                self.on_before_optimizer_step = self._before_optimizer_step  # type: ignore[method-assign]
        if self.stage == "train" and self.is_manual and self._before_step:
            self.on_before_optimizer_step = self._before_optimizer_step  # type: ignore[method-assign]

    def _transfers(self) -> Callable[[Any, int], Any] | None:
        """Return what the overridden hooks around the transfer of a batch do, in order; None if none is.

        A data module's own hook takes the place of the module's, as in Lightning. The batch is on the device
        already, if the engine can move it.
        """
        data = self.task.datamodule
        found: dict[str, Callable[..., Any]] = {}
        for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            hook = getattr(data, name) if is_overridden(data, name) else self.hook(name)
            if hook is not None:
                found[name] = hook
        if not found:
            return None

        def transfer(batch: Any, loader: int) -> Any:
            for name, hook in found.items():
                device = (self.view.strategy.root_device,) if name == "transfer_batch_to_device" else ()
                batch = hook(batch, *device, loader)
            return batch

        return transfer

    def join(self, callbacks: Sequence[Any]) -> None:
        """Call the hooks of more callbacks of Lightning from now on, beginning with `setup`."""
        self.callbacks += callbacks
        self._bind()
        for each in callbacks:
            each.setup(self.view, self.module, stage=self.verb)

    # The module's own attributes for a run.

    def _attach(self) -> None:
        """Give the module `self.trainer`, and the methods that belong to a run.

        A method that the module overrides stays: `super()` in it finds what it needs in `self.trainer`.
        """
        own = vars(self.module)
        self.module.trainer = self.view
        if self.task.datamodule is not None:
            self.task.datamodule.trainer = self.view
        methods = {
            "log": self._log,
            "log_dict": self._log_dict,
            "all_gather": self.all_gather,
            "optimizers": self._optimizers,
            "clip_gradients": self.clip_gradients,
        }
        if self.manual is not None:
            methods["manual_backward"] = self.manual_backward
        if is_overridden(self.module, "log"):  # which Lightning's log_dict calls
            del methods["log_dict"]
        self._attached = [name for name in methods if not is_overridden(self.module, name)]
        own.update((name, methods[name]) for name in self._attached)

    def _detach(self) -> None:
        own = vars(self.module)
        for name in self._attached:
            own.pop(name, None)
        self.module.trainer = None
        vars(self.task)["hooks"] = None

    def _set_up(self) -> None:
        if (prepare := self.hook("prepare_data")) is not None:
            once_per_machine(prepare, once=not self.module.prepare_data_per_node)
        if (setup := self.hook("setup")) is not None:
            setup(stage=self.verb)
        configure = self.hook("configure_model") or self.hook("configure_sharded_model")
        if configure is not None:
            configure()
        if is_overridden(self.module, "state_dict"):
            check_state_dict(self.module)

    def _begin(self, run: Run) -> None:
        """Take over a run that begins."""
        self.run = run
        self.has_loggers = bool(run.loggers)
        for each in self.module.modules():
            if is_kind(each, "LightningModule"):  # nothing public moves this attribute without the tensors
                vars(each)["_device"] = run.engine.device

    # The methods that the module calls.

    def _log(self, *args: Any, **options: Any) -> None:
        self.logs.log(*args, **options)

    def _log_dict(self, *args: Any, **options: Any) -> None:
        self.logs.log_dict(*args, **options)

    def optimizer_views(self) -> list[Any]:
        """Return the optimizers as the module gets them."""
        return [*self.optimizers] if self.manual is None else self.manual.views

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = self.optimizer_views() if use_pl_optimizer else [*self.optimizers]
        return found[0] if len(found) == 1 else found

    # Optimizers.

    def optimizer_factories(self) -> Any:
        """Return what a task's `configure_optimizers` returns."""
        if self.manual is None:
            return self._make_optimizer
        # Several need their names first. The strategies that serve them change parameters in place.
        self.optimizers, self.schedules = read_optimizers(self.module)
        return {str(number): _given(each) for number, each in enumerate(self.optimizers)}

    def _make_optimizer(self, _: Any) -> Optimizer:
        self.optimizers, self.schedules = read_optimizers(self.module)
        (optimizer,) = self.optimizers
        if needs_closure(optimizer):
            self.closures = ClosureSteps(self, optimizer)
        self.trains_nothing = isinstance(optimizer, NoOptimizer)
        if any(each.reduce_on_plateau and each.interval == "step" for each in self.schedules):
            self.on_save = self._after_step  # type: ignore[method-assign]
        if is_overridden(self.module, "optimizer_step"):
            step = optimizer.step
            view = OptimizerView(optimizer, step)

            @functools.wraps(step)  # with the mark that torch's schedulers leave on it
            def overridden() -> Any:
                with self.inside("optimizer_step", self._batch, is_batch=True):
                    return self._call_optimizer_step(view)

            # On the object, as torch's own schedulers do.
            vars(optimizer)["step"] = overridden
        return optimizer

    def _call_optimizer_step(self, view: OptimizerView) -> Any:
        """Call the module's `optimizer_step`, with a closure that returns the loss of the last batch."""
        loss: list[Tensor | None] = [self.loss]

        def closure() -> Tensor | None:
            if not loss:
                raise ConfigError(
                    f"{type(self.module).__name__}.optimizer_step called its closure twice: forward and"
                    " backward have run before, once. Set self.automatic_optimization = False, and call"
                    " self.manual_backward as often as needed"
                )
            return loss.pop()

        return self.module.optimizer_step(self.epoch, self.next_index - 1, view, closure)

    # Training.

    def on_fit_start(self, run: Run) -> None:
        """Call `on_fit_start` and `on_train_start`."""
        self._begin(run)
        self._is_watched = any(_may_watch(each) for each in run.callbacks if each is not self)
        feed = run.train_feed
        is_steady, batches, accumulation = False, None, 1
        if feed is not None and not feed.calendar.varies:
            is_steady, batches, accumulation = True, feed.batches_per_epoch, feed.accumulation
        for each in self.schedules:
            if each.reduce_on_plateau:
                warn_of_default_mode(each.scheduler, each.monitor)
            if not self.is_manual and not run.progress.steps:  # a resumed one has taken steps already
                each.check_length(run.length.steps, run.length.epochs, batches, accumulation)
            if is_steady and run.is_main and not self.is_manual:
                each.warn_if_never(batches, accumulation, run.length.epochs)
        engine = run.engine
        updaters = engine.updaters.values()
        norm = next((each.max_grad_norm for each in updaters if each.max_grad_norm is not None), None)
        if norm is not None:
            self.clipping = norm, "norm"
        elif engine.max_grad_value is not None:
            self.clipping = engine.max_grad_value, "value"
        if self.manual is not None:
            self.manual.begin(run)
        elif self._clips is not None:  # the module clips in place of the engine
            engine.optimizer.max_grad_norm, engine.max_grad_value = None, None
        if is_overridden(self.module, "optimizer_step") and engine.strategy.name not in _PLAIN:
            raise StrategyError(
                f"{type(self.module).__name__}.optimizer_step is not called with strategy"
                f" {engine.strategy.name!r}, which steps the optimizer itself. Use one of {', '.join(_PLAIN)}"
            )
        if self._backward is not None and engine.strategy.name != "single":
            raise StrategyError(
                f"{type(self.module).__name__}.backward is not called with strategy {engine.strategy.name!r},"
                " which runs backward itself. Train on one device, change the loss in training_step, or"
                " gradients in on_after_backward"
            )
        if engine.strategy.name == "single":
            # Parameters that are frozen now may be unfrozen later, if the module's optimizer has them.
            of_optimizer = {id(each) for updater in updaters for each in updater.parameters}
            engine.parameters = [
                each for each in run.task.parameters() if each.requires_grad or id(each) in of_optimizer
            ]
        self.call("on_fit_start")

    def on_epoch_start(self, run: Run) -> None:
        """Call `on_train_start` once, and `on_train_epoch_start`."""
        if not self._has_started:
            self._has_started = True
            self.call("on_train_start")
        self._is_cut = False
        self._set_modes()
        self.call("on_train_epoch_start")

    def on_step_start(self, run: Run) -> None:
        """Note where the window's batches begin."""
        self.next_index = run.progress.epoch_batches
        self._is_first, self._is_repeated = True, False
        self._left = sum(not (each.bad or has_zero_weight(each)) for each in run.window.micro_batches)

    def repeat(self, batches: int) -> None:
        """Begin to evaluate the window once more, of so many batches."""
        self.next_index -= batches
        self._left += batches
        self._is_first = self._is_repeated = True

    def training_step(self, batch: Batch) -> Any:
        """Run one batch; see `TaskModule.training_step`."""
        skipped = self.skipped
        if self._left <= 0:
            loss = self._placeholder(batch)
            return loss if skipped is None else skipped.loss_of(loss)
        loss = self._loss(self._run_step(batch))
        counted = loss if skipped is None else skipped.loss_of(loss)
        if loss is None:
            return counted
        if self._is_first:
            self._is_first = False
            optimizer = self.optimizers[0]
            self.call("on_before_zero_grad", optimizer, batch=self._batch, is_batch=True)
            if self._zero is not None:
                with self.inside("optimizer_zero_grad", self._batch, is_batch=True):
                    self._zero(self.epoch, self.next_index - 1, optimizer)
        if self._before_backward is not None:
            with self.inside("on_before_backward", self._batch, is_batch=True), _no_autocast(loss):
                self._before_backward(loss)
        self.loss = loss
        if self._backward is not None:
            return with_own_backward(loss, self._backward)
        return loss

    def _run_step(self, batch: Batch) -> Any:
        """Run the module's step on a batch that counts."""
        index = self.next_index
        self.next_index += 1
        self._left -= 1
        logs = self.training_logs
        if self._transfer is not None:
            batch = self._transfer(batch, 0)
        self._batch = batch
        if self._batch_start is not None and self._ends_epoch(batch, index):
            self._batch = None
            return None
        logs.hook, logs.batch, logs.is_batch, logs.steps_by_default = "training_step", batch, True, True
        try:
            output = self._step(batch, index) if self._takes_index else self._step(batch)
        except AttributeError as error:
            self.tell(error)
            raise
        logs.hook = ""
        return output

    def _ends_epoch(self, batch: Batch, index: int) -> bool:
        """Call `on_train_batch_start`; return whether it has returned -1 in this epoch, which ends it."""
        assert self._batch_start is not None
        if self._is_cut or self._is_repeated:  # a later batch of the same window, or the same one again
            return self._is_cut
        with self.inside("on_train_batch_start", batch, is_batch=True), _no_autocast(batch):
            self._is_cut = self._batch_start(batch, index) == -1
        if self._is_cut:
            assert self.run is not None
            self.run.end_epoch()
        return self._is_cut

    def _placeholder(self, batch: Batch) -> Any:
        """Run a batch that counts for nothing, which other ranks wait for, without a trace of it."""
        with self._unlogged():
            return self._loss(self._step(batch, self.next_index) if self._takes_index else self._step(batch))

    @contextmanager
    def _unlogged(self, step: str = "training_step") -> Iterator[None]:
        """Run the block, a step on a placeholder, without a trace in the logs or in torchmetrics objects."""
        kept, self.logs = self.logs, self.new_logs()
        self.logs.hook, self.logs.is_batch = step, True
        self.logs.steps_by_default = step == "training_step"
        metrics = self._metrics()
        before = metrics.state_dict()
        try:
            yield
        finally:
            self.logs = kept
            metrics.load_state_dict(before)

    def _loss(self, output: Any) -> Any:
        """Return the loss of a step's output, and keep what `on_train_batch_end` gets."""
        if isinstance(output, Tensor):
            if self._batch_end is not None:
                self._outputs = {"loss": self._shared(output)}
            return output
        if output is None:
            self._outputs = None
            return None
        if not isinstance(output, Mapping) or not isinstance(output.get("loss"), Tensor):
            raise ConfigError(
                f"{type(self.module).__name__}.training_step returned {_described(output)}. Allowed: a tensor"
                " with one number, a mapping with 'loss', or None"
            )
        if self._batch_end is not None:
            self._outputs = {**_detached(output), "loss": self._shared(output["loss"])}
        return output["loss"]

    def _shared(self, loss: Tensor) -> Tensor:
        """Return a loss divided by the number of batches of a step, as Lightning does."""
        shared: Tensor = loss.detach() / self.view.accumulate_grad_batches
        return shared

    def manual_step(self, batch: Batch) -> Any:
        """Run one batch of a module that steps its optimizers itself."""
        assert self.manual is not None
        self.manual.is_placeholder = self._left <= 0
        if self.manual.is_placeholder:
            with self._unlogged():
                self._step(batch, self.next_index) if self._takes_index else self._step(batch)
            return {"loss": 0.0}
        output = self._run_step(batch)
        self._outputs = _detached(output) if isinstance(output, Mapping) else output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return {"loss": loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else 0.0}

    def _micro_batch_end(self, run: Run) -> None:
        is_skipped = self.skipped is not None and self.skipped.is_last_skipped
        if self._left > 0 and not is_skipped:
            self.call("on_after_backward", is_batch=True, batch=self._batch)
            self._end_batch()

    def _before_optimizer_step(self, run: Run) -> None:
        if self.manual is not None:
            assert self._before_step is not None
            self._before_step(self.manual.current)
            return
        optimizer = self.optimizers[0]
        if self._after_backward is not None:
            self.call("on_after_backward", is_batch=True, batch=self._batch)
        if self._before_step is not None:
            self.call("on_before_optimizer_step", optimizer, is_batch=True, batch=self._batch)
        if self._clips is not None:
            with self.inside("configure_gradient_clipping", self._batch, is_batch=True):
                value, algorithm = self.clipping
                self._clips(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    def on_step_end(self, run: Run) -> None:
        """Step schedules, and call `on_train_batch_end` of the window's last batch."""
        assert run.result is not None
        if self.schedules and not self.is_manual and run.result.applied:
            self._step_schedules("steps", self.next_index, plateau=False)
            if run.window.last:
                self._step_schedules("epochs", run.progress.epoch + 1, plateau=False)
        if self._batch_end is not None:
            self._end_batch()
        self.loss = None

    def _after_step(self, run: Run) -> None:
        """Call the plateau schedules that follow steps; a validation may just have logged their value."""
        if run.result is not None and run.result.applied:
            self._step_schedules("steps", self.next_index, plateau=True)

    def _end_batch(self) -> None:
        if self._batch_end is not None and self._batch is not None:
            with self.inside("on_train_batch_end", self._batch, is_batch=True):
                self._batch_end(self._outputs, self._batch, self.next_index - 1)
        self._batch = self._outputs = None

    def _step_schedules(self, interval: str, number: int, plateau: bool) -> None:
        assert self.run is not None
        try:
            for each in self.schedules:
                timed = each.timed
                if timed is None or each.reduce_on_plateau != plateau or not timed.is_due(interval, number):
                    continue
                values = self.values() if plateau else {}  # which waits for the device
                timed.step(interval, number, values, self.module.lr_scheduler_step)
        except ConfigError as error:
            self.run.fail(ConfigError(f"{error} Validate before that, or give the schedule 'strict': False"))

    def on_log(self, run: Run) -> None:
        """Add the last values of training to its log points."""
        self._set_modes()
        if self._skips_log:
            self._skips_log = False
            return
        if run.stage == "train":
            self._publish(run, self.training_logs.take_latest(run.engine.data_ranks), of_step=True)

    def _publish(self, run: Run, values: Mapping[LoggedEntry, float], of_step: bool) -> None:
        for entry, value in values.items():
            name = entry.full_name(of_step)
            if entry.to_loggers and entry.name != "step":
                run.log(name, value)
            run.metrics[name] = value
            if name != entry.name:
                run.metrics[entry.name] = value  # what early stopping and checkpoints may watch
            if entry.prog_bar and name not in self._shown:
                self._show(run, name)

    def _show(self, run: Run, name: str) -> None:
        self._shown.append(name)
        for each in run.callbacks:
            if isinstance(each, ProgressBar) and (each.metrics is None or each.metrics is self._shown):
                each.metrics = self._shown

    def on_epoch_end(self, run: Run) -> None:
        """Call `on_train_epoch_end`, log the epoch's values, and step schedules that watch a value."""
        self.ended = 1
        self._end_epoch(run)
        if self.schedules and not self.is_manual:
            self._step_schedules("epochs", run.progress.epoch, plateau=True)
        self.ended = 0

    def _end_epoch(self, run: Run) -> None:
        self._call_at_end("on_train_epoch_end", self.training_logs, run)
        values = self.training_logs.take_epoch(run.engine.data_ranks)
        if values:
            self._skips_log = True
            self._publish(run, values, of_step=False)
            run.log_training()  # a log point of its own, also where this step has had one
        entries = self.training_logs.entries.values()
        if self._is_watched and any(each.on_step and not each.on_epoch for each in entries):
            # A callback may watch these values before the first log point.
            latest = self.training_logs.latest(run.engine.data_ranks)
            if run.latest_at != run.progress.steps:
                run.latest, run.latest_at = {}, run.progress.steps
            for entry, value in latest.items():
                run.metrics[entry.name] = run.latest[entry.name] = value

    def _call_at_end(self, name: str, logs: Logs, run: Run) -> None:
        """Call a hook at the end of an epoch; `self.trainer.callback_metrics` has the values of the epoch."""
        if self.hook(name) is not None:
            for entry, value in logs.epoch(run.engine.data_ranks).items():
                self.epoch_values[entry.name] = self.epoch_values[entry.full_name(of_step=False)] = value
            self.call(name)
            self.epoch_values.clear()

    def on_fit_end(self, run: Run) -> None:
        """Call `on_train_end` and `on_fit_end`; first end an epoch that the end of the fit has cut short.

        A fit that a signal ends goes on in that epoch when it is resumed.
        """
        if run.progress.epoch_batches and not _is_interrupted(run):
            self._end_epoch(run)
        self.call("on_train_end")
        self.call("on_fit_end")
        self._end()

    def on_exception(self, run: Run) -> None:
        """Tell Lightning's callbacks and the data module of the error, and leave the module as it was."""
        for each in self.callbacks:
            if has_hook(each, "on_exception"):
                each.on_exception(self.view, self.module, run.exception)
        if is_overridden(self.task.datamodule, "on_exception"):
            self.task.datamodule.on_exception(run.exception)
        self._detach()

    def _end(self) -> None:
        if (teardown := self.hook("teardown")) is not None:
            teardown(stage=self.verb)
        self._detach()

    # Evaluation.

    def evaluation_mode(self) -> bool:
        """Call `on_validation_model_eval`, or that of the stage; return whether there is one.

        It takes the place of setting all modules to evaluation mode.
        """
        stage = self.verb if self.run is None else self.run.stage
        stage = "validation" if stage == "validate" else stage
        with self.inside(""):
            if self.run is not None and self.run.train_feed is not None and self.module.training:
                self.call("on_validation_model_zero_grad")
            self.call(f"on_{stage}_model_eval")
        return self.hook(f"on_{stage}_model_eval") is not None

    def _set_modes(self) -> None:
        """Set the modes that a hook of the module has left after an evaluation."""
        for module, training in self._modes:
            module.training = training
        self._modes = []

    def on_evaluation_start(self, run: Run) -> None:
        """Call `on_validation_start` and `on_validation_epoch_start`, or those of the stage."""
        if self.run is None:
            self._begin(run)
        self._before = self.stage
        self.stage = run.stage
        self.ended = int(run.train_feed is not None and run.window is not None and run.window.last)
        name = f"{run.stage}_step"
        # Lightning's own predict_step returns the forward of the batch.
        if run.stage != "predict" and not is_overridden(self.module, name):
            raise ConfigError(f"{type(self.module).__name__} has no {name}, and there is data for it")
        step = getattr(self.module, name)
        several = len(run.evaluation_feeds) > 1
        self._evaluation = _EvaluationStep(
            step,
            takes(step, "batch_idx", 2),
            several,
            [loader for loader, _ in run.evaluation_feeds],
            self.hook(f"on_{run.stage}_batch_start"),
            self.hook(f"on_{run.stage}_batch_end"),
        )
        if several and not takes(step, "dataloader_idx", 3):
            raise ConfigError(
                f"{type(self.module).__name__}.{name} has no parameter dataloader_idx, and there are"
                f" {len(run.evaluation_feeds)} loaders. Write it as {name}(self, batch, batch_idx,"
                " dataloader_idx=0)"
            )
        self.logs = self.new_logs()
        if run.evaluation.is_sanity_check:  # leaves no trace in torchmetrics objects
            self._before_check = self._metrics().state_dict()
            self.call("on_sanity_check_start")
        self.call(f"on_{run.stage}_start")
        self.call(f"on_{run.stage}_epoch_start")

    def evaluation_step(self, batch: Batch) -> Any:
        """Run one batch of an evaluation or prediction."""
        run, evaluation = self.run, self._evaluation
        assert run is not None
        index = run.evaluation.batch
        loader = evaluation.loaders.index(run.evaluation.loader) if evaluation.several else 0
        if self._transfer is not None:
            batch = self._transfer(batch, loader)
        arguments: tuple[Any, ...] = (batch, index) if evaluation.takes_index else (batch,)
        arguments += (loader,) if evaluation.several else ()
        if run.evaluation.is_placeholder:
            with self._unlogged(f"{run.stage}_step"):
                return evaluation.step(*arguments)
        logs = self.logs
        logs.loader = loader if evaluation.several else None
        if evaluation.start is not None:
            with self.inside(f"on_{run.stage}_batch_start", batch, is_batch=True), _no_autocast(batch):
                evaluation.start(batch, index, *((loader,) if evaluation.several else ()))
        with self.inside(f"{run.stage}_step", batch, is_batch=True):
            output = evaluation.step(*arguments)
        self._evaluated = (output, batch, index)
        return output if run.stage == "predict" else None

    def on_evaluation_step_end(self, run: Run) -> None:
        """Call `on_validation_batch_end`, or that of the stage."""
        end = self._evaluation.end
        if end is not None and self._evaluated is not None:
            output, batch, index = self._evaluated
            with self.inside(f"on_{run.stage}_batch_end", batch, is_batch=True):
                end(output, batch, index, *(() if self.logs.loader is None else (self.logs.loader,)))
        self._evaluated = None

    def on_evaluation_end(self, run: Run) -> None:
        """Call `on_validation_epoch_end`, log the evaluation's values, and call `on_validation_end`."""
        logs, stage = self.logs, run.stage
        logs.loader = None
        self._call_at_end(f"on_{stage}_epoch_end", logs, run)
        if stage != "predict":
            ranks = run.engine.data_ranks
            self._publish(run, logs.take_latest(ranks), of_step=True)
            self._publish(run, logs.take_epoch(ranks), of_step=False)
        self.call(f"on_{stage}_end")
        if run.evaluation.is_sanity_check:
            self.call("on_sanity_check_end")
        if self.hook(f"on_{stage}_model_train") is not None:
            self.call(f"on_{stage}_model_train")
            self._modes = [(each, each.training) for each in self.module.modules()]
        self.logs, self.stage, self.ended = self.training_logs, self._before, 0
        self._skips_log = run.train_feed is not None and not run.evaluation.is_sanity_check
        if self._before_check is not None:
            self._metrics().load_state_dict(self._before_check)
            self._before_check = None
        if run.train_feed is None:
            self._end()

    # Checkpoints.

    def saving(self, run: Run) -> AbstractContextManager[object]:
        """Return a context manager inside which the optimizer's state can be stored."""
        return nullcontext() if self.closures is None else self.closures.packed()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedules, what is logged so far, and what `on_save_checkpoint` adds."""
        run = self.run
        if run is None:
            return {}
        own = {"logs": self.training_logs.state_dict(), "metrics": self._metrics().state_dict()}
        state: dict[str, Any] = {
            "steps": self.optimizer_steps,
            "schedules": [each.scheduler.state_dict() for each in self.schedules],
            "kinds": [kind_of(each.scheduler) for each in self.schedules],
            "ranks": run.engine.data_ranks.all_gather(own),
        }
        if self.manual is not None:
            state["gradients"] = self.manual.pending_gradients()
        of_callbacks = {each.state_key: kept for each in self.callbacks if (kept := each.state_dict())}
        if of_callbacks:
            state["callbacks"] = of_callbacks
        save = self.hook("on_save_checkpoint")
        if save is not None or self.hook("on_load_checkpoint") is not None:
            # A save at the end of an epoch is part of it, as in Lightning; it is counted already.
            progress = run.progress
            epoch = progress.epoch - (progress.epoch > 0 and progress.epoch_batches == 0)
            given = _Checkpoint(epoch=epoch, global_step=self.steps)
            if save is not None:
                save(given)
            state["of_module"] = dict(given)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not state:
            return
        self.optimizer_steps = int(state["steps"])
        if len(state["schedules"]) != len(self.schedules):
            raise ConfigError(
                f"the checkpoint has {len(state['schedules'])} schedules, the module {len(self.schedules)}"
            )
        here = [kind_of(each.scheduler) for each in self.schedules]
        there = state.get("kinds", here)  # checkpoints of earlier versions lack them
        if here != there:
            raise ConfigError(
                f"the module has the schedules {', '.join(here)}, and the checkpoint the states of"
                f" {', '.join(there)}. Resume with the schedules that it was saved with"
            )
        for config, each in zip(self.schedules, state["schedules"], strict=True):
            config.scheduler.load_state_dict(dict(each))
        self._kept = state
        for each in self.callbacks:
            if (kept := state.get("callbacks", {}).get(each.state_key)) is not None:
                each.load_state_dict(dict(kept))
        if (load := self.hook("on_load_checkpoint")) is not None:
            load(_Checkpoint(state.get("of_module", {})))

    def on_checkpoint_loaded(self, run: Run) -> None:
        """Take over what was logged before the checkpoint."""
        state, self._kept = self._kept, {}
        if not state:
            return
        ranks = run.engine.data_ranks
        stored = list(state["ranks"])
        # Fewer or more ranks than before: the sums of all are in the first ones.
        mine = stored[ranks.rank :: ranks.size]
        self.training_logs.load_state_dict(
            [part for each in mine for part in each["logs"]], run.engine.device
        )
        if mine:
            self._metrics().load_states([each["metrics"] for each in mine])
        if self.manual is not None:
            self.manual.load_gradients(state.get("gradients", {}))

    def _metrics(self) -> DeclaredMetrics:
        """Return the module's torchmetrics objects, whose states no state dict has."""
        found: dict[str, Any] = {}
        flags: list[tuple[Any, bool]] = []
        for path, each in self.module.named_modules():
            if hasattr(each, "sync_on_compute") and not any(path.startswith(f"{other}.") for other in found):
                found[path] = each
                flags.append((each, each.sync_on_compute))
        device = torch.device("cpu") if self.run is None else self.run.engine.device
        declared = DeclaredMetrics(found, device)
        for each, own in flags:
            each.sync_on_compute = each._to_sync = own
        return declared


def _is_interrupted(run: Run) -> bool:
    """Return whether a fit was ended by a signal or an error, so that a resumed one goes on in its epoch."""
    return run.failure is not None or run.stop_reason in run.stopping.signals


def _may_watch(callback: Callback) -> bool:
    """Return whether a callback may read logged values by their names at the end of an epoch."""
    if isinstance(callback, CheckpointSaver):
        return any(each.by is not None for each in callback.policies)
    if isinstance(callback, (EarlyStopping, LambdaCallback)):
        return True
    return not type(callback).__module__.startswith("drivetrain.callbacks.")


class _EvaluationStep(NamedTuple):
    """The step of an evaluation, how it is called, and the hooks around it."""

    step: Callable[..., Any]
    takes_index: bool
    several: bool
    loaders: list[str | None]
    start: Callable[..., Any] | None
    end: Callable[..., Any] | None


class _Checkpoint(dict[str, Any]):
    """The mapping that `on_save_checkpoint` and `on_load_checkpoint` get: what they store themselves."""

    def __missing__(self, name: str) -> Any:
        raise ConfigError(
            f"the checkpoint of on_save_checkpoint and on_load_checkpoint has no {name!r} here. When it"
            f" was saved it got {', '.join(map(repr, self)) or 'nothing'}: 'epoch', 'global_step' and what"
            " on_save_checkpoint adds. Weights, optimizers and schedules are stored without it"
        )


@contextmanager
def _no_autocast(given: Any) -> Iterator[None]:
    """Run the block outside of autocast, as Lightning runs hooks."""
    if torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            yield
    elif torch.cuda.is_available() and torch.is_autocast_enabled("cuda"):
        with torch.autocast("cuda", enabled=False):
            yield
    else:
        yield


def _given(optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    return lambda _: optimizer


def _detached(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.detach() if isinstance(each, Tensor) else each for name, each in output.items()}


def _described(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a mapping without a tensor 'loss', with {', '.join(map(repr, output)) or 'nothing'}"
    return f"a {type(output).__name__}"
