"""These tests run where torch_xla is: `make xla` builds an environment of its own for them."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the night what is not needed before each landing."""
    for item in items:
        if "tests/xla/" in item.path.as_posix() and not item.get_closest_marker("landing"):
            item.add_marker(pytest.mark.nightly)
