"""A table of a task's modules and parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.weights.module_state import elements
from drivetrain.core.errors import ConfigError, StrategyError, shown
from drivetrain.core.messages import columns, logger, sized
from drivetrain.core.validation import by_name, count
from drivetrain.strategies.precision.base import Precision

if TYPE_CHECKING:
    from drivetrain.callbacks.layers import Layer, Shapes
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

_DTYPES = {
    "storage": "weights, gradients",
    "compute": "products",
    "reduce": "sums over processes",
    "optimizer": "optimizer state",
}
"""The label of each of a precision's dtypes."""


@dataclass(frozen=True)
class ModuleSummary:
    """One module of a summary. Everything below the module counts.

    Attributes:
        name: Its name; "(own)" for the parameters that the whole holds itself.
        type: Its class.
        parameters: The number of its parameters.
        trainable: The number of those that are trained.
        bytes: The memory of its parameters.
        dtypes: The dtypes of its parameters.
        shared: The number of parameters that count elsewhere, at the module that has them first.
        lazy: Its parameters without a shape.
        inputs: The shapes of the tensors that its forward first got; None without a batch, or if the batch
            does not reach it.
        outputs: The shapes of the tensors that its forward returned, likewise.
        forward_flops: The floating-point operations of its forwards, likewise.
        backward_flops: Those of backward, likewise.
    """

    name: str
    type: str
    parameters: int
    trainable: int
    bytes: int
    dtypes: tuple[str, ...]
    shared: int = 0
    lazy: int = 0
    inputs: Shapes | None = None
    outputs: Shapes | None = None
    forward_flops: int | None = None
    backward_flops: int | None = None


@dataclass(frozen=True)
class Summary:
    """A summary of a module; its text is a table.

    Attributes:
        modules: The modules that are shown.
        total: The whole, under the name "".
        buffer_bytes: The memory of its buffers.
        has_layers: Whether a batch was given, so that shapes and operations are known.
    """

    modules: tuple[ModuleSummary, ...]
    total: ModuleSummary
    buffer_bytes: int
    has_layers: bool

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, in JSON's types."""
        made: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return made

    def __str__(self) -> str:
        header = ["module", "type", "parameters", "trainable", "dtype"]
        header += ["input", "output", "forward", "backward"] if self.has_layers else []
        rows = [_cells(each, self.has_layers) for each in self.modules]
        rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [*columns([header, rule, *rows], (2, 3, 7, 8)), ""] if rows else []
        total = self.total
        lazy = f"; {total.lazy} more tensors are lazy and have no shape yet" if total.lazy else ""
        memory = sized(total.bytes) + (
            f" and {sized(self.buffer_bytes)} of buffers" if self.buffer_bytes else ""
        )
        lines.append(f"{total.parameters:,} parameters, {total.trainable:,} trainable, {memory}{lazy}")
        if self.has_layers:
            forward, backward = _flops(total.forward_flops), _flops(total.backward_flops)
            lines.append(f"floating-point operations for this batch: {forward} forward, {backward} backward")
        return shown("\n".join(lines))


@by_name
class ModelSummary(Callback):
    """Prints a table of the task's parameters by module when a fit starts, on the main rank, to stderr.

    Below it are the totals, their memory, the dtypes of storage and computation, the device, the strategy and
    the precision.

    Args:
        depth: The levels of modules to show; 0 shows the totals alone.
        batch: A batch of the training data, to show each module's shapes and floating-point operations too;
            see `summarize`.

    Attributes:
        summary: The table as data; None before a fit.

    Raises:
        ConfigError: A negative depth.
    """

    def __init__(self, depth: int = 1, batch: Any = None) -> None:
        self.depth = count("ModelSummary(depth=)", depth)
        self.batch = batch
        self.summary: Summary | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the layers can be followed.

        Raises:
            StrategyError: A batch is given, and the strategy changes the forward of the layers.
        """
        if self.batch is None:
            return
        what = f"ModelSummary(batch=...) with strategy {strategy.name!r}"
        if strategy.device.type == "xla":
            # A gradient before XLA's device is opened, even one without values, makes the device unusable.
            raise StrategyError(
                f"{what}: the layers are followed without XLA. Call print(summarize(task, batch=...)) in a"
                " separate program, or run `drivetrain summary`"
            )
        if strategy.sharded:
            raise StrategyError(
                f"{what}: its layers hold shards, whose forward needs all ranks. Call"
                " print(summarize(task, batch=...)) before the fit"
            )

    def on_fit_start(self, run: Run) -> None:
        """Print the table."""
        if not run.is_main:
            return
        engine = run.engine
        where = (
            f"device {engine.device} | strategy {engine.strategy.name} | precision {engine.precision.name}"
        )
        if engine.splitter is not None:
            where += f" | micro-batch {engine.splitter}"
        # In the dtype of the run's batches.
        batch = None if self.batch is None else engine.transfer(self.batch)
        self.summary = summarize(run.task, self.depth, batch=batch)
        _LOG.info("\n\n".join((str(self.summary), _dtype_table(engine.precision), where)))


def _dtype_table(precision: Precision) -> str:
    """Return `Precision.dtypes`, the dtypes of storage and computation, as a table."""
    return "\n".join(columns([(_DTYPES[name], each) for name, each in precision.dtypes._asdict().items()]))


def summarize(task: nn.Module, depth: int = 1, *, batch: Any = None) -> Summary:
    """Return a table of `task`'s parameters by module, and their totals; print it, or read its fields.

    A row counts everything below its module. A parameter that several modules share counts where it appears
    first; the others show it as shared. A lazy parameter without a shape counts as nothing and is shown as
    lazy.

    With a batch, a row also has the shapes of what the module first gets and returns, and its floating-point
    operations in forward and backward. Counted are matrix products, convolutions and attention, 2 operations
    for each multiplication with its addition. Nothing is computed: forward, loss and backward run on tensors
    without values. The module and the random streams stay as they are.

    Args:
        task: Any module.
        depth: The levels of modules to show; 0 shows the totals alone.
        batch: For a task a batch of its data; for another module the only argument of its forward, or a tuple
            or mapping of its arguments. None shows parameters alone.

    Raises:
        ConfigError: A negative depth, or the forward cannot be followed without values.
    """
    count("the depth of a summary", depth)
    if not isinstance(task, nn.Module):
        raise ConfigError(
            f"a summary needs a module, not {task!r}; give an object of the class, not the class"
        )
    layers: dict[str, Layer] = {}
    if batch is not None:
        from drivetrain.callbacks.layers import layers_of

        layers = layers_of(task, batch)
    owned = {id(each): name.rpartition(".")[0] for name, each in task.named_parameters()}
    rows = [
        _row(name, module, module.parameters(), owned, layers.get(name))
        for name, module in task.named_modules(remove_duplicate=False)
        if name and name.count(".") < depth
    ]
    if depth and (own := list(task.parameters(recurse=False))):
        rows.insert(0, replace(_row("", task, own, owned, None), name="(own)"))
    buffers = [each for each in task.buffers() if not isinstance(each, nn.UninitializedBuffer)]
    return Summary(
        tuple(rows),
        _row("", task, task.parameters(), owned, layers.get("")),
        sum(each.numel() * each.element_size() for each in buffers),
        batch is not None,
    )


def _row(
    name: str,
    module: nn.Module,
    parameters: Iterable[nn.Parameter],
    owned: Mapping[int, str],
    layer: Layer | None,
) -> ModuleSummary:
    """Return the row of a module.

    Args:
        owned: The name of the first module that holds each parameter, by the parameter's id.
    """
    inside = f"{name}." if name else ""
    lazy = trainable = size = 0
    counts, dtypes = {True: 0, False: 0}, dict[str, None]()  # of its own and of shared ones
    for each in parameters:
        is_own = f"{owned[id(each)]}.".startswith(inside)
        dtypes[str(each.dtype).removeprefix("torch.")] = None
        if isinstance(each, nn.UninitializedParameter):
            lazy += is_own
            continue
        counts[is_own] += (number := elements(each))
        trainable += number * (is_own and each.requires_grad)
        size += number * is_own * each.element_size()
    sizes = (counts[True], trainable, size, tuple(dtypes), counts[False], lazy)
    return ModuleSummary(name, type(module).__name__, *sizes, **({} if layer is None else vars(layer)))


def _cells(row: ModuleSummary, has_layers: bool) -> list[str]:
    notes = [f"+ {row.lazy} lazy"] if row.lazy else []
    notes += [f"+ {row.shared:,} shared"] if row.shared else []
    parameters = " ".join([f"{row.parameters:,}", *notes])
    cells = [row.name, row.type, parameters, f"{row.trainable:,}", ", ".join(row.dtypes)]
    if has_layers:
        cells += [_shape_text(row.inputs), _shape_text(row.outputs)]
        cells += [_flops(row.forward_flops), _flops(row.backward_flops)]
    return cells


def _shape_text(shapes: Shapes | None) -> str:
    return ", ".join(str(list(each)) for each in shapes or ())


def _flops(count: int | None) -> str:
    if count is None:
        return ""
    size = float(count)
    for unit in ("", " k", " M", " G", " T"):
        if size < 1000:
            return f"{size:.0f}" if not unit else f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g} P"
