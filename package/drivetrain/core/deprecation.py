"""Deprecation: public names and arguments that still work and are to go. CONTRIBUTING.md has the policy."""

from __future__ import annotations

import warnings


def deprecated(what: str, instead: str, *, since: str, removed_in: str, stacklevel: int = 2) -> None:
    """Warn that a public name or argument will go.

    Call it where the old name is used, and then do what the old name did. A test fails when the package has
    reached the version `removed_in` and the call is still there.

    Args:
        what: The old name as a user writes it, such as "Trainer(epochs=)".
        instead: What to write in its place, such as "max_epochs=".
        since: The first version that warns.
        removed_in: The version without the old name: two minor versions after `since`, or later.
        stacklevel: As in `warnings.warn`: 2 is the line that called the caller of this function.

    Warns:
        FutureWarning: Always. Python shows it by default wherever the call is, unlike a DeprecationWarning.
    """
    warnings.warn(
        f"{what} is deprecated since drivetrain {since}, and {removed_in} removes it. Use {instead}.",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )
