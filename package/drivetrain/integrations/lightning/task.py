"""A LightningModule as a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch
from drivetrain.engine.generator_step import returned_rows
from drivetrain.integrations.lightning.arguments_objects import module_callbacks
from drivetrain.integrations.lightning.closures import collect
from drivetrain.integrations.lightning.hooks import ModuleHooks
from drivetrain.integrations.lightning.methods import check_module
from drivetrain.integrations.lightning.skipping import Skipped
from drivetrain.integrations.lightning.state import ModuleState
from drivetrain.integrations.lightning.trainer_view import TrainerView
from drivetrain.task.attributes import never_search
from drivetrain.task.output import Optimized
from drivetrain.task.task import TaskModule

never_search("lightning", "pytorch_lightning")

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The tables of an `nn.Module` that a task shares with its module, so that names in checkpoints are the
module's own, and what a strategy replaces is replaced in the module."""

_PLAIN = (bool, int, float, str, type(None))


class LightningTask(TaskModule):
    """An unchanged LightningModule as a task; made by `as_task`.

    It has the module's parameters and buffers under the module's own names.

    Attributes:
        module: The module.
        datamodule: The data module of the run that has begun last, if `as_data` has given one.

    Args:
        module: The module.
        hyper_parameters: What the module has saved by `save_hyperparameters`, for checkpoints and loggers.
    """

    def __init__(self, module: Any, **hyper_parameters: Any) -> None:
        check_module(module)
        vars(self)["module"] = module  # not a child: its children are the task's
        super().__init__()
        vars(self).update({name: vars(module)[name] for name in _SHARED})
        vars(self)["hooks"] = None
        self.datamodule: Any = None
        self.callbacks: Sequence[Any] = ()
        """Callbacks of Lightning, whose hooks are called; see `as_task`."""
        self.may_skip = True
        """Whether `training_step` may return None; see `as_task`."""

    # The module's own mode: `StepModule.evaluating` and the strategies set the task's.

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> LightningTask:
        """Set the mode by the module's own method."""
        self.module.train(mode)
        return self

    def eval(self) -> LightningTask:
        """Set evaluation mode, by the module's own hook for it if it has one."""
        if self.hooks is None or not self.hooks.evaluation_mode():
            self.module.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    def take_data_module(self, data_module: Any) -> None:
        """Show a data module as `self.trainer.datamodule`; `as_data` calls it when a run begins.

        From then on the data module's `self.trainer` knows the processes; it knows the rest when the run
        begins.
        """
        self.datamodule = data_module
        data_module.trainer = TrainerView(ModuleState(self, self.module, "train"))

    def configure_callbacks(self, stage: str) -> Sequence[Any]:
        """Set the module up for a run, and return the callback that calls its hooks."""
        taken = module_callbacks(self.module, self.callbacks)
        hooks = ModuleHooks(self, self.module, stage, taken.bridged)
        vars(self)["hooks"] = hooks
        return [hooks, *taken.callbacks]

    def configure_optimizers(self) -> Any:
        """Return a function that makes the module's own optimizers."""
        return self.hooks.optimizer_factories()

    def metric_name(self, stage: str, loader: str | None, name: str) -> str | None:
        """Leave out the engine's own values: a module logs under its own names."""
        return None

    def training_step(self, batch: Batch) -> Any:
        """Run the module's training step."""
        return self.hooks.training_step(batch)

    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        """Make one optimizer step from the batches whose `training_step` returns a loss."""
        if weighted_batches and self.hooks.trains_nothing:
            return collect(engine, weighted_batches)
        if weighted_batches and self.hooks.closures is not None:
            done: Optimized = self.hooks.closures.optimize(engine, weighted_batches)
            return done
        if not (self.may_skip and weighted_batches):
            return super().optimize(engine, weighted_batches)
        skipped = self.hooks.skipped = Skipped(engine, weighted_batches)
        step_values, metric_inputs = engine.accumulate(weighted_batches)
        if (step_values := skipped.left(step_values, engine.parameters)) is None:
            return Optimized([], applied=False)
        applied, norm = engine.update(engine.optimizer, step_values, engine.parameters)
        return Optimized(step_values, applied, norm, metric_inputs)

    def validation_step(self, batch: Batch) -> Any:
        """Run the module's validation step.

        Raises:
            ConfigError: The run is a prediction.
        """
        if self.hooks.verb == "predict":
            raise ConfigError(
                f"predict(metrics=True) with a {type(self).__name__}: its validation_step logs values itself,"
                " in an evaluation of its own. Call validate for the values, and predict for the outputs"
            )
        return self.hooks.evaluation_step(batch)

    def test_step(self, batch: Batch) -> Any:
        """Run the module's test step."""
        return self.hooks.evaluation_step(batch)

    def predict_step(self, batch: Batch) -> Any:
        """Run the module's prediction step."""
        return self.hooks.evaluation_step(batch)


class ManualTask(LightningTask):
    """A module with `automatic_optimization = False`, which steps its optimizers itself."""

    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        """Run the module's `training_step`, which steps its optimizers; each batch counts once."""
        returned = []
        for micro_batch, _ in list(engine.transfer.moving(weighted_batches)):
            engine.passes += 1
            body, step = self.training_step(micro_batch.batch), engine.run_step
            if micro_batch.is_placeholder:
                returned.append(engine.placeholders.forward(self, step, body))
            else:
                returned.append(step(body))
        return Optimized(returned_rows(returned, weighted_batches), applied=True)

    def training_step(self, batch: Batch) -> Any:
        """Run the module's training step; a generator, as all steps that strategies do not wrap."""
        return self.hooks.manual_step(batch)
        yield


def as_task(module: Any, callbacks: Sequence[Any] = ()) -> LightningTask:
    """Return a task around an unchanged LightningModule of `lightning` or `pytorch_lightning`.

    ::

        trainer.fit(as_task(LitModel()), train_loader, validation_loader)

    The module's steps and hooks are called in Lightning's order, `self.log` logs under the module's own
    names, and its `configure_optimizers` makes the optimizers and schedules.

    Args:
        module: The module; it is trained in place.
        callbacks: Callbacks of Lightning, as `configure_callbacks` of a module returns them: users' and
            libraries' own, whose hooks are called with `self.trainer` and the module, and those that have a
            counterpart here. They join those of the Trainer.

    Returns:
        The task. `task.may_skip = False`, for a module whose training step never returns None, saves several
        ranks an exchange of two numbers in each step.

    Raises:
        ConfigError: It is no LightningModule, or it has a hook of Lightning 1 that its Trainer refuses too;
            says what to do instead.
    """
    check_module(module)
    saved = {
        name: value for name, value in dict(module.hparams).items() if name != "module" and _is_plain(value)
    }
    kind = LightningTask if module.automatic_optimization else ManualTask
    # Messages, run directories and logged configurations name a task by its class.
    named = type(type(module).__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    found: LightningTask = named(module, **saved)
    found.callbacks = tuple(callbacks) if isinstance(callbacks, (list, tuple)) else (callbacks,)
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and _is_plain(each) for key, each in value.items())
    return type(value) in _PLAIN
