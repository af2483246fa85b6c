"""The layers: imports that only go down, no circle, a light import; and tests shorter than the package."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.counts import BUDGET as SIZES
from tests.support.counts import (
    CONDITIONS,
    MEMBERS,
    class_of,
    complex_functions,
    conditions_in,
    lines_by_layer,
    public_members,
)
from tests.support.gate import BUDGET, TESTS, lines_of
from tests.support.site import site_script

import drivetrain

PACKAGE = Path(drivetrain.__file__).parent
ROOT = PACKAGE.parents[1]

# From the ground up: a file imports its own layer and those before it.
LAYERS = ["core", "distributed", "checkpoint", "data", "task", "strategies", "engine", "loggers", "run"]
LAYERS += ["callbacks", "trainer", "testing", "cli"]
ORDER = [*LAYERS, "integrations"]
# What users import from, beside the package itself; all other modules are private. STUBS have nothing else.
STUBS = ["errors", "losses", "metrics", "optim"]
PUBLIC = [
    *STUBS,
    "callbacks",
    "checkpoint",
    "data",
    "distributed",
    "loggers",
    "strategies",
    "task",
    "testing",
]
PUBLIC += ["trainer", *(f"integrations.{each}" for each in ("hub", "lightning", "optuna", "ray", "trackers"))]
# Packages that name what is missing when the other library is: they are loaded only where it is installed.
GUARDED = ["integrations.sklearn", "integrations.transformers"]

OPTIONAL_OR_HEAVY = {"fsspec", "s3fs", "tqdm", "tensorboard", "torchmetrics", "sklearn", "deepspeed"}
OPTIONAL_OR_HEAVY |= {
    "wandb",
    "accelerate",
    "torch_xla",
    "torchao",
    "huggingface_hub",
    "transformers",
    "peft",
    "optuna",
    "ray",
    "plotly",
}

# Private attributes of other packages, where nothing public serves. None of ours is here: no object of
# this package reads another one's.
PRIVATE_BY_USE = """
_backward_hooks _post_accumulate_grad_hooks _forward_hooks  # torch: hooks of a parameter or a module
_buffers _non_persistent_buffers_set _parameters _modules _apply  # torch: tensors replaced in place
_version _cdata _nnz _values  # torch: a tensor changed in place, its storage, a sparse gradient
_BatchNorm  # torch: the base of all batch norms has no other name
_found_inf_per_device _per_optimizer_states  # torch: the overflow of one optimizer, before its step
_optimizer_step_pre_hooks _optimizer_step_post_hooks  # torch: whether somebody listens to a step
_global_optimizer_pre_hooks _global_optimizer_post_hooks _is_profiler_enabled  # likewise
_local_scalar_dense _get_default_mps_generator  # torch: a number of the meta device, MPS's generator
_dump_fr_trace_json _get_default_store _op_dispatcher _remove_autograd_hooks  # torch: groups, stores, DDP
_compute_bucket_assignment_by_size _resolve_process_group  # torch: DDP's buckets, a group by its name
_dynamo _inductor _compiled_call_impl  # torch: compiled modules, their errors and options
_C _current_graph_task_id  # torch: whether a forward is recomputed, inside a backward
_autograd _top_saved_tensors_default_hooks _current_autograd_node  # torch: the same, by checkpoint
_iterator _on_queue_feeder_error  # torch and Python: the ends of a loader's workers
_computed _defaults _reductions _to_sync _update_count  # torchmetrics: a metric's states
_models _optimizers _shared_state  # accelerate: what it has prepared, and its singletons
_ALL_TO_ALL_GROUP _ZERO_PARAM_INTRA_PARALLEL_GROUP _global_grad_norm _hp_mapping  # DeepSpeed
_XLAC _xla_get_spmd_config_is_locked _get_no_batch_dim  # torch_xla: the mode of sharding, dimensions
_attn_implementation _pad_tensors_to_max_len _init_weights  # transformers
_strip_protocol _get_kwargs_from_urls  # fsspec: an address as a storage itself names it
_initial_last_step  # trackio: the last step of a run that is continued
_dump_snapshot  # torch: the allocator's blocks, which have no public name
_actions _current_frames _getframe  # Python: a parser's arguments, frames
"""
PRIVATE = {name for line in PRIVATE_BY_USE.splitlines() for name in line.partition("#")[0].split()}
# Names with an underscore that are public: of named tuples, and of `os`.
NOT_PRIVATE = {"_asdict", "_exit", "_fields", "_make", "_replace"}

# What may print, have a logger of its own, or warn; all else goes through drivetrain.core.messages.
OUTPUT = {
    "print sys.stderr.write traceback.print_exc traceback.print_exception": (
        "cli/",
        "callbacks/progress/progress_bar.py",
        "trainer/trainer.py",  # `plan` prints the forecast that was asked for
        "task/optim/mup.py",  # `check_coordinates` prints the table that was asked for
        "testing/strategies/check.py",  # `check_strategy` prints its result
        "distributed/failure/",  # the last words of a process that ends
        "distributed/launch/",
        "data/keyed_batches.py",  # the last words of a worker
        "integrations/lightning/trainer_view.py",  # `self.trainer.print` of a module
        "integrations/hub/upload.py",  # the answer of a process to the one that started it
    ),
    "logging.getLogger": (
        "core/messages.py",
        "strategies/fsdp/strategy.py",
        "strategies/deepspeed/library.py",
    ),
    "warnings.warn": (
        "integrations/transformers/script/trainer",  # as transformers warns: scripts filter and test for it
        "core/deprecation.py",
    ),
}


class Import(NamedTuple):  # in an import anywhere in the file, or as a text in a table
    module: str
    kind: str  # "top", "types" or "local"; "text"


class Source:  # a file, parsed once for all tests
    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = path.relative_to(PACKAGE).as_posix()
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        self.name = ".".join(part for part in parts if part != "__init__")
        self.text = path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def only_for_types(self) -> set[ast.AST]:
        return {
            inner
            for node in self.tree.body
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }

    def find_imports(self, modules: set[str]) -> Iterator[Import]:
        top = set(self.tree.body)
        for node in self.nodes:
            kind = "types" if node in self.only_for_types else "top" if node in top else "local"
            kind = "text" if self.path.suffix == ".pyi" else kind  # a stub is a lazy table
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("drivetrain."):
                package = str(node.module).removeprefix("drivetrain").lstrip(".")
                for alias in node.names:
                    inner = f"{package}.{alias.name}".lstrip(".")
                    yield Import(inner if inner in modules else package, kind)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("drivetrain."):
                        yield Import(alias.name.removeprefix("drivetrain."), kind)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.fullmatch(r"drivetrain\.([a-z_0-9.]+)(:\w+)?", node.value)
                if named and named[1] in modules:
                    yield Import(named[1], "text")


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return [Source(path) for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])]


@pytest.fixture(scope="module")
def imports(sources: list[Source]) -> dict[Source, list[Import]]:
    modules = {each.name for each in sources}
    return {each: list(each.find_imports(modules)) for each in sources}


def test_the_root_holds_the_layers_and_folders_are_small(sources: list[Source]) -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert entries == {*ORDER, *STUBS, "__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
    folders = {each.path.parent for each in sources}
    assert not [folder for folder in folders if len(list(folder.glob("*.py"))) > 22]


def test_the_picture_of_the_layers_shows_the_imports(imports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for source, named in imports.items():
        there = {each.module.partition(".")[0] for each in named if each.kind != "text"}
        found.setdefault(source.name.partition(".")[0], set()).update(there)
    drawer = site_script("draw_layers")  # `python docs/site/draw_layers.py` draws it
    assert [*drawer.LAYERS][::-1] == LAYERS
    monkeypatch.setattr(drawer, "layers_imported", lambda layer: {*LAYERS} & found[layer] - {layer})
    assert drawer.PICTURE.read_text(encoding="utf-8") == drawer.draw()


def test_imports_only_go_down_and_heavy_ones_are_in_functions(imports: dict[Source, list[Import]]) -> None:
    """Those for types, those in functions and those in lazy tables too; a text may name an integration."""
    wrong = []
    for source, found in imports.items():
        layer, _, rest = source.name.partition(".")
        if layer in ORDER:
            for each in found:
                there = each.module.partition(".")[0]
                below = there in ORDER and ORDER.index(there) <= ORDER.index(layer)
                own = each.module.split(".")[1:2] == rest.split(".")[:1]
                same = there != layer or layer != "integrations" or own
                if not (below and same) and not (there == "integrations" and each.kind == "text"):
                    wrong.append(f"{source.name} imports {each.module or 'a name of the package itself'}")
        for node in source.tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            own = rest.partition(".")[0] if layer == "integrations" else ""
            heavy = {name.partition(".")[0] for name in names} & (OPTIONAL_OR_HEAVY - {own})
            wrong += [f"{source.name} imports {name} when it is imported" for name in heavy]
        if str(ROOT) in source.text:
            wrong.append(f"{source.name} names the directory that it was written in")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle_of_files(imports: dict[Source, list[Import]]) -> None:
    """Nor one by texts, but for the rows of the loggers: a run makes them by name, and a tracker reads it."""
    graph: dict[str, set[str]] = {}
    for source, named in imports.items():
        if source.name:
            rows = {each for each in named if each.kind == "text"} if source.name == "loggers.base" else set()
            found = {each.module for each in named if each not in rows} - {source.name, ""}
            if source.path.stem == "__init__":  # a package's table of its own modules
                found = {each for each in found if not each.startswith(f"{source.name}.")}
            graph.setdefault(source.name, set()).update(found)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_object_reads_another_ones_private_attributes(sources: list[Source]) -> None:
    wrong, used = [], set[str]()
    for source in sources:
        classes = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
        inner = (node for owner in classes for node in ast.walk(owner) if isinstance(node, ast.Attribute))
        stored = {each.attr for each in inner if isinstance(each.ctx, ast.Store)}
        own = {each.name for each in classes} | stored  # another object of the same class is no stranger
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_|foreach_)", node.attr):
                used.add(node.attr)
                holder = ast.unparse(node.value)
                known = node.attr in PRIVATE | NOT_PRIVATE | own
                if not known and holder not in ("self", "cls", "super()", *own):
                    wrong.append(f"{source.place}, line {node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
    assert not PRIVATE - used, "rows that no file needs"


# The classes that users subclass, or whose attributes they may set.
HOOKED = dict(MEMBERS.keys())
HELD = {"run/run.py": "Run", "run/state.py": "RunState", "engine/engine.py": "Engine"}


def set_on_self(owner: ast.AST) -> set[str]:
    stored = (each for each in ast.walk(owner) if isinstance(each, ast.Attribute))
    return {
        each.attr
        for each in stored
        if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self" and each.attr[0] != "_"
    }


def test_no_member_of_the_core_is_there_for_one_integration(sources: list[Source]) -> None:
    """A name that only one integration uses, overrides or sets, and that no page for all users shows."""
    defined: dict[str, str] = {}
    hooks: set[str] = set()
    of_core, overridden = set[str](), set[str]()
    of_integrations: dict[str, set[str]] = {}
    overridden_there: dict[str, set[str]] = {}
    for source in sources:
        layer, _, rest = source.place.partition("/")
        is_core = layer != "integrations"
        classes = {each.name: each for each in source.nodes if isinstance(each, ast.ClassDef)}
        hooks |= public_members(classes[HOOKED[source.place]]) if source.place in HOOKED else set()
        hooks |= set_on_self(classes[HELD[source.place]]) if source.place in HELD else set()
        used, given = set[str](), set[str]()
        for node in source.nodes:
            if isinstance(node, ast.Attribute):
                is_own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                used |= set() if is_own else {node.attr}
                given |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.keyword) and node.arg:
                used.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= {*re.findall(r"\w+", node.value)} if re.fullmatch(r"[\w.:]+", node.value) else set()
        if source.place not in HOOKED | HELD:
            given = given.union(*map(public_members, classes.values()))
        else:
            given = set()
        if is_core:
            named = [each for each in source.nodes if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
            own = {each.name for each in named if not each.name.startswith("_")}
            own = own.union(*map(public_members, classes.values()), *map(set_on_self, classes.values()))
            defined |= dict.fromkeys(own, source.place)
            of_core |= used
            overridden |= given
        else:
            for name in used:
                of_integrations.setdefault(name, set()).add(rest.partition("/")[0])
            for name in given:
                overridden_there.setdefault(name, set()).add(rest.partition("/")[0])
    found = (ROOT / "docs" / "how-to").rglob("*.md")
    pages = [path for path in found if not path.name.startswith(("lightning", "transformers", "publish"))]
    shown = {*re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in pages))}
    wrong = [
        f"{place}: only integrations/{min(of_integrations[name])} uses {name}"
        for name, place in defined.items()
        if name not in of_core | shown and len(of_integrations.get(name, ())) == 1
    ]
    wrong += [
        f"only integrations/{min(overridden_there[name])} overrides or sets {name}; no how-to page shows it"
        for name in hooks
        if name not in overridden | shown and len(overridden_there.get(name, ())) == 1
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_names_no_project_that_an_integration_is_for(sources: list[Source]) -> None:
    """Texts that are the name of a package or a module of it; `core/synonyms` has names of their parts."""
    allowed = {"checkpoint/formats.py", "cli/checkpoint/arguments.py"}  # lazy rows
    allowed |= {"checkpoint/weights/torch_files.py", "task/optim/quantized.py", "task/attributes.py"}
    allowed |= {"run/setting_checks.py"}  # a lazy row
    folders = {each.name for each in (PACKAGE / "integrations").iterdir() if each.name[0] != "_"}
    # XLA's strategies are its back end, figures of matplotlib are what loggers take and results give, and
    # "tensorboard" is the default of Trainer(loggers=).
    known = {"hub", "matplotlib", "report", "tensorboard", "torch_xla"}
    projects = (folders - known) | {"peft", "pytorch_lightning"}
    named = {
        source.place
        for source in sources
        if not source.place.startswith("integrations/")
        for node in source.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.partition(".")[0] in projects
    }
    assert named == allowed


SAME_NAME = {"Trainer"}  # transformers' class, whose name the drop-in replacement has to have


def test_no_class_name_is_two_things_and_no_file_name_three_times_in_a_layer(
    sources: list[Source],
) -> None:
    classes: dict[str, list[str]] = {}
    files: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name.strip("_"), []).append(source.place)
        files.setdefault((source.place.partition("/")[0], source.path.name), []).append(source.place)
    assert not {name: places for name, places in classes.items() if len(places) > 1 and name not in SAME_NAME}
    assert not [places for (_, name), places in files.items() if len(places) > 2 and "__init__" not in name]


def test_what_users_subclass_and_the_step_stay_small() -> None:
    for (path, name), most in MEMBERS.items():
        assert len(public_members(class_of(path, name))) <= most, name
    assert conditions_in("engine/engine.py", "Engine", "accumulate") <= CONDITIONS


def test_messages_go_through_the_logger(sources: list[Source]) -> None:
    called = {
        source.place: {ast.unparse(node.func) for node in source.nodes if isinstance(node, ast.Call)}
        for source in sources
    }
    for names, allowed in OUTPUT.items():
        found = {place for place, calls in called.items() if calls & {*names.split()}}
        strangers = [each for each in found if not each.startswith(allowed)]
        assert not strangers, f"{names} in these files: use drivetrain.core.messages.logger"
        unneeded = [row for row in allowed if not any(each.startswith(row) for each in found)]
        assert not unneeded


def test_pages_examples_and_messages_name_public_packages_alone(sources: list[Source]) -> None:
    modules = {each.name for each in sources}
    private = modules - {"", "cli.main", *PUBLIC, *GUARDED}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in pages]
    for source in sources:
        docstrings = {node.value for node in source.nodes if isinstance(node, ast.Expr)}
        strings = [node for node in source.nodes if isinstance(node, ast.Constant) and node not in docstrings]
        texts += [(source.place, node.value) for node in strings if isinstance(node.value, str)]
    wrong = []
    for place, text in texts:
        for named in re.findall(r"(?<![\w./])drivetrain\.[\w.]*\w(?: import)?", text):
            parts = re.split(r"[. ]", named)[1:]
            length = max((n for n in range(len(parts)) if ".".join(parts[:n]) in modules), default=0)
            if ".".join(parts[:length]) in private and ".".join(parts) not in modules:
                wrong.append(f"{place}: {named}")
    assert not wrong, "\n".join(wrong)


def test_lazy_packages_export_what_type_checkers_see() -> None:
    for package in ["", *PUBLIC]:
        exporting = importlib.import_module(f"drivetrain.{package}".rstrip("."))
        stub = Path(exporting.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        seen = re.findall(r"^from ([\w.]+) import (\w+) as \2$", stub, re.M)
        assert len(seen) == len(stub.splitlines())
        assert sorted(name for _, name in seen) == exporting.__all__
        for module, name in seen:
            assert getattr(exporting, name) is getattr(importlib.import_module(module), name)
            assert name in dir(exporting)
        with pytest.raises(AttributeError, match=r"has no 'Chekpoint'\. .*Allowed: "):
            _ = exporting.Chekpoint


IMPORTS = """
import sys
import drivetrain
assert "torch" not in sys.modules, "the package alone loads torch"
import torch
before = set(sys.modules)
drivetrain.TaskModule, drivetrain.Callback
trainer = drivetrain.Trainer(max_steps=1, checkpoint=False, loggers=(), progress_bar=False)
ours = lambda: {name.removeprefix("drivetrain.") for name in sys.modules if name.startswith("drivetrain.")}
bare = ours()
class Task(drivetrain.TaskModule):
    def __init__(self): super().__init__(); self.line, self.loss = torch.nn.Linear(1, 1), torch.nn.MSELoss()
    def forward(self, x): return self.line(x)
trainer.fit(Task(), [(torch.ones(2, 1), torch.ones(2, 1))])
fitted = ours()
[getattr(drivetrain, name) for name in drivetrain.__all__]
print((bare, fitted, {name.split(".")[0] for name in set(sys.modules) - before}))
"""
UNASKED = {"callbacks.progress.progress_bar", "callbacks.summary", "checkpoint.saving.manager", "loggers.csv"}
UNASKED |= {"checkpoint.storage.remote", "checkpoint.weights.warm_start", "distributed.group"}
UNASKED |= {"engine.own_loop_checkpoint", "run.checkpoint", "trainer.checkpoints", "trainer.plan.plan"}
UNASKED |= {"distributed.failure.monitor", "strategies.ddp", "strategies.fsdp.strategy"}


@pytest.mark.heavy("a new interpreter, which imports torch")
def test_imports_load_no_torch_no_heavy_package_and_nothing_of_what_is_not_asked_for() -> None:
    """Compared with a bare import of torch, which brings some of the heavy ones by itself."""
    command = [sys.executable, "-c", IMPORTS]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    bare, fitted, loaded = ast.literal_eval(printed)
    assert len(bare) <= 100, "modules for a Trainer and a TaskModule; import others where they are used"
    assert not fitted & UNASKED
    assert "drivetrain" in loaded
    assert not loaded & OPTIONAL_OR_HEAVY


def test_each_planted_fault_has_its_line() -> None:
    for fault in tomllib.loads((TESTS / "faults" / "faults.toml").read_text(encoding="utf-8"))["fault"]:
        text = (PACKAGE / fault["file"]).read_text(encoding="utf-8")
        assert text.count(fault["line"]) == 1, fault["name"]


def test_each_layer_of_the_package_has_at_most_the_code_lines_of_its_budget() -> None:
    budget, found = SIZES["code_lines"], lines_by_layer()
    assert found.keys() == budget.keys(), "each folder of the package has a row in package/budget.toml"
    over = [f"{layer} has {each} of {budget[layer]}" for layer, each in found.items() if each > budget[layer]]
    assert not over, f"over the code lines of package/budget.toml: {'; '.join(over)}"


def test_no_other_function_than_those_of_the_budget_is_complex() -> None:
    limits = SIZES["complexity"]
    found, allowed = dict(complex_functions(limits["most"])), set(limits["functions"])
    worse = {name: each for name, each in found.items() if name not in allowed}
    assert not worse, f"too complex: {worse}; divide them into functions with names"
    assert max(found.values()) <= limits["at_all"]
    assert not allowed - found.keys(), "take these functions off the list in package/budget.toml"


def test_each_layer_has_at_most_the_lines_of_its_budget() -> None:
    found, layers = lines_of(TESTS), BUDGET["layers"]
    assert found.keys() == layers.keys(), "each folder of tests has a row in budget.toml, and no other"
    over = [
        f"tests/{name}: {found[name]} of {row['lines']}"
        for name, row in layers.items()
        if found[name] > 1.1 * row["lines"]
    ]
    assert not over, f"over the lines of tests/budget.toml: {'; '.join(over)}"


def test_the_tests_are_shorter_than_the_package() -> None:
    package = lines_of(PACKAGE).total()
    most = BUDGET["lines_per_line_of_package"] * package
    assert lines_of(TESTS).total() <= most, f"{lines_of(TESTS).total()} lines of tests, over {most:.0f}"
