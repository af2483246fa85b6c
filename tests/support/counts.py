"""Counts of the package that its tests hold: `python -m tests.support.counts` prints them."""

from __future__ import annotations

import ast
from pathlib import Path

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent

MEMBERS = {
    ("task/task.py", "TaskModule"): 20,
    ("strategies/base.py", "Strategy"): 36,
    ("callbacks/base.py", "Callback"): 26,
}
"""The classes that users subclass, and the most public members of each; those inherited do not count."""

CONDITIONS = 6
"""The most conditions in `Engine.accumulate`."""


def class_of(path: str, name: str) -> ast.ClassDef:
    """Return the syntax tree of a class."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


def public_members(owner: ast.ClassDef) -> set[str]:
    """Return the names that a class defines without an underscore."""
    named: set[str] = {each.name for each in owner.body if isinstance(each, ast.FunctionDef)}
    named |= {ast.unparse(each.target) for each in owner.body if isinstance(each, ast.AnnAssign)}
    plain = (each for each in owner.body if isinstance(each, ast.Assign))
    # A name of another library's that is answered with ours is no member.
    named |= {
        ast.unparse(at) for each in plain if "Elsewhere(" not in ast.unparse(each) for at in each.targets
    }
    return {name for name in named if not name.startswith("_")}


def conditions_in(path: str, owner: str, method: str) -> int:
    """Return the number of `if` statements, conditional expressions and `while` loops of a method."""
    body = next(each for each in class_of(path, owner).body if getattr(each, "name", "") == method)
    return sum(isinstance(each, (ast.If, ast.IfExp, ast.While)) for each in ast.walk(body))


def lines_by_layer() -> dict[str, int]:
    """Return the lines of each folder of the package."""
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        layer = path.relative_to(PACKAGE).parts[0]
        found[layer] = found.get(layer, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items()))


def main() -> None:
    """Print the counts."""
    for (path, name), most in MEMBERS.items():
        members = sorted(public_members(class_of(path, name)))
        print(f"{name}: {len(members)} public members of at most {most}: {', '.join(members)}")
    found = conditions_in("engine/engine.py", "Engine", "accumulate")
    print(f"Engine.accumulate: {found} conditions of at most {CONDITIONS}")
    lines = lines_by_layer()
    without = sum(lines.values()) - lines["integrations"]
    print(f"{sum(lines.values())} lines, {without} without integrations: {lines}")


if __name__ == "__main__":
    main()
