"""Values in the names of checkpoint directories: `CheckpointConfig(name=...)`."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from drivetrain.core.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+-]")
"""Characters that some file system or object store refuses in a name."""

_LONGEST = 100

_FORMATTER = string.Formatter()


def check_name(template: object) -> None:
    """Check a template, such as "loss={validation/loss:.3f}".

    The number of steps begins each name, so that names sort by it and two of them never collide.
    """
    what = f"CheckpointConfig: name={template!r}"
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{what} must be a text such as 'loss={{validation/loss:.3f}}', or None")
    try:
        text = _render(template, dict.fromkeys(metrics_of(template), 0.0), 0)
        literals = "".join(each[0] for each in _FORMATTER.parse(template))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{what} is malformed: {error}. A value is a name in braces, with a format after a colon:"
            " {epoch:02d}, {validation/loss:.3f}"
        ) from error
    # A "." would allow ".bad", which marks damaged checkpoints; in a value it has digits around it.
    if "." in literals or _UNSAFE.search(text) or len(text) > _LONGEST:
        raise ConfigError(
            f"{what} adds {text!r} to the name step-00000048. Add at most {_LONGEST} letters, digits and"
            " '_=+-', and values in braces"
        )
    if counted := {"step", "steps"}.intersection(metrics_of(template)):
        raise ConfigError(f"{what}: leave out {{{counted.pop()}}}: each name begins with the step's number")


def metrics_of(template: str | None) -> list[str]:
    """Return the names of the metrics in a template; none for None."""
    fields = (name for _, name, _, _ in _FORMATTER.parse(template or ""))
    return [name for name in fields if name is not None and name != "epoch"]


def rendered_name(template: str | None, metrics: Mapping[str, float], epoch: int) -> str:
    """Return what a template adds to the name of a checkpoint's directory, with a "-" before it."""
    if template is None:
        return ""
    return f"-{_UNSAFE.sub('_', _render(template, metrics, epoch))[:_LONGEST]}"


def _render(template: str, metrics: Mapping[str, float], epoch: int) -> str:
    text = ""
    for literal, name, spec, conversion in _FORMATTER.parse(template):
        text += literal
        if name is None:
            continue
        if not name or conversion or "{" in (spec or ""):
            raise ValueError("a pair of braces must have a name, and at most a format")
        if name == "epoch":
            text += format(epoch, spec or "")
        else:
            text += format(metrics[name], spec or ".4g") if name in metrics else "none"
    return text
