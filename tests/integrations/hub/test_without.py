"""Without the Hub's client, the error names the extra that brings it."""

from __future__ import annotations

import pytest

from drivetrain import MissingDependencyError
from drivetrain.integrations.hub import Publish


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.integrations.hub.client.is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"Publish needs .*'drivetrain\[hub\]'"):
        Publish("org/line")
