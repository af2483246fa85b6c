"""No file can make us run code: nothing unpickles, evaluates or imports by name. See `test_hostile.py`."""

import ast
from pathlib import Path

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in SOURCES.items()}
NODES = {name: list(ast.walk(ast.parse(text))) for name, text in TEXTS.items()}

MODULES = {"_pickle", "builtins", "cPickle", "cloudpickle", "code", "copyreg", "dill", "importlib", "joblib"}
MODULES |= {"marshal", "pickle", "pkgutil", "runpy", "shelve", "yaml"}
NAMES = {"__builtins__", "__import__", "compile", "eval", "exec", "getattr_static", "get_type_hints"}
ATTRIBUTES = {("torch", name) for name in ("hub", "jit", "load", "package", "save")}
ATTRIBUTES |= {("np", "load"), ("numpy", "load"), ("typing", "get_type_hints")}
# The storage of torch.distributed.checkpoint unpickles; its planners, which we use, read no files.
PLANNERS = {"default_planner", "metadata", "planner"}

# Each with the reason why no file says what is run or imported there; the first five are on a load path.
KNOWN = {
    "core/lazy.py": ["importlib"],  # the packages' own tables of names
    "core/public.py": ["importlib", "pkgutil"],  # our own modules, by a fixed table
    "core/synonyms.py": ["importlib"],  # the data file beside it
    "core/registry.py": ["importlib", "importlib.metadata", "importlib.util"],  # rows, ours and others'
    "task/attribute_state.py": ["pickle"],  # what pickle would store of an object, for a digest of it
    "task/stored.py": ["typing.get_type_hints"],  # of annotations in the code
    # by `weights_only=True` alone; the error that it raises
    "checkpoint/weights/torch_files.py": ["pickle", "torch.load"],
    "distributed/launch/calls.py": ["pickle"],  # what a child sends through a pipe of its own
    "checkpoint/formats.py": ["importlib"],  # the modules of a fixed table of formats
    "cli/checkpoint/actions.py": ["torch.save"],  # on request, for programs that read no other format
    "cli/checkpoint/arguments.py": ["importlib"],  # the modules of a fixed list of commands
    "cli/references.py": ["importlib"],  # what the user names on the command line
    "cli/arguments.py": ["yaml"],  # lists and mappings in the words of a command line, by its safe loaders
    # annotations in the code; YAML that the user names, by its safe loader
    "cli/settings.py": ["get_type_hints", "typing.get_type_hints", "yaml"],
    "cli/settings_tree.py": ["yaml"],
    "cli/main.py": ["importlib"],  # the modules of a fixed list of commands
    "cli/new.py": ["importlib", "importlib.util"],  # the files of a new project; whether its name is free
    "cli/parser.py": ["importlib"],  # the examples of the help, beside it
    "cli/runs.py": ["importlib"],  # the report, by a fixed name
    "integrations/optuna/command.py": ["importlib"],  # likewise
    "integrations/trackers/mlflow_model.py": ["cloudpickle"],  # writes MLflow's format of a model, by choice
    "integrations/transformers/__main__.py": ["runpy"],  # the script that the user names
    "integrations/transformers/script/replacing.py": ["importlib"],  # transformers, by a fixed name
    "run/record.py": ["importlib.metadata"],  # versions
    "integrations/transformers/arguments.py": ["importlib"],  # one integration of ours, by a fixed name
    "integrations/transformers/script/trainer.py": ["importlib"],  # likewise
    # writes, and never reads, the files of a folder checkpoint-N that transformers' own Trainer goes on from
    "integrations/transformers/script/their_files.py": ["torch.save"],
    # annotations in the code of transformers
    "integrations/transformers/arguments_values.py": ["get_type_hints", "typing.get_type_hints"],
    "testing/resume/program.py": ["runpy"],  # the program that the user names on the command line
}


def is_forbidden(module):
    names = module.split(".")
    storage = names[:3] == ["torch", "distributed", "checkpoint"] and not set(names[3:]) & PLANNERS
    return names[0] in MODULES or storage


def forbidden(nodes):  # what in a source could run, or import, what a file says
    own = {  # a parameter that has the name of a builtin
        name
        for function in nodes
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for each in ast.walk(function.args)
        if isinstance(each, ast.arg) and each.arg in NAMES
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and name.id == each.arg
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_forbidden(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if is_forbidden(module):
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


def test_the_source_has_no_way_to_run_a_file():
    for node in NODES["checkpoint/weights/torch_files.py"]:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in map(ast.unparse, node.keywords)
    found = {name: sorted(set(forbidden(nodes))) for name, nodes in NODES.items()}
    assert {name: ways for name, ways in found.items() if ways} == KNOWN
