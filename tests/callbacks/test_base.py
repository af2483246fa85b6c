"""The hooks and their drawing."""

import re

from drivetrain.callbacks import HOOKS, Callback


def test_the_drawing_has_every_hook_at_the_start_of_a_line():
    drawn = re.findall(r"^ +(on_\w+)", Callback.__doc__ or "", flags=re.MULTILINE)
    assert set(drawn) == set(HOOKS)
    assert [name for name in HOOKS if drawn.count(name) > 1] == ["on_log"]


def test_only_an_overridden_hook_counts_as_used():
    class Mine(Callback):
        def on_step_end(self, run):
            super().on_step_end(run)

    used = [name for name in HOOKS if not getattr(getattr(Mine(), name), "__unused_hook__", False)]
    assert used == ["on_step_end"]


def test_a_hook_inherited_from_a_callback_that_uses_it_is_used():
    class Parent(Callback):
        def on_log(self, run):
            pass

    class Child(Parent):
        pass

    assert not hasattr(Child().on_log, "__unused_hook__")
