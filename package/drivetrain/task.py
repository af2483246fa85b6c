"""The task: what a user writes, and the module that strategies wrap."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from drivetrain import later
from drivetrain.data.batch import batch_size
from drivetrain.data.feed import Measure
from drivetrain.errors import ConfigError, DataError, nearest
from drivetrain.forwards import FORWARDS, call_forward, read_forward
from drivetrain.module_state import has_extras, load_module_state
from drivetrain.optim import OptimizerConfig
from drivetrain.options import check_names
from drivetrain.renaming import Rename
from drivetrain.synonyms import Elsewhere, missing
from drivetrain.task_arguments import construct, parameters_of, record_arguments
from drivetrain.types import Batch, StepOutput

if TYPE_CHECKING:
    from drivetrain.warm_start import LoadReport, Source

TARGETS = ("label", "labels", "target", "targets", "y")
"""The columns that `metric_inputs` looks for, in this order."""


class TaskModule(nn.Module):
    """What to train: subclass it and write `forward`, `loss` and, where wanted, `metrics` and
    `configure_optimizers`.

    Nothing in a task knows about devices, processes, precision or files, and every method can be called
    without a trainer. Constructor arguments are recorded as `hparams` and stored in checkpoints.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> TaskModule:
        """Record the constructor's arguments before the constructor runs."""
        task = super().__new__(cls)
        arguments = record_arguments(cls, args, kwargs)
        if arguments is not None:  # copying and unpickling give none, and then fill the object's __dict__
            object.__setattr__(task, "hparams", arguments)
        return task

    load_from_checkpoint = Elsewhere()

    def __getattr__(self, name: str) -> Any:
        """Look where `nn.Module` looks, and answer another library's name with ours."""
        own = self.__dict__
        for kind in ("_modules", "_parameters", "_buffers"):  # what a forward names most often first
            if kind in own and name in own[kind]:
                return own[kind][name]
        raise AttributeError(missing(type(self), name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _RESERVED:
            raise ConfigError(
                f"{type(self).__name__}.{name} is a method of TaskModule, which an attribute would hide."
                f" Choose another name for the attribute, such as {name + '_function'!r}"
            )
        if name == "hparams":
            raise ConfigError(
                f"{type(self).__name__}.hparams is recorded by TaskModule and holds the constructor's"
                " arguments already. Remove the assignment, or choose another name for the attribute"
            )
        super().__setattr__(name, value)

    # What a task is about.

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Any]:
        """The scalar to minimise, or a mapping whose "loss" is minimised and whose other values are logged.

        The default takes the loss out of the outputs of a model that computes its own: `outputs.loss`,
        `outputs["loss"]`, or the first item of a tuple if that is a scalar.

        Args:
            outputs: What `forward` returned.
            batch: The whole batch, on the device.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if _begins_with_loss(outputs):
            loss = outputs[0]
        if isinstance(loss, Tensor):
            return loss
        raise ConfigError(
            f"{type(self).__name__} has no loss: define `loss(self, outputs, batch)`, or let `forward` return"
            " something with a `loss`, or a tuple that begins with it (it returned a"
            f" {type(outputs).__name__})"
        )

    def metrics(self) -> Mapping[str, Any]:
        """Metrics by name: objects with `update`, `compute` and `reset`, such as torchmetrics'. Default:
        none.
        """
        return {}

    def configure_optimizers(self) -> Any:
        """How to optimise; an early-built optimizer is refused, because a strategy may have to shard first.

        Returns:
            An `OptimizerConfig`; a mapping of names to them for several optimizers; or a callable that is
            given the list of trainable parameters and returns an optimizer or `(optimizer, schedule)`, the
            schedule a `torch.optim.lr_scheduler.LRScheduler` stepped once per update.
        """
        return OptimizerConfig("adamw")

    def parallel_plan(self) -> Mapping[str, Any]:
        """How modules are split over processes, for `FSDPConfig(tensor_parallel=2)`; without that it is not
        looked at. Default: none is.

        Returns:
            Styles of `torch.distributed.tensor.parallel`, such as `ColwiseParallel()`, by the names of
            modules in the task. In a name `*` stands for any part between two dots: `"blocks.*.out"`.
        """
        return {}

    # What a step does.

    def training_step(self, batch: Batch) -> Any:
        """One micro-batch: a scalar loss, a mapping with "loss", or a `StepOutput`.

        It may also be a generator for several optimizers: `yield "discriminator", d_loss`, then `yield
        "generator", g_loss`; at each yield the named optimizer makes its update before the body goes on.
        """
        outputs = call_forward(self, self.inputs(batch))
        return StepOutput(self.loss(outputs, batch), outputs)

    def validation_step(self, batch: Batch) -> Any:
        """One validation batch; returns what `training_step` may, or None. Default: outputs and loss."""
        outputs = call_forward(self, self.inputs(batch))
        return StepOutput(self.loss(outputs, batch), outputs)

    def test_step(self, batch: Batch) -> Any:
        """One test batch; default is `validation_step`."""
        return self.validation_step(batch)

    def predict_step(self, batch: Batch) -> Any:
        """One batch to predict; default is the model's outputs."""
        return call_forward(self, self.inputs(batch))

    # How a batch is read.

    def inputs(self, batch: Batch) -> Any:
        """What `forward` gets: a mapping is passed by name, a tuple by position, anything else as the only
        argument.

        From a mapping batch the keys that `forward`'s parameters name; from a sequence its first items, as
        many as `forward` takes; a tensor is itself.

        Raises:
            DataError: A parameter without a default has no column; lists the batch's columns.
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
            return batch if forward.takes_all else columns
        if kind is tuple or kind is list or isinstance(batch, (tuple, list)):
            if len(batch) < len(forward.required):
                raise DataError(
                    f"{type(self).__name__}.forward needs {len(forward.required)} inputs"
                    f" ({', '.join(forward.required)}), but the batch is a sequence of {len(batch)}. Override"
                    " `inputs(batch)` to say what forward gets"
                )
            return tuple(batch[: forward.positional])
        return batch

    def _missing(self, name: str, batch: Mapping[str, Any]) -> DataError:
        return DataError(
            f"{type(self).__name__}.forward has a parameter {name!r}, but the batch has no such column. "
            f"{nearest(name, map(str, batch)).replace('Allowed:', 'The batch has:')} Rename the parameter or "
            "the column, or override `inputs(batch)`"
        )

    def metric_inputs(self, outputs: Any, batch: Batch) -> tuple[Any, ...]:
        """What each metric's `update` gets; default: the outputs and the target.

        Of outputs that have `logits`, these are given; of a tuple that begins with a scalar loss, its second
        item. The target is the batch's column `label`, `labels`, `target`, `targets` or `y`, or a sequence's
        last item.

        Raises:
            DataError: No target can be told; lists the batch's columns.
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
                f"no target for the metrics: the batch's columns are {', '.join(map(repr, batch))}, none of "
                f"{', '.join(map(repr, TARGETS))}. Override `metric_inputs(outputs, batch)`"
            )
        if isinstance(batch, (tuple, list)):
            return outputs, batch[-1]
        raise DataError(
            f"no target for the metrics: the batch is a {type(batch).__name__}. Override"
            " `metric_inputs(outputs, batch)`"
        )

    def loss_weight(self, batch: Batch) -> float | Tensor:
        """What the loss is a mean over; default: the number of samples.

        A loss that averages over unmasked tokens returns their number here, so that any split of a batch
        gives the same gradient: sum(weight x loss) / sum(weight). It is called on the host, before the batch
        is moved.
        """
        size = batch_size(batch)
        return 1 if size is None else size

    def tokens(self, batch: Batch) -> int:
        """How many tokens a batch has, for intervals and throughput; default: they are not counted."""
        return 0

    def overrides(self, method: str) -> bool:
        """Whether this task defines the named method itself."""
        return getattr(type(self), method) is not getattr(TaskModule, method)

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """A task rebuilt from a checkpoint: its recorded constructor arguments, then its weights.

        Args:
            path: A checkpoint, or a run directory (its newest good checkpoint).
            overrides: Constructor arguments to use in place of the recorded ones, or for those that a file
                cannot hold.

        Raises:
            CheckpointError: Nothing readable there, or weights that do not fit the task.
            ConfigError: None in place of a path, or a constructor argument that could not be stored and is
                not given, or that the task does not take.
        """
        if path is None:
            raise ConfigError(
                f"{cls.__name__}.from_checkpoint takes a path, not None. A result's best_checkpoint is None"
                " where no evaluation gave the value that CheckpointConfig(by=...) names; its"
                " last_checkpoint is the newest one"
            )
        parameters = parameters_of(cls)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            check_names(cls.__name__, overrides, [each.name for each in parameters])
        stored = later.read_task(os.fspath(path))
        task = construct(cls, stored.arguments(cls, overrides), stored.path)
        extras = later.read_extras(stored.path) if has_extras(task) else {}
        load_module_state(task, stored.tensors, extras, where=stored.path, adopt_dtypes=True)
        return task

    def load_weights(
        self, source: Source, *, strict: bool = True, rename: Rename | None = None
    ) -> LoadReport:
        """Start from weights of elsewhere: copy them into this task, all or none, before `fit`.

        Args:
            source: A safetensors file, a folder of Hugging Face's, a checkpoint, a run directory (its newest
                good checkpoint), an address of one of these, or tensors by name.
            strict: Whether everything must fit. If not, what fits is loaded, and the report says the rest.
            rename: From names there to names here: a mapping of regular expressions to replacements, or a
                function; None in place of a name drops the tensor.

        Returns:
            What was loaded, converted, missing...; its text is a table.

        Raises:
            CheckpointError: Nothing readable there, or weights that do not fit; the task is as it was.
            ConfigError: A source, or a `rename`, that is no such thing.
        """
        return later.load_weights_into(self, source, strict=strict, rename=rename)


def _begins_with_loss(outputs: Any) -> bool:
    """Whether outputs are a tuple as Hugging Face's models return it with `return_dict=False` and labels."""
    return (
        type(outputs) is tuple and len(outputs) > 0 and isinstance(outputs[0], Tensor) and not outputs[0].ndim
    )


_RESERVED = frozenset(
    name for name, value in vars(TaskModule).items() if inspect.isfunction(value) and not name.startswith("_")
)


def measure_of(task: TaskModule) -> Measure:
    """How the task counts its batches; methods that it does not override are not called."""
    weight = task.loss_weight if task.overrides("loss_weight") else None
    return Measure(weight, task.tokens if task.overrides("tokens") else None)


class StepModule(nn.Module):
    """The module that strategies wrap: its forward runs the step of the current stage under the precision's
    context.

    Because the wrapped thing is the whole step, a wrapper's forward hooks see every parameter that the step
    uses, also those used in the loss only.

    Args:
        task: The task, or any module whose forward is to run under the context.
        context: A factory of the context, or None; see `Precision.forward_context`.
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
        """Run this step from now on."""
        # Past nn.Module's own bookkeeping: a module that is the step must not be registered as a second
        # child.
        object.__setattr__(self, "step", step)

    @contextmanager
    def evaluating(self, step: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Run this step in evaluation mode and without gradients; all is as before afterwards.

        Yields what runs it: the module's forward, or, without a context, the step itself.
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The current step on one micro-batch."""
        if self.context is None:
            return self.step(*args, **kwargs)
        with self.context():
            return self.step(*args, **kwargs)
