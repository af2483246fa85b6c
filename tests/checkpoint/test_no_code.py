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
# Written on request only, for programs that read nothing else; no code of ours reads it.
ALLOWED = {"torch_file.py": ["torch.save"]}


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
    found = list(forbidden(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == ALLOWED.get(path.name, [])


def test_what_writes_a_pickle_is_not_on_the_load_path():
    """Only the package itself names the module; none of those that read does."""
    using = {
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "drivetrain.checkpoint.torch_file"
    }
    assert using == {"__init__.py"}


def test_the_walk_would_find_each_of_them():
    assert len(SOURCES) > 8
    text = (
        "import pickle\nfrom importlib import x\neval('1')\ntorch.load('x')\nnp.load('x', allow_pickle=True)"
    )
    assert len(list(forbidden(ast.parse(text)))) == 6
