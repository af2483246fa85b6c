"""Programs that mostly wait are run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.support.failing import Ended, run_program, run_together


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
                run = run_program if marker.args else run_together
                options = {"directory": tmp_path_factory.mktemp("program"), **marker.kwargs}
                found[item.name] = pool.submit(run, *marker.args, **options)
        yield found


@pytest.fixture
def ended(request: pytest.FixtureRequest, programs: dict[str, Future[Ended]]) -> Ended:
    """How the program of this test has ended: of `run_program` if its marker gives a text, else of
    `run_together`.
    """
    return programs[request.node.name].result()
