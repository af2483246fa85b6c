"""Every test here runs with Lightning imported."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def library(lightning_library: None) -> None:
    """Import it before a test's own state is noted."""
