"""One LightningModule under Lightning's Trainer and under ours; more comparisons are in the full tier."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from tests.integrations.lightning.equality import (
    differences,
    made,
    under_lightning,
    under_ours,
    weights_of,
)
from tests.integrations.lightning.modules import Classifier


@pytest.mark.filterwarnings("ignore::Warning")
def test_an_unchanged_module_has_the_weights_and_values_of_lightning() -> None:
    theirs, ours = made(Classifier), made(Classifier)
    logged = under_lightning(theirs, max_epochs=2)
    found, _ = under_ours(ours, max_epochs=2)
    assert torch.equal(weights_of(theirs), weights_of(ours))
    assert not differences(logged, found)
