"""Asynchronous saving: a copy in the host's memory, and one thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.failure.named_locations import waits_for_thread

_THREAD = "drivetrain-checkpoint"

_Identity: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


class HostBuffers:
    """The buffers for one process's share of a save in the host's memory.

    They are reused from save to save, because copying into untouched memory takes several times as long.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._copied: list[torch.Event] = []

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of the tensors in its plan, so that later changes do not matter.

        Tensors that share memory (tied weights) still do. The next call overwrites the copies. They can be
        read after `wait`. Copies from a device go in turn with its other work, so that what comes later
        cannot change what they copy; the caller does not wait for them.
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
                    if id(buffer) in taken:  # the tensors shared memory at the save before, and do not now
                        buffer = None
                    target = same[identity] = _buffer_for(part, buffer)
                    taken.add(id(target))
                    pairs.append((target, part))
                self._buffers[group, name] = target
                parts[group][name] = target
        self._copied = _copy_all(pairs)
        plan = replace(snapshot.plan, parts=parts)
        return replace(snapshot, plan=plan, tensors=_detached(snapshot.tensors, parts))

    def wait(self) -> None:
        """Wait until the last copies are made; any thread may call it."""
        for each in self._copied:
            each.synchronize()


def _identity(tensor: Tensor) -> _Identity:
    # XLA's tensors have no address, so none counts as shared.
    return tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _buffer_for(tensor: Tensor, before: Tensor | None) -> Tensor:
    if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
        return before
    # Pinned, so that an accelerator copies at full speed, without the host's help.
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> list[torch.Event]:
    """Start the copies of the second tensors into the first, and return the events of their ends."""
    devices = set()
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            if source.device.type not in ("cpu", "xla"):  # XLA's copies to the host are synchronous
                devices.add(source.device)
    events = []
    for device in devices:
        if device.type != "cuda":  # others were never tried with events
            torch.accelerator.synchronize(device)
            continue
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)
    return events


def _detached(
    tensors: Mapping[str, Mapping[str, Tensor]], parts: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors with copies instead of originals, so that the snapshot does not change with them.

    An original that this process does not write, or writes only in part, stays; only its name is used.
    """
    return {
        group: {
            name: part if (part := parts[group].get(name)) is not None and part.shape == each.shape else each
            for name, each in named.items()
        }
        for group, named in tensors.items()
    }


class Background:
    """A runner of one piece of work at a time, in a separate thread.

    Each piece has its own thread, which is not a daemon: no thread runs between saves, and the interpreter
    waits at its exit for a save that has begun.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Start the work; call `wait` first if other work was started before.

        Raises:
            CheckpointError: The system cannot start a thread; the work has not begun.
        """
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # returned by `wait`, in the thread that calls it
                self._error = error

        thread = threading.Thread(target=run, name=_THREAD)
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(f"no thread can be started to save in the background: {error}") from error
        self._thread = thread

    @waits_for_thread(_THREAD)
    def wait(self) -> BaseException | None:
        """Wait for the work to end; return the exception that it raised, or None."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        return error
