"""The graph of a model's operations, for TensorBoard's tab Graphs."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.containers import leaves
from drivetrain.core.errors import ConfigError
from drivetrain.task.without_trace import without_trace

_SAMPLES = 2
"""The samples that the model is traced with."""


def check_graph(run: Any) -> None:
    """Check that rank 0 can run the model alone.

    Args:
        run: The run, with the model as the strategy has placed it.

    Raises:
        ConfigError: The model is sharded over ranks.
    """
    if any(hasattr(each, "full_tensor") or hasattr(each, "ds_id") for each in run.task.parameters()):
        raise ConfigError(
            "TensorBoardLogger(graph=True) runs the model on rank 0 alone, and its parameters are sharded"
            " over ranks. Leave out graph=True, or write the graph in a short fit with strategy='cpu'"
        )


def trace_graph(run: Any) -> bytes:
    """Return the graph of the forward of a run's model, as the bytes of a `GraphDef`.

    The model is traced in evaluation mode, with the first samples of the batch that the run is being trained
    on, and nothing of that stays in it.

    Args:
        run: The run, at the end of a step.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from torch.utils.tensorboard import SummaryWriter

    with TemporaryDirectory() as folder, without_trace(run.task, device=run.engine.device):
        model = _Traceable(run.task, run.task.inputs(run.window.micro_batches[0].batch))
        # torch warns of its own use of torch.jit, and prints an error before it raises it.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with SummaryWriter(folder) as writer, torch.no_grad():
                writer.add_graph(model, model.tensors, use_strict_trace=False)
        (path,) = Path(folder).iterdir()
        found = [each.graph_def for each in EventFileLoader(str(path)).Load() if each.graph_def]
    return bytes(found[0])


class _Traceable(nn.Module):
    """A task whose forward takes tensors by position and returns tensors, as torch's tracer needs it.

    Args:
        task: The task.
        inputs: What `task.inputs` gave.
    """

    def __init__(self, task: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.task = task
        positional = inputs if isinstance(inputs, tuple) else (inputs,)
        named = inputs if isinstance(inputs, Mapping) else dict(enumerate(positional))
        self._by_name = isinstance(inputs, Mapping)
        self._rest = {name: each for name, each in named.items() if not isinstance(each, Tensor)}
        found = {name: each for name, each in named.items() if isinstance(each, Tensor)}
        self._names = tuple(found)
        self.tensors = tuple(each[:_SAMPLES] if each.ndim else each for each in found.values())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given: dict[Any, Any] = {**self._rest, **dict(zip(self._names, tensors, strict=True))}
        outputs = self.task(**given) if self._by_name else self.task(*(given[each] for each in sorted(given)))
        return tuple(each for each in leaves(outputs) if isinstance(each, Tensor))
