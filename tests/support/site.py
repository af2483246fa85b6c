"""The scripts of docs/site."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[2] / "docs" / "site"


def site_script(name: str) -> Any:
    """Return a script as a module; skip the test where the documentation is missing."""
    if not SITE.exists():  # an installed package
        pytest.skip("the documentation is not here")
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script
