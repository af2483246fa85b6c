"""The logged learning rates."""

from __future__ import annotations

import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LearningRateMonitor, OptimizerConfig


def test_a_log_point_has_the_rates_that_its_step_used() -> None:
    task = Regression(OptimizerConfig("sgd", lr=0.4, schedule="linear"))
    result = quiet(callbacks=[LearningRateMonitor()], max_epochs=2).fit(task, pairs(4, 2), pairs(2, 2))
    assert result.metrics["lr"] == pytest.approx(0.1)  # of the last of four steps; 0 would be a fifth's
