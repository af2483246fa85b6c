"""transformers' `TrainerCallback` objects as a callback of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import (
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    trainer,
    trainer_utils,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import speed_metrics

from drivetrain.callbacks.base import Callback as OwnCallback
from drivetrain.checkpoint.saving.config import rankings
from drivetrain.core.calendar import RunLength
from drivetrain.core.errors import ConfigError, StrategyError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.types import Stateful
from drivetrain.distributed.processes import local_rank
from drivetrain.engine.placeholder import has_zero_weight
from drivetrain.integrations.transformers.log_names import all_to_transformers, metric_name, with_prefix
from drivetrain.integrations.transformers.run_arguments import (
    UNLIMITED,
    arguments_of,
    saver_of,
)
from drivetrain.integrations.transformers.stored_model import base_of
from drivetrain.run.loop import validate

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.run.state import Evaluation
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

EVENTS: Mapping[str, str | None] = {
    "on_init_end": None,
    "on_train_begin": None,
    "on_train_end": None,
    "on_epoch_begin": None,
    "on_epoch_end": "on_epoch_end",
    "on_step_begin": None,
    "on_substep_end": "on_micro_batch_end",
    "on_pre_optimizer_step": None,
    "on_optimizer_step": None,
    "on_step_end": "on_step_end",
    "on_evaluate": None,
    "on_predict": None,
    "on_save": None,
    "on_log": None,
    "on_prediction_step": "on_evaluation_step_end",
    "on_push_begin": None,
}
"""The events that are served, each with the hook that is in use for it alone."""

_FLAGS = tuple(field.name for field in dataclasses.fields(TrainerControl))
ONCE = ("should_log", "should_evaluate", "should_save")
"""The flags that are cleared in each step."""

_OUTSIDE = ("FlyteCallback", "KubeflowCallback")
_OURS = {
    **dict.fromkeys(
        _OUTSIDE,
        "It writes to a service outside the program. Give Trainer(loggers=...) an object with log_metrics,"
        " log_config and close instead; see docs/how-to/loggers-in-detail.md",
    ),
    "AzureMLCallback": "Trainer(loggers='azureml') does that",
    "ClearMLCallback": "Trainer(loggers='clearml') does that",
    "CodeCarbonCallback": "Trainer(callbacks=[CodeCarbon('DEU')]) does that, with the country's code and"
    " CodeCarbon of drivetrain.integrations.trackers",
    "CometCallback": "Trainer(loggers='comet') does that",
    "DagsHubCallback": "Trainer(loggers='mlflow') does that, with DagsHub's MLFLOW_TRACKING_URI",
    "MLflowCallback": "Trainer(loggers='mlflow') does that",
    "NeptuneCallback": "Trainer(loggers='neptune') does that",
    "SwanLabCallback": "Trainer(loggers='swanlab') does that",
    "DVCLiveCallback": "Trainer(loggers='dvclive') does that",
    "TrackioCallback": "Trainer(loggers='trackio') does that",
    "WandbCallback": "Trainer(loggers='wandb') does that",
    "JITCheckpointCallback": "It saves when the machine is taken away, as Trainer(preemption=True) does",
}
_OF_TRIAL = ("is_hyper_param_search", "trial_name", "trial_params")
"""The fields of the state that a search sets for each trial."""

OBJECTS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""The objects that events get besides the arguments, the state and the control."""

_FLOW = DefaultFlowCallback()
_AROUND_STEP = ("on_pre_optimizer_step", "on_optimizer_step")


class CallbackAdapter(OwnCallback):
    """Calls transformers' callbacks in a run, with the state and the control that they expect.

    `Trainer(callbacks=[CallbackAdapter([EarlyStoppingCallback(3)])])` is all that a script needs. Callbacks
    see transformers' names of values ("loss", "eval_loss") and epochs as fractions, and what a callback sets
    in its control is carried out: stop, end the epoch, save, evaluate, log.

    The Trainer's own intervals decide when to log, evaluate and save. A plain `DefaultFlowCallback`, which
    decides this in transformers, is left out.

    Args:
        callbacks: transformers' callbacks, or their classes.
        args: What the callbacks get as `args`; None makes arguments that describe the run.
        state: The state to keep; None makes a new one.
        control: The control; None makes a new one.
        log: Called with the values of a log point under transformers' names, instead of this object's `log`.
        pushes: Whether the program calls `call("on_push_begin")`.

    Attributes:
        callbacks: The callbacks that are called.
        args: The arguments.
        state: Where the run is, and its `log_history`; it is part of checkpoints.
        control: What the callbacks have asked for.
        train_dataloader: The object that callbacks get under this name; None gives them only the length of an
            epoch.
        eval_dataloader: The object that callbacks get under this name during an evaluation.
        train_metrics: The summary of a finished fit, such as "train_loss" and "train_runtime".
        follows_args: Whether the run's intervals are those of `args`, so that the control tells what is due.
        reports_evaluations: Whether evaluations are logged and their events called here, not by the program.
        shown_path: Takes the path of a checkpoint, and returns the path to put into the state.
        told: Names of values that the program has put in rows of its own since the last log point.
        objects: The objects that events get besides the arguments, the state and the control.
        calls_by: A function that calls callbacks instead of this class: it gets the callbacks, the name of
            the event, (args, state, control) and the event's objects. With None this class calls them.

    Raises:
        ConfigError: An object that is no callback of transformers, one that writes to an outside service, or
            a method for an event that is never called.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: TrainingArguments | None = None,
        *,
        state: TrainerState | None = None,
        control: TrainerControl | None = None,
        log: Callable[[dict[str, float]], Any] | None = None,
        pushes: bool = False,
    ) -> None:
        self.callbacks = _checked(callbacks, pushes)
        self._given_args = args
        self.args: Any = args
        self.state = TrainerState() if state is None else state
        self.control = TrainerControl() if control is None else control
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.train_metrics: dict[str, float] = {}
        self.follows_args = False
        self.reports_evaluations = True
        self.told: set[str] = set()
        self.calls_by: Callable[..., TrainerControl | None] | None = None
        self.shown_path: Callable[[str], str] = str
        self._log = self.log if log is None else log
        self._by_event = {
            event: [each for each in self.callbacks if _overrides(each, event)] for event in EVENTS
        }
        self._run: Run | None = None
        self._training: Run | None = None  # while a fit lasts
        self.objects: dict[str, Any] = dict.fromkeys(OBJECTS)
        self.is_initialized = self._is_resumed = False
        self._handles: list[RemovableHandle] = []
        self._asked_by = ""
        self._heeded: frozenset[str] = frozenset()  # the flags of the control that the run has been asked for
        self._epoch = 0  # the one in progress
        self._rate: float | None = None  # of the last step
        self._sub_steps = 0  # left in this step
        self._passes: Sequence[Evaluation] | None = None  # of an evaluation that is not logged yet
        self._main_input, self._counts_tokens = "input_ids", False
        self._elements = 0  # of the main input, on this rank, since they were counted
        self._size = 0  # of the model, without embeddings
        self._losses = 0.0  # the sum over the steps of this fit
        self._logged_at = 0
        self._began = _Began(0.0, 0, 0, 0)
        self.changes_data = any(not _is_theirs(each) for each in self.callbacks)
        # Whether on_epoch_end has been called for this epoch, and what of this step has it called afterwards.
        self._epoch_ended = self._ends_after_log = self._ends_after_save = False
        for event, hook in EVENTS.items():
            used = self._by_event[event] or (event == "on_step_end" and self._by_event["on_epoch_end"])
            if hook is not None and not used:
                setattr(self, hook, getattr(OwnCallback, hook))  # which is marked unused

    def check_trainer(self, settings: RunSettings, strategy: Strategy) -> None:
        """Check that the events of the callbacks can be called in a run with these settings.

        Raises:
            ConfigError: `on_substep_end` with parts of micro-batches, or an event of the optimizer's step
                without whole gradients.
            StrategyError: An event of the optimizer's step with a strategy that hides the gradients.
        """
        if settings.micro_batch is not None and (found := self._by_event["on_substep_end"]):
            raise ConfigError(
                f"{type(found[0]).__name__}.on_substep_end with micro_batch={settings.micro_batch!r}: a"
                " part of a micro-batch is no sub-step. Leave one of them out"
            )
        for event in _AROUND_STEP:
            for each in self._by_event[event]:
                name = f"{type(each).__name__}.{event}"
                if reason := strategy.refuses("value_clipping"):
                    raise StrategyError(
                        f"{name} with strategy {strategy.name!r}: {reason}. Use"
                        " on_step_end, or strategy 'ddp' or 'fsdp'"
                    )

    def describe_by(self, args: TrainingArguments) -> None:
        """Give the callbacks other arguments from now on."""
        self.args = self._given_args = args

    def watch_steps(self) -> None:
        """Carry out the control's requests after each step, and keep the state up to date in the step."""
        vars(self).pop("on_step_end", None)

    # Calling the callbacks.

    def init_end(self, model: Any, processing_class: Any = None) -> None:
        """Call `on_init_end`, once; a fit calls it itself if nobody has."""
        if not self.is_initialized:
            self.is_initialized = True
            self.call("on_init_end", **{**self.objects, "model": model, "processing_class": processing_class})

    def call(self, event: str, **objects: Any) -> TrainerControl:
        """Call an event of all callbacks that have it; a control that a callback returns replaces it.

        Args:
            event: Its name.
            objects: What the callbacks get beside (args, state, control).

        Raises:
            ConfigError: A callback returned something other than a control.
        """
        callbacks, calls = self._by_event[event], self.calls_by
        if calls is not None and callbacks:
            returned = calls(callbacks, event, self.args, self.state, self.control, **objects)
            self.control = self.control if returned is None else returned
            return self.control
        for callback in callbacks:
            asked = self.control.should_training_stop
            returned = getattr(callback, event)(
                self.args, self.state, self.control, **{**self.objects, **objects}
            )
            if returned is not None:
                if not isinstance(returned, TrainerControl):
                    raise ConfigError(
                        f"{type(callback).__name__}.{event} returned a {type(returned).__name__}; an event of"
                        " transformers returns the control or None"
                    )
                self.control = returned
            if self.control.should_training_stop and not asked:
                self._asked_by = f"{type(callback).__name__}.{event}"
        return self.control

    def event(self, event: str, **objects: Any) -> TrainerControl:
        """Call an event, as `call` does; a fit in progress does what its callbacks have asked for."""
        if self._training is None:
            return self.call(event, **objects)
        self._event(self._training, event, **objects)
        return self.control

    def note_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record the values of a fit's evaluation that the program has reported; its log point follows."""
        assert self._training is not None
        self._passes = ()
        self._note_best(self._training, metrics)

    def _event(self, run: Run, event: str, **objects: Any) -> set[str]:
        """Call an event of a run, do what its callbacks have asked for, and return what that is."""
        if not self._by_event[event]:
            return set()
        self._see(run)
        self.call(event, **objects)
        return self.heed(run)

    def heed(self, run: Run) -> set[str]:
        """Pass to the run what the control has asked for since the last call, and return it."""
        now = self._flags()
        asked, self._heeded = set(now - self._heeded), now
        if not asked or run.train_feed is None or run.is_over:
            return set()
        if "should_training_stop" in asked:
            run.stop(f"{self._asked_by or 'a method of the Trainer'} set control.should_training_stop")
        if "should_epoch_stop" in asked:
            run.end_epoch()
        if "should_log" in asked:
            run.log_now()
        if "should_evaluate" in asked:
            run.validate()
        if "should_save" in asked:
            run.save()
        return asked

    def _flags(self) -> frozenset[str]:
        return frozenset(name for name in _FLAGS if getattr(self.control, name))

    def clear(self, *flags: str) -> None:
        """Set flags of the control to False: what they asked for is done, or no longer due."""
        for name in flags:
            setattr(self.control, name, False)
        self._heeded -= {*flags}

    def _event_with_flow(self, run: Run, event: str) -> tuple[TrainerControl, set[str]]:
        """Call an event whose callbacks may look in the control for what is due, if the arguments say it.

        The run does it by its own intervals, before the event or after it.

        Returns:
            What is due, and what the callbacks have asked for beside that.
        """
        asked = self.heed(run)
        if self.follows_args:
            self._see(run)
            getattr(_FLOW, event)(self.args, self.state, self.control)
            self._heeded = self._flags()
        due = dataclasses.replace(self.control)
        asked |= self._event(run, event)
        self.clear(*ONCE)
        return due, asked

    # The state.

    @property
    def is_training(self) -> bool:
        """Whether a fit is in progress."""
        return self._training is not None

    def fresh_state(self) -> TrainerState:
        """Return the state with the current step and epoch."""
        if self._training is not None:
            self._see(self._training)
        return self.state

    def _see(self, run: Run) -> None:
        if run.train_feed is None:
            return  # an evaluation after a fit leaves the fit's step and epoch
        self.state.global_step = run.progress.steps
        self.state.epoch = self._fraction(run)
        self.state.num_input_tokens_seen = run.progress.tokens

    def _fraction(self, run: Run) -> float:
        """Return the epoch with the part of it that is done."""
        progress, feed = run.progress, run.train_feed
        if not progress.epoch_batches or feed is None:
            return float(progress.epoch)
        batches = feed.batches_per_epoch
        if batches is None:  # as transformers does for data of unknown length
            batches = (run.length.steps or UNLIMITED) * feed.accumulation
        return self._epoch + progress.epoch_batches / batches

    def _begin(self, run: Run) -> None:
        """Set what does not change in a run. An evaluation after a fit leaves the fit's optimizer there."""
        if self._run is run:
            return
        self._run, task = run, run.task
        model = getattr(task, "model", task)
        self.args = arguments_of(run) if self._given_args is None else self._given_args
        self.state.is_world_process_zero = run.is_main
        self.state.is_local_process_zero = local_rank() == 0
        self._main_input = str(getattr(base_of(model), "main_input_name", "input_ids"))
        counts = str(getattr(self.args, "include_num_input_tokens_seen", "no"))
        self._counts_tokens = counts != "no"
        if self._counts_tokens and getattr(task, "count_tokens", counts) != counts:
            raise ConfigError(
                f"include_num_input_tokens_seen={counts!r} with a task that counts none: give it"
                f" TransformersTask(count_tokens={counts!r})"
            )
        self.objects |= {
            "model": model,
            "processing_class": getattr(task, "processing_class", None),
            "eval_dataloader": self.eval_dataloader,
        }
        self.init_end(model, self.objects["processing_class"])

    def log(self, logs: dict[str, float]) -> None:
        """Add values to `state.log_history`, with the epoch and the step, and call `on_log`."""
        if self._run is not None:
            self._see(self._run)
        logs["epoch"] = self.state.epoch
        if self._counts_tokens:
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.clear("should_log")
        if self._run is None:
            self.call("on_log", logs=logs)
        else:
            self._event(self._run, "on_log", logs=logs)

    # The hooks.

    def on_fit_start(self, run: Run) -> None:
        """Fill the state, and call `on_train_begin`."""
        self._begin(run)
        state, length, progress = self.state, run.length, run.progress
        if not self._is_resumed:
            fresh = TrainerState(**{name: getattr(state, name) for name in _OF_TRIAL})
            for name, value in vars(fresh).items():
                setattr(state, name, value)
        self._is_resumed = False
        state.is_world_process_zero, state.is_local_process_zero = run.is_main, local_rank() == 0
        state.max_steps, state.num_train_epochs = length.steps or UNLIMITED, _epochs(length)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, state.max_steps)
        updater = run.engine.optimizer
        assert run.train_feed is not None
        self.objects |= {
            "optimizer": updater.optimizer,
            "lr_scheduler": updater.scheduler or Rates(updater.optimizer),
            "train_dataloader": (
                _SeenBatches(run.train_feed.batches_per_epoch)
                if self.train_dataloader is None
                else self.train_dataloader
            ),
        }
        self._size = _size_without_embeddings(run.task)
        self._elements = 0
        self._losses, self._logged_at = 0.0, progress.steps
        self._began = _Began(time.time(), progress.samples, progress.steps, progress.tokens)
        self._epoch = progress.epoch
        self._training = run
        self._watch_optimizers(run)
        self.control.should_training_stop = False
        self._asked_by, self._heeded = "", self._flags()
        self._event(run, "on_train_begin")

    def _watch_optimizers(self, run: Run) -> None:
        def called(event: str) -> Callable[..., None]:
            def call(*_: Any) -> None:
                self._event(run, event)

            return call

        before, after = _AROUND_STEP
        for updater in run.engine.updaters.values():
            optimizer = updater.optimizer
            if self._by_event[before]:
                self._handles.append(optimizer.register_step_pre_hook(called(before)))
            if self._by_event[after]:
                self._handles.append(optimizer.register_step_post_hook(called(after)))

    def on_epoch_start(self, run: Run) -> None:
        """Call `on_epoch_begin`."""
        if self._ends_after_save:  # and nothing was saved
            self._end_epoch(run)
        self._epoch_ended = False
        self._epoch = run.progress.epoch
        self.clear("should_epoch_stop")
        self._event(run, "on_epoch_begin")

    def on_step_start(self, run: Run) -> None:
        """Count the window's input, and call `on_step_begin`."""
        if self._heeded:
            self.clear(*ONCE)
        self._rate = float(run.engine.optimizer.optimizer.param_groups[0]["lr"])
        real = [each for each in run.window.micro_batches if not (each.is_placeholder or each.bad)]
        for each in real:
            self._count(each.batch)
        if self._by_event["on_substep_end"]:
            self._sub_steps = sum(not has_zero_weight(each) for each in real)
        self._event(run, "on_step_begin")

    def _count(self, batch: Any) -> None:
        if not isinstance(batch, Mapping):
            return
        given = batch.get(self._main_input)
        if isinstance(given, Tensor):
            self._elements += given.numel()

    def _add_counts(self, run: Run) -> None:
        """Add what all ranks have counted since the last call to the state; all ranks call it."""
        (elements,) = run.engine.data_ranks.total([self._elements])
        self._elements = 0
        self.state.total_flos += float(6 * elements * self._size)

    def on_micro_batch_end(self, run: Run) -> None:
        """Call `on_substep_end` after every micro-batch but the last."""
        self._sub_steps -= 1
        if self._sub_steps > 0:
            self._event(run, "on_substep_end")

    def on_step_end(self, run: Run) -> None:
        """Call `on_step_end`, and in the last step of an epoch `on_epoch_end` too.

        As in transformers, what is due by steps comes before `on_epoch_end`, and what is due by epochs comes
        after it.
        """
        ends = self.follows_args and run.window.last and bool(self._by_event["on_epoch_end"])
        if not (ends or self._by_event["on_step_end"]):
            self._see(run)
            self.heed(run)
            return
        due, _ = self._event_with_flow(run, "on_step_end")
        if ends and due.should_save:
            self._ends_after_save = True
        elif ends and due.should_log:
            self._ends_after_log = not due.should_evaluate
        elif ends and not due.should_evaluate:
            self._end_epoch(run)

    def on_epoch_end(self, run: Run) -> None:
        """Call `on_epoch_end`, unless it was called already or the save of this step will call it."""
        if not (self._epoch_ended or self._ends_after_save):
            self._meet_now(run, self._end_epoch(run))

    def _end_epoch(self, run: Run) -> set[str]:
        self._epoch_ended, self._ends_after_log, self._ends_after_save = True, False, False
        return self._event_with_flow(run, "on_epoch_end")[1]

    def on_evaluation_start(self, run: Run) -> None:
        """Prepare an evaluation, which may be outside a fit."""
        self._begin(run)
        self.objects["eval_dataloader"] = self.eval_dataloader

    def on_evaluation_step_end(self, run: Run) -> None:
        """Call `on_prediction_step`, but not for the short validation before training."""
        if run.evaluation.is_sanity_check:
            return
        if self.eval_dataloader is None:
            self.objects["eval_dataloader"] = _SeenBatches(run.evaluation.batches)
        self._event(run, "on_prediction_step")

    def on_evaluation_end(self, run: Run) -> None:
        """Outside a fit, log the values and call `on_evaluate` or `on_predict`."""
        passes = run.evaluation.passes
        if not self.reports_evaluations or run.evaluation.is_sanity_check:
            return
        if run.train_feed is not None:
            self._passes = passes  # logged next
        elif run.stage == "validation":
            self._evaluated(run, passes, run.evaluation.values)
        else:
            metrics: dict[str, float] = {}
            for each in passes:
                metrics |= self._values_of(run, each)
            self._event(run, "on_predict", metrics=metrics)

    def _values_of(self, run: Run, part: Evaluation) -> dict[str, float]:
        """Return the values of one evaluation set under transformers' names, with its speed."""
        samples = int(run.engine.data_ranks.total([part.samples])[0])
        prefix = metric_name(run.stage if run.train_feed is None else "validation", part.loader, "")
        return {
            **all_to_transformers(part.values, [part.loader]),
            **speed_metrics(
                prefix.removesuffix("_"),
                time.time() - part.seconds,
                num_samples=samples,
                num_steps=part.batch + 1,
            ),
        }

    def _evaluated(self, run: Run, passes: Sequence[Evaluation], values: Mapping[str, float]) -> None:
        """Log the values of each evaluation set, and call `on_evaluate` for it."""
        of_sets = {name for each in passes for name in each.values}
        others = {name: value for name, value in values.items() if name not in of_sets}
        merged: dict[str, float] = {}
        for each in passes:
            metrics = self._values_of(run, each)
            if each is passes[-1]:
                metrics |= all_to_transformers(others)
            self._log(metrics)
            self.clear("should_evaluate")
            self._event(run, "on_evaluate", metrics=metrics)
            merged |= metrics
        self._note_best(run, merged)

    def _note_best(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Note the best value so far of `metric_for_best_model`."""
        if self.args.metric_for_best_model is None or run.train_feed is None:
            return
        name = with_prefix(self.args.metric_for_best_model)
        if name not in metrics:
            run.fail(
                ConfigError(
                    f"metric_for_best_model={self.args.metric_for_best_model!r}: the evaluation gave no"
                    f" {name!r}. {nearest(name, metrics)}"
                )
            )
            return
        value, state = metrics[name], self.state
        larger = self.args.greater_is_better
        best = (-math.inf if larger else math.inf) if state.best_metric is None else state.best_metric
        if value > best if larger else value < best:
            state.best_metric = value
            if self.args.save_strategy != "no":
                state.best_global_step = state.global_step

    def on_log(self, run: Run) -> None:
        """Log the values of training, or those of an evaluation, and call `on_log`."""
        if self._passes is not None:
            passes, self._passes = self._passes, None
            if passes:
                self._evaluated(run, passes, run.logged)
            return
        logs = all_to_transformers(run.logged)
        for name in self.told:
            logs.pop(name, None)
        self.told.clear()
        if not logs.get("skipped_steps", 1):
            del logs["skipped_steps"]  # transformers has no such value; what is skipped is in the logs
        if "loss" in logs:
            self._losses += logs["loss"] * (run.progress.steps - self._logged_at)
            self._logged_at = run.progress.steps
        if run.is_over:
            return  # transformers leaves out what is not due; the summary has it
        if run.result is not None and run.result.grad_norm is not None:
            logs["grad_norm"] = float(run.result.grad_norm)
        if self._rate is not None:
            logs["learning_rate"] = self._rate
        if self._counts_tokens:
            tokens = run.progress.tokens - self._began.tokens
            logs |= speed_metrics("train", self._began.time, num_tokens=tokens)
        self._add_counts(run)
        self._log(logs)
        if self._ends_after_log:
            self._end_epoch(run)

    def on_checkpoint_saved(self, run: Run) -> None:
        """Call `on_save`."""
        self.note_checkpoint(run)
        self.clear("should_save")
        self._event(run, "on_save")
        if not self._ends_after_save:
            return
        self._meet_now(run, self._end_epoch(run))

    def _meet_now(self, run: Run, asked: set[str]) -> None:
        """Log and evaluate at once what a callback on any rank has asked for at the end of an epoch."""
        of_ranks: set[str] = set().union(*run.engine.ranks.all_gather(sorted(asked)))
        if "should_log" in of_ranks:
            run.requests.pop("log", None)
            run.log_training()
        if "should_evaluate" in of_ranks:
            run.requests.pop("validate", None)
            validate(run)

    def note_checkpoint(self, run: Run) -> None:
        """Record which checkpoint is the best, after a save."""
        saver, state = saver_of(run), self.state
        best = state.best_model_checkpoint
        if saver is not None and rankings(saver.policies):
            found = saver.manager.best()
            best = None if found is None else self.shown_path(found)
        elif state.best_global_step == run.progress.steps and run.last_checkpoint is not None:
            best = self.shown_path(run.last_checkpoint)
        state.best_model_checkpoint = best

    def on_fit_end(self, run: Run) -> None:
        """Log the summary of the fit, and call `on_train_end`."""
        cut = run.progress.epoch_batches and not self._epoch_ended  # transformers calls its end, too
        if cut or self._ends_after_save:
            self._end_epoch(run)
        self._add_counts(run)
        self._release()
        steps = run.progress.steps - self._began.steps
        self.train_metrics = {
            **speed_metrics(
                "train",
                self._began.time,
                num_samples=run.progress.samples - self._began.samples,
                num_steps=steps,
            ),
            "total_flos": self.state.total_flos,
            "train_loss": self._losses / max(steps, 1),
        }
        self._log(self.train_metrics)
        self._event(run, "on_train_end")

    def on_exception(self, run: Run) -> None:
        """Remove the hooks from the optimizers."""
        self._release()

    def _release(self) -> None:
        self._training = None
        for each in self._handles:
            each.remove()
        self._handles = []

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, with the states of callbacks that have one."""
        if self._training is not None:
            self._see(self._training)
            self._add_counts(self._training)
        exported: dict[str, Any] = {}
        for each in self.callbacks:
            if isinstance(each, ExportableState):
                exported.setdefault(type(each).__name__, []).append(each.state())
        control = dataclasses.replace(self.control)
        control.should_training_stop |= 0 < self.state.max_steps <= self.state.global_step
        exported["TrainerControl"] = [control.state()]
        self.state.stateful_callbacks = {
            name: states[0] if len(states) == 1 else states for name, states in exported.items()
        }
        return {
            "state": self.state_json(),
            "callbacks": [
                each.state_dict() if isinstance(each, Stateful) else None for each in self.callbacks
            ],
        }

    def state_json(self, indent: int | None = None) -> str:
        """Return the state as JSON; the states of callbacks are those of the last `state_dict`."""
        return json.dumps(dataclasses.asdict(self.fresh_state()), indent=indent, default=float)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next fit continues from there."""
        stored = json.loads(state["state"])
        for name in (field.name for field in dataclasses.fields(TrainerState)):
            if name in stored and name not in _OF_TRIAL:  # a trial may go on from another one's checkpoint
                setattr(self.state, name, stored[name])
        compare = getattr(trainer_utils, "compare_trainer_and_checkpoint_args", None)  # of 5.4
        if self._given_args is not None and compare is not None:
            compare(self.args, self.state)
        restores = bool(getattr(self.args, "restore_callback_states_from_checkpoint", False))
        exported = {
            name: list(each) if isinstance(each, list) else [each]
            for name, each in (stored.get("stateful_callbacks") or {}).items()
        }
        for each in self.callbacks:
            found = exported.get(type(each).__name__)
            if isinstance(each, ExportableState) and found:
                saved, own_state = found.pop(0), each.state()
                for part in ("args", "attributes") if restores else ("attributes",):
                    values = saved.get(part, {})
                    for name in own_state.get(part, ()):  # a file chooses no other attribute
                        if name in values and hasattr(each, name):
                            setattr(each, name, values[name])
        exported.pop("TrainerControl", None)  # for transformers' own Trainer
        left = sorted(name for name, states in exported.items() if states)
        if left and restores:
            trainer.logger.warning(
                f"the checkpoint has states of callbacks that are not there: {', '.join(left)}"
            )
        for each, own in zip(self.callbacks, state["callbacks"], strict=False):
            if own is not None and isinstance(each, Stateful):
                each.load_state_dict(own)
        self._is_resumed = True


class _Began(NamedTuple):
    """The time and the counts at which a fit began in this program."""

    time: float
    samples: int
    steps: int
    tokens: int


class Rates:
    """The learning rates of an optimizer, under the name that torch's schedulers have for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


class _SeenBatches:
    """The number of batches of a run's data, in the place of a loader."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __len__(self) -> int:
        if self._number is None:
            raise TypeError("the number of batches is not known")
        return self._number

    def __bool__(self) -> bool:
        return True


def _epochs(length: RunLength) -> int:
    """Return the number of epochs that a fit begins."""
    if length.epochs is None and length.steps and length.steps_per_epoch:
        return math.ceil(length.steps / length.steps_per_epoch)
    return length.epochs or UNLIMITED


def _checked(callbacks: Sequence[Any], pushes: bool) -> list[TrainerCallback]:
    if isinstance(callbacks, (TrainerCallback, type)):
        raise ConfigError(f"CallbackAdapter takes a sequence of callbacks, not {callbacks!r}: give [it]")
    kept: list[TrainerCallback] = []
    for given in callbacks:
        each = given() if isinstance(given, type) and issubclass(given, TrainerCallback) else given
        name = type(each).__name__
        if not isinstance(each, TrainerCallback):
            own = " itself" if isinstance(each, OwnCallback) else ""
            raise ConfigError(
                f"CallbackAdapter takes transformers' TrainerCallback objects, not a {name}. Give a callback"
                f" of drivetrain to Trainer(callbacks=[...]){own}"
            )
        for kind in type(each).__mro__:
            if kind.__module__.startswith("transformers.") and kind.__name__ in _OURS:
                raise ConfigError(f"{name} cannot be used here. {_OURS[kind.__name__]}")
        _check_events(each, pushes)
        if type(each) is DefaultFlowCallback:
            _LOG.info(
                "DefaultFlowCallback is left out: log_every, validate_every and checkpoint of the Trainer say"
                " when to log, evaluate and save"
            )
        else:
            kept.append(each)
    return kept


def _check_events(callback: TrainerCallback, pushes: bool) -> None:
    name = type(callback).__name__
    for event in dir(callback):
        if not event.startswith("on_") or not callable(getattr(callback, event)):
            continue
        if event not in EVENTS and not (hasattr(TrainerCallback, event) and not _overrides(callback, event)):
            raise ConfigError(f"{name}.{event} is never called. {nearest(event, EVENTS)}")
    if not pushes and _overrides(callback, "on_push_begin"):
        raise ConfigError(
            f"{name}.on_push_begin is never called: a run pushes nothing by itself. Publish(...) uploads in"
            " the background; see docs/how-to/publish.md"
        )


def _overrides(callback: TrainerCallback, event: str) -> bool:
    own = getattr(callback, event)
    return getattr(own, "__func__", own) is not getattr(TrainerCallback, event, None)


def _is_theirs(callback: TrainerCallback) -> bool:
    return type(callback).__module__.startswith("transformers.")


def _size_without_embeddings(task: nn.Module) -> int:
    """Return the number of parameters outside of embeddings, as transformers counts them for FLOPs."""
    embedded = {id(each.weight) for each in task.modules() if isinstance(each, nn.Embedding)}
    return sum(
        int(getattr(each, "ds_numel", None) or each.numel())
        for each in task.parameters()
        if id(each) not in embedded
    )
