"""The documentation is code under test: its blocks run, its links lead somewhere, its site has no warnings.

In a page, blocks marked `python` run one after another in one namespace and in a directory of their own; one
that begins with `# file: name.py` is written there instead, before anything runs. A block marked `output` is
what the Python block before it prints; digits may differ, and a line `...` stands for any lines. In blocks
marked `console`, lines that begin with `drivetrain` are run. The blocks of docstrings run too.
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.messages import unconfigured
from torch import nn
from torch.nn import functional as F
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

import drivetrain
from drivetrain.cli.main import main as command_line

# torch sets this handler once, for good, when a loader first has workers; set now, it is no leak of a page's.
_set_SIGCHLD_handler()

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OBJECT = re.compile(r"^::: ([\w.]+)$", re.M)
"""The line of a reference page at which the site shows an object's docstring."""
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page where the text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[2], m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def file_of(block: Block) -> str | None:
    """The name of the file that a block is to be written to."""
    match = re.match(r"# file: (\S+)\n", block.text)
    return match[1] if match and block.language == "python" else None


@pytest.fixture(scope="module", autouse=True)
def environment_is_set() -> None:
    """The first imports of scikit-learn and of Lightning set variables in it, which is no leak of a page."""
    importlib.import_module("sklearn")
    importlib.import_module("lightning.pytorch")


@pytest.fixture
def importable(tmp_path: Path) -> Iterator[Path]:
    """The page's directory: its files can be imported, and are forgotten afterwards."""
    known, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run_python(page: Path, block: Block, namespace: dict[str, Any]) -> str:
    """Run a block; returns what it printed. A traceback points to the line of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with unconfigured(), redirect_stdout(printed), redirect_stderr(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_console(page: Path, block: Block, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the lines of a block that call `drivetrain`, in the directory that a `cd` before them names."""
    printed = io.StringIO()
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["cd"]:
            monkeypatch.chdir(directory / words[1])
        if words[:1] != ["drivetrain"]:
            continue
        with unconfigured(), redirect_stdout(printed), redirect_stderr(printed):
            code = command_line(words[1:])
        assert code == 0, f"{named(page)}, from line {block.line}: {line!r} gave {code}: {printed.getvalue()}"
    return printed.getvalue()


def masked(text: str) -> list[str]:
    """Lines in which every number is one sign, as is every run of spaces and dashes: columns move."""
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text)
    text = re.sub(r"\b(device|on) (cuda:#|mps)\b", r"\1 cpu", text)
    lines = [re.sub(r"[ \-]{2,}", " ", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def assert_printed(page: Path, block: Block, printed: str) -> None:
    expected = "\n".join(".*" if line == "..." else re.escape(line) for line in masked(block.text))
    # A line that stands for any lines may stand for none.
    expected = expected.replace(".*\n", "(?:.*\n)?").replace("\n.*", "(?:\n.*)?")
    found = "\n".join(masked(printed))
    assert re.fullmatch(expected, found, re.S), (
        f"{named(page)}, line {block.line}: the page shows\n{block.text}\nbut it is\n{printed}"
    )


PYTHON_PAGES = [page for page in PAGES if any(b.language in ("python", "console") for b in blocks(page))]


SLOW_PAGES = {
    "check-resume.md",
    "compile.md",
    "deepspeed-checkpoints.md",
    "launching.md",
    "write-a-strategy.md",
    "write-an-inexact-strategy.md",
}
"""Pages whose blocks start many processes, or compile."""


def tiered(pages: list[Path]) -> list[Any]:
    """The pages as parameters, the slow ones in the full tier."""
    return [pytest.param(each, marks=pytest.mark.full if each.name in SLOW_PAGES else ()) for each in pages]


def test_every_slow_page_is_there() -> None:
    assert {page.name for page in PYTHON_PAGES} >= SLOW_PAGES


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize("page", tiered(PYTHON_PAGES), ids=named)
def test_the_blocks_of_a_page_run(page: Path, importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "README.md" and page.parent == ROOT:
        shutil.copytree(ROOT / "examples", importable / "examples")
    for block in blocks(page):
        file = file_of(block)
        if file is not None:
            (importable / file).write_text(block.text, encoding="utf-8")
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        if block.language == "output":
            assert_printed(page, block, printed)
        elif block.language == "console":
            printed = run_console(page, block, importable, monkeypatch)
        elif block.language == "python" and file_of(block) is None:
            printed = run_python(page, block, namespace)


class Scalar(nn.Module):
    """What the docstrings' examples call `model`: gives its batch's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss


DOCUMENTED_FILES = [
    path for path in (ROOT / "package").rglob("*.py") if "```python" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", DOCUMENTED_FILES, ids=named)
def test_the_examples_of_docstrings_run(file: Path) -> None:
    """They are excerpts, which name a model and a loader."""
    namespace: dict[str, Any] = {"__name__": "page", "torch": torch, "nn": nn, "F": F}
    namespace |= {"Engine": drivetrain.Engine, "TaskModule": drivetrain.TaskModule}
    namespace |= {"model": Scalar(), "loader": list(torch.ones(2, 4, 3))}
    run = 0
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        for match in re.finditer(r"^( *)```python\n(.*?)^\1```", ast.get_docstring(node) or "", re.M | re.S):
            run_python(file, Block("python", textwrap.dedent(match[2]), 1), namespace)
            run += 1
    assert run


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{named(page)} links to {target}, which is not there"
        assert ROOT in place.parents, f"{named(page)} links to {target}, outside the repository"
        if anchor:
            there = place.read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.*)$", there, re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
            anchors |= set(OBJECT.findall(there))
            assert anchor in anchors, f"{named(page)} links to {target}, but that page has no such heading"


def test_every_page_can_be_reached_from_the_map() -> None:
    reached: set[Path] = set()
    left = [ROOT / "docs" / "README.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        left += [(page.parent / each).resolve() for each in links if not re.match(r"[a-z]+:", each)]
    missing = [named(page) for page in PAGES if page not in reached and page.parent != ROOT]
    assert not missing, f"no link leads to {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_names_neither_issues_nor_places_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"(?i)\bissue #?\d+|(?:/home|/Users|/root|/work|/tmp|/mnt|C:)[/\\][\w./\\-]*", text)
    assert not found, f"{named(page)} has {found}"


def test_every_public_name_has_its_place_in_the_reference() -> None:
    described = {
        each for page in REFERENCE.glob("*.md") for each in OBJECT.findall(page.read_text(encoding="utf-8"))
    }
    names = {each.rpartition(".")[2] for each in described}
    public = set(drivetrain.__all__) - {"__version__"}
    for module in ("callbacks", "checkpoint", "data", "loggers", "strategies", "testing"):
        public |= set(importlib.import_module(f"drivetrain.{module}").__all__)
    missing = sorted(public - names)
    assert not missing, (
        f"no page of docs/reference has a line '::: ...{missing[0]}'; it lacks {', '.join(missing)}"
    )


def test_every_command_has_its_place_in_the_reference() -> None:
    page = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    for words in ([], ["checkpoint"], ["runs"]):
        printed = io.StringIO()
        with redirect_stdout(printed):
            command_line([*words, "--help"])
        for command in re.findall(r"^    ([a-z][\w-]*)", printed.getvalue(), re.M):
            assert f"<!-- help: {' '.join([*words, command])} -->" in page


def build_site(docs: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(docs / "mkdocs.yml"),
        "--site-dir",
        str(to),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_site_is_built_without_a_warning_and_asks_nothing_of_other_hosts(tmp_path: Path) -> None:
    built = build_site(ROOT / "docs", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").exists()
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        asked = re.findall(
            r'<(?:script|img|iframe)[^>]* src="https?:[^"]*|<link[^>]* href="https?:[^"]*', text
        )
        assert not asked, f"{page} loads {asked}"


@pytest.mark.full
def test_a_dead_link_a_dead_anchor_and_a_missing_docstring_each_fail_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "package", tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "tests", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file, planted in {
        "docs/how-to/data.md": "[a](no-such-page.md) [b](memory.md#no-heading) [c](../../package/none.py)",
        "docs/reference/errors.md": "::: drivetrain.core.errors.Planted",
        "package/drivetrain/core/errors.py": "class Planted:\n    def method(self) -> None:\n        pass",
    }.items():
        with (tmp_path / file).open("a", encoding="utf-8") as opened:
            opened.write(f"\n\n{planted}\n")
    built = build_site(tmp_path / "docs", tmp_path / "site")
    assert built.returncode != 0
    bare = ("errors.Planted has no docstring", "errors.Planted.method has no docstring")
    for found in ("no-such-page.md", "#no-heading", "none.py", *bare):
        assert found in built.stderr
    assert built.stderr.count("WARNING") == 5, built.stderr


def test_the_schedules_and_precisions_of_the_guides_are_those_that_there_are() -> None:
    from drivetrain.strategies.precision.registry import PRECISIONS
    from drivetrain.task.optim.schedules import SCHEDULES

    for guide, names in (("optimizers-and-schedules", SCHEDULES), ("precision", PRECISIONS)):
        text = (ROOT / "docs" / "how-to" / f"{guide}.md").read_text(encoding="utf-8")
        rows = re.findall(r'^\| `"([\w-]+)"`', text, re.M)
        assert sorted(rows) == sorted(names), f"the table of {guide} has {rows}"
