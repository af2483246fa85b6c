"""Accumulation by schedule beside Lightning's callback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

pl = pytest.importorskip("lightning.pytorch")

from tests.integrations.lightning.equality import (  # noqa: E402
    differences,
    made,
    under_lightning,
    under_ours,
    weights_of,
)
from tests.integrations.lightning.modules import Classifier, loader  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]


class Watching(Classifier):
    """Keeps what the trainer says of its accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, self.global_step, self.trainer.accumulate_grad_batches))


def both(epochs: int, batches: int, stages: dict[int, int]) -> tuple[Watching, Watching, dict[str, Any]]:
    theirs, ours = made(Watching), made(Watching)
    options: dict[str, Any] = {"max_epochs": epochs, "limit_train_batches": batches}
    scheduler = pl.callbacks.GradientAccumulationScheduler(dict(stages))
    logged = under_lightning(theirs, callbacks=[scheduler], **options)
    own = {f"{epoch} epochs": number for epoch, number in stages.items()}
    found, _ = under_ours(ours, gradient_accumulation_steps=own, **options)
    return theirs, ours, differences(logged, found)


def test_weights_logs_and_windows_are_lightnings() -> None:
    theirs, ours, different = both(5, 4, {0: 4, 1: 2, 3: 1})
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)
    assert ours.seen == theirs.seen
    assert {name for name in different if not name.startswith("train_")} == set()


def by_hand(divisor: int) -> Any:
    """One epoch of five batches in windows of four; the last, of one batch, is divided by `divisor`."""
    module = made(Classifier)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(loader()):
        if number == 5:
            break
        (F.cross_entropy(module.net(x), y) / (4 if number < 4 else divisor)).backward()
        if number >= 3:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([each.detach().reshape(-1).double() for each in module.net.parameters()])


def test_a_short_last_window_is_divided_by_its_own_batches_and_by_four_in_lightning() -> None:
    theirs, ours, _ = both(1, 5, {0: 4, 7: 1})
    flat = [
        torch.cat([each.detach().reshape(-1).double() for each in one.net.parameters()])
        for one in (ours, theirs)
    ]
    torch.testing.assert_close(flat[0], by_hand(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(flat[1], by_hand(4), rtol=0, atol=1e-6)
    assert (flat[0] - flat[1]).abs().max() > 1e-3
