"""The hooks and their drawing, and the small LambdaCallback, LearningRateMonitor and EmptyCache."""

import re

import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.callbacks import HOOKS, Callback, EmptyCache, LambdaCallback, LearningRateMonitor


def used(callback):
    return [name for name in HOOKS if not getattr(getattr(callback, name), "__unused_hook__", False)]


def test_the_drawing_has_every_hook_at_the_start_of_a_line():
    drawn = re.findall(r"^ +(on_\w+)", Callback.__doc__ or "", flags=re.MULTILINE)
    assert set(drawn) == set(HOOKS)
    assert [name for name in HOOKS if drawn.count(name) > 1] == ["on_log"]


def test_only_overridden_hooks_count_as_used():
    class Mine(Callback):
        def on_step_end(self, run):
            super().on_step_end(run)

    class Child(Mine):
        pass

    assert used(Mine()) == used(Child()) == ["on_step_end"]
    assert used(LambdaCallback(on_log=print)) == ["on_log"]


def test_lambda_callback_calls_its_functions_at_their_hooks_with_the_run(drive):
    seen = []
    callback = LambdaCallback(
        on_step_end=lambda run: seen.append(("step", run.progress.updates)),
        on_fit_end=lambda run: seen.append(("end", run.progress.updates)),
    )
    drive(callback, updates_per_epoch=2).fit()
    assert seen == [("step", 1), ("step", 2), ("end", 2)]


def test_learning_rate_monitor_logs_the_rate(drive):
    run = drive(LearningRateMonitor(), updates_per_epoch=4, log_every=2).fit()
    assert [point["lr"] for point in run.history] == [0.05, 0.05]


def test_empty_cache_empties_at_the_interval(monkeypatch):
    emptied = []

    class Allocator:
        @staticmethod
        def empty_cache():
            emptied.append(callback.updates)

    class Everywhere(EmptyCache):
        def check_trainer(self, trainer, strategy): ...

        def on_step_end(self, run):
            self.updates = run.progress.updates
            with monkeypatch.context() as patch:
                patch.setattr(torch, "get_device_module", lambda device: Allocator)
                super().on_step_end(run)

    callback = Everywhere(every=3)
    quiet(max_steps=7, callbacks=[callback]).fit(Regression(), pairs())
    assert emptied == [3, 6]
