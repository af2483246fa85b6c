"""The client of the Hub, and error messages without its token."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from drivetrain.core.errors import (
    HIDDEN,
    ConfigError,
    DrivetrainError,
    MissingDependencyError,
    without_secrets,
)
from drivetrain.core.registry import is_installed
from drivetrain.core.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY = re.compile(r"(\w[\w.-]{0,95}/)?\w([\w.-]{0,94}\w)?", re.ASCII)
"""A repository's name on the Hub."""


class HubError(DrivetrainError):
    """The Hub could not be reached, or refused a request.

    Args:
        what: The action that failed.
        reason: Why; without secrets.

    Attributes:
        reason: The reason that was given.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type[HubError], tuple[str, str]]:
        """Pickle by the constructor's arguments: errors travel between processes."""
        return type(self), (str(self).removesuffix(f": {self.reason}"), self.reason)


def check_installed(purpose: str) -> None:
    """Check that the Hub's client is installed.

    Raises:
        MissingDependencyError: It is not.
    """
    if not is_installed("huggingface_hub"):
        raise MissingDependencyError("huggingface_hub", "hub", purpose)


def check_repository(name: str) -> str:
    """Return the name of a repository after a check.

    Raises:
        ConfigError: It is no name that the Hub allows.
    """
    if not isinstance(name, str) or not REPOSITORY.fullmatch(name) or "--" in name or ".." in name:
        raise ConfigError(
            f"the repository {name!r} is no name on the Hub. Give it as 'organisation/name', of letters,"
            " digits, '-', '_' and '.'"
        )
    return name


def known_token(given: str | None = None) -> str | None:
    """Return the token: the given one, else that of `HF_TOKEN` or of `hf auth login`."""
    from huggingface_hub import get_token

    return given or get_token()


def client(token: str | None) -> HfApi:
    """Return a client of the Hub at `HF_ENDPOINT`."""
    from huggingface_hub import HfApi

    return HfApi(
        endpoint=os.environ.get("HF_ENDPOINT") or None,
        token=token,
        library_name="drivetrain",
        library_version=__version__,
    )


def without_token(text: str, token: str | None) -> str:
    """Return a text with the token, and all that looks like a secret, replaced by `<hidden>`."""
    if token is not None and token.strip():
        for each in (token.strip(), repr(token)[1:-1]):  # as it is, and as an error quotes it
            text = text.replace(each, HIDDEN)
    return without_secrets(text)


def words_of(error: BaseException, token: str | None) -> str:
    """Return the causes of an error on one line, without secrets."""
    told: list[str] = []
    each: BaseException | None = error
    while each is not None and len(told) < 3:
        words = " ".join(str(each).split())
        told.append(f"{type(each).__name__}: {words}" if words else type(each).__name__)
        each = each.__cause__
    return without_token("; caused by ".join(told), token)
