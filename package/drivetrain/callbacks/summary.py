"""A table of a task's modules and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.weights.module_state import elements
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.strategies.precision.base import Precision

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)

_HEADER = ("module", "type", "parameters", "trainable", "dtype")
_NUMBERS = (2, 3)

_DTYPES = {
    "storage": "weights, gradients",
    "compute": "products",
    "reduce": "sums over processes",
    "optimizer": "optimizer state",
}
"""The label of each of a precision's dtypes."""


class ModelSummary(Callback):
    """Prints a table of the task's parameters by module when a fit starts, on the main rank, to stderr.

    Below it are the totals, their memory, the dtypes of storage and computation, the device, the strategy and
    the precision.

    Args:
        depth: The levels of modules to show; 0 shows the totals alone.

    Raises:
        ConfigError: A negative depth.
    """

    def __init__(self, depth: int = 1) -> None:
        _check_depth(depth)
        self.depth = depth

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
        parts = (summarize(run.task, self.depth), _dtype_table(engine.precision), where)
        _LOG.info("\n\n".join(parts))


def _dtype_table(precision: Precision) -> str:
    """Return `Precision.dtypes`, the dtypes of storage and computation, as a table."""
    rows = [(_DTYPES[name], value) for name, value in precision.dtypes._asdict().items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def summarize(task: nn.Module, depth: int = 1) -> str:
    """Return a table of `task`'s parameters by module, and their totals.

    A row counts everything below its module. A parameter that several modules share counts where it appears
    first; the others show it as shared. A lazy parameter without a shape counts as nothing and is shown as
    lazy.

    Args:
        task: Any module.
        depth: The levels of modules to show; 0 shows the totals alone.

    Raises:
        ConfigError: A negative depth.
    """
    _check_depth(depth)
    owned = _owned(task)
    rows = [
        _row(name, type(module).__name__, _count(module, name, owned))
        for name, module in task.named_modules(remove_duplicate=False)
        if name and name.count(".") < depth
    ]
    own = _Count()
    own.add_all(task.parameters(recurse=False))
    if depth and own.tensors:
        rows.insert(0, _row("(own)", type(task).__name__, own))
    total = _Count()
    total.add_all(task.parameters())
    lines = _table(rows) if rows else []
    return "\n".join([*lines, _totals(total, task)])


@dataclass(slots=True)
class _Count:
    """Sums over parameters."""

    tensors: int = 0
    elements: int = 0
    trainable: int = 0
    bytes: int = 0
    lazy: int = 0
    shared: int = 0
    dtypes: dict[str, None] = field(default_factory=dict)

    def add_all(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self.tensors += 1
            self.dtypes[str(parameter.dtype).removeprefix("torch.")] = None
            if isinstance(parameter, nn.UninitializedParameter):
                self.lazy += 1
                continue
            count = elements(parameter)
            self.elements += count
            self.trainable += count if parameter.requires_grad else 0
            self.bytes += count * parameter.element_size()


def _check_depth(depth: int) -> None:
    if depth < 0:
        raise ConfigError(
            f"the model summary has depth={depth!r}; give 0 for the totals alone, or more for modules"
        )


def _owned(task: nn.Module) -> dict[int, str]:
    """Return the name of the first module that holds each parameter, by the parameter's id."""
    return {
        id(parameter): name.rpartition(".")[0]
        for name, parameter in task.named_parameters(remove_duplicate=True)
    }


def _count(module: nn.Module, name: str, owned: dict[int, str]) -> _Count:
    count = _Count()
    for parameter in module.parameters():
        owner = owned[id(parameter)]
        if owner == name or owner.startswith(f"{name}."):
            count.add_all([parameter])
        else:
            count.dtypes[str(parameter.dtype).removeprefix("torch.")] = None
            count.shared += 0 if isinstance(parameter, nn.UninitializedParameter) else elements(parameter)
    return count


def _row(name: str, kind: str, count: _Count) -> tuple[str, ...]:
    notes = []
    if count.lazy:
        notes.append(f"+ {count.lazy} lazy")
    if count.shared:
        notes.append(f"+ {count.shared:,} shared")
    parameters = " ".join([f"{count.elements:,}", *notes])
    return name, kind, parameters, f"{count.trainable:,}", ", ".join(count.dtypes)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [_HEADER, *rows]) for column in range(len(_HEADER))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(_HEADER), "  ".join("-" * width for width in widths), *(line(row) for row in rows), ""]


def _totals(total: _Count, task: nn.Module) -> str:
    lazy = f"; {total.lazy} more tensors are lazy and have no shape yet" if total.lazy else ""
    sizes = [
        buffer.numel() * buffer.element_size()
        for buffer in task.buffers()
        if not isinstance(buffer, nn.UninitializedBuffer)
    ]
    memory = sized(total.bytes) + (f" and {sized(sum(sizes))} of buffers" if sizes else "")
    return f"{total.elements:,} parameters, {total.trainable:,} trainable, {memory}{lazy}"


def sized(size: float) -> str:
    """Return a number of bytes with its unit: "1.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
