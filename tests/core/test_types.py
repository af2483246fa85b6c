"""The vocabulary that every module shares."""

from __future__ import annotations

import torch

from drivetrain.core.types import Stateful


def test_what_has_a_state_is_known_by_its_methods() -> None:
    assert isinstance(torch.nn.Linear(1, 1), Stateful)
    assert not isinstance({}, Stateful)
