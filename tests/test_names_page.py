"""The page that lists transformers' names: it has all of them, and what it calls ours exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.tasks import Regression, pairs, quiet
from tests.support.transformers_names import ARGUMENTS, EVENTS

import drivetrain
from drivetrain import FitResult, Run, Trainer
from drivetrain.run.hooks import HOOKS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reference" / "transformers-names.md").read_text(encoding="utf-8")
STATES = ("same name", "other name", "no", "later")


def rows() -> Iterator[tuple[str, str, str]]:
    for line in PAGE.partition("\n## TrainingArguments\n")[2].splitlines():
        if line.startswith("| ") and not line.startswith(("| there |", "| --- |")):
            there, state, here = line.removeprefix("| ").removesuffix(" |").split(" | ")
            yield there, state, here


def classes() -> dict[str, tuple[set[str], set[str]]]:
    """By name: what the constructor of each public class takes, and its methods; functions too."""
    found: dict[str, tuple[set[str], set[str], list[str]]] = {}
    for path in (ROOT / "package").rglob("*.py"):
        if path.parent.name == "script":  # `Trainer` on this page is `drivetrain.Trainer`
            continue
        for each in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.FunctionDef):
                found.setdefault(each.name, (arguments(each), set(), []))
            if not isinstance(each, ast.ClassDef) or each.name.startswith("_"):
                continue
            takes, members = set[str](), set[str]()
            for part in each.body:
                if isinstance(part, ast.FunctionDef):
                    members.add(part.name)
                    takes |= arguments(part) if part.name == "__init__" else set()
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    takes.add(part.target.id)
            found[each.name] = (takes, members, [ast.unparse(base) for base in each.bases])
    for name, (takes, members, bases) in found.items():
        for base in bases:
            if base in found and base != name:
                takes |= found[base][0]
                members |= found[base][1]
    return {name: (takes, members) for name, (takes, members, _) in found.items()}


def arguments(function: ast.FunctionDef) -> set[str]:
    given = function.args
    named = {each.arg for each in (*given.args, *given.kwonlyargs)}
    return named | ({"**"} if given.kwarg else set())


def ours() -> list[str]:
    """What stands in code style in the last column."""
    return sorted({code for _, _, here in rows() for code in re.findall(r"`([^`]+)`", here)})


OUTSIDE = {"HfArgumentParser", "PeftModel", "F", "Task", "Adafactor", "CallbackAdapter", "Seq2SeqTrainer"}
"""Names of other packages, the reader's task, and those of which only the place is named."""


def test_every_row_has_a_state_and_says_where_or_why() -> None:
    found = list(rows())
    assert len(found) == 284
    assert {state for _, state, _ in found} == set(STATES)
    assert all(there and here for there, _, here in found)


def test_every_documented_option_and_event_has_a_row() -> None:
    left = {name for there, _, _ in rows() for name in re.findall(r"\w+", there)}
    documented = left & {*ARGUMENTS, *EVENTS}
    assert len(documented) > 100
    newer = {*ARGUMENTS} - left  # on the page of arguments alone
    assert {"learning_rate", "push_to_hub", "xpu_backend", "sortish_sampler"} <= left
    assert len(newer) < 60


def test_the_classes_and_arguments_that_the_page_names_exist() -> None:
    known = classes()
    checked = 0
    for code in ours():
        for name, given in re.findall(
            r"\b([A-Z]\w+|from_training_arguments|export_pretrained)\((.*)\)", code
        ):
            if name in OUTSIDE or name == "DRIVETRAIN_LOG_LEVEL":
                continue
            takes, _ = known[name]
            for argument in re.findall(r"(?:^|, )(\w+)=", re.sub(r"\{.*?\}|\[.*?\]|\(.*?\)", "", given)):
                options = {"betas", "eps", "amsgrad"}  # of the optimizers themselves
                assert argument in takes or argument in options, code
                checked += 1
    assert checked > 80


def test_the_members_that_the_page_names_exist() -> None:
    known = classes()
    seen: list[Run] = []
    keep = drivetrain.LambdaCallback(on_fit_start=seen.append)
    quiet(max_steps=1, callbacks=[keep]).fit(Regression(), pairs(4))
    commands = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    owners = {"run": seen[0], "trainer": Trainer(max_steps=1), "drivetrain": drivetrain}
    for code in ours():
        for owner, name in re.findall(r"^(run|trainer|drivetrain|result|TaskModule)\.(\w+)", code):
            if owner == "result":
                assert name in FitResult.__dataclass_fields__ or hasattr(FitResult, name), code
            elif owner == "TaskModule":
                assert name in known["TaskModule"][1], code
            else:
                assert hasattr(owners[owner], name), code
        if re.fullmatch(r"on_\w+", code):
            assert code in HOOKS
        if code.startswith("drivetrain "):
            assert f"drivetrain {code.split()[1]}" in commands, code


@pytest.mark.parametrize("name", ["from_training_arguments", "export_pretrained", "CallbackAdapter"])
def test_the_integration_has_what_the_page_names(name: str) -> None:
    assert name in classes()
