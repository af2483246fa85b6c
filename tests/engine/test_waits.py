"""On several ranks an update waits no more often than on one, and the page shows the table."""

from pathlib import Path

import pytest
from tests.support.ranks import on_two_ranks
from tests.support.waits import TWO_RANKS, markdown, waits, waits_of_own_loop

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "the-step.md"


def waits_of_rank(strategy: str, directory: Path) -> tuple[float, float]:
    own_loop = waits_of_own_loop(strategy, ranks=2)
    return waits(TWO_RANKS[strategy], strategy, directory, devices=2), own_loop


@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_updates_on_two_ranks_wait_as_often_as_the_table_says(strategy: str, tmp_path: Path) -> None:
    assert on_two_ranks(waits_of_rank, strategy, tmp_path) == 2 * [(TWO_RANKS[strategy].waits, 0)]


def test_page_has_the_table() -> None:
    assert markdown() in PAGE.read_text(encoding="utf-8")
