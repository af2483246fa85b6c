"""Counts of the package that its tests hold: `python -m tests.support.counts` prints them."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent

BUDGET: dict[str, Any] = tomllib.loads((PACKAGE.parent / "budget.toml").read_text(encoding="utf-8"))
"""The code lines that a layer may have, and the functions that are still more complex than allowed."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert)

MEMBERS = {
    ("task/task.py", "TaskModule"): 20,
    ("strategies/base.py", "Strategy"): 36,
    ("callbacks/base.py", "Callback"): 26,
}
"""The classes that users subclass, and the most public members of each; those inherited do not count."""

CONDITIONS = 6
"""The most conditions in `Engine.accumulate`."""


def class_of(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    return next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)


def public_members(owner: ast.ClassDef) -> set[str]:
    named: set[str] = {each.name for each in owner.body if isinstance(each, ast.FunctionDef)}
    named |= {ast.unparse(each.target) for each in owner.body if isinstance(each, ast.AnnAssign)}
    plain = (each for each in owner.body if isinstance(each, ast.Assign))
    # A name of another library's that is answered with ours is no member.
    named |= {
        ast.unparse(at) for each in plain if "Elsewhere(" not in ast.unparse(each) for at in each.targets
    }
    return {name for name in named if not name.startswith("_")}


def conditions_in(path: str, owner: str, method: str) -> int:
    body = next(each for each in class_of(path, owner).body if getattr(each, "name", "") == method)
    return sum(isinstance(each, (ast.If, ast.IfExp, ast.While)) for each in ast.walk(body))


def code_lines(text: str) -> int:
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in ("", "#")}
    rest: list[Any] = [ast.parse(text)]
    while rest:
        node = rest.pop()
        rest += [each for each in node.body if isinstance(each, _DOCUMENTED)]
        for each in node.body:
            if isinstance(each, ast.Expr) and isinstance(getattr(each.value, "value", None), str):
                lines.difference_update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return len(lines)


def lines_by_layer() -> dict[str, int]:
    """Return the code lines of each layer; the strategies with a back end of their own count apart."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        is_back_end = parts[:2] in {("strategies", each) for each in ("deepspeed", "xla", "accelerate")}
        layer = "back_ends" if is_back_end and len(parts) > 2 else parts[0] if len(parts) > 1 else "root"
        found[layer] += code_lines(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def complexity(function: ast.AST) -> int:
    """Return the number of a function by McCabe (1976), without those of functions in it."""
    count, rest = 1, list(ast.iter_child_nodes(function))
    while rest:
        node = rest.pop()
        if isinstance(node, (*_DOCUMENTED, ast.Lambda)):
            continue
        count += isinstance(node, _BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.cases) if isinstance(node, ast.Match) else 0
        rest += ast.iter_child_nodes(node)
    return count


def complex_functions(most: int) -> Iterator[tuple[str, int]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("integrations/"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and complexity(node) > most:
                    yield f"{name} {node.name}", complexity(node)


def main() -> None:
    """Print the counts."""
    for (path, name), most in MEMBERS.items():
        members = sorted(public_members(class_of(path, name)))
        print(f"{name}: {len(members)} public members of at most {most}: {', '.join(members)}")
    count = conditions_in("engine/engine.py", "Engine", "accumulate")
    print(f"Engine.accumulate: {count} conditions of at most {CONDITIONS}")
    lines = lines_by_layer()
    without = sum(lines.values()) - lines["integrations"]
    print(f"{sum(lines.values())} code lines, {without} without integrations")
    print("[code_lines]", *(f"{layer} = {count}" for layer, count in lines.items()), sep="\n")
    found = dict(complex_functions(BUDGET["complexity"]["most"]))
    print("functions that are too complex:", *(f'    "{name}",' for name in found), sep="\n")


if __name__ == "__main__":
    main()
