"""The task that a user writes, and the module that strategies wrap."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.weights.module_state import clean_name, load_module_state
from drivetrain.checkpoint.weights.rename import Rename
from drivetrain.core.calendar import RunLength
from drivetrain.core.errors import ConfigError, DataError, nearest
from drivetrain.core.progress import Progress
from drivetrain.core.synonyms import Elsewhere, missing
from drivetrain.core.types import Batch, StepOutput
from drivetrain.core.validation import check_names, check_no_class
from drivetrain.data.batch import batch_size, described
from drivetrain.distributed.failure.named_locations import named_location
from drivetrain.task.assigned_loss import check_assigned_loss, counts_labels, is_sum, total_of_labels
from drivetrain.task.forward import FORWARDS, call_forward, read_forward
from drivetrain.task.hparams import construct, parameters_of, record_arguments
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.output import Optimized

if TYPE_CHECKING:
    from drivetrain.checkpoint.weights.warm_start import LoadReport, WeightSource
    from drivetrain.data.counting import Measure
TARGETS = ("label", "labels", "target", "targets", "y")
"""The columns that `metric_inputs` looks for, in this order."""


def check_constructed(module: nn.Module) -> None:
    if "_parameters" not in vars(module):
        raise ConfigError(
            f"the constructor of {type(module).__name__} does not call super().__init__(); call it first,"
            " before anything is assigned"
        )


class TaskModule(nn.Module):
    """A model with its loss, metrics and optimizers: subclass it, write `forward` and `loss`, and if needed
    `metrics` and `configure_optimizers`.

    A task knows nothing of devices, processes, precision or files, and every method can be called without a
    trainer. Constructor arguments are recorded as `hparams` and stored in checkpoints.

    Example:
        ```python
        class Digits(TaskModule):
            def __init__(self, hidden: int = 128):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

            def forward(self, image):
                return self.net(image)

            def loss(self, outputs, batch):
                return F.cross_entropy(outputs, batch["label"])
        ```
    """

    hparams: dict[str, Any]

    run_length: RunLength = RunLength()
    """The planned length of the fit in progress, from before `configure_optimizers` until the fit has ended.
    Outside of a fit nothing is known, and every field is None."""

    progress: Progress = Progress()
    """Where the fit in progress is: `self.progress.epoch`, `self.progress.steps` and so on. Outside of a
    fit every count is 0. A compiled method that reads a count is compiled anew whenever it changes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> TaskModule:
        """Record the constructor's arguments before the constructor runs."""
        task = super().__new__(cls)
        arguments = record_arguments(cls, args, kwargs)
        if arguments is not None:  # copying and unpickling pass none, and then fill the object's __dict__
            object.__setattr__(task, "hparams", arguments)
        return task

    load_from_checkpoint = Elsewhere()

    def __getattr__(self, name: str) -> Any:
        """Look up as `nn.Module` does, and answer another library's name with ours."""
        own = self.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):  # the most frequent first
            if kind in own and name in own[kind]:
                return own[kind][name]
        if name in ("_modules", "training"):  # what torch's own methods look for
            check_constructed(self)
        raise AttributeError(missing(type(self), name))

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__ and isinstance(value, (nn.Module, Tensor)):
            check_constructed(self)
        if name == "loss":
            check_no_class(f"{type(self).__name__}.loss", value)
        if name in _DESCRIBED and self._take(name, value):
            return
        if name in _RESERVED:
            instead = "" if overrides(self, name) else _INSTEAD.get(name, "")
            raise ConfigError(
                f"{type(self).__name__}.{name} is a method of TaskModule, which an attribute would hide."
                f"{instead} Choose another name for the attribute, such as {name + '_function'!r}"
            )
        if name == "hparams":
            raise ConfigError(
                f"{type(self).__name__}.hparams is recorded by TaskModule and holds the constructor's"
                " arguments already. Remove the assignment, or choose another name for the attribute"
            )
        if name in _OF_FIT and not isinstance(value, _OF_FIT[name][0]):
            kind, what = _OF_FIT[name]
            raise ConfigError(
                f"{type(self).__name__}.{name} is {what}, a {kind.__name__}. Choose another name"
                " for the attribute"
            )
        super().__setattr__(name, value)

    def _take(self, name: str, value: Any) -> bool:
        """Take a module as the loss, or a mapping as the metrics, if the class defines no method for it."""
        is_one = isinstance(value, nn.Module if name == "loss" else (Mapping, nn.Module))
        if not is_one or getattr(type(self), name) is not getattr(TaskModule, name):
            return False
        if name == "loss":
            super().__setattr__(name, value)  # registered; `self.loss` stays the method, which calls it
        else:
            self.__dict__["_metrics"] = value  # not registered: a run moves and resets its own copies
        return True

    # The four methods that describe a task.

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Any]:
        """Return the scalar to minimise, or a mapping: its "loss" is minimised, its other values are logged.

        A value of the mapping that is a `Term` is minimised too, as a mean with a denominator of its own.

        Instead of this method, a constructor may assign a module, `self.loss = nn.CrossEntropyLoss()`, which
        is called with the outputs and the target that `metric_inputs` finds. The result of a loss of torch
        with `reduction="sum"` is divided here by the number of samples, and the step multiplies the gradient
        by that number: the gradient is the sum's, and the values are means. Without a module the default is
        for models that compute their loss: it takes `outputs.loss`, `outputs["loss"]`, or the first item of a
        tuple if that is a scalar.

        Args:
            outputs: The return value of `forward`.
            batch: The whole batch, on the device. A loss that is a module also takes the target alone.
        """
        if (module := self._modules.get("loss")) is not None:
            inputs = (outputs, batch) if isinstance(batch, Tensor) else self.metric_inputs(outputs, batch)
            loss = module(*inputs)
            return loss / (batch_size(batch) or 1) if is_sum(module) else loss  # type: ignore[no-any-return]
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if _begins_with_loss(outputs):
            loss = outputs[0]
        if isinstance(loss, Tensor):
            return loss
        raise ConfigError(
            f"{type(self).__name__} has no loss: assign a module, `self.loss = nn.CrossEntropyLoss()`, define"
            " `loss(self, outputs, batch)`, or let `forward` return something with a `loss`, or a tuple that"
            f" begins with it (it returned a {type(outputs).__name__})"
        )

    def metrics(self) -> Mapping[str, Any]:
        """Return metrics by name: objects with `update`, `compute` and `reset`, such as torchmetrics', or its
        `MetricCollection`.

        Instead of this method, a constructor may assign them: `self.metrics = {"accuracy": ...}`. Default:
        none.

        A method with a parameter `loader` is called for each set of evaluation data, with its name, and with
        None for training and for data without a name: `def metrics(self, loader=None)`.
        """
        metrics: Mapping[str, Any] = self.__dict__.get("_metrics", {})
        return metrics

    def configure_callbacks(self, stage: str) -> Sequence[Any]:
        """Return callbacks that belong to this task; they precede those of `Trainer(callbacks=...)`.

        It is called once for each run, before the strategy places the task. Default: none.

        Args:
            stage: "train", "validation", "test" or "predict".
        """
        return ()

    def model_info(self) -> ModelInfo:
        """Return facts about the model for other parts of the library; called whenever one is needed.

        They include its blocks for sharding, its collation and the files beside its weights: see `ModelInfo`.
        Default: no facts.
        """
        return ModelInfo()

    def configure_optimizers(self) -> Any:
        """Return the optimizers' configuration.

        An optimizer that is already built is refused, because a strategy may have to shard first. The
        planned length of the fit is in `self.run_length`.

        Returns:
            An `OptimizerConfig`; or a callable that takes the list of trainable parameters and returns an
            optimizer or `(optimizer, schedule)`; or a mapping of names to either for several optimizers,
            which step together from one loss, or in turns by a generator `training_step`. The schedule is a
            `torch.optim.lr_scheduler.LRScheduler` whose `step()` is called after each step, or a
            `TorchSchedule`, for a scheduler that follows epochs or a metric.
        """
        return OptimizerConfig("adamw")

    # The steps.

    def training_step(self, batch: Batch) -> Any:
        """Run one micro-batch and return a scalar loss, a mapping with "loss", or a `StepOutput`.

        It may also be a generator for several optimizers: `yield "discriminator", d_loss`, then `yield
        "generator", g_loss`. At each yield the named optimizer makes its step, then the body resumes.
        """
        outputs = call_forward(self, self.inputs(batch))
        return StepOutput(self.loss(outputs, batch), outputs)

    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        """Make one optimizer step from micro-batches. The engine makes the same step as this default without
        calling it.

        Override it to make the step in another way, for example with two backward passes, or with several
        steps of optimizers. The engine counts it, and the batches, when it returns.

        Args:
            engine: The `Engine`: `accumulate(weighted_batches)` runs forward and backward, and
                `update(updater, step_values, parameters)` clips, steps and clears the gradients of one of
                `engine.updaters`, or of all by `engine.optimizer`.
            weighted_batches: The micro-batches, each with the factor of its loss; none if there is
                nothing to learn from.
        """
        step_values, metric_inputs = engine.accumulate(weighted_batches)
        if not weighted_batches:
            return Optimized(step_values, applied=False)
        applied, norm = engine.update(engine.optimizer, step_values, engine.parameters)
        return Optimized(step_values, applied, norm, metric_inputs)

    def validation_step(self, batch: Batch) -> Any:
        """Run one validation batch; return what `training_step` may, or None. Default: outputs and loss."""
        outputs = call_forward(self, self.inputs(batch))
        return StepOutput(self.loss(outputs, batch), outputs)

    def test_step(self, batch: Batch) -> Any:
        """Run one test batch. Default: `validation_step`."""
        return self.validation_step(batch)

    def predict_step(self, batch: Batch) -> Any:
        """Predict one batch. Default: the model's outputs."""
        return call_forward(self, self.inputs(batch))

    # Reading a batch.

    def inputs(self, batch: Batch) -> Any:
        """Return the input of `forward`: a mapping is passed by name, a tuple by position, anything else as
        the only argument.

        The default takes from a mapping the keys that `forward`'s parameters name, and from a sequence its
        first items, one for each parameter without a default. `**` takes all keys of a mapping, except the
        target of an assigned loss or of the metrics. A tensor or a data class is passed unchanged.

        Raises:
            DataError: A parameter without a default has no column; lists the batch's columns. Or a sequence
                has more items than these and the target, and `forward` has a parameter with a default. Or the
                batch is a data class with a field of a parameter's name.
        """
        kind = type(batch)
        forward = FORWARDS.get(type(self))
        if forward is None:
            forward = read_forward(type(self))
        if kind is dict or isinstance(batch, Mapping):
            columns = {}
            for name in forward.names:
                if name in batch:
                    columns[name] = batch[name]
                elif name in forward.required:
                    raise self._missing(name, batch)
            return self._all_columns(batch, forward.names) if forward.takes_all else columns
        if kind is tuple or kind is list or isinstance(batch, (tuple, list)):
            size, needed = len(batch), len(forward.positional)
            is_clear = needed <= size <= forward.most
            if not is_clear and not (size == forward.most + 1 and self._takes_target()):
                raise self._unclear(batch, forward.positional)
            return tuple(batch[:needed])
        if hasattr(kind, "__dataclass_fields__"):
            self._check_whole(kind, forward.required)
        return batch

    def _all_columns(self, batch: Mapping[str, Any], named: Sequence[str]) -> Mapping[str, Any]:
        """Return the columns of a forward that takes `**`."""
        target = next((each for each in TARGETS if each in batch), None)
        is_of_model = "loss" not in self._modules and not overrides(self, "loss")
        if target is None or target in named or is_of_model or not self._takes_target():
            return batch
        return {name: value for name, value in batch.items() if name != target}

    def _check_whole(self, kind: Any, required: Sequence[str]) -> None:
        name = next((each for each in required if each in kind.__dataclass_fields__), None)
        if name is not None:
            raise DataError(
                f"{type(self).__name__}.forward{inspect.signature(self.forward)} gets the whole batch, of the"
                f" data class {kind.__name__}, and not its field {name!r}. Say what forward gets, such as"
                f" `def inputs(self, batch): return {{{name!r}: batch.{name}}}`"
            )

    def _takes_target(self) -> bool:
        """Return whether the loss or the metrics get the target that the default `metric_inputs` finds."""
        if overrides(self, "metric_inputs"):
            return False
        if self._modules.get("loss") is not None:
            return True
        has_metrics = overrides(self, "metrics") or bool(self.__dict__.get("_metrics"))
        return has_metrics and (overrides(self, "loss") or overrides(self, "training_step"))

    def _unclear(self, batch: Sequence[Any], required: Sequence[str]) -> DataError:
        items = ", ".join(f"batch[{index}]" for index in range(max(1, len(batch) - 1)))
        return DataError(
            f"{type(self).__name__}.forward{inspect.signature(self.forward)} does not fit a sequence of"
            f" {len(batch)}: {described(batch)}. A sequence gives forward its first items, one for each"
            f" parameter without a default ({', '.join(required) or 'there is none'}). Where it has other"
            " parameters, only the target of the loss or the metrics may be left over. Say what forward gets,"
            f" such as `def inputs(self, batch): return {items}`, or give mappings, whose keys are the"
            " parameters' names"
        )

    def _missing(self, name: str, batch: Mapping[str, Any]) -> DataError:
        return DataError(
            f"{type(self).__name__}.forward has a parameter {name!r}, but the batch has no such column. "
            f"{nearest(name, map(str, batch)).replace('Allowed:', 'The batch has:')} Rename the parameter or "
            "the column, or override `inputs(batch)`"
        )

    def metric_inputs(self, outputs: Any, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of each metric's `update`. Default: the outputs and the target.

        If the outputs have `logits`, the metrics get these. If the outputs are a tuple that begins with a
        scalar loss, the metrics get its second item. The target is the batch's column `label`, `labels`,
        `target`, `targets` or `y`, or a sequence's last item.

        Raises:
            DataError: The batch has no recognisable target; lists the batch's columns.
        """
        if _begins_with_loss(outputs) and len(outputs) > 1:
            outputs = outputs[1]
        elif not isinstance(outputs, Tensor) and isinstance(
            logits := getattr(outputs, "logits", None), Tensor
        ):
            outputs = logits
        if isinstance(batch, Mapping):
            for name in TARGETS:
                if name in batch:
                    return outputs, batch[name]
            raise DataError(
                "no target for the loss or the metrics: the batch's columns are"
                f" {', '.join(map(repr, batch))}, none of {', '.join(map(repr, TARGETS))}. Override"
                " `metric_inputs(outputs, batch)`"
            )
        if isinstance(batch, (tuple, list)):
            forward = FORWARDS.get(type(self))
            if forward is not None and 1 < len(batch) == len(forward.positional):
                self._check_target(batch, forward.positional)
            return outputs, batch[-1]
        raise DataError(
            f"no target for the loss or the metrics: the batch is a {type(batch).__name__}. Override"
            " `metric_inputs(outputs, batch)`"
        )

    def _check_target(self, batch: Sequence[Any], required: Sequence[str]) -> None:
        if not overrides(self, "inputs") and not overrides(self, "training_step"):
            raise DataError(
                f"the batch has {len(batch)} items, {described(batch)}: forward takes all of them"
                f" ({', '.join(required)}), and the last one is also the target of the loss or the metrics."
                " Give the target as another item, or override `inputs(batch)` to say what forward gets or"
                " `metric_inputs(outputs, batch)` to say what the target is"
            )

    def metric_name(self, stage: str, loader: str | None, name: str) -> str | None:
        """Return the name under which a value is logged and returned. Default: "train/loss",
        "validation/loss", or "validation/<loader>/loss" with named loaders.

        Loggers, results, checkpoint policies, early stopping and schedules all use this name. Each value
        needs its own name; two values with the same name are an error. If the method returns None, the value
        is not logged or returned.

        Args:
            stage: "train", "validation" or "test".
            loader: The name of the evaluation's loader; None if there is only one.
            name: The name that the step or `metrics` gives the value.
        """
        return f"{stage}/{name}" if loader is None else f"{stage}/{loader}/{name}"

    def loss_weight(self, batch: Batch) -> float | Tensor:
        """Return the number of items that the loss is a mean over. Default: the number of samples; for an
        assigned `nn.CrossEntropyLoss` or `nn.NLLLoss`, the number of labels that it does not ignore, or the
        sum of their class weights. The labels are found by `metric_inputs(None, batch)`, because there are no
        outputs yet.

        A loss that averages over unmasked tokens returns their number here, so that any split of a batch
        gives the same gradient: sum(weight x loss) / sum(weight). The engine calls it on the host, before it
        moves the batch.

        Raises:
            ConfigError: A `metric_inputs` of the task needs the outputs to find the labels.
        """
        if counts_labels(loss := self._modules.get("loss"), overrides(self, "training_step")):
            return total_of_labels(loss, self._labels(batch))
        size = batch_size(batch)
        return 1 if size is None else size

    def _labels(self, batch: Batch) -> Tensor:
        try:
            labels: Tensor = self.metric_inputs(None, batch)[1]
        except (TypeError, AttributeError, ValueError) as error:  # what None in place of outputs raises
            raise ConfigError(
                f"{type(self).__name__}.metric_inputs needs the outputs to find the labels ({error})."
                f" {type(self._modules['loss']).__name__} is a mean over the labels, and their number is the"
                " weight of a batch, which is counted before the forward. Define loss_weight(self, batch)"
                ' to return it, such as (batch["label"] != -100).sum()'
            ) from error
        if not isinstance(labels, Tensor):
            raise DataError(
                f"the target of {type(self).__name__}.loss is a {type(labels).__name__}, not a tensor. Make"
                " one where batches are made, such as torch.tensor(labels) in the collate_fn"
            )
        return labels

    def tokens(self, batch: Batch) -> int:
        """Return the batch's number of tokens, for intervals and throughput. Default: 0, not counted."""
        return 0

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Rebuild a task from a checkpoint: its recorded constructor arguments, then its weights.

        The task is in evaluation mode, so that dropout is off in predictions. A fit sets training mode again.

        Args:
            path: A checkpoint, or a run directory (its newest good checkpoint).
            overrides: Constructor arguments that replace the recorded ones, or that a file cannot hold.

        Raises:
            CheckpointError: Nothing readable there, or weights that do not fit the task; or a checkpoint with
                the trained parameters only, and the constructor does not make the same frozen ones.
            ConfigError: The path is None; an argument is missing that could not be stored; or the task does
                not take an argument.
        """
        if path is None:
            raise ConfigError(
                f"{cls.__name__}.from_checkpoint takes a path, not None. A result's best_checkpoint is None"
                " where no evaluation gave the value that CheckpointConfig(by=...) names; its"
                " last_checkpoint is the newest one"
            )
        from drivetrain.task.stored import read_extras, read_frozen, read_task

        parameters = parameters_of(cls)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            check_names(cls.__name__, overrides, [each.name for each in parameters])
        stored = read_task(os.fspath(path))
        task = construct(cls, stored.arguments(cls, overrides), stored.path)
        extras = read_extras(stored.path, task, stored.tensors)
        kept = read_frozen(stored.path, task)
        load_module_state(task, stored.tensors, extras, where=stored.path, adopt_dtypes=True, kept=kept)
        object.__setattr__(task, _LOADED, [each for each in task.modules() if each.training])
        task.eval()
        return task

    def load_weights(
        self, source: WeightSource, *, strict: bool = True, rename: Rename | None = None
    ) -> LoadReport:
        """Copy pretrained weights into this task before `fit`: all of them, or none on an error.

        A task made on the meta device gets them when "fsdp" or "zero3" shards it, each process only its part.
        Weights that do not fit are an error now.

        Args:
            source: A safetensors file, a Hugging Face folder, a checkpoint, a run directory (its newest good
                checkpoint), an address of one of these, or tensors by name.
            strict: Whether everything must fit. If not, what fits is loaded, and the report lists the rest.
            rename: Maps names in the source to names in the task: a mapping of regular expressions to
                replacements, or a function. A tensor whose new name is None is dropped.

        Returns:
            The tensors that were loaded, converted, missing and so on; its text is a table.

        Raises:
            CheckpointError: Nothing readable there, or weights that do not fit; the task is unchanged.
            ConfigError: The source or `rename` has a wrong type.
        """
        from drivetrain.checkpoint.weights.warm_start import load_weights_into

        return load_weights_into(self, source, strict=strict, rename=rename)


def _begins_with_loss(outputs: Any) -> bool:
    """Return whether outputs are a Hugging Face model's tuple (`return_dict=False`, with labels)."""
    return (
        type(outputs) is tuple and len(outputs) > 0 and isinstance(outputs[0], Tensor) and not outputs[0].ndim
    )


_DESCRIBED = ("loss", "metrics")
"""The methods that a constructor may replace by an object."""


_INSTEAD = {
    "loss": " Assign a module, `self.loss = nn.CrossEntropyLoss()`, or define loss(self, outputs, batch).",
    "metrics": " Assign a mapping, `self.metrics = {'accuracy': ...}`.",
}
"""Advice for an object that cannot replace a method."""


_RESERVED = frozenset(
    name for name, value in vars(TaskModule).items() if inspect.isfunction(value) and not name.startswith("_")
)


_OF_FIT: dict[str, tuple[type, str]] = {
    "run_length": (RunLength, "the planned length of the fit"),
    "progress": (Progress, "the progress of the fit"),
}
"""The attributes that tell a task of its fit: their types and descriptions."""


_LOADED = "_trains_after_load"
"""The attribute of a task from a checkpoint that lists the modules which were in training mode when made."""


def train_loaded(task: TaskModule) -> None:
    """Set the modules of a task from a checkpoint to the modes that its constructor chose, unless the program
    has called `train()` since.
    """
    modules = task.__dict__.pop(_LOADED, ())
    if not any(each.training for each in task.modules()):
        for each in modules:
            each.training = True


def modules_in_evaluation(task: nn.Module) -> dict[str, nn.Module]:
    """Return the modules in evaluation mode by name, without those inside another one of them."""
    found: dict[str, nn.Module] = {}
    for given, module in task.named_modules():
        name = clean_name(given)
        if not module.training and "" not in found and not name.startswith(tuple(f"{n}." for n in found)):
            found[name] = module
    return found


@contextmanager
def known_fit(task: TaskModule, length: RunLength, progress: Progress | None = None) -> Iterator[None]:
    """Run the block with the planned length of a fit in `task.run_length` and its progress in
    `task.progress`; restore them afterwards.
    """
    known: dict[str, Any] = {"run_length": length, "progress": Progress() if progress is None else progress}
    for name in known:
        if getattr(type(task), name) is not getattr(TaskModule, name):
            raise ConfigError(
                f"{type(task).__name__}.{name} hides {_OF_FIT[name][1]}, which TaskModule has under this"
                " name. Choose another name"
            )
    before = {name: task.__dict__[name] for name in known if name in task.__dict__}
    task.__dict__.update(known)
    try:
        yield
    finally:
        for name in known:
            del task.__dict__[name]
        task.__dict__.update(before)


def overrides(task: TaskModule, method: str) -> bool:
    """Return whether a task's class defines the named method itself."""
    return getattr(type(task), method) is not getattr(TaskModule, method)


def measure_of(task: TaskModule) -> Measure:
    """Return how the task counts its batches; methods that would give the default are not called.

    Raises:
        ConfigError: An assigned loss with settings that allow no exact weight.
    """
    from drivetrain.data.counting import Measure

    weighs, loss = overrides(task, "loss_weight"), assigned_loss(task)
    if loss is not None:
        own = {each for each in ("training_step", "loss_weight") if overrides(task, each)}
        check_assigned_loss(task, loss, own)
        weighs = weighs or is_sum(loss) or counts_labels(loss, "training_step" in own)
    return Measure(task.loss_weight if weighs else None, task.tokens if overrides(task, "tokens") else None)


def assigned_loss(task: nn.Module) -> nn.Module | None:
    """Return the module that a constructor has assigned to `self.loss`, or None."""
    return task._modules.get("loss") if isinstance(task, TaskModule) else None


class StepModule(nn.Module):
    """The module that strategies wrap: its forward runs the current stage's step under the precision's
    context.

    The wrapped module is the whole step, so a wrapper's forward hooks see every parameter that the step uses,
    including those used in the loss only.
    """

    def __init__(
        self, task: nn.Module, context: Callable[[], AbstractContextManager[object]] | None = None
    ) -> None:
        super().__init__()
        self.task = task
        self.context = context
        self.step: Callable[..., Any]
        self.use(task)

    def use(self, step: Callable[..., Any]) -> None:
        # Bypasses nn.Module's bookkeeping: a module that is the step must not be registered as a second
        # child.
        object.__setattr__(self, "step", step)

    @contextmanager
    def evaluating(self, step: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Run the block with this step, in evaluation mode and without gradients; restore everything
        afterwards.

        Yields the callable to run: the module's forward, or the step if there is no context.
        """
        modes = [(module, module.training) for module in self.task.modules()]
        before = self.step
        self.use(step)
        self.task.eval()
        try:
            with torch.no_grad():
                yield step if self.context is None else self.forward
        finally:
            self.use(before)
            for module, training in modes:
                module.training = training

    @named_location("in the forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.context is None:
            return self.step(*args, **kwargs)
        with self.context():
            return self.step(*args, **kwargs)
