"""The place of a thread of a run, in a few words, read from its frames.

CPython 3.11 may crash when the frames of a thread that runs are looked at from another thread. So they are
looked at only where a run has shown no progress for long, or has failed.
"""

from __future__ import annotations

import bdb
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

from drivetrain.distributed.failure_wire import is_collective
from drivetrain.hooks import HOOKS

_OURS = os.path.join(Path(__file__).parents[1], "")

_PLACES = {
    ("task.py", "forward"): "in the forward",
    ("engine.py", "accumulate"): "in the forward",
    ("engine.py", "train_step"): "in the step",
    ("engine.py", "evaluation_step"): "in the forward",
    ("engine.py", "predict_step"): "in the forward",
    ("strategies", "backward"): "in the backward",
    ("strategies", "clip_grad_norm"): "as it clips the gradient",
    ("strategies", "optimizer_step"): "in the optimizer's step",
    ("run.py", "log_training"): "at a log point",
    ("run.py", "log_point"): "at a log point",
    ("run.py", "restore"): "as it takes over a checkpoint",
}
"""By the first part of a file's path in this package, and a function's name."""

_SAVER = os.path.join(_OURS, "callbacks", "checkpoint.py")

_CHECKPOINTS = (_SAVER, os.path.join(_OURS, "checkpoint", ""))
_BACKGROUND = os.path.join(_OURS, "checkpoint", "background.py")
_WRITER = "drivetrain-checkpoint"
"""The name of the thread that saves in the background."""

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
    _OURS,
    _TORCH,
    *(os.path.join(Path(torch.__file__).parents[1], name, "") for name in ("deepspeed", "accelerate")),
)


class Phase(StrEnum):
    """How a rank that shows no progress counts.

    `WORKS` may be anything. `WAITS` is a collective. `UNSEEN` is a compilation, a save or a load, which show
    no progress until they are done, or a debugger's prompt. `OUTSIDE` is the body of the program's own loop.
    """

    WORKS = "works"
    WAITS = "waits"
    UNSEEN = "unseen"
    OUTSIDE = "outside"


def doing_now(thread: int) -> str:
    """What a thread does at this moment: "in the forward", "in on_step_end of MyCallback", "in a save"; empty
    where nothing of that kind can be said.

    Args:
        thread: As `threading.get_ident` names it.
    """
    return _innermost(each.f_code for each in _outward(sys._current_frames().get(thread)))


def phase_now(thread: int) -> tuple[Phase, str]:
    """Return the phase that a thread is in; of one that waits, also where, such as "barrier (train.py:12)".

    Args:
        thread: As `threading.get_ident` names it.
    """
    threads = sys._current_frames()
    stack = list(_outward(threads.get(thread)))
    if any(each.f_code.co_filename == _BACKGROUND and each.f_code.co_name == "wait" for each in stack):
        writers = (each.ident for each in threading.enumerate() if each.name == _WRITER)
        stack = next((list(_outward(threads.get(each))) for each in writers if each in threads), stack)
    if stack and is_collective(stack[0]):
        return Phase.WAITS, _collective(stack)
    if any(each.f_code.co_filename.startswith((*_CHECKPOINTS, _XLA, *_DEBUGGERS)) for each in stack):
        return Phase.UNSEEN, ""
    # On a GPU the backward is compiled in one of torch's own threads.
    compiles = ((each.f_code.co_filename, each.f_code.co_name) for each in _all_frames(threads.values()))
    return (Phase.UNSEEN if any(each in _COMPILERS for each in compiles) else Phase.WORKS), ""


def _collective(stack: list[FrameType]) -> str:
    """The collective, and the innermost line of the user's program."""
    name = ""
    for frame in stack:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_NOT_THE_USERS):
            return f"{name or 'a collective'} ({Path(file).name}:{frame.f_lineno})"
        if not name and file.startswith(_TORCH) and not function.startswith(("_", "wrapper")):
            name = function
    return name or "a collective"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _all_frames(innermost: Iterable[FrameType]) -> Iterator[FrameType]:
    for each in innermost:
        yield from _outward(each)


def doing_when(error: BaseException) -> str:
    """What was done when an error was raised; empty where that cannot be said."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _innermost(reversed(codes))


def _innermost(codes: Iterable[CodeType]) -> str:
    """The innermost hook if there is one, else the innermost place of the loop that has a name."""
    place = ""
    for code in codes:
        if code.co_name in HOOKS:
            return _hook(code)
        place = place or _place(code)
    return place


def hook_name(hook: Any) -> str:
    """Return where a run is while it calls a callback's hook: "in on_step_end of MyCallback"."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return "" if code is None or code.co_name not in HOOKS else _hook(code)


def _hook(code: CodeType) -> str:
    if code.co_filename == _SAVER:
        return "in a save" if code.co_name == "on_save" else f"in {code.co_name} of the checkpoints' saver"
    owner = code.co_qualname.split(".")[-2:-1]
    return f"in {code.co_name} of {owner[0]}" if owner and owner[0] != "<locals>" else f"in {code.co_name}"


def _place(code: CodeType) -> str:
    if not code.co_filename.startswith(_OURS):
        return ""
    return _PLACES.get((code.co_filename[len(_OURS) :].split(os.sep)[0], code.co_name), "")
