"""The house keeps its order: thirteen layers and the integrations above them, imports that only go down, no
circle, and a light import.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.site import site_script

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up: a file imports its own layer and those before it.
LAYERS = [
    "core",
    "distributed",
    "checkpoint",
    "data",
    "task",
    "strategies",
    "engine",
    "loggers",
    "run",
    "callbacks",
    "trainer",
    "testing",
    "cli",
]

ORDER = [*LAYERS, "integrations"]

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
    "huggingface_hub",
    "transformers",
    "peft",
}

# Modules of ours that are imported inside a function: a Trainer that needs no plan, checkpoint or copy of the
# process starts without loading them.
LOADED_WHEN_USED = {
    "callbacks.layers",
    "checkpoint.prediction_files",
    "checkpoint.saving.io",
    "checkpoint.weights.load",
    "checkpoint.weights.warm_start",
    "distributed.group",
    "distributed.launch.forks",
    "engine.own_loop_checkpoint",
    "run.checkpoint",
    "task.stored",
    "trainer.checkpoints",
    "trainer.plan.plan",
}

# Private attributes of other packages' objects, each with the reason why nothing public serves. None of ours
# is here: no object of this package reads another one's.
PRIVATE = {
    # Of torch, modules and tensors.
    "_backward_hooks": "whether a parameter has hooks, for which torch has no public question",
    "_post_accumulate_grad_hooks": "likewise",
    "_buffers": "what a forward leaves is undone without the copies that `buffers()` would make",
    "_non_persistent_buffers_set": "as `_buffers`",
    "_parameters": "a parameter is replaced by its shard or copy, which `register_parameter` refuses",
    "_modules": "a child is replaced in its place and order",
    "_apply": "converts parameters in place, as `Module.to` does",
    "_version": "tells whether a tensor was changed in place since",
    "_cdata": "names a storage, of which several tensors may be views",
    "_nnz": "of a gradient that is not coalesced, `indices()` refuses",
    "_values": "as `_nnz`",
    "_BatchNorm": "the base of all batch norms has no other name",
    "_register_state_dict_hook": "the public one cannot take a shard out",
    "_register_load_state_dict_pre_hook": "as `_register_state_dict_hook`",
    "_forward_hooks": "what a library has hooked on is taken off again",
    # Of torch, optimizers, scaling, functions.
    "_found_inf_per_device": "the overflow of one optimizer, before its step",
    "_per_optimizer_states": "a step that is skipped leaves no state behind",
    "_optimizer_step_pre_hooks": "whether somebody listens to a step; see strategies/stepping.py",
    "_optimizer_step_post_hooks": "as `_optimizer_step_pre_hooks`",
    "_global_optimizer_pre_hooks": "as `_optimizer_step_pre_hooks`",
    "_global_optimizer_post_hooks": "as `_optimizer_step_pre_hooks`",
    "_is_profiler_enabled": "as `_optimizer_step_pre_hooks`",
    "_record_memory_history": "a device's memory over time; torch has no public name for it",
    "_dump_snapshot": "as `_record_memory_history`",
    "_local_scalar_dense": "a number read from the meta device, which has none",
    "_get_default_mps_generator": "torch has no public name for it",
    # Of torch, distributed and compilation.
    "_get_default_store": "the store that the ranks met in",
    "_world": "which back end a group uses",
    "_op_dispatcher": "holds on to a mesh whose group has ended",
    "_dynamo": "compiled modules, and the errors of compiling",
    "_inductor": "the options that `torch.compile` takes",
    "_compiled_call_impl": "whether a module was compiled in place",
    "_C": "holds `_current_graph_task_id`",
    "_current_graph_task_id": "whether a forward is recomputed, inside of a backward",
    "_remove_autograd_hooks": "gradients go to a new wrapper of DDP's, and not to the old one too",
    # Of torch, data.
    "_iterator": "a loader's persistent workers are ended",
    "_on_queue_feeder_error": "a batch that cannot be sent is reported, where Python prints and goes on",
    # torchmetrics
    "_computed": "what was computed from another state is forgotten",
    "_defaults": "the names of a metric's states",
    "_reductions": "how each state is joined over ranks",
    "_to_sync": "the engine synchronises",
    "_update_count": "part of a metric's state that its state dict leaves out",
    # accelerate
    "_models": "what an Accelerator has prepared is let go of",
    "_optimizers": "as `_models`",
    "_shared_state": "the singletons of a process are put back",
    # DeepSpeed
    "_ALL_TO_ALL_GROUP": "a group that has ended must not be used again",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "as `_ALL_TO_ALL_GROUP`",
    "_global_grad_norm": "the norm that was clipped by",
    "_hp_mapping": "where a parameter's float32 copy is",
    # torch_xla
    "_XLAC": "whether the sharding mode is chosen already",
    "_xla_get_spmd_config_is_locked": "as `_XLAC`",
    "_rebuild_full_params": "a step over several backwards gathers once",
    "_register_post_backward_hooks": "as `_rebuild_full_params`",
    "_free_full_params": "as `_rebuild_full_params`",
    "_get_no_batch_dim": "how many dimensions an instance norm's sample has",
    # transformers
    "_attn_implementation": "which attention a model was made with",
    "_pad_tensors_to_max_len": "a script's copy of `prediction_step` calls it",
    # fsspec, argparse, Python
    "_strip_protocol": "an address as a storage itself names it",
    "_get_kwargs_from_urls": "options that stand in an address",
    "_actions": "the arguments of a parser that jsonargparse has made",
    "_current_frames": "where a thread is that does not come back",
    "_getframe": "whether an attribute is asked for by `from drivetrain import`",
}


# Names with an underscore that are public: of named tuples, and of `os`.
NOT_PRIVATE = {"_asdict", "_exit", "_fields", "_make", "_replace"}


class Import(NamedTuple):
    """A module of ours that a file names: in an import anywhere in it, or as a text in a table."""

    module: str
    kind: str  # "top", "types" or "local"; "text"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in FILES}


def only_for_types(tree: ast.Module) -> set[ast.AST]:
    """Everything under `if TYPE_CHECKING:`."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imports(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types, top = only_for_types(tree), set(tree.body)
    for node in ast.walk(tree):
        kind = "types" if node in types else "top" if node in top else "local"
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("drivetrain."):
            package = str(node.module).removeprefix("drivetrain").lstrip(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".lstrip(".")
                yield Import(inner if inner in MODULES else package, kind)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("drivetrain."):
                    yield Import(alias.name.removeprefix("drivetrain."), kind)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = re.fullmatch(r"drivetrain\.([a-z_0-9.]+)(:\w+)?", node.value)
            if named and named[1] in MODULES:
                yield Import(named[1], "text")


def names_for_types(path: Path) -> dict[str, str]:
    """The names of ours that a file imports for type checkers, by the module that has them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module
        for node in only_for_types(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("drivetrain")
        for alias in node.names
    }


def test_the_picture_of_the_layers_is_that_of_the_imports() -> None:
    """`python docs/site/draw_layers.py` writes it."""
    drawer = site_script("draw_layers")
    assert [*drawer.LAYERS][::-1] == LAYERS
    assert drawer.PICTURE.read_text(encoding="utf-8") == drawer.draw()


def test_the_root_holds_the_layers() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert entries == {*ORDER, "__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != PACKAGE], ids=module_name)
def test_imports_only_go_down(path: Path) -> None:
    """Those for types, those in functions and those in lazy tables too; a text may name an integration."""
    name = module_name(path)
    own = ORDER.index(name.split(".")[0])
    for each in imports(path):
        assert each.module, f"{name} imports a name of the package itself, which is above all layers"
        layer = each.module.split(".")[0]
        assert ORDER.index(layer) <= own or (layer == "integrations" and each.kind == "text"), (
            f"{name} imports {each.module}, which is above it"
        )


def test_integrations_do_not_import_one_another() -> None:
    """A text may name one, which is then loaded when an option asks for it."""
    for name, path in MODULES.items():
        if name.startswith("integrations."):
            own = name.split(".")[1]
            others = {
                each.module
                for each in imports(path)
                if each.module.startswith("integrations.") and each.kind != "text"
            }
            assert {each.split(".")[1] for each in others} <= {own}


def test_there_is_no_circle_of_files() -> None:
    graph = {}
    for name, path in MODULES.items():
        if name:
            found = {each.module for each in imports(path)} - {name, ""}
            if path.name == "__init__.py":  # a package's table of its own modules
                found = {each for each in found if not each.startswith(f"{name}.")}
            graph[name] = found
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_a_folder_has_about_twenty_files_at_most() -> None:
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) <= 22, folder


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_object_reads_another_ones_private_attributes(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for owner in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for node in ast.walk(owner):  # another object of the same class is no stranger
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match(
            r"_(?!_|foreach_)", node.attr
        ):  # torch._foreach_add
            continue
        holder = node.value
        if isinstance(holder, ast.Name) and holder.id in ("self", "cls", *own):
            continue
        if isinstance(holder, ast.Call) and isinstance(holder.func, ast.Name) and holder.func.id == "super":
            continue
        assert node.attr in PRIVATE.keys() | NOT_PRIVATE | own, f"line {node.lineno}: {ast.unparse(node)}"


def test_the_list_of_private_attributes_has_no_line_too_many() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    assert [name for name in PRIVATE if f".{name}" not in source] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != PACKAGE], ids=module_name)
def test_what_is_imported_in_a_function_is_on_the_list(path: Path) -> None:
    local = {each.module for each in imports(path) if each.kind == "local"}
    assert module_name(path).startswith("cli") or local <= LOADED_WHEN_USED, local - LOADED_WHEN_USED


@pytest.mark.parametrize(
    "package", ["", ".callbacks", ".checkpoint", ".integrations.hub", ".loggers", ".testing"]
)
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
    assert "engine.engine" in loaded
    unasked = {
        "callbacks.progress_bar",
        "callbacks.summary",
        "checkpoint.saving.manager",
        "checkpoint.storage.remote",
        "checkpoint.weights.warm_start",
        "distributed.group",
        "engine.own_loop_checkpoint",
        "loggers.csv",
        "run.checkpoint",
        "trainer.checkpoints",
        "trainer.plan.plan",
    }
    assert not loaded & unasked


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_heavy_packages_are_imported_inside_functions(path: Path) -> None:
    integrations = PACKAGE / "integrations"
    own = path.relative_to(integrations).parts[0] if path.is_relative_to(integrations) else ""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        heavy = [name for name in names if name.split(".")[0] in OPTIONAL_OR_HEAVY - {own}]
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
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert printed.stdout.strip() == "False"


def test_the_package_does_not_name_the_directory_that_it_was_written_in() -> None:
    for path in FILES:
        assert str(PACKAGE.parents[1]) not in path.read_text(encoding="utf-8"), path
