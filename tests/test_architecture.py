"""The house keeps its order: imports go down, and importing the package stays light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A module may import what stands in its own layer or below; the longest matching prefix
# counts. Storage stands below the task, not above it as the first drawing had it, because
# `TaskModule.from_checkpoint` reads a file.
LAYERS: list[set[str]] = [
    {
        "version",
        "errors",
        "registry",
        "progress",
        "types",
        "containers",
        "options",
        "synonyms",
        "hooks",
        "mps_fallback",
        "lazy",
        "later",
        "observing",
    },
    {"distributed"},
    {"checkpoint", "streams", "module_state"},
    {
        "stored_task",
        "task_arguments",
        "renaming",
        "out_of_memory",
        "foreign",
        "warm_start",
        "precision",
        "tf32",
        "float8",
        "step_output",
        "metrics",
        "metric_states",
        "declared_metrics",
        "data",
    },
    {
        "schedules",
        "parameter_groups",
        "muon",
        "quantized_optimizers",
        "optimizer_state",
        "optimizer_config",
        "optim",
        "weight_updates",
    },
    {"blocks", "forwards", "task", "compiling"},
    {"strategies"},
    {
        "updates",
        "update_gate",
        "placeholder",
        "window",
        "generator_step",
        "kept_buffers",
        "micro_batch",
        "agreement",
        "native",
        "offloading",
        "gradient_release",
        "memory_use",
        "memory",
        "engine_state",
        "engine",
    },
    {"imported_state", "run_state", "save_errors", "nonfinite", "ledger", "runs", "run"},
    {"arguments", "loop", "preemption", "token_weight"},
    {"callbacks", "loggers"},
    {
        "paths",
        "prediction_files",
        "boundary",
        "feeds",
        "assembly",
        "run_checkpoints",
        "plan",
        "plan_conflicts",
        "plan_counts",
        "plan_optimizers",
        "trainer",
    },
    {"cli", "testing", "__main__"},
]
OPTIONAL_OR_HEAVY = {
    "fsspec",
    "s3fs",
    "tqdm",
    "tensorboard",
    "torchmetrics",
    "sklearn",
    "deepspeed",
    "accelerate",
    "torch_xla",
    "torchao",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for number, names in enumerate(LAYERS):
        if top in names:
            return number
    raise AssertionError(f"drivetrain.{module} stands in no layer; add it to LAYERS")


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of ours that a file imports when it runs, and whether at the top of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = only_for_types(tree)
    top = set(tree.body)
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "drivetrain":
            for alias in node.names:
                yield alias.name, node in top
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("drivetrain"):
            yield node.module.removeprefix("drivetrain").lstrip("."), node in top
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("drivetrain."):
                    yield alias.name.removeprefix("drivetrain."), node in top


def names_for_types(path: Path) -> dict[str, str]:
    """The names of ours that a file imports for type checkers, by the module that has them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module
        for node in only_for_types(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("drivetrain")
        for alias in node.names
    }


def used_later(path: Path) -> set[str]:
    """The names that a file uses as `later.name`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "later"
    }


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_go_down(path: Path) -> None:
    name = module_name(path)
    if not name:  # the package itself names everything, lazily
        return
    homes = names_for_types(PACKAGE / "later.py")
    loaded_later = [homes[used].removeprefix("drivetrain.") for used in used_later(path)]
    for imported in (*(imported for imported, _ in imports(path)), *loaded_later):
        assert layer_of(imported) <= layer_of(name), f"{name} imports {imported}, which stands above it"


def test_what_is_loaded_later_is_used_and_not_imported() -> None:
    names = names_for_types(PACKAGE / "later.py")
    used = {path: used_later(path) for path in FILES}
    assert set().union(*used.values()) == set(names)
    for path in FILES:
        eager = {imported for imported, at_top in imports(path) if at_top}
        assert not eager & {names[name].removeprefix("drivetrain.") for name in used[path]}, path
        assert "from drivetrain.later import" not in path.read_text(encoding="utf-8") or path.stem == "later"


@pytest.mark.parametrize("package", ["", ".callbacks", ".checkpoint", ".later", ".loggers", ".testing"])
def test_lazy_packages_export_what_type_checkers_see(package: str) -> None:
    exporting = importlib.import_module(f"drivetrain{package}")
    assert exporting.__file__ is not None
    seen = names_for_types(Path(exporting.__file__))
    assert sorted(seen) == sorted(set(exporting.__all__) - {"__version__"})
    for name, module in seen.items():
        assert getattr(exporting, name) is getattr(importlib.import_module(module), name)
        assert name in dir(exporting)
    with pytest.raises(AttributeError, match=r"has no 'Chekpoint'\. .*Allowed: "):
        _ = exporting.Chekpoint


def test_a_bare_trainer_loads_nothing_of_what_it_does_not_do() -> None:
    """Plans, checkpoints, weights of elsewhere and object stores: those who ask for them load them."""
    program = (
        "import sys, drivetrain; drivetrain.TaskModule, drivetrain.Callback;"
        " drivetrain.Trainer(max_steps=1, checkpoint=False, loggers=(), progress_bar=False);"
        " print([name for name in sys.modules if name.startswith('drivetrain.')])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    loaded = {name.removeprefix("drivetrain.") for name in ast.literal_eval(printed)}
    assert "engine" in loaded
    unasked = {
        "callbacks.progress_bar",
        "callbacks.summary",
        "checkpoint.format",
        "checkpoint.manager",
        "checkpoint.remote",
        "distributed.group",
        "loggers.csv",
        "plan",
        "run_checkpoints",
        "warm_start",
    }
    assert not loaded & unasked


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_function_local_imports_are_for_optional_packages_only(path: Path) -> None:
    if module_name(path) in (
        "",
        "cli.main",
    ):  # lazy by purpose: a package's names, a command that was not asked for
        return
    local = [imported for imported, at_top in imports(path) if not at_top]
    assert not local or module_name(path).startswith("cli"), f"imports inside functions: {local}"


def test_there_are_no_import_cycles() -> None:
    graph = {
        module_name(path): {i for i, at_top in imports(path) if at_top} for path in FILES if module_name(path)
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module in done:
            return
        for imported in graph.get(module, ()):
            if imported != module:
                visit(imported, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_heavy_packages_are_imported_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        heavy = [name for name in names if name.split(".")[0] in OPTIONAL_OR_HEAVY]
        assert not heavy, f"{path.name} imports {heavy} when it is imported"


def test_importing_everything_public_loads_no_heavy_package() -> None:
    """Compared with a bare import of torch, which brings some of them by itself."""
    program = (
        "import sys, torch; before = set(sys.modules); import drivetrain; "
        "[getattr(drivetrain, name) for name in drivetrain.__all__]; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    loaded = set(ast.literal_eval(printed))
    assert "drivetrain" in loaded
    assert not loaded & OPTIONAL_OR_HEAVY, loaded & OPTIONAL_OR_HEAVY


def test_importing_the_package_alone_does_not_even_load_torch() -> None:
    program = "import sys, drivetrain; print('torch' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout.strip() == "False"


def test_the_package_does_not_name_the_directory_that_it_was_written_in() -> None:
    for path in FILES:
        assert str(PACKAGE.parents[1]) not in path.read_text(encoding="utf-8"), path
