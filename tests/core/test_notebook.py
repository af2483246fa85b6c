"""What a notebook shows: tables, small curves, and messages of progress on stdout."""

import math
import re
from types import SimpleNamespace

import pytest

from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.notebook.output import in_notebook


def test_a_table_escapes_its_cells_and_holds_curves_of_the_finite_values() -> None:
    table = html_table(("a/b",), [("<i>",), (sparkline([1.0, math.nan, math.inf, 2.0]),)])
    assert ">a/<wbr>b</th>" in table
    assert "&lt;i&gt;" in table
    assert 'points="0.0,23.0 120.0,1.0"' in table
    assert sparkline([math.nan, 1.0]) == sparkline([]) == ""
    (points,) = re.findall('points="(.*?)"', sparkline([float(each) for each in range(100_000)]))
    assert (len(points.split()), points[:8], points[-9:]) == (100, "0.0,23.0", "120.0,1.0")


def test_a_kernel_is_a_notebook_and_a_copy_of_its_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=SimpleNamespace(session=SimpleNamespace(pid=-1)))
    monkeypatch.setattr(pytest.importorskip("IPython"), "get_ipython", lambda: shell)
    assert not in_notebook()
    del shell.kernel.session  # of another kernel than ipykernel's
    assert in_notebook()
