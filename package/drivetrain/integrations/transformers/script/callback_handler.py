"""The object that scripts call callbacks by."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl

from drivetrain.integrations.transformers.callbacks import CallbackAdapter
from drivetrain.integrations.transformers.script.checks import made_callback


class CallbackHandler:
    """Calls the callbacks of a Trainer by their events' names: `on_evaluate(args, state, control, metrics)`.

    Args:
        adapter: Calls the callbacks.
        callbacks: The callbacks of the Trainer; a change of the list counts from its next verb on.
    """

    def __init__(self, adapter: CallbackAdapter, callbacks: list[Any]) -> None:
        self._adapter = adapter
        self.callbacks = callbacks

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of one."""
        self.callbacks.append(made_callback(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        for number, each in enumerate(self.callbacks):
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                return self.callbacks.pop(number)
        return None

    remove_callback = pop_callback

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float]) -> TrainerControl:
        """Call `on_evaluate`."""
        return self._adapter.event("on_evaluate", metrics=metrics)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, float]) -> TrainerControl:
        """Call `on_predict`."""
        return self._adapter.event("on_predict", metrics=metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float]) -> TrainerControl:
        """Call `on_log`."""
        return self._adapter.event("on_log", logs=logs)

    def on_push_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> TrainerControl:
        """Call `on_push_begin`."""
        return self._adapter.call("on_push_begin", **objects)
