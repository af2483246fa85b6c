"""The tests stay small: their lines by layer, and together beside the package, by tests/budget.toml."""

from pathlib import Path

from tests.support.gate import BUDGET, TESTS, lines_of

import drivetrain


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
    package = lines_of(Path(drivetrain.__file__).parent).total()
    most = BUDGET["lines_per_line_of_package"] * package
    assert lines_of(TESTS).total() <= most, f"{lines_of(TESTS).total()} lines of tests, over {most:.0f}"
