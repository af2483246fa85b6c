"""Writes docs/reference/ from the docstrings and signatures: `python docs/generate_reference.py`.

The pages hold nothing that differs from machine to machine, so that they can be committed, and a test
compares them with what this program would write now.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drivetrain.cli.main import main as command_line
from drivetrain.registry import Registry

HERE = Path(__file__).parent / "reference"


class Page(NamedTuple):
    """One page: its title, the guide that goes with it, and its names by module of ours."""

    title: str
    guide: str
    names: dict[str, str]

    @property
    def about(self) -> str:
        """Where to read how these things are used."""
        name = self.guide.rpartition("/")[2].removesuffix(".md").replace("-", " ")
        return f"How to use it: [{name}](../{self.guide})."

    def references(self) -> list[str]:
        """The names as `module:name`."""
        return [
            f"drivetrain.{module}:{name}" for module, names in self.names.items() for name in names.split(" ")
        ]


_SCHEDULES = "constant linear cosine cosine_with_restarts polynomial inverse_sqrt warmup_stable_decay"
_STORAGE = "CheckpointIO DirectoryCheckpointIO Snapshot Manifest FORMAT_VERSION resolve verify read_manifest"

PAGES = {
    "task": Page(
        "The task", "how-to/write-a-task.md", {"task": "TaskModule", "types": "StepOutput Batch Stateful"}
    ),
    "trainer": Page(
        "The Trainer",
        "tutorials/first-task.md",
        {
            "trainer": "Trainer FitResult",
            "plan": "Plan",
            "types": "Every",
            "distributed.watchdog": "EXIT_HANG",
        },
    ),
    "preemption": Page(
        "Signals",
        "how-to/preemption.md",
        {"preemption": "PreemptionConfig", "errors": "Preempted EXIT_REQUEUE EXIT_STOPPED"},
    ),
    "run": Page(
        "The run",
        "how-to/callbacks.md",
        {"run": "Run Totals Evaluation", "progress": "Progress", "window": "StepResult"},
    ),
    "runs": Page(
        "The time of a run",
        "how-to/goodput.md",
        {"runs": "read_ledger find_runs RunLedger Attempt KINDS"},
    ),
    "engine": Page("The Engine", "how-to/your-own-loop.md", {"engine": "Engine", "native": "EngineData"}),
    "optim": Page(
        "Optimizers",
        "how-to/optimizers-and-schedules.md",
        {
            "optim": "OptimizerConfig ParameterGroup OPTIMIZERS OptimizerFactory build_optimizer",
            "muon": "muon CombinedOptimizer",
        },
    ),
    # The module's own words, whose name is empty, come first.
    "schedules": Page(
        "Schedules",
        "how-to/optimizers-and-schedules.md",
        {
            "schedules": f" Schedule SCHEDULES {_SCHEDULES} PlateauSchedule make_schedule warmed_up",
            "optim": "build_schedule",
        },
    ),
    "precision": Page(
        "Precision",
        "how-to/precision.md",
        {
            "precision": "Precision Dtypes PRECISIONS UPDATES as_precision",
            "tf32": "TF32",
            "float8": "Float8 RECIPES",
            "weight_updates": "WeightUpdates",
        },
    ),
    "compiling": Page(
        "Compilation",
        "how-to/compile.md",
        {"compiling": "CompileConfig SCOPES MODES", "blocks": "repeated_blocks"},
    ),
    "memory": Page(
        "Memory",
        "how-to/memory.md",
        {"memory": "MemoryConfig", "memory_use": "MemoryUse MemoryWatch"},
    ),
    "data": Page(
        "Data",
        "how-to/data.md",
        {
            "data": "as_source evaluation_sources Everywhere Feed Measure MicroBatch Share Source Transfer"
            " Window",
            "data.batch": "batch_size map_tensors move to_host",
            "data.reading": "pin_memory_for",
            "data.split": "already_split",
        },
    ),
    "callbacks": Page(
        "Callbacks",
        "how-to/callbacks.md",
        {
            "callbacks": "Callback CompileTime EarlyStopping LambdaCallback LearningRateMonitor LossSpike"
            " MemoryReport ModelSummary NonFiniteDetector ProgressBar Throughput HOOKS summarize",
            "callbacks.base": "unused",
            "callbacks.peaks": "peak_flops",
        },
    ),
    "loggers": Page(
        "Loggers",
        "how-to/loggers.md",
        {"loggers": "CSVLogger JSONLinesLogger TensorBoardLogger Logger LoggerSpec LOGGERS build_loggers"},
    ),
    "checkpoint": Page(
        "Checkpoints",
        "how-to/checkpoints-and-resume.md",
        {
            "checkpoint": f"CheckpointConfig CheckpointManager SavedCheckpoint {_STORAGE} pack unpack"
            " DamagedCheckpointError",
            "checkpoint.inspection": "list_checkpoints Listing Listed",
            "checkpoint.compare": "compare Comparison TensorDifference ValueDifference",
            "checkpoint.filesystem": "FileSystem LocalFileSystem",
            "checkpoint.remote": "RemoteFileSystem",
            "checkpoint.retries": "Retry",
            "distributed.ranks": "Ranks",
            "prediction_files": "read_predictions",
        },
    ),
    "weights": Page(
        "Weights",
        "how-to/weights.md",
        {
            "checkpoint": "export_weights export_torch load_weights",
            "warm_start": "load_weights_into LoadReport",
            "foreign": "import_deepspeed ImportedCheckpoint import_weights ImportedWeights",
        },
    ),
    "testing": Page(
        "Testing",
        "how-to/write-a-strategy.md",
        {
            "testing.distributed": "run_distributed",
            "testing.strategies": "check_strategy",
            "testing.strategy_resume": "check_resume",
            "testing.resume.check": "assert_resumable check_program Check",
            "testing.resume.report": "Report Difference",
            "testing.strategy_job": "Job MakeStrategy",
            "testing.storage": "check_file_system check_checkpoint_io everything",
        },
    ),
    "strategies": Page(
        "Strategies",
        "how-to/strategies/single.md",
        {
            "strategies": "Strategy StrategyConfig Prepared Settings Support SingleDevice STRATEGIES Choice"
            " choose select_strategy select_precision Hardware",
            "strategies.ddp": "DDP DDPConfig",
            "strategies.fsdp": "FSDP",
            "strategies.fsdp_config": "FSDPConfig",
            "strategies.deepspeed": "DeepSpeed",
            "strategies.deepspeed_config": "DeepSpeedConfig",
            "strategies.accelerate": "Accelerate",
            "strategies.accelerate_config": "AccelerateConfig",
            "mps_fallback": "enable_mps_fallback",
            "distributed.processes": "rank world_size one_at_a_time",
            "strategies.xla": "XLAConfig",
            "strategies.xla_fsdp": "XLAFSDPConfig",
            "strategies.xla_fsdp_v2": "XLAFSDPv2Config",
            "registry": "Registry",
        },
    ),
    "errors": Page(
        "Errors",
        "how-to/debugging.md",
        {
            "errors": "DrivetrainError ConfigError DataError CheckpointError StrategyError RankFailure"
            " NonFiniteError DivergenceError MissingDependencyError nearest"
        },
    ),
    "command-line": Page("The command line", "how-to/command-line.md", {}),
}

NOTE = "*Generated by `python docs/generate_reference.py` from the docstrings; change those, not this page.*"


# Signatures. `inspect` prints them differently from one Python to the next, so they are put together here.


def _default(value: Any) -> str:
    text = repr(value)
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__qualname__)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _parameters(function: Callable[..., Any]) -> tuple[list[str], str]:
    """Each parameter as it is written in a definition, without `self`; and the annotation of what returns."""
    signature = inspect.signature(function)
    written: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls") and not written:
            continue
        text = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            text, star = f"*{text}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            written.append("*")
            star = True
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            equals = " = " if parameter.annotation is not parameter.empty else "="
            text += f"{equals}{_default(parameter.default)}"
        written.append(text)
    returns = signature.return_annotation
    return written, "" if returns is signature.empty else f" -> {_annotation(returns)}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _definition(name: str, parameters: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) <= 100:
        return line
    listed = "".join(f"    {each},\n" for each in parameters)
    return f"{name}(\n{listed}){returns}"


def _signature(name: str, thing: Any) -> str:
    """How a class or a function is called; "" where that says nothing."""
    if not inspect.isclass(thing):
        return _definition(name, *_parameters(thing))
    constructor = inspect.getattr_static(thing, "__init__", None)
    ours = str(getattr(constructor, "__module__", "")).startswith("drivetrain")
    generated = "__dataclass_fields__" in vars(thing)
    if issubclass(thing, tuple):
        constructor, ours = thing.__new__, True
    if getattr(thing, "_is_protocol", False) or not (ours or generated) or not callable(constructor):
        return ""
    parameters, _ = _parameters(constructor)
    return _definition(name, parameters, "")


# Docstrings: Google's sections become lists, reStructuredText's "::" a Markdown code block.

_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
_TITLES = {"Args": "Parameters"}
_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \w+)*): +(.*)")


def _markdown(thing: Any) -> str:
    """A docstring as Markdown."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        section = _SECTION.match(line)
        if section or line == "Example:":
            end = at + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            body = textwrap.dedent("\n".join(lines[at + 1 : end])).strip("\n")
            if section:
                out += [f"**{_TITLES.get(section[1], section[1])}**", "", *_entries(section[1], body), ""]
            else:
                out += ["**Example**", "", *body.splitlines(), ""]
            at = end
            continue
        if line.rstrip().endswith("::"):
            line = line.rstrip()[:-2] + (":" if line.strip() != "::" else "")
        out.append(line)
        at += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _entries(section: str, body: str) -> Iterator[str]:
    """The entries of a section as a list; what a "Returns" says is plain text unless it has names."""
    if section in ("Returns", "Yields"):
        yield " ".join(each.strip() for each in body.splitlines())
        return
    entries: list[list[str]] = []
    for line in body.splitlines():
        found = _ENTRY.fullmatch(line)
        if found or not entries:
            entries.append([f"`{found[1]}`: {found[2]}" if found else line.strip()])
        else:
            entries[-1].append(line.strip())
    for entry in entries:
        yield f"- {' '.join(each for each in entry if each)}"


# Pages.


def _assigned_doc(module: str, name: str) -> str:
    """The text below an assignment at the top of a module, which Python itself does not keep.

    It is looked for where the module takes the name from, when it does not assign it itself.
    """
    source = inspect.getsource(importlib.import_module(module))
    found = re.search(rf'(?ms)^{name}\b[^\n]*=.*?^(?:[)}}]\n)?(?:"""(.*?)"""|(?=\S))', source)
    if found:
        return " ".join((found[1] or "A table of names; see [Registry](strategies.md#registry).").split())
    home = re.search(rf"^\s*from (drivetrain[\w.]*) import .*\b{name}\b", source, re.M)
    return _assigned_doc(home[1], name) if home else ""


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself; what it inherits stands at its base."""
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value):
            yield name, value


def _describe(reference: str) -> Iterator[str]:
    module, _, name = reference.partition(":")
    thing: Any = importlib.import_module(module)
    if not name:
        yield f"{_markdown(thing)}\n"
        return
    thing = getattr(thing, name)
    yield f"## {name}\n"
    yield f"`{module}.{name}`\n"
    if inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith("drivetrain")):
        yield from _described(name, thing)
        return
    if isinstance(thing, Registry):
        yield f"{_assigned_doc(module, name)}\n\n{_rows(thing)}\n"
        return
    yield f"```text\n{name} = {_value(thing)}\n```\n"
    yield f"{_assigned_doc(module, name)}\n"


def _value(thing: Any) -> str:
    if isinstance(thing, tuple):
        return "(\n" + "".join(f"    {each!r},\n" for each in thing) + ")"
    return re.sub(r"\b(typing|collections\.abc|drivetrain\.types)\.", "", str(thing))


def _rows(registry: Registry[Any]) -> str:
    """The built-in names; torch's optimizers are left out, for they depend on its version."""
    torchs = {name.lower() for name in vars(torch.optim)} if registry.kind == "optimizer" else set()
    kept = [name for name in registry if name == "muon" or name not in torchs]
    names = ", ".join(f"`{name}`" for name in kept)
    more = ", and every optimizer of `torch.optim` by its lower-case name" if torchs else ""
    return f"Names: {names}{more}."


def _described(name: str, thing: Any) -> Iterator[str]:
    signature = _signature(name, thing)
    if signature:
        yield f"```text\n{signature}\n```\n"
    yield f"{_markdown(thing)}\n"
    for member, value in _members(thing) if inspect.isclass(thing) else ():
        yield f"### {name}.{member}\n"
        if isinstance(value, property):
            yield f"*property*: {_markdown(value)}\n"
            continue
        yield f"```text\n{_definition(member, *_parameters(getattr(value, '__func__', value)))}\n```\n"
        yield f"{_markdown(getattr(thing, member))}\n"


def _page(page: Page) -> str:
    parts = [f"# {page.title}\n", f"{page.about}\n", f"{NOTE}\n"]
    for reference in page.references():
        parts += _describe(reference)
    parts += [] if page.names else _usage()
    return "\n".join(parts).rstrip() + "\n"


COMMANDS = [
    *(
        [],
        ["fit"],
        ["validate"],
        ["test"],
        ["predict"],
        ["plan"],
        ["env"],
        ["strategies"],
        ["launch"],
        ["checkpoint"],
        ["runs"],
    ),
    *(["checkpoint", action] for action in ("list", "show", "verify", "export", "diff", "import-deepspeed")),
    *(["runs", action] for action in ("list", "show")),
]


def _usage() -> Iterator[str]:
    """The help of the command and of each of its subcommands, as a terminal of 100 columns shows it."""
    before = dict(os.environ)
    os.environ["COLUMNS"] = "100"
    try:
        for words in COMMANDS:
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                command_line([*words, "--help"])
            own, separator, _ = text.getvalue().partition("\narguments of Trainer:")
            yield f"## {' '.join(['drivetrain', *words])}\n"
            yield f"```text\n{(own if words != ['fit'] else text.getvalue()).rstrip()}\n```\n"
            if separator and words != ["fit"]:
                yield "And the arguments of the Trainer, as for `drivetrain fit`.\n"
    finally:
        os.environ.clear()
        os.environ.update(before)


def _index() -> str:
    lines = ["# Reference\n", "Every public name, from its docstring.\n", f"{NOTE}\n"]
    for file, page in PAGES.items():
        names = ", ".join(f"`{name}`" for name in " ".join(page.names.values()).split())
        lines.append(f"- [{page.title}]({file}.md): {names or '`drivetrain` and its commands'}")
    return "\n".join(lines) + "\n"


def generate() -> dict[str, str]:
    """All pages by file name."""
    return {"README.md": _index(), **{f"{file}.md": _page(page) for file, page in PAGES.items()}}


def main() -> None:
    """Write the pages, and remove those that are no longer generated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=HERE, help="the directory; it holds nothing else")
    directory = parser.parse_args().to
    directory.mkdir(parents=True, exist_ok=True)
    pages = generate()
    for old in directory.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        (directory / name).write_text(text, encoding="utf-8")
    print(f"{len(pages)} pages in {directory}")


if __name__ == "__main__":
    main()
