"""The values, beside numbers, that wait for the next log point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import shielded
from drivetrain.core.types import Logger
from drivetrain.loggers.media import HOW_TO_LOG, Media, MediaLogger

_LOG = logger(__name__)


class PendingMedia:
    """Keeps values until a log point, and gives each logger those of the kinds that it takes.

    Nothing is kept, drawn or copied to the host if no logger takes it.

    Args:
        loggers: The loggers of a run; none on ranks other than 0.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._taken = {kind for each in loggers if isinstance(each, MediaLogger) for kind in each.takes}
        self._loggers = loggers
        self._values: dict[str, Media] = {}
        self._said: set[tuple[int | str, str]] = set()

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, name: str, value: Media | Callable[[], Media]) -> None:
        """Keep a value, or the one that a function returns, in place of an earlier one of that name.

        Raises:
            ConfigError: It is of another type.
        """
        if not self._loggers:
            return
        if callable(value):
            with torch.no_grad(), shielded():
                value = value()
        if not isinstance(value, Media):
            raise ConfigError(
                f"{name!r} of StepOutput(media=...) is a {type(value).__name__}; allowed are a value of"
                f" drivetrain.loggers, and a function without arguments that returns one. {HOW_TO_LOG}"
            )
        for index, each in enumerate(self._loggers):
            takes = each.takes if isinstance(each, MediaLogger) else ()
            if value.kind not in takes and (index, value.kind) not in self._said:
                self._said.add((index, value.kind))
                _LOG.warning(
                    f"{type(each).__name__} takes no values of the kind {value.kind!r}: it gets neither"
                    f" {name!r} nor other such values"
                )
        if value.kind in self._taken:
            self._values[name] = value.snapshot()

    def log_to(self, logger: Logger, step: int) -> None:
        """Give a logger what it takes."""
        if not isinstance(logger, MediaLogger):
            return
        taken = {name: each for name, each in self._values.items() if each.kind in logger.takes}
        for name, each in taken.items():
            each.to_host()
            if each.problem and (name, each.kind) not in self._said:
                self._said.add((name, each.kind))
                _LOG.warning(f"{each.kind} {name!r}: {each.problem}")
        if taken:
            logger.log_media(taken, step)

    def clear(self) -> None:
        """Forget all values."""
        self._values = {}

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Forget the values that are added inside the block, and keep earlier ones."""
        before, self._values = self._values, {}
        try:
            yield
        finally:
            self._values = before
