"""The hooks and their drawing, and the small LambdaCallback, LearningRateMonitor and EmptyCache."""

import re
from types import SimpleNamespace

import torch

from drivetrain.callbacks import HOOKS, Callback, EmptyCache, LambdaCallback, LearningRateMonitor


def used(callback):
    return [name for name in HOOKS if not getattr(getattr(callback, name), "__unused_hook__", False)]


def test_the_drawing_has_every_hook_at_the_start_of_a_line():
    drawn = re.findall(r"^ +(on_\w+)", Callback.__doc__ or "", flags=re.MULTILINE)
    assert set(drawn) == set(HOOKS)
    assert [name for name in HOOKS if drawn.count(name) > 1] == ["on_log"]


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


def test_empty_cache_empties_the_devices_cache_at_its_interval(drive, monkeypatch):
    emptied = []
    step = LambdaCallback(on_step_end=EmptyCache(every=3).on_step_end)  # as with a GPU
    run = drive(step, updates_per_epoch=7)
    module = SimpleNamespace(empty_cache=lambda: emptied.append(run.progress.updates))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    run.fit()
    assert emptied == [3, 6]
