"""Averages of weights beside Lightning's callbacks of the same name."""

from __future__ import annotations

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")

from tests.integrations.lightning.equality import made, under_lightning, under_ours, weights_of  # noqa: E402
from tests.integrations.lightning.modules import Classifier  # noqa: E402

from drivetrain import WeightAverage  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]


def test_an_exponential_average_is_lightnings() -> None:
    theirs, ours = made(Classifier), made(Classifier)
    under_lightning(theirs, max_epochs=3, callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.9)])
    under_ours(ours, max_epochs=3, callbacks=[WeightAverage("ema", decay=0.9)])
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)
