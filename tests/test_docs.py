"""The documentation is code under test: blocks run, tables have what there is, the site has no warnings.

The blocks `python` of a page run in one namespace; `# file: name.py` is written before, and not run.
An `output` is what the block before it prints; digits may differ, and a line `...` stands for any lines.
`make test` runs README.md and changed pages, also since the revision CHANGE; PAGES names others.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.messages import unconfigured
from tests.support.site import site_script
from tests.support.transformers_names import ARGUMENTS, EVENTS
from tests.test_public_api import PACKAGES
from torch import nn
from torch.nn import functional as F

import drivetrain
from drivetrain.cli.main import main as command_line
from drivetrain.run.hooks import HOOKS
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.task.optim.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
DOCS, REFERENCE = ROOT / "docs", ROOT / "docs" / "reference"
README, WORK = ROOT / "README.md", DOCS / "how-to" / "kinds"  # campaigns/test_kinds_of_work.py runs WORK
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.M | re.S)
SLOW = {"benchmark.md", "check-resume.md", "compile.md", "deepspeed-checkpoints.md", "launching.md"}
# These start many processes, or compile.
SLOW |= {"slow-or-stuck.md", "write-a-strategy.md", "write-an-inexact-strategy.md"}


class Block(NamedTuple):  # `line`: of the page, where the text begins
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:  # the name of the file that the block is to be written to
        match = re.match(r"# file: (\S+)\n", self.text)
        return match[1] if match and self.language == "python" else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[2], m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def changed() -> list[Path]:  # the pages that PAGES names; without it, README.md and those that have changed
    if os.environ.get("PAGES", "all") != "all":
        return [ROOT / each for each in os.environ["PAGES"].split()]
    commands = [["git", "status", "--porcelain", "--no-renames"]] if shutil.which("git") else []
    if commands and os.environ.get("CHANGE"):
        commands.append(["git", "diff", "--name-status", "--no-renames", os.environ["CHANGE"]])
    found = {README}
    for command in commands:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        found |= {ROOT / line.split()[-1] for line in listed.stdout.splitlines()}
    return [page for page in PAGES if page in found and page.parent != WORK]


def run_python(page: Path, block: Block, namespace: dict[str, Any]) -> str:
    """Run a block; returns what it printed. A traceback points to the line of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    printed = io.StringIO()
    with unconfigured(), redirect_stdout(printed), redirect_stderr(printed):
        exec(code, namespace)
    return printed.getvalue()


def run_console(block: Block, directory: Path) -> str:  # in the directory that a `cd` before names
    printed = io.StringIO()
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["cd"]:
            os.chdir(directory / words[1])
        if words[:1] == ["drivetrain"]:
            with unconfigured(), redirect_stdout(printed), redirect_stderr(printed):
                code = command_line(words[1:])
            assert code == 0, f"from line {block.line}: {line!r} gave {code}: {printed.getvalue()}"
    return printed.getvalue()


def masked(text: str) -> list[str]:  # numbers are one sign, as runs of spaces and dashes: columns move
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "#", text)
    text = re.sub(r"\b(device|on) (cuda:#|mps)\b", r"\1 cpu", text)
    lines = [re.sub(r"[ \-]{2,}", " ", line).strip() for line in text.splitlines()]
    # The pages leave out the last lines of a fit, the one on an unused seed, and that of a busy machine.
    left = ("drivetrain: curves: ", "drivetrain: the fit ended early", "drivetrain: torch.manual_seed(")
    left += ("drivetrain: waiting for ",)
    return [line for line in lines if line and not line.startswith(left)]


def assert_printed(block: Block, printed: str) -> None:
    expected = "\n".join(".*" if line == "..." else re.escape(line) for line in masked(block.text))
    # A line that stands for any lines may stand for none.
    expected = expected.replace(".*\n", "(?:.*\n)?").replace("\n.*", "(?:\n.*)?")
    is_it = re.fullmatch(expected, "\n".join(masked(printed)), re.S)
    assert is_it, f"line {block.line}: the page shows\n{block.text}\nbut it is\n{printed}"


def run_page(page: Path, directory: Path) -> None:
    """Run a page's blocks in a directory, whose modules are then forgotten; README.md twice, as one does."""
    directory.mkdir()
    if page == README:
        shutil.copytree(ROOT / "examples", directory / "examples")
    found = blocks(page) * (2 if page == README else 1)
    for block in found:
        if block.file is not None:
            (directory / block.file).write_text(block.text, encoding="utf-8")
    known, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(directory))
    os.chdir(directory)
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    try:
        for block in found:
            if block.language == "output":
                assert_printed(block, printed)
            elif block.language == "console":
                printed = run_console(block, directory)
            elif block.language == "python" and block.file is None:
                printed = run_python(page, block, namespace)
                if page == README and "best_value" in block.text:
                    assert namespace["result"].metrics["validation/accuracy"] >= 0.95
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(directory)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def environment_is_set() -> None:
    """The first imports of scikit-learn and of Lightning set variables in it, which is no leak of a page."""
    importlib.import_module("sklearn")
    importlib.import_module("lightning.pytorch")


@pytest.fixture
def run_pages(
    environment_is_set: None, own_registries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    # torch's exporter makes a bar, whose thread would stay.
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)

    def run(pages: list[Path]) -> None:
        wrong = []
        for page in pages:
            before = dict(os.environ)
            ours = logging.getLogger("drivetrain")
            level = ours.level
            try:
                run_page(page, tmp_path / re.sub(r"\W", "_", named(page)))
            except Exception:
                wrong.append(f"{named(page)}: {traceback.format_exc()}")
            os.chdir(tmp_path)
            ours.setLevel(level)  # which a page may have raised, as that of transformers
            if "transformers" in sys.modules:
                sys.modules["transformers"].logging.set_verbosity_warning()
            wrong += [f"{named(page)} changes the environment"] if os.environ != before else []
        assert not wrong, "\n\n".join(wrong)

    return run


@pytest.mark.heavy("a page that has changed, and what a reader runs first")
def test_the_blocks_of_changed_pages_run(run_pages: Any) -> None:
    run_pages(changed())


@pytest.mark.landing(long=True)
def test_the_blocks_of_all_pages_run(run_pages: Any) -> None:
    run_pages([p for p in PAGES if p.name not in SLOW and p != README and p.parent != WORK])


@pytest.mark.nightly
def test_the_blocks_of_slow_pages_run(run_pages: Any) -> None:
    slow = [page for page in PAGES if page.name in SLOW]
    assert len(slow) == len(SLOW)
    run_pages(slow)


class Scalar(nn.Module):  # what the docstrings' examples call `model`: gives its batch's loss
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss


def test_the_examples_of_docstrings_run() -> None:  # they are excerpts, which name a model and a loader
    run = 0
    for file in (ROOT / "package").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if "```python" not in source:
            continue
        namespace: dict[str, Any] = {"__name__": "page", "torch": torch, "nn": nn, "F": F}
        namespace |= {"Engine": drivetrain.Engine, "TaskModule": drivetrain.TaskModule}
        namespace |= {"model": Scalar(), "loader": list(torch.ones(2, 4, 3))}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                for match in re.finditer(r"^( *)```python\n(.*?)^\1```", text, re.M | re.S):
                    run_python(file, Block("python", textwrap.dedent(match[2]), 1), namespace)
                    run += 1
    assert run > 3


# The pages' tables and places.


def test_every_page_is_on_the_map_and_names_no_place_of_one_machine() -> None:
    wrong, reached, left = [], set[Path](), [DOCS / "README.md"]
    while left:
        page = left.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
            left += [(page.parent / each).resolve() for each in links if not re.match(r"[a-z]+:", each)]
    for page in PAGES:
        wrong += [f"no link leads to {named(page)}"] if page not in reached and page.parent != ROOT else []
        text = page.read_text(encoding="utf-8")
        places = r"(?i)\bissue #?\d+|(?:/home|/Users|/root|/work|/tmp|/mnt|C:)[/\\][\w./\\-]*"
        wrong += [f"{named(page)} has {each}" for each in re.findall(places, text)]
    assert not wrong


def test_the_pages_that_people_open_first_are_short_and_begin_with_an_example() -> None:
    first = "data write-a-task metrics checkpoints-and-resume loggers callbacks strategies precision memory"
    for name in (first + " command-line search launching").split():
        page = DOCS / "how-to" / f"{name}.md"
        words = len(page.read_text(encoding="utf-8").split())
        assert words <= 1500, f"{named(page)}: more goes into {name}-in-detail"
        assert blocks(page)[0].line <= 10, f"{named(page)}: an example comes first"
        assert len(blocks(page)[0].text.splitlines()) <= 25, f"{named(page)}: the example is shorter"


def test_public_names_commands_and_tables_are_in_the_guides(capsys: pytest.CaptureFixture[str]) -> None:
    described = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    names = {each.rpartition(".")[2] for each in re.findall(r"^::: ([\w.]+)$", described, re.M)}
    public = set(drivetrain.__all__) - {"__version__"}
    for module in PACKAGES:
        public |= set(importlib.import_module(f"drivetrain.{module}").__all__)
    assert not public - names, "no page of docs/reference has a line '::: ...NAME'"
    for words in ([], ["checkpoint"], ["runs"]):
        command_line([*words, "--help"])
        for command in re.findall(r"^    ([a-z][\w-]*)", capsys.readouterr().out, re.M):
            assert f"<!-- help: {' '.join([*words, command])} -->" in described
    for guide, rows in (("optimizers-and-schedules", SCHEDULES), ("precision", PRECISIONS)):
        text = (DOCS / "how-to" / f"{guide}.md").read_text(encoding="utf-8")
        assert sorted(re.findall(r'^\| `"([\w-]+)"`', text, re.M)) == sorted(rows), f"the table of {guide}"


def test_the_page_of_the_trainers_arguments_is_current_and_its_defaults_are_true() -> None:
    printer = site_script("print_trainer_arguments")
    text = printer.PAGE.read_text(encoding="utf-8")
    assert text == printer.page(), "run docs/site/print_trainer_arguments.py"
    rows = re.findall(r"(?m)^\| `(\w+)` \| `(.*?)` \| `(\w+)=", text)
    defaults = {each.name: each.default for each in dataclasses.fields(drivetrain.Trainer)}
    assert {name: ast.literal_eval(shown) for name, shown, _ in rows} == defaults
    assert all(name == example for name, _, example in rows)


def test_the_page_of_transformers_names_has_all_and_names_what_exists() -> None:
    page = (REFERENCE / "transformers-names.md").read_text(encoding="utf-8")
    lines = page.partition("\n## TrainingArguments\n")[2].splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if re.match(r"\| (?!there \||---)", line)]
    assert len(rows) == 284
    assert {state for _, state, _ in rows} == {"same name", "other name", "no"}
    there = {name for row in rows for name in re.findall(r"\w+", row[0])}
    assert len({*ARGUMENTS} - there) < 60  # on the page of arguments alone
    assert len(there & {*ARGUMENTS, *EVENTS}) > 100
    codes = {code for row in rows for code in re.findall(r"`([^`]+)`", row[2])}
    wrong = [code for code in codes if re.fullmatch(r"on_\w+", code) and code not in HOOKS]
    calls = [(code, *found) for code in codes for found in re.findall(r"\b(\w+)\((.*)\)", code)]
    for whole, name, given in calls:
        if name in drivetrain.__all__:
            known = {*inspect.signature(getattr(drivetrain, name)).parameters, "betas", "eps", "amsgrad"}
            plain = re.sub(r"\{.*?\}|\[.*?\]|\(.*?\)", "", given)
            wrong += [whole] if {*re.findall(r"(?:^|, )(\w+)=", plain)} - known else []
    assert not wrong


# The site.


def test_names_and_cells_of_a_table_keep_together_on_a_phone() -> None:
    hooks = site_script("hooks")
    long, part = 25 * "a", "b-" + 9 * "c"  # a longer word than fits on a line
    code = f"<code>on_log</code> <code>f(a, x.y)</code> <code>{long}.{part}</code> <pre><code>a</code></pre>"
    kept = code.replace("<code>on_log", '<code class="name">on_log')
    kept = kept.replace("f(a, x.y)", '<span class="name">f(a,</span> <span class="name">x.y)</span>')
    kept = kept.replace(f".{part}", f'.<wbr><span class="name">{part}</span>')
    assert hooks.CODE.sub(hooks._unbroken, code) == kept
    assert hooks.CELL.sub(hooks._wide, "<td>short</td>") == "<td>short</td>"
    assert hooks.CELL.sub(hooks._wide, f"<th>{'word ' * 9}</th>").startswith('<th class="sentence">')


def build_site(docs: Path, to: Path) -> subprocess.CompletedProcess[str]:  # as `make docs`
    command = ["mkdocs", "build", "--config-file", str(docs / "mkdocs.yml"), "--site-dir", str(to)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment, check=False)


@pytest.mark.landing
def test_the_site_is_built_without_a_warning_and_asks_nothing_of_other_hosts(tmp_path: Path) -> None:
    built = build_site(DOCS, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").exists()
    index, whole = ((tmp_path / "site" / f"llms{end}.txt").read_text("utf-8") for end in ("", "-full"))
    assert "](how-to/data/): use training and evaluation data" in index
    for part in ("\n# Give it data\n", "\n## drivetrain.Trainer\n", "\n### Trainer.fit\n", "\nfit(task: "):
        assert part in whole
    elsewhere = re.compile(r'<(?:script|img|iframe)[^>]* src="https?:[^"]*|<link[^>]* href="https?:[^"]*')
    for page in (tmp_path / "site").rglob("*.html"):
        asked = elsewhere.findall(page.read_text(encoding="utf-8"))
        assert not asked, f"{page} loads {asked}"
