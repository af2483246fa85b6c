"""Predictions with metrics, of a module whose steps log by themselves."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from tests.integrations.lightning.equality import made
from tests.integrations.lightning.modules import Classifier
from tests.support.tasks import pairs, quiet

from drivetrain import ConfigError
from drivetrain.integrations.lightning import as_task

pytestmark = pytest.mark.full


def test_a_module_is_refused_with_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"predict\(metrics=True\) with a Classifier.*Call validate"):
        quiet().predict(as_task(made(Classifier)), pairs(), metrics=True)
