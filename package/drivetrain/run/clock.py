"""The clock of a run: nested spans of time by name, which the ledger adds up and a profile lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch.profiler import record_function


@dataclass(slots=True)
class Span:
    """The spans of one name.

    Attributes:
        calls: How many have ended.
        seconds: The host's time in them.
        own: The same without that of the spans inside them.
    """

    calls: int = 0
    seconds: float = 0.0
    own: float = 0.0


@dataclass(slots=True)
class _Open:
    """A span that has begun: its entry, its start, the time of spans inside it, and its range in a trace."""

    span: Span
    start: float
    inside: float = 0.0
    range: record_function | None = None


class Clock:
    """A clock of nested spans, of one thread. It reads the host's clock and waits for no device.

    Attributes:
        found: The spans by name, in the order of their first beginning.
        traced: Whether spans that begin now are ranges for torch's profiler too.
    """

    def __init__(self) -> None:
        self.found: dict[str, Span] = {}
        self.traced = False
        self._open: list[_Open] = []

    def begin(self, name: str) -> None:
        """Begin a span inside the one that has begun last."""
        entry = _Open(self.found.setdefault(name, Span()), perf_counter())
        if self.traced:
            entry.range = record_function(name)
            entry.range.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(entry)

    def end(self, calls: int = 1) -> float:
        """End the span that has begun last, count it so many times, and return its seconds."""
        entry = self._open.pop()
        if entry.range is not None:
            entry.range.__exit__(None, None, None)
        passed = perf_counter() - entry.start
        entry.span.calls += calls
        entry.span.seconds += passed
        entry.span.own += passed - entry.inside
        if self._open:
            self._open[-1].inside += passed
        return passed

    @contextmanager
    def span(self, name: str, calls: int = 1) -> Iterator[None]:
        """Run the block as a span, which counts so many times."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(calls)

    def wrap(self, name: Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are spans.

        Args:
            name: Returns the span's name at each call.
            function: The function. The result has it as `__wrapped__`.
        """

        def call(*args: Any, **options: Any) -> Any:
            with self.span(name()):
                return function(*args, **options)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    def each(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator that counts each item as a call of the span that waits for it."""
        while True:
            self.begin(name)
            calls = 0
            try:
                item = next(items)
                calls = 1
            except StopIteration:
                return
            finally:
                self.end(calls)
            yield item
