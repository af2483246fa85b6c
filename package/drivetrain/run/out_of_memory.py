"""The memory of a rank that has run out of it: the largest blocks by name, and torch's snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.core.messages import logger, sized

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)
_SHOWN = 3


def largest_blocks(run: Run) -> str:
    """Return a sentence with the largest tensors that this rank keeps, by name, and with the rest."""
    sizes: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for name, tensor in _kept(run):
        tensor = getattr(tensor, "_local_tensor", tensor) if is_sharded(tensor) else tensor
        if tensor.device.type == run.engine.device.type and id(tensor) not in seen:
            seen.add(id(tensor))
            sizes[name] += tensor.nbytes
    total = sum(sizes.values())
    blocks = sorted(sizes.items(), key=lambda each: -each[1])[:_SHOWN]
    if run.engine.device.type == "cuda":
        rest = torch.cuda.memory_allocated(run.engine.device) - total
        blocks.append(("activations and the rest", max(rest, 0)))
    named = ", ".join(f"{name} ({sized(size)})" for name, size in blocks)
    return f"the largest blocks are {named}, of {sized(total)} in weights, gradients and optimizer states"


def _kept(run: Run) -> Iterator[tuple[str, Tensor]]:
    names = {}
    for name, parameter in run.task.named_parameters():
        names[id(parameter)] = repr(name)
        yield f"the weight {name!r}", parameter
        if parameter.grad is not None:
            yield f"the gradient of {name!r}", parameter.grad
    for name, buffer in run.task.named_buffers():
        yield f"the buffer {name!r}", buffer
    for updater in run.engine.updaters.values():
        for weight, state in updater.optimizer.state.items():
            # While a forward has gathered the weights, the task has others than the optimizer.
            of = names.get(id(weight)) or f"a weight of shape {list(weight.shape)}"
            for each in state.values() if isinstance(state, dict) else ():
                if isinstance(each, Tensor):
                    yield f"the optimizer state of {of}", each


def write_snapshot(run: Run) -> str | None:
    """Write torch's snapshot of this rank's allocator, for pytorch.org/memory_viz, where a GPU has one.

    Returns:
        The path; None without a GPU or a run directory, or if it cannot be written.
    """
    if run.run_dir is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    path = run.run_dir / "failures" / f"memory-rank-{run.engine.strategy.rank}.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        _LOG.warning(f"the snapshot of the memory was not written: {error}")
        return None
    return str(path)
