"""No file can make us run code: nothing on a load path unpickles, evaluates or imports by name.

The source is walked, all of the package, because nearly all of it lies on a load path: a run takes its state
over in every part. What a walk cannot see is tried by `test_hostile.py`.
"""

import ast
from pathlib import Path

import pytest

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

MODULES = {
    "_pickle",
    "builtins",
    "cPickle",
    "cloudpickle",
    "code",
    "copyreg",
    "dill",
    "importlib",
    "joblib",
    "marshal",
    "pickle",
    "pkgutil",
    "runpy",
    "shelve",
    "yaml",
}
NAMES = {"__builtins__", "__import__", "compile", "eval", "exec", "getattr_static", "get_type_hints"}
ATTRIBUTES = {
    ("np", "load"),
    ("numpy", "load"),
    ("torch", "hub"),
    ("torch", "jit"),
    ("torch", "load"),
    ("torch", "package"),
    ("torch", "save"),
    ("typing", "get_type_hints"),
}
# The storage of torch.distributed.checkpoint unpickles; its planners, which we use, read no files.
PLANNERS = {"default_planner", "metadata", "planner"}

# Each with the reason why no file says what is run or imported there.
ALLOWED = {
    "core/lazy.py": ["importlib"],  # the packages' own tables of names; see the test of them below
    "core/registry.py": [
        "importlib",
        "importlib.metadata",
        "importlib.util",
    ],  # rows, ours and others'
    "task/stored.py": ["typing.get_type_hints"],  # of annotations in the code
    "checkpoint/formats.py": ["importlib"],  # the modules of a fixed table of formats
    "checkpoint/weights/export_torch.py": ["torch.save"],  # on request, for programs that read no other
    "cli/checkpoint/actions.py": ["importlib"],  # one integration of ours, for the command `push`
    "cli/environment.py": ["importlib.metadata"],  # versions of a fixed list of packages
    "cli/references.py": ["importlib"],  # what the user names on the command line
    # annotations in the code; YAML that the user names, by its safe loader
    "cli/settings.py": ["get_type_hints", "typing.get_type_hints", "yaml"],
    "cli/settings_tree.py": ["yaml"],
    "cli/main.py": ["importlib"],  # the modules of a fixed list of commands
    "integrations/transformers/arguments.py": ["importlib"],  # one integration of ours, by a fixed name
    "integrations/transformers/script/trainer.py": ["importlib"],  # likewise
    # annotations in the code of transformers
    "integrations/transformers/arguments_values.py": ["get_type_hints", "typing.get_type_hints"],
    "testing/resume/program.py": ["runpy"],  # the program that the user names on the command line
}


def forbidden(tree):
    """What in a source could run, or import, what a file says."""
    own = {  # a parameter that has the name of a builtin
        name
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for each in ast.walk(function.args)
        if isinstance(each, ast.arg) and each.arg in NAMES
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and name.id == each.arg
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if _is_forbidden(module):
                yield module
            full = ((module, alias.name) for alias in node.names)
            yield from (".".join(each) for each in full if each in ATTRIBUTES)
        elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
            if node not in own:
                yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ATTRIBUTES:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield "allow_pickle"


def _is_forbidden(module):
    names = module.split(".")
    storage = names[:3] == ["torch", "distributed", "checkpoint"] and not set(names[3:]) & PLANNERS
    return names[0] in MODULES or storage


def test_the_source_has_no_way_to_run_a_file():
    found = {
        name: sorted(set(forbidden(ast.parse(path.read_text(encoding="utf-8")))))
        for name, path in SOURCES.items()
    }
    assert {name: ways for name, ways in found.items() if ways} == ALLOWED


def imported(name):
    """The files of ours that one of them imports."""
    for node in ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drivetrain":
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("drivetrain.")]
        for module in modules:
            path = "/".join(module.split(".")[1:])
            yield from {f"{path}.py", f"{path}/__init__.py"} & SOURCES.keys()


def reached(*names):
    """The files that some of them import, directly or not, themselves included."""
    found, rest = set(), list(names)
    while rest:
        name = rest.pop()
        if name not in found:
            found.add(name)
            rest += imported(name)
    return found


def test_what_may_import_by_name_is_on_no_load_path():
    path = reached(
        "engine/engine.py",
        "engine/own_loop_checkpoint.py",
        "run/checkpoint.py",
        "task/stored.py",
        "task/task.py",
        "trainer/trainer.py",
        *(name for name in SOURCES if name.startswith("checkpoint/")),
    )
    assert len(path) > 80
    assert {name for name in ALLOWED if name in path} == {
        "core/lazy.py",
        "core/registry.py",
        "task/stored.py",
        "checkpoint/formats.py",
        "checkpoint/weights/export_torch.py",
    }
    assert not [name for name in path if name.startswith(("cli/", "testing/"))]


def tables():
    """What each file gives `exports`: a package's own name, and its table as it stands in the source."""
    for name, path in SOURCES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exports":
                package, table = node.args
                if isinstance(table, ast.Name):  # assigned once, at the top
                    (table,) = [
                        each.value
                        for each in ast.walk(tree)
                        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == table.id
                    ]
                yield name, ast.unparse(package), ast.literal_eval(table)


def test_what_is_loaded_lazily_is_ours_and_stands_in_the_source():
    """So whatever name is asked of such a package, nothing but modules of ours can be loaded by it."""
    found = list(tables())
    assert {name for name, _, _ in found} == {
        "__init__.py",
        "callbacks/__init__.py",
        "checkpoint/__init__.py",
        "integrations/hub/__init__.py",
        "integrations/lightning/__init__.py",
        "integrations/transformers/__init__.py",
        "loggers/__init__.py",
        "testing/__init__.py",
    }
    for _, package, table in found:
        assert package == "__name__"
        for module in table:
            path = "/".join(module.split(".")[1:])
            assert module.startswith("drivetrain.")
            assert {f"{path}.py", f"{path}/__init__.py"} & SOURCES.keys()
    users = {name for name, path in SOURCES.items() if "exports(" in path.read_text(encoding="utf-8")}
    assert users == {name for name, _, _ in found} | {"core/lazy.py"}


def test_what_reads_a_checkpoint_knows_no_registry():
    """By a registry's rows a name becomes a module; no name out of a file gets there on the way in."""
    reading = reached("task/stored.py", *(name for name in SOURCES if name.startswith("checkpoint/")))
    assert "core/registry.py" not in reading


def test_what_writes_a_pickle_is_not_on_a_load_path():
    """Only the package itself, and the command that is told to write one, name the module."""
    using = {name for name in SOURCES if "checkpoint/weights/export_torch.py" in imported(name)}
    assert using <= {"checkpoint/__init__.py", "cli/checkpoint/actions.py"}
    assert "checkpoint/__init__.py" in using


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import importlib.util as x",
        "from importlib import import_module",
        "from torch import load",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint as dcp",
        "eval('1')",
        "run = exec",
        "def f(eval): pass\neval('1')",
        "__builtins__['eval']",
        "torch.load('x')",
        "torch.jit.load('x')",
        "np.load('x')",
        "load('x', allow_pickle=True)",
    ],
)
def test_the_walk_finds_it(text):
    assert len(list(forbidden(ast.parse(text)))) == 1


def test_the_walk_lets_a_parameter_be():
    assert not list(forbidden(ast.parse("def f(compile=False):\n    return compile\nx = a.compile()")))
