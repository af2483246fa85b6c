"""What the memory of an update is used for, at the moment at which most of it is in use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.quantized_optimizers import compiles_itself, is_quantized, parts_of

_KINDS = ("parameters", "buffers", "optimizer", "gradients", "activations", "step", "kernels", "other")
_ALLOCATIONS = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes in use in one process when an update used most.

    Attributes:
        parameters: The model's parameters; of a sharded one, this process's shards.
        buffers: Its buffers.
        optimizer: The optimizers' state.
        gradients: The parameters' gradients that were there at that moment.
        activations: What forward keeps for backward, the batch, and what is on its way.
        step: What the optimizers' steps make for themselves, such as float32 copies of 16-bit weights.
        kernels: What the operation that ran at that moment took beside its results, such as the scratch of
            an LSTM; on CUDA 0, see `measured`.
        other: What was there before and is none of these, such as the buffers in which a strategy exchanges
            gradients.
        measured: The peak: on CUDA the allocator's own, in which what kernels take is counted too; on the
            CPU, where torch keeps no account, the sum of the parts.
        device: Where.
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    activations: int
    step: int
    kernels: int
    other: int
    measured: int
    device: str

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, each) for each in _KINDS)

    def __str__(self) -> str:
        rows = [(each, getattr(self, each)) for each in (*_KINDS, "total")]
        if not self.device.startswith("cpu"):
            rows.append((f"measured on {self.device}", self.measured))
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name.ljust(width)}  {size / 2**20:12,.2f} MiB" for name, size in rows]
        return "\n".join(["memory at the peak of an update", *lines])


class MemoryWatch(TorchDispatchMode):
    """Watches the memory of what is run within it: one update.

    Every tensor that an operation makes counts until it is freed, and on the CPU, unless something else
    profiles, what an operation takes while it runs. It holds on to none. The steps of an optimizer that
    compiles them, which makes no such tensors, are left out.

    Args:
        model: Its parameters and buffers.
        optimizers: Their state, of updates before.
        device: Whose memory.
        batch: Tensors that are there from the beginning, in any tree.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device, batch: Any = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._parameters = list(model.parameters())
        # By storage: of what kind, how large, and how many were made before it.
        self._kinds: dict[int, tuple[str, int, int]] = {}
        self._born = 0
        self._peak_born = 0
        self._sizes = dict.fromkeys(_KINDS, 0)
        self._watching = False
        self._current = 0
        self._peak = 0
        self._at_peak = dict(self._sizes)
        self._hooks: list[Any] = []
        self._optimizers = optimizers = list(optimizers)
        self._steps: list[Any] = []
        self._in_step = False
        # Tensors whose memory may be given to them and taken away without an operation.
        self._passing: dict[int, weakref.ref[Any]] = {}
        self._compiling = [each for each in optimizers if compiles_itself(each)]
        for kind, tensors in (
            ("parameters", self._parameters),
            ("buffers", model.buffers()),
            ("optimizer", list(self._states())),
            ("activations", tree_leaves(batch)),
        ):
            for tensor in tensors:
                self._add(tensor, kind)

    def __enter__(self) -> Self:
        """Begin."""
        for each in self._parameters:
            if each.requires_grad and each.is_leaf:
                tensor: Any = each
                handle = tensor.register_post_accumulate_grad_hook(self._has_gradient)
                self._hooks.append(handle)
                # Before any other hook, which may free the gradient. torch reads the order in which they were
                # put there, so that the others are put there once more.
                hooks = tensor._post_accumulate_grad_hooks
                for key in [key for key in hooks if key != handle.id]:
                    hooks[key] = hooks.pop(key)
        for optimizer in self._compiling:
            self._hooks.append(optimizer.register_step_pre_hook(self._pause))
            self._hooks.append(optimizer.register_step_post_hook(self._resume))
        self._steps = [vars(each).get("step") for each in self._optimizers]
        for optimizer in self._optimizers:
            vars(optimizer)["step"] = functools.wraps(optimizer.step)(partial(self._step, optimizer.step))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._resume()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        self._pause()
        for handle in self._hooks:
            handle.remove()
        for optimizer, before in zip(self._optimizers, self._steps, strict=False):
            if before is None:
                vars(optimizer).pop("step", None)
            else:
                vars(optimizer)["step"] = before
        self._hooks, self._steps = [], []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._look_again()
        for each in tree_leaves((args, kwargs)):
            self._add(each, "step" if self._in_step else "other", passing=self._in_step)
        before = self._current
        result, taken = self._run(partial(func, *args, **(kwargs or {})))
        for each in tree_leaves(result):
            self._add(each, "step" if self._in_step else "activations")
        beside = max(0, taken - (self._current - before))
        self._grow("kernels", beside)
        self._grow("kernels", -beside)
        return result

    def _run(self, operation: Callable[[], Any]) -> tuple[Any, int]:
        """An operation's result, and the most bytes that it held while it ran."""
        if self._device.type != "cpu" or _profiler_enabled():  # torch has one profiler at a time
            return operation(), 0
        # A profile of a whole update would miss what is freed of what was there before it, and warn of that.
        # This kind begins and ends in 50 us, and has its events in their order.
        _enable_profiler_legacy(_ALLOCATIONS)
        try:
            result = operation()
        finally:
            threads = _disable_profiler_legacy()
        changes = (
            each.cpu_memory_usage()
            for events in threads
            for each in events
            if str(each.kind()) == "memory_alloc"  # or freed, of negative size
        )
        return result, max(accumulate(changes), default=0)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An optimizer's step; what it has made of its state is that from then on."""
        self._in_step = True
        try:
            return step(*args, **kwargs)
        finally:
            self._in_step = False
            self._look_again()
            for each in self._states():
                self._belongs(each, ("step",), "optimizer")

    def _states(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            for slots in optimizer.state.values():
                yield from slots.values()

    def _pause(self, *_: object) -> None:
        if self._watching:  # and not in a step that has failed
            self._watching = False
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _resume(self, *_: object) -> None:
        self._watching = True
        super().__enter__()  # type: ignore[no-untyped-call]

    def use(self) -> MemoryUse:
        """What was found."""
        cuda = self._device.type == "cuda"
        measured = torch.cuda.max_memory_allocated(self._device) if cuda else self._peak
        return MemoryUse(**self._at_peak, measured=measured, device=str(self._device))

    def _add(self, value: object, kind: str, passing: bool = False) -> None:
        for tensor in _plain(value):
            if tensor.device.type != self._device.type:
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._kinds or not size:
                continue
            self._born += 1
            self._kinds[key] = kind, size, self._born
            # Not a bound method of this object's, which would live until all tensors are freed.
            ended = weakref.finalize(storage, partial(_freed, weakref.ref(self), key))
            ended.atexit = False
            if passing:
                self._passing[key] = weakref.ref(storage)
            self._grow(kind, size)

    def _grow(self, kind: str, size: int) -> None:
        self._sizes[kind] += size
        self._current += size
        if self._current > self._peak:
            self._peak, self._at_peak = self._current, dict(self._sizes)
            self._peak_born = self._born

    def _look_again(self) -> None:
        """Where memory was given or taken without an operation."""
        for key, reference in list(self._passing.items()):
            storage = reference()
            kind, size, born = self._kinds.get(key, ("step", 0, 0))
            if storage is not None and storage.nbytes() != size:
                self._kinds[key] = kind, storage.nbytes(), born
                self._grow(kind, storage.nbytes() - size)

    def _has_gradient(self, parameter: Tensor) -> None:
        self._add(parameter.grad, "gradients")
        self._belongs(parameter.grad, ("activations", "other"), "gradients")

    def _belongs(self, value: object, before: tuple[str, ...], now: str) -> None:
        """Count something as of another kind, also at the peak if it was there by then."""
        for tensor in _plain(value):
            key = tensor.untyped_storage()._cdata
            kind, size, born = self._kinds.get(key, (now, 0, 0))
            if kind in before:
                self._kinds[key] = now, size, born
                self._sizes[kind] -= size
                self._sizes[now] += size
                if born <= self._peak_born:  # and has been there since
                    self._at_peak[kind] -= size
                    self._at_peak[now] += size

    def _remove(self, key: int) -> None:
        self._passing.pop(key, None)
        kind, size, _ = self._kinds.pop(key)
        self._sizes[kind] -= size
        self._current -= size


def _freed(watch: weakref.ref[MemoryWatch], key: int) -> None:
    alive = watch()
    if alive is not None:
        alive._remove(key)


def _plain(value: object) -> Iterator[Tensor]:
    """The tensors of which a tensor consists: its shard, or its parts, and mostly itself."""
    if not isinstance(value, Tensor):
        return
    tensor: Tensor = value.to_local() if hasattr(value, "to_local") else value
    if is_quantized(tensor):
        for each in parts_of("", tensor).values():
            yield from _plain(each)
    elif tensor.layout == torch.strided and not tensor.is_meta:
        yield tensor
