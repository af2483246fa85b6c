"""Names that are deprecated: the warning, and their end."""

import ast
from pathlib import Path

import pytest

import drivetrain
from drivetrain.core.progress import Progress


def test_the_warning_names_the_version_the_replacement_and_the_users_line() -> None:
    said = r"Progress\.updates is deprecated since drivetrain 0\.1\.0, .* removes it\. Use Progress\.steps\."
    with pytest.warns(FutureWarning, match=said) as warned:
        assert Progress(steps=3).updates == 3
    assert warned[0].filename == __file__


def overdue(source: str, version: str) -> list[str]:  # what is to be gone, and what goes too soon
    found = []
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "deprecated":
            given = {
                each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg != "stacklevel"
            }
            since, removed = (tuple(map(int, given[each].split("."))) for each in ("since", "removed_in"))
            soon = removed[0] == since[0] and removed[1] < since[1] + 2
            if soon or removed <= tuple(map(int, version.split("."))):
                found.append(ast.unparse(call.args[0]))
    return found


def test_a_deprecated_name_works_for_two_minor_versions_and_then_goes() -> None:
    call = "deprecated('{}', 'new', since='0.2.0', removed_in='{}')\n"
    source = call.format("soon", "0.3.0") + call.format("kept", "0.5.0") + call.format("over", "0.4.0")
    assert overdue(source, "0.4.0") == ["'soon'", "'over'"]
    package = Path(drivetrain.__file__).parent
    for path in package.rglob("*.py"):
        assert not overdue(path.read_text(encoding="utf-8"), drivetrain.__version__), path
