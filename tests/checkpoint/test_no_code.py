"""No file can make us run code: nothing on the load path unpickles, evaluates or imports by name."""

import ast
from pathlib import Path

import pytest

import drivetrain.checkpoint

SOURCES = sorted(Path(drivetrain.checkpoint.__file__).parent.glob("**/*.py"))
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "importlib",
    "runpy",
    "yaml",
}
NAMES = {"eval", "exec", "compile", "__import__", "getattr_static"}
ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("torch", "package")}


def forbidden(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ATTRIBUTES:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_source_has_no_way_to_run_a_file(path):
    assert list(forbidden(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_walk_would_find_each_of_them():
    assert len(SOURCES) > 8
    text = (
        "import pickle\nfrom importlib import x\neval('1')\ntorch.load('x')\nnp.load('x', allow_pickle=True)"
    )
    assert len(list(forbidden(ast.parse(text)))) == 6
