"""The object that scripts call callbacks by."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl

from drivetrain.integrations.transformers.callbacks import CallbackAdapter


class CallbackHandler:
    """Calls the callbacks of a Trainer by their events' names: `on_evaluate(args, state, control, metrics)`.

    Args:
        adapter: Has the callbacks.
    """

    def __init__(self, adapter: CallbackAdapter) -> None:
        self._adapter = adapter
        self.callbacks = list(adapter.callbacks)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float]) -> TrainerControl:
        """Call `on_evaluate`."""
        return self._adapter.event("on_evaluate", metrics=metrics)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, float]) -> TrainerControl:
        """Call `on_predict`."""
        return self._adapter.event("on_predict", metrics=metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float]) -> TrainerControl:
        """Call `on_log`."""
        return self._adapter.event("on_log", logs=logs)
