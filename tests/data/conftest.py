"""Fixtures for tests of data."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

from drivetrain.core.random_streams import preserved


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    with preserved():
        yield


@pytest.fixture(scope="session", autouse=True)
def workers_were_used_before() -> None:
    """Use workers once: torch then installs its handler for dead ones, which stays for the process's life."""
    assert len(list(DataLoader([0], num_workers=1))) == 1


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    """Wait for the threads that feed workers: an error keeps them in a cycle with its traceback."""
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 5
    if threading.active_count() > before:
        gc.collect()
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
