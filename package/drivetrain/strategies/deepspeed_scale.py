"""DeepSpeed's loss scale, in the form in which torch's gradient scaler stores its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OWN = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What only DeepSpeed's scaler has: where it stands, and how many overflows it will still forgive."""


def scaler_state(scaler: Any) -> dict[str, Any]:
    """The state of a dynamic loss scaler."""
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": float(scaler.scale_factor),
        "backoff_factor": 1.0 / float(scaler.scale_factor),
        "growth_interval": int(scaler.scale_window),
        "_growth_tracker": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
        "deepspeed": {name: int(getattr(scaler, name)) for name in _OWN},
    }


def load_scaler_state(scaler: Any, state: Mapping[str, Any]) -> None:
    """Take over a state: DeepSpeed's, or that of torch's scaler."""
    scaler.cur_scale = float(state["scale"])
    own = state.get("deepspeed")
    if own is None:
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(state["_growth_tracker"])
        return
    for name in _OWN:
        setattr(scaler, name, int(own[name]))
