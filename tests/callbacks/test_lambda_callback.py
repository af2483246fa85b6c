"""A callback from functions."""

import pytest

from drivetrain.callbacks import HOOKS, LambdaCallback
from drivetrain.core.errors import ConfigError


def test_functions_are_called_at_their_hooks_with_the_run(drive):
    seen = []
    callback = LambdaCallback(
        on_step_end=lambda run: seen.append(("step", run.progress.updates)),
        on_fit_end=lambda run: seen.append(("end", run.progress.updates)),
    )
    drive(callback, updates_per_epoch=2).fit()
    assert seen == [("step", 1), ("step", 2), ("end", 2)]


def test_hooks_that_are_not_given_stay_unused():
    callback = LambdaCallback(on_log=print)
    used = [name for name in HOOKS if not getattr(getattr(callback, name), "__unused_hook__", False)]
    assert used == ["on_log"]


def test_a_wrong_hook_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"no hook 'on_step_ends'. Did you mean 'on_step_end'"):
        LambdaCallback(on_step_ends=print)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ConfigError, match="on_log must be a function that is given the run, not 3"):
        LambdaCallback(on_log=3)
