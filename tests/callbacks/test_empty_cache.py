"""The callback that empties the allocator's cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError, EmptyCache


def test_the_cache_is_emptied_at_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []

    class Allocator:
        @staticmethod
        def empty_cache() -> None:
            emptied.append(callback.updates)

    class Everywhere(EmptyCache):
        updates = 0

        def check_trainer(self, trainer: Any, strategy: Any) -> None: ...

        def on_step_end(self, run: Any) -> None:
            self.updates = run.progress.updates
            with monkeypatch.context() as patch:
                patch.setattr(torch, "get_device_module", lambda device: Allocator)
                super().on_step_end(run)

    callback = Everywhere(every=3)
    quiet(max_steps=7, callbacks=[callback]).fit(Regression(), pairs())
    assert emptied == [3, 6]


def test_a_device_without_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="EmptyCache on 'cpu'"):
        quiet(max_steps=1, callbacks=[EmptyCache(every=1)])
    with pytest.raises(ConfigError, match="EmptyCache: every must be"):
        EmptyCache(every=0)
