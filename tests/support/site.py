"""The scripts of docs/site."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SITE = Path(__file__).parents[2] / "docs" / "site"


def site_script(name: str) -> SimpleNamespace:
    if not SITE.exists():  # an installed package
        pytest.skip("the documentation is not here")
    return SimpleNamespace(**runpy.run_path(str(SITE / f"{name}.py")))
