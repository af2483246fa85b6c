"""The object that scripts call callbacks by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerControl

from drivetrain.core.errors import ConfigError
from drivetrain.integrations.transformers.callbacks import EVENTS, OBJECTS, CallbackAdapter
from drivetrain.integrations.transformers.script.checks import made_callbacks

_FOURTH = {"on_evaluate": "metrics", "on_predict": "metrics", "on_log": "logs"}
"""The names of the fourth arguments of events, which may be given by position."""


class CallbackHandler:
    """Calls the callbacks of a Trainer by their events' names: `on_evaluate(args, state, control, metrics)`.

    It is one object for the life of its Trainer, and a script may set attributes on it. A `call_event` that
    is set is called with (event, args, state, control, **objects) in the place of this class's. It finds the
    callbacks that have the event in `callbacks`.

    Args:
        callbacks: The callbacks of the Trainer; a change of the list counts from its next verb on.
    """

    _adapter: CallbackAdapter

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def serve(self, adapter: CallbackAdapter) -> None:
        """Call the callbacks by an adapter from now on."""
        self._adapter = adapter
        adapter.calls_by = self._call_by_script if "call_event" in vars(self) else None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "call_event":
            self._adapter.calls_by = self._call_by_script

    def _call_by_script(self, callbacks: list[Any], event: str, *given: Any, **objects: Any) -> Any:
        every, self.callbacks = self.callbacks, callbacks
        try:
            return self.call_event(event, *given, **objects)
        finally:
            self.callbacks = every

    def call_event(self, event: str, args: Any, state: Any, control: Any, **objects: Any) -> TrainerControl:
        """Call an event of all callbacks that have it."""
        return self._adapter.event(event, **objects)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of one.

        Raises:
            ConfigError: Training is in progress.
        """
        self._check_idle()
        self.callbacks[:] = made_callbacks([*self.callbacks, callback])

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none.

        Raises:
            ConfigError: Training is in progress.
        """
        self._check_idle()
        for number, each in enumerate(self.callbacks):
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                return self.callbacks.pop(number)
        return None

    remove_callback = pop_callback

    def _check_idle(self) -> None:
        if self._adapter.is_training:
            raise ConfigError(
                "callbacks are added and removed before train(), not while it runs: add one before, with"
                " events that do nothing until they should"
            )

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS:
            return self._caller(name)
        if name in OBJECTS and "_adapter" in vars(self):
            return self._adapter.objects[name]
        raise AttributeError(f"trainer.callback_handler has no {name!r}: it has the events and callbacks")

    def _caller(self, event: str) -> Callable[..., TrainerControl]:
        def call(args: Any, state: Any, control: Any, *given: Any, **objects: Any) -> TrainerControl:
            if given:
                objects[_FOURTH[event]] = given[0]
            return self.call_event(event, args, state, control, **objects)

        return call
