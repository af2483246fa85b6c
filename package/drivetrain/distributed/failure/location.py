"""The location of a thread of a run, in a few words, read from its stack frames.

They are read only after a run has shown no progress for long, or has failed.
"""

from __future__ import annotations

import bdb
import gc
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from drivetrain.distributed.failure import named_locations
from drivetrain.distributed.failure.messages import is_collective

_PACKAGE = os.path.join(Path(__file__).parents[2], "")

_TORCH = os.path.join(Path(torch.__file__).parent, "")
_COMPILERS = {
    (os.path.join(_TORCH, "_dynamo", "convert_frame.py"), "_compile"),
    (os.path.join(_TORCH, "_inductor", "compile_fx.py"), "compile_fx"),
    (os.path.join(_TORCH, "_inductor", "compile_fx.py"), "compile_fx_inner"),
    (os.path.join(_TORCH, "utils", "cpp_extension.py"), "_jit_compile"),
}
"""Functions that compile and do not run what they have compiled."""

_XLA = os.path.join(Path(torch.__file__).parents[1], "torch_xla", "")
_DEBUGGERS = (bdb.__file__, os.path.join(Path(torch.__file__).parents[1], "debugpy", ""))
_NOT_THE_USERS = (
    _PACKAGE,
    _TORCH,
    os.path.join(Path(os.__file__).parent, ""),
    "<frozen ",
    *(os.path.join(Path(torch.__file__).parents[1], name, "") for name in ("deepspeed", "accelerate")),
)


class Phase(StrEnum):
    """How a rank without progress counts.

    `WORKS` may be anything. `WAITS` is a collective. `OPAQUE` is a debugger's prompt, or a compilation, a
    save or a load, which show no progress until they are done. `OUTSIDE` is the body of the program's own
    loop.
    """

    WORKS = "works"
    WAITS = "waits"
    OPAQUE = "opaque"
    OUTSIDE = "outside"


def thread_location(thread: int) -> str:
    """Return a thread's location now: "in the forward", "in on_step_end of MyCallback", "in a save".

    Empty if the thread is in no named function.
    """
    return _innermost(each.f_code for each in _stacks().get(thread, ()))


def phase_of_thread(thread: int) -> tuple[Phase, str]:
    """Return a thread's phase and, if it waits, the collective, such as "barrier (train.py:12)"."""
    stacks = _stacks()
    stack = stacks.get(thread, [])
    awaited = {named_locations.waits[each.f_code] for each in stack if each.f_code in named_locations.waits}
    if awaited:
        others = (each.ident for each in threading.enumerate() if each.name in awaited)
        stack = next((stacks[each] for each in others if each in stacks), stack)
    if stack and is_collective(stack[0]):
        return Phase.WAITS, _collective(stack)
    opaque = (*named_locations.opaque, _XLA, *_DEBUGGERS)
    for each in stack:
        if each.f_code.co_filename.startswith(opaque):
            return Phase.OPAQUE, ""
        if each.f_code in named_locations.callers:
            break
    # On a GPU, torch compiles the backward in a thread of its own.
    every = (each.f_code for found in stacks.values() for each in found)
    compiles = any((code.co_filename, code.co_name) in _COMPILERS for code in every)
    return (Phase.OPAQUE if compiles else Phase.WORKS), ""


def _collective(stack: list[FrameType]) -> str:
    """Return the collective's name with the innermost line of the user's program."""
    name = ""
    for frame in stack:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_NOT_THE_USERS):
            return f"{name or 'a collective'} ({Path(file).name}:{frame.f_lineno})"
        if not name and file.startswith(_TORCH) and not function.startswith(("_", "wrapper")):
            name = function
    return name or "a collective"


def _stacks() -> dict[int, list[FrameType]]:
    """Return the frames of each thread, innermost first.

    CPython 3.11 may collect garbage while it makes the object of a frame. If a finalizer then lets the
    frame's thread run, the frame is gone: a segmentation fault.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return {thread: list(_outward(innermost)) for thread, innermost in sys._current_frames().items()}
    finally:
        if collects:
            gc.enable()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_line(error: BaseException) -> str:
    """Return the innermost line of the user's program in a traceback, or an empty text."""
    for each in reversed(traceback.extract_tb(error.__traceback__)):
        if not each.filename.startswith(_NOT_THE_USERS):
            return f"{Path(each.filename).name}:{each.lineno} ({(each.line or '')[:80]})"
    return ""


def error_location(error: BaseException) -> str:
    """Return where an error was raised; empty if that is in no named function."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _innermost(reversed(codes))


def _innermost(codes: Iterable[CodeType]) -> str:
    """Return the innermost hook if there is one, else the innermost function that has a name."""
    location = ""
    for code in codes:
        if code.co_name in named_locations.hooks:
            return _hook(code)
        location = location or named_locations.names.get(code, "")
    return location


def hook_location(hook: Any) -> str:
    """Return where a run is while it calls a callback's hook: "in on_step_end of MyCallback"."""
    hook = inspect.unwrap(hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return "" if code is None or code.co_name not in named_locations.hooks else _hook(code)


def _hook(code: CodeType) -> str:
    if code in named_locations.names:
        return named_locations.names[code]
    owner = code.co_qualname.split(".")[-2:-1]
    return f"in {code.co_name} of {owner[0]}" if owner and owner[0] != "<locals>" else f"in {code.co_name}"
