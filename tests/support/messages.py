"""The library's messages in tests: a warning that a test does not expect fails it."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.core.messages import NAME, handled_by


class Kept(logging.Handler):  # keeps the texts of messages that match
    def __init__(self, level: int, match: str = "") -> None:
        super().__init__(level)
        self.match = re.compile(match, re.DOTALL)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.match.search(text):
            self.texts.append(text)


ASKED_FOR = (
    "drivetrain.callbacks.loss_spike",
    "drivetrain.checkpoint.storage.retries",
    "drivetrain.run.nonfinite",
)
"""Loggers of policies that a test chooses, whose warnings are then no surprise."""

UNEXPECTED = Kept(logging.WARNING)
"""Receives the other warnings of a test; those left in the end were not expected."""
UNEXPECTED.addFilter(lambda record: record.name not in ASKED_FOR)


@contextmanager
def heard(
    match: str = "", level: int = logging.WARNING, texts: list[str] | None = None
) -> Iterator[list[str]]:
    """Give the messages that match as they come, or add them to `texts`; a test may have them, or none."""
    kept = Kept(level, match)
    kept.texts = kept.texts if texts is None else texts
    try:
        with handled_by(kept):
            yield kept.texts
    finally:
        UNEXPECTED.texts = [each for each in UNEXPECTED.texts if not kept.match.search(each)]


@contextmanager
def warned(match: str = "") -> Iterator[list[str]]:
    """Give the warnings that match as they come; a test must have one at least."""
    with heard(match) as found:
        yield found
    assert found, f"no warning matches {match!r}; others: {UNEXPECTED.texts}"


@contextmanager
def unconfigured() -> Iterator[None]:
    """Handle messages as in a program that configures no logging: pytest's handlers do not count."""
    root = logging.getLogger(NAME)
    before, propagate = root.handlers, root.propagate
    root.handlers, root.propagate = [each for each in before if not isinstance(each, Kept)], False
    try:
        yield
    finally:
        root.handlers, root.propagate = before, propagate
