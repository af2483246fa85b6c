"""The figure and the first table of docs/explanation/benchmarks.md are those of the stored results."""

from __future__ import annotations

from tests.support.site import site_script


def test_the_figure_and_the_table_are_of_the_stored_results() -> None:
    """`python docs/site/draw_overhead.py` draws the one and, with --table, prints the other."""
    drawer = site_script("draw_overhead")
    assert drawer.PICTURE.read_text(encoding="utf-8") == drawer.draw()
    page = (drawer.EXPLANATION / "benchmarks.md").read_text(encoding="utf-8")
    assert "\n".join(drawer.table()) in page
    assert drawer.source() in page
