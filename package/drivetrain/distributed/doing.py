"""What a thread of a run is doing, in a few words: read from its frames, so that the run notes nothing."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

from drivetrain.hooks import HOOKS

_OURS = os.path.join(Path(__file__).parents[1], "")

_PLACES = {
    ("task.py", "forward"): "in the forward",
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


def doing_now(thread: int) -> str:
    """What a thread does at this moment: "in the forward", "in on_step_end of MyCallback", "in a save"; empty
    where nothing of that kind can be said.

    Args:
        thread: As `threading.get_ident` names it.
    """
    codes = []
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        codes.append(frame.f_code)
        frame = frame.f_back
    return _innermost(codes)


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


def _hook(code: CodeType) -> str:
    if code.co_filename == _SAVER:
        return "in a save" if code.co_name == "on_save" else f"in {code.co_name} of the checkpoints' saver"
    owner = code.co_qualname.split(".")[-2:-1]
    return f"in {code.co_name} of {owner[0]}" if owner and owner[0] != "<locals>" else f"in {code.co_name}"


def _place(code: CodeType) -> str:
    if not code.co_filename.startswith(_OURS):
        return ""
    return _PLACES.get((code.co_filename[len(_OURS) :].split(os.sep)[0], code.co_name), "")
