"""Every test here runs with transformers imported."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def library(transformers_library: None) -> None:
    """Import it before a test's own state is noted."""
