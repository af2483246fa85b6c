"""The public API as stored in public_api.txt, which `python tests/test_public_api.py` writes."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import drivetrain

PACKAGES = [
    "callbacks",
    "checkpoint",
    "data",
    "distributed",
    "errors",
    "loggers",
    "losses",
    "metrics",
    "optim",
    "strategies",
]
PACKAGES += ["task", "testing", "trainer"]
SNAPSHOT = Path(__file__).parent / "public_api.txt"


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing))
    except (TypeError, ValueError):
        return ""


def _members(kind: type) -> list[str]:
    lines = []
    for name in sorted(dir(kind)):
        if name.startswith("_") or not hasattr(kind, name):
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None or not owner.__module__.startswith("drivetrain"):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property):
            lines.append(f"    {name}: property")
        elif callable(getattr(kind, name)):
            lines.append(f"    {name}{_signature(getattr(kind, name))}")
        else:
            lines.append(f"    {name}")
    return lines


def describe() -> str:  # every public name with its signature and, for classes, its public members
    lines = []
    for name in sorted(drivetrain.__all__):
        if name == "__version__":
            continue
        value = getattr(drivetrain, name)
        lines.append(f"{name}{_signature(value)}")
        if isinstance(value, type):
            lines += _members(value)
    for package in PACKAGES:
        public = importlib.import_module(f"drivetrain.{package}")
        lines += [f"{package}.{name}" for name in sorted(public.__all__)]
    return "\n".join(lines) + "\n"


def test_the_public_names_are_those_of_the_snapshot() -> None:
    stored = SNAPSHOT.read_text(encoding="utf-8")
    assert describe() == stored, "if the change is meant, run python tests/test_public_api.py"


def test_every_public_name_is_loaded_and_documented() -> None:
    for name in drivetrain.__all__:
        if name != "__version__":
            assert inspect.getdoc(getattr(drivetrain, name)), f"{name} has no docstring"


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), encoding="utf-8")
