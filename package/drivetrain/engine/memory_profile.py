"""The use of memory in a step, at its peak."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from drivetrain.core.messages import columns
from drivetrain.task.optim.quantized import compiles_itself

_KINDS = ("parameters", "buffers", "optimizer", "gradients", "activations", "step", "other")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use in one process at the peak of a step.

    The parts count tensors. They do not count the scratch memory that a kernel, such as an LSTM's, allocates
    while it runs; on CUDA it is in `measured`.

    Attributes:
        parameters: The model's parameters; of a sharded one, this process's shards.
        buffers: The model's buffers.
        optimizer: The optimizers' state.
        gradients: The parameters' gradients that existed at that moment.
        activations: Tensors that forward keeps for backward, the batch, and temporary tensors.
        step: Temporary tensors of the optimizers' steps, such as float32 copies of 16-bit weights.
        other: All memory from before the step, such as a strategy's buffers for exchanging gradients or
            gathering sharded weights; on CUDA also the step's first batch, whose copy is started early.
        measured: The peak: on CUDA as the allocator reports it; on the CPU, where torch keeps no account, the
            sum of the parts.
        device: The device whose memory this is.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    activations: int
    step: int
    other: int
    measured: int
    device: str

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, each) for each in _KINDS)

    def __str__(self) -> str:
        sizes = {each: getattr(self, each) for each in (*_KINDS, "total")}
        if not self.device.startswith("cpu"):
            sizes[f"measured on {self.device}"] = self.measured
        rows = [(f"  {name}", f"{size / 2**20:12,.2f} MiB") for name, size in sizes.items()]
        return "\n".join(["memory at the peak of a step", *columns(rows)])


@dataclass(eq=False, slots=True)
class _Allocation:
    """The memory of one storage; `kind` may change during the watch, `size` never does."""

    kind: str
    size: int
    storage: weakref.ref[torch.UntypedStorage]


class MemoryWatch(TorchDispatchMode):
    """Watches the memory of the step that runs while it is entered.

    A tensor counts from the first operation that takes or makes it until it is freed; the watch keeps none
    alive. Steps that an optimizer compiles run unwatched. torch's MemTracker (in
    `torch.distributed._tools.mem_tracker`) cannot be used: it refuses a module that is called twice, as in
    gradient accumulation.

    Args:
        model: The model whose parameters and buffers are counted.
        optimizers: The optimizers whose state is counted.
        device: The device whose memory is counted.
        batch: Tensors that exist from the beginning, in any tree.

    Attributes:
        total: The bytes that exist now.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device, batch: Any = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._optimizers = list(optimizers)
        self._steps: list[Any] = []
        self._in_step = False
        self._held: dict[int, _Allocation] = {}
        # Memory that exists before this step.
        self._older: set[int] = set()
        self.total = self._peak = 0
        self._at_peak: list[_Allocation] = []
        self._count(model.parameters(), "parameters")
        self._count(model.buffers(), "buffers")
        states = (slots for each in self._optimizers for slots in each.state.values())
        self._count((value for slots in states for value in slots.values()), "optimizer")
        self._count(tree_leaves(batch), "activations")

    def __enter__(self) -> Self:
        self._steps = [vars(each).get("step") for each in self._optimizers]
        for each in self._optimizers:
            vars(each)["step"] = functools.wraps(each.step)(functools.partial(self._step, each, each.step))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for optimizer, before in zip(self._optimizers, self._steps, strict=True):
            del vars(optimizer)["step"]
            if before is not None:
                vars(optimizer)["step"] = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked of each tensor without values, and no operation
            return func(*args)
        self._count(tree_leaves((args, kwargs)), "step" if self._in_step else "other", older=True)
        self._look_again()
        result = func(*args, **(kwargs or {}))
        self._count(tree_leaves(result), "step" if self._in_step else "activations")
        if self.total > self._peak:
            self._peak, self._at_peak = self.total, list(self._held.values())
        return result

    def _step(self, optimizer: Optimizer, step: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        for memory in self.of(each.grad for each in parameters):
            memory.kind = "gradients"  # also at the peak, if it was there by then
        self._in_step = True
        try:
            with _disable_current_modes() if compiles_itself(optimizer) else nullcontext():
                return step(*args, **kwargs)
        finally:
            self._in_step = False

    def use(self) -> MemoryUse:
        """Return the result."""
        sizes = {**dict.fromkeys(_KINDS, 0), **self.at_peak()}
        cuda = self._device.type == "cuda"
        measured = torch.cuda.max_memory_allocated(self._device) if cuda else self._peak
        return MemoryUse(**sizes, measured=measured, device=str(self._device))

    def at_peak(self) -> dict[str, int]:
        """Return the bytes at the peak by kind."""
        sizes: Counter[str] = Counter()
        for memory in self._at_peak:
            sizes[memory.kind] += memory.size
        return sizes

    def of(self, values: Iterable[object]) -> Iterator[_Allocation]:
        """Yield what is known of the memory of tensors."""
        for storage in _storages(values):
            if storage._cdata in self._held:
                yield self._held[storage._cdata]

    def _count(self, values: Iterable[object], kind: str, older: bool = False) -> None:
        """Count the memory of new tensors, which may be older than this step."""
        for storage in _storages(values):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._held and size and storage.device.type == self._device.type:
                freed = functools.partial(self._freed, key)
                self._held[key] = _Allocation(kind, size, weakref.ref(storage, freed))
                self.total += size
                if older:
                    self._older.add(key)

    def _look_again(self) -> None:
        """Read the sizes of older memory: FSDP and 16-bit updates resize theirs without an operation."""
        for key in list(self._older):
            memory = self._held[key]
            storage = memory.storage()
            if storage is not None and storage.nbytes() != memory.size:
                self._held[key] = _Allocation(memory.kind, storage.nbytes(), memory.storage)
                self.total += storage.nbytes() - memory.size

    def _freed(self, key: int, _: object) -> None:
        self._older.discard(key)
        self.total -= self._held.pop(key).size


def _storages(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of tensors; those of its parts for a DTensor or another tensor made of tensors."""
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            yield from _storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            yield value.untyped_storage()
