"""Every error that drivetrain raises on purpose.

Each message says what was given, what is allowed and how to fix it. `nearest` finds the name a user most
likely meant, so that no module writes its own spelling help. `shown` makes a text safe to print: without
secrets, and without characters that control a terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

EXIT_REQUEUE = 75
"""The exit code that asks for a restart: `EX_TEMPFAIL` of sysexits.h, "temporary failure; the user is invited
to retry"."""

EXIT_STOPPED = 130
"""The exit code of a program that was asked to stop: 128 plus the number of SIGINT, as in shells."""


HIDDEN = "<hidden>"

_NAMES = r"(?:token|passwd|password|pwd|secret|key|signature|sig|credential)"
_SECRETS = re.compile(
    r"(://[^/:@\s\"]*:)[^\s\"]*(?=@)"  # the password of an address, which may contain "@" itself
    r"|(\bhttps?://)[^/:@\s\"]+(?=@)"  # a token in its place
    rf"|([?&;](?:[\w.~%-]*[_.-])?(?:access|account|api|auth)?{_NAMES}=)[^&;\s\"'#]+"  # signed addresses
    r"|([?&]X-(?:Amz|Goog)-[\w-]+=)[^&;\s\"'#]+"
    r"|(Bearer )[^\s'\"]+"
    r"|\b()hf_[A-Za-z0-9]{8,}",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return a text with the secrets of the addresses in it, and tokens of the Hub, replaced by `<hidden>`.

    `postgresql://user:<hidden>@host` keeps the user. In a query, such as that of a signed address, the values
    of token, password, secret, key, signature, sig, credential and the X-Amz- parameters are hidden.
    """
    return _SECRETS.sub(lambda found: f"{next(filter(None, found.groups()), '')}{HIDDEN}", text)


def repr_without_secrets(value: Any) -> str:
    """Return the `repr` of a data class, without the secrets of the addresses in its fields."""
    given = ", ".join(f"{each.name}={getattr(value, each.name)!r}" for each in fields(value))
    return without_secrets(f"{type(value).__name__}({given})")


def plain(text: str, kept: str = "") -> str:
    """Return a text on one line, with escapes for characters that could control a terminal.

    Args:
        kept: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() or each in kept
        else each.encode("unicode_escape", "surrogatepass").decode("ascii")
        for each in text
    )


def shown(text: str) -> str:
    """Return a text of one or several lines as it may be printed: without secrets and control characters."""
    return plain(without_secrets(text), kept="\n\t")


class DrivetrainError(Exception):
    """Base class of all errors raised by drivetrain. Messages hide the secrets of addresses."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(each) if isinstance(each, str) else each for each in args))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor, whose arguments may be others: errors travel between processes."""
        return _bare, (type(self),), {"args": self.args, **vars(self)}


def _bare(kind: type[DrivetrainError]) -> DrivetrainError:
    return kind.__new__(kind)


class ConfigError(DrivetrainError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class DataError(DrivetrainError):
    """Data that is empty, raises, or has a shape that the task cannot use; names the batch."""


class CheckpointError(DrivetrainError):
    """A checkpoint that cannot be written, found or verified, or that does not fit the task."""


class StrategyError(DrivetrainError):
    """A strategy that cannot run here, or cannot do what was asked of it."""


class RankFailure(DrivetrainError):  # noqa: N818 - the design's public name
    """The first failure among the ranks of a distributed run."""


class Preempted(SystemExit):
    """A run that a signal has stopped, after saving; the batch system should start it again.

    Raised by `fit` after the save. Nobody has to catch it: the program then ends with `code`.

    Attributes:
        reason: The signal that stopped the run.
        code: `EXIT_REQUEUE`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_REQUEUE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class NonFiniteError(DrivetrainError, ArithmeticError):
    """A loss, metric or weight became NaN or infinite; names the step, the rank and the metrics.

    Attributes:
        what: The value that is not finite, and where it came from.
        help: How to fix it.
        step: The step, from 0; None if it is not known.
    """

    def __init__(self, what: str, help: str = "", step: int | None = None) -> None:
        super().__init__(f"{what}. {help}" if help else what)
        self.what, self.help, self.step = what, help, step


class DivergenceError(DrivetrainError, ArithmeticError):
    """The loss has spiked, or spikes again in each step although such steps are skipped; names the steps."""


class MissingDependencyError(DrivetrainError, ImportError):
    """An optional package is not installed; names the extra that brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'drivetrain[{extra}]'"
        )


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint for a wrong name: the closest allowed name, then all of them.

    Args:
        name: The wrong name; case is ignored.
        allowed: All valid names.
    """
    names = sorted(allowed)
    by_lower_case = {each.lower(): each for each in reversed(names)}
    found = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
    close = [name] if name in names else [by_lower_case[each] for each in found]
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Allowed: {', '.join(repr(each) for each in names) or 'none'}."
