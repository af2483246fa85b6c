"""Programs that mostly wait are run side by side."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.support.failing import Ended, run_written, together

TOGETHER = inspect.signature(together).parameters.keys()
"""What a marker says of the program's text; the rest is of how it is run."""


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The programs of all tests of this module that will run, by the test's name."""
    with ThreadPoolExecutor(4) as pool:
        found = {}
        for item in request.session.items:
            marker = item.get_closest_marker("program")
            if marker is not None and item.path == request.path:
                made = {name: marker.kwargs[name] for name in TOGETHER & marker.kwargs.keys()}
                options = {name: each for name, each in marker.kwargs.items() if name not in made}
                text = marker.args[0] if marker.args else together(**made)
                directory = tmp_path_factory.mktemp("program")
                # Here, because a test that ends meanwhile would be told that it leaks an open file.
                (directory / "program.py").write_text(text, encoding="utf-8")
                found[item.name] = pool.submit(run_written, directory, **options)
        yield found


@pytest.fixture
def ended(request: pytest.FixtureRequest, programs: dict[str, Future[Ended]]) -> Ended:
    """How the program of this test has ended: the text of its marker, or what `together` makes of it."""
    return programs[request.node.name].result()
