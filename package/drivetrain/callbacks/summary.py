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
from drivetrain.core.errors import ConfigError, shown
from drivetrain.core.messages import columns, logger, sized
from drivetrain.core.validation import by_name, count

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)


@dataclass(frozen=True)
class ModuleSummary:
    """One module of a summary. Everything below the module counts.

    Attributes:
        name: Its name; "(own)" for the parameters that are direct attributes of the whole module.
        type: Its class.
        parameters: The number of its parameters.
        trainable: The number of its trained parameters.
        bytes: The memory of its parameters.
        dtypes: The dtypes of its parameters.
        shared: The number of parameters that count elsewhere, at the module that has them first.
        lazy: Its parameters without a shape.
    """

    name: str
    type: str
    parameters: int
    trainable: int
    bytes: int
    dtypes: tuple[str, ...]
    shared: int = 0
    lazy: int = 0


@dataclass(frozen=True)
class Summary:
    """A summary of a module; its text is a table.

    Attributes:
        modules: The modules that are shown.
        total: The whole, under the name "".
        buffer_bytes: The memory of its buffers.
    """

    modules: tuple[ModuleSummary, ...]
    total: ModuleSummary
    buffer_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, in JSON's types."""
        made: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return made

    def __str__(self) -> str:
        header = ["module", "type", "parameters", "trainable", "dtype"]
        rows = [_cells(each) for each in self.modules]
        rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [*columns([header, rule, *rows], (2, 3)), ""] if rows else []
        total = self.total
        lazy = f"; {total.lazy} more tensors are lazy and have no shape yet" if total.lazy else ""
        memory = sized(total.bytes) + (
            f" and {sized(self.buffer_bytes)} of buffers" if self.buffer_bytes else ""
        )
        lines.append(f"{total.parameters:,} parameters, {total.trainable:,} trainable, {memory}{lazy}")
        return shown("\n".join(lines))


@by_name
class ModelSummary(Callback):
    """Prints a table of the task's parameters by module when a fit starts, on the main rank, to stderr.

    Below it are the totals, their memory, the device, the strategy and the precision with its dtypes.

    Args:
        depth: The levels of modules to show; 0 shows the totals alone.

    Attributes:
        summary: The table as data; None before a fit.

    Raises:
        ConfigError: A negative depth.
    """

    def __init__(self, depth: int = 1) -> None:
        self.depth = count("ModelSummary(depth=)", depth)
        self.summary: Summary | None = None

    def on_fit_start(self, run: Run) -> None:
        """Print the table."""
        if not run.is_main:
            return
        engine = run.engine
        where = f"device {engine.device} | strategy {engine.strategy.name} | precision {engine.precision}"
        if engine.splitter is not None:
            where += f" | micro-batch {engine.splitter}"
        self.summary = summarize(run.task, self.depth)
        _LOG.info(f"{self.summary}\n\n{where}")


def summarize(task: nn.Module, depth: int = 1) -> Summary:
    """Return a table of `task`'s parameters by module, and their totals; print it, or read its fields.

    A row counts everything below its module. A parameter that several modules share counts where it appears
    first; the others show it as shared. A lazy parameter without a shape counts as nothing and is shown as
    lazy.

    Args:
        task: Any module.
        depth: The levels of modules to show; 0 shows the totals alone.

    Raises:
        ConfigError: A negative depth, or something that is no module.
    """
    count("the depth of a summary", depth)
    if not isinstance(task, nn.Module):
        raise ConfigError(f"a summary needs a module, not {task!r}: an object of the class, not the class")
    owned = {id(each): name.rpartition(".")[0] for name, each in task.named_parameters()}
    rows = [
        _row(name, module, module.parameters(), owned)
        for name, module in task.named_modules(remove_duplicate=False)
        if name and name.count(".") < depth
    ]
    if depth and (own := list(task.parameters(recurse=False))):
        rows.insert(0, replace(_row("", task, own, owned), name="(own)"))
    buffers = [each for each in task.buffers() if not isinstance(each, nn.UninitializedBuffer)]
    size = sum(each.numel() * each.element_size() for each in buffers)
    return Summary(tuple(rows), _row("", task, task.parameters(), owned), size)


def _row(
    name: str, module: nn.Module, parameters: Iterable[nn.Parameter], owned: Mapping[int, str]
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
    return ModuleSummary(name, type(module).__name__, *sizes)


def _cells(row: ModuleSummary) -> list[str]:
    notes = [f"+ {row.lazy} lazy"] if row.lazy else []
    notes += [f"+ {row.shared:,} shared"] if row.shared else []
    parameters = " ".join([f"{row.parameters:,}", *notes])
    return [row.name, row.type, parameters, f"{row.trainable:,}", ", ".join(row.dtypes)]
