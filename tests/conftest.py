"""Every test proves that it leaks nothing, and none writes outside its own directory."""

import faulthandler
import gc
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tests.support.gate import Gate
from tests.support.messages import UNEXPECTED
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler

from drivetrain.core.messages import handled_by
from drivetrain.core.registry import Registry
from drivetrain.distributed import processes
from drivetrain.loggers.base import LOGGERS
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.task.optim.config import OPTIMIZERS
from drivetrain.task.optim.schedules import SCHEDULES

try:
    import hypothesis
except ModuleNotFoundError:  # `make gpu` installs nothing, and its tests need none of it
    pass
else:
    # Without shrinking: a fault would make the run hang for minutes, and the first example shows it too.
    hypothesis.settings.register_profile(
        "gate",
        max_examples=40,
        deadline=None,
        derandomize=True,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("gate")

REGISTRIES: tuple[Registry[Any], ...] = (LOGGERS, OPTIMIZERS, PRECISIONS, SCHEDULES, STRATEGIES)

torch.set_num_threads(1)
# torch names its compiler's cache in the environment when the first optimizer of a process is made.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
# Its DataLoader installs this handler for good when it first starts workers.
_set_SIGCHLD_handler()
# Ignored in what a shell runs in the background, and then in all that this process starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Jobs of several processes would otherwise make the file of this user's secret, in the home directory.
os.environ["DRIVETRAIN_SECRET"] = secrets.token_hex(32)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--reverse`: tests that depend on one another's order fail in one of the two."""
    parser.addoption("--reverse", action="store_true", help="run the last test first")


def pytest_configure(config: pytest.Config) -> None:
    """Hold the tests to their budget; one example of each random test is shrunk by nobody."""
    config.pluginmanager.register(Gate(config), "gate")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reverse the order of the tests where asked for, and let each process begin with one that lasts long."""
    if config.getoption("reverse"):
        items.reverse()
    if any(map(_is_long, items)):
        # Each process is given one piece of the list, and takes from the others' when it has none left.
        items.sort(key=_is_long, reverse=True)
        processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        items[:] = [each for first in range(processes) for each in items[first::processes]]


def _is_long(item: pytest.Item) -> bool:
    landing = item.get_closest_marker("landing")
    return landing is not None and bool(landing.kwargs.get("long"))


def pytest_collection_finish() -> None:
    """Keep the collector off what is here for good, in this process and in the copies that tests make."""
    gc.collect()
    gc.freeze()


def _open_files() -> set[str]:
    """The regular files that this process has open; empty where the system does not tell."""
    found = set()
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        return found
    for each in os.listdir(descriptors):
        try:
            target = os.readlink(descriptors / each)
        except OSError:  # the descriptor of the listing itself
            continue
        kept = target.startswith(("/proc", "/dev")) or "/mpl-data/fonts/" in target  # matplotlib keeps fonts
        if target.startswith("/") and os.path.isfile(target) and not kept:
            found.add(target)
    return found


def _state() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        # pytest itself notes the running test in the environment.
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "threads": {thread.name for thread in threading.enumerate()},
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "determinism": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn.benchmark,
            cudnn.deterministic,
        ),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "working directory": os.getcwd(),
        "open files": _open_files(),
        "fault handler": faulthandler.is_enabled(),
        "registered names": [sorted(registry) for registry in REGISTRIES],
    }


def _settled(before: dict[str, Any]) -> dict[str, Any]:
    """The state after a test, once threads that are ending (a DataLoader joins no feeder) have ended."""
    deadline = time.monotonic() + 60
    after = _state()
    while (
        any(after[each] - before[each] for each in ("threads", "open files")) and time.monotonic() < deadline
    ):
        time.sleep(0.01)
        after = _state()
    return after


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:  # fail a test after which the process is not as it was before
    before = _state()
    yield
    after = _settled(before)
    wrong = []
    for name, was in before.items():
        now = after[name]
        if name in ("threads", "open files"):
            extra = now - was
            if extra:
                wrong.append(f"{name}: {sorted(extra)}")
        elif now != was:
            wrong.append(f"{name}: {was!r} became {now!r}")
    assert not wrong, "this test leaks: " + "; ".join(wrong)


@pytest.fixture(autouse=True)
def warns_as_expected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test with a warning of ours that it does not expect; one that takes `caplog` looks itself."""
    UNEXPECTED.texts = []
    with handled_by(UNEXPECTED):
        yield
    if "caplog" not in request.fixturenames:
        assert not UNEXPECTED.texts, f"warnings that this test does not expect: {UNEXPECTED.texts}"


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaks_nothing: None) -> None:
    """Run in a directory of the test's own, with torch's seed 0, and before the program asks for its rank."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    monkeypatch.setattr(processes, "_asked_alone", None)


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch, leaks_nothing: None) -> None:
    for registry in REGISTRIES:
        list(registry)  # finds other packages' rows, which stay
        monkeypatch.setattr(registry, "_rows", dict(registry._rows))
