"""Which names the methods of a class read from `self` and set on it, as their source says."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """The names in one method.

    Attributes:
        read: The attributes of `self` that it reads.
        of_accelerator: The attributes of `self.accelerator` that it reads.
        of_anything: The attributes of any object that it reads.
        divisors: The attributes of any object that it divides by.
        assigned: The attributes of `self` that it sets.
        texts: All strings in it, among them those that it gives `hasattr`.
        calls: The functions that it calls by their bare names, such as "setattr".
        catches: Whether it catches an AttributeError.
    """

    read: frozenset[str]
    of_accelerator: frozenset[str]
    of_anything: frozenset[str]
    divisors: frozenset[str]
    assigned: frozenset[str]
    texts: frozenset[str]
    calls: frozenset[str]
    catches: bool


def names_in(kind: type) -> Iterator[tuple[str, Names]]:
    """Yield each method that a class defines itself and whose source is known, by its name."""
    files: dict[str, dict[int, ast.FunctionDef]] = {}
    for name, value in vars(kind).items():
        if isinstance(value, staticmethod):
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if code is None:
            continue
        if code.co_filename not in files:
            files[code.co_filename] = _functions_in(code.co_filename)
        tree = files[code.co_filename].get(code.co_firstlineno)
        if tree is not None and tree.args.args:
            yield name, _names(tree, tree.args.args[0].arg)


def _functions_in(path: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a file by their first lines; none if there is no source.

    `inspect.getsource` would search all modules for each function.
    """
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(path)))))
    except SyntaxError:  # a cell of a notebook with a command in it
        return {}
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef)]
    return {min([each.lineno, *(above.lineno for above in each.decorator_list)]): each for each in functions}


def _names(tree: ast.FunctionDef, own: str) -> Names:
    def is_own(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == own

    nodes = list(_outside_of_classes(tree))
    attributes = [each for each in nodes if isinstance(each, ast.Attribute)]
    loaded = [each for each in attributes if isinstance(each.ctx, ast.Load)]
    return Names(
        read=frozenset(each.attr for each in loaded if is_own(each.value)),
        of_accelerator=frozenset(
            each.attr
            for each in loaded
            if isinstance(each.value, ast.Attribute)
            and each.value.attr == "accelerator"
            and is_own(each.value.value)
        ),
        of_anything=frozenset(each.attr for each in loaded),
        divisors=frozenset(filter(None, map(_divisor, nodes))),
        assigned=frozenset(
            each.attr for each in attributes if isinstance(each.ctx, ast.Store) and is_own(each.value)
        ),
        texts=frozenset(
            each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ),
        calls=frozenset(
            each.func.id for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        ),
        catches=any(isinstance(each, ast.ExceptHandler) and _is_caught(each) for each in nodes),
    )


def _divisor(node: ast.AST) -> str | None:
    """Return the attribute that an expression or a statement divides by, if it does."""
    if not (isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)):
        return None
    by = node.right if isinstance(node, ast.BinOp) else node.value
    return by.attr if isinstance(by, ast.Attribute) else None


def _outside_of_classes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of classes in it, which have a `self` of their own."""
    yield tree
    for each in ast.iter_child_nodes(tree):
        if not isinstance(each, ast.ClassDef):
            yield from _outside_of_classes(each)


def _is_caught(handler: ast.ExceptHandler) -> bool:
    caught = "" if handler.type is None else ast.unparse(handler.type)
    return not caught or "AttributeError" in caught or caught in ("Exception", "BaseException")
