"""Saving behind the training loop: a copy in the host's memory, and one thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from drivetrain.checkpoint.format import Snapshot
from drivetrain.errors import CheckpointError

_Identity: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


class HostBuffers:
    """The host's copy of what one process saves, kept from save to save: memory that was never touched takes
    several times as long to copy into.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the tensors of its plan as they are now, whatever becomes of the originals.

        Tensors that are the same memory (tied weights) stay so. The copies are overwritten by the next call.
        """
        assert snapshot.plan is not None
        before, self._buffers = self._buffers, {}
        same: dict[_Identity, Tensor] = {}
        taken: set[int] = set()
        pairs: list[tuple[Tensor, Tensor]] = []
        parts: dict[str, dict[str, Tensor]] = {}
        for group, named in snapshot.plan.parts.items():
            parts[group] = {}
            for name, part in named.items():
                identity = _identity(part)
                target = same.get(identity)
                if target is None:
                    buffer = before.pop((group, name), None)
                    if id(buffer) in taken:  # these were one memory at the save before, and are no more
                        buffer = None
                    target = same[identity] = _buffer_for(part, buffer)
                    taken.add(id(target))
                    pairs.append((target, part))
                self._buffers[group, name] = target
                parts[group][name] = target
        _copy_all(pairs)
        plan = replace(snapshot.plan, parts=parts)
        return replace(snapshot, plan=plan, tensors=_detached(snapshot.tensors, parts))


def _identity(tensor: Tensor) -> _Identity:
    # XLA's tensors have no address; each is then by itself.
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _buffer_for(tensor: Tensor, before: Tensor | None) -> Tensor:
    if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
        return before
    # Pinned, so that an accelerator copies at full speed and without the host's help.
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    devices = set()
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            if source.device.type not in ("cpu", "xla"):  # XLA's copies to the host wait by themselves
                devices.add(source.device)
    for device in devices:
        torch.accelerator.synchronize(device)


def _detached(
    tensors: Mapping[str, Mapping[str, Tensor]], parts: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """The copies in place of the originals, so that nothing in the snapshot changes with them.

    A tensor that is written by others, or in part, stays for its name only.
    """
    return {
        group: {
            name: parts[group][name] if _is_whole(parts[group].get(name), tensor) else tensor
            for name, tensor in named.items()
        }
        for group, named in tensors.items()
    }


def _is_whole(part: Tensor | None, tensor: Tensor) -> bool:
    return part is not None and part.shape == tensor.shape


class Background:
    """One piece of work at a time, in a thread of its own.

    A thread for each piece, and not a daemon: nothing is left running between saves, and an interpreter that
    ends waits for a save that has begun.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the last piece must have been waited for.

        Raises:
            CheckpointError: The system gives no thread; nothing was begun.
        """
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # handed over by `wait`, in the thread that asks
                self._error = error

        thread = threading.Thread(target=run, name="drivetrain-checkpoint")
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(f"no thread can be started to save in the background: {error}") from error
        self._thread = thread

    def wait(self) -> BaseException | None:
        """Return once the work has ended; what it raised, or None."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        return error
