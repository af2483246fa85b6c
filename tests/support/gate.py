"""What the tests may cost, and which may run twice: a plugin that holds them to tests/budget.toml."""

import os
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from tests.support import ranks

TESTS = Path(__file__).parents[1]
BUDGET: dict[str, Any] = tomllib.loads((TESTS / "budget.toml").read_text(encoding="utf-8"))
TIERS = ("landing", "nightly", "extended")
MAY_BE_SLOW = {"real", "heavy", "gpu", *TIERS}


def layer_of(path: Path) -> str:
    """Return the folder of `tests` that a file is in; "tests" for one that is in none."""
    parts = path.relative_to(TESTS).parts
    return parts[0] if len(parts) > 1 else "tests"


def lines_of(root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        found[layer_of(path) if root == TESTS else ""] += len(path.read_bytes().splitlines())
    return found


def cpu() -> float:
    return sum(os.times()[:4]) + ranks.cpu_seconds


def slowness() -> float:
    """Return how many times slower this core is now than the one of the budget; at least 1."""
    times = []
    for _ in range(7):
        start, total = time.process_time(), 0
        for number in range(150_000):
            total += number * number % 7
        times.append(time.process_time() - start)
    return max(1.0, sorted(times)[3] / BUDGET["calibration"])


def tier_of(item: pytest.Item) -> str:
    return next((each for each in TIERS if item.get_closest_marker(each)), "quick")


class Gate:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.spent: Counter[str] = Counter()
        self.dearest: list[tuple[float, str]] = []
        self.over: list[str] = []
        self.near: list[str] = []
        self.first_failures: dict[str, str] = {}
        self.flaky: dict[str, str] = {}
        self.slowness = 1.0
        self.wrong: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let tests of real processes run once more, and refuse what the budget forbids."""
        files = set(BUDGET["real"]["files"])
        cases: Counter[str] = Counter()
        wrong = []
        for item in items:
            if TESTS not in item.path.parents:
                continue
            place = item.path.relative_to(TESTS).as_posix()
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.flaky(reruns=1))
                if place not in files:
                    wrong.append(
                        f"{item.nodeid} is marked real, but {place} is not on the list of budget.toml"
                    )
            elif item.get_closest_marker("flaky"):
                wrong.append(f"{item.nodeid} asks for reruns, which are for tests marked real")
            if tier_of(item) in ("quick", "landing"):
                cases[item.nodeid.partition("[")[0]] += 1
        most = BUDGET["most_cases_of_a_test"]
        wrong += [f"{name} has {count} cases, over {most}" for name, count in cases.items() if count > most]
        if wrong:
            raise pytest.UsageError("\n".join(wrong))

    def pytest_sessionstart(self) -> None:
        self.slowness = slowness()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Count a test's CPU seconds; what it imports first, or the machine disturbs, is not its own."""
        before = cpu()
        result = yield
        used = cpu() - before
        most = BUDGET["most_seconds_of_a_test"] * self.slowness
        if used > most and not any(item.get_closest_marker(each) for each in MAY_BE_SLOW):
            now, before = slowness(), cpu()
            runtestprotocol(item, nextitem=nextitem, log=False)
            used = min(used, cpu() - before)
            row = f"{item.nodeid} took {used:.1f} CPU seconds, the less of two times"
            most *= max(self.slowness, now, slowness()) / self.slowness
            # Other processes slow down what reads much memory, up to three times as far as seen.
            if used > most:
                (self.over if used > 3 * most else self.near).append(row)
        if TESTS in item.path.parents:
            self.spent[f"{tier_of(item)} {layer_of(item.path)}"] += used
            self.dearest = sorted([*self.dearest, (used, item.nodeid)], reverse=True)[:400]
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]
            self.first_failures.setdefault(report.nodeid, report.longreprtext)
        elif report.when == "call" and report.passed and report.nodeid in self.first_failures:
            self.flaky[report.nodeid] = self.first_failures[report.nodeid]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        spent, dearest, over, near = getattr(node, "workeroutput", {}).get("gate", ({}, [], [], []))
        self.spent.update(spent)
        self.dearest += [(seconds, name) for seconds, name in dearest]
        self.over += over
        self.near += near

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what a worker has counted, or fail the run that is over its budget."""
        if self.is_worker or not session.config.getoption("numprocesses", None):
            scale = (self.slowness + slowness()) / 2
            self.spent = Counter({name: seconds / scale for name, seconds in self.spent.items()})
        if self.is_worker:
            self.config.workeroutput["gate"] = (  # type: ignore[attr-defined]
                dict(self.spent),
                self.dearest,
                self.over,
                self.near,
            )
            return
        self.wrong = [f"{each}; mark it, or make it cheaper" for each in self.over]
        for name, seconds in self.spent.items():
            tier, layer = name.split()
            column = {"quick": "seconds", "landing": "landing"}.get(tier)
            limit = BUDGET.get("layers", {}).get(layer, {}).get(column or "", 0)
            if column and limit and seconds > 1.1 * limit:
                inside = [row for row in sorted(self.dearest, reverse=True) if _layer(row[1]) == layer]
                dear = ", ".join(f"{name} {used:.1f}" for used, name in inside[:5])
                self.wrong.append(
                    f"tests/{layer} took {seconds:.0f} CPU seconds of {limit} ({tier}); dearest: {dear}"
                )
        if self.wrong and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what passed on its second run only, what was spent, and what was too much."""
        if self.is_worker:
            return
        for name, text in self.flaky.items():
            terminalreporter.write_line(f"FLAKY: {name}\n{text}", yellow=True)
        rows = sorted(self.spent.items(), key=lambda row: -row[1])
        terminalreporter.write_line(
            f"CPU seconds: {sum(self.spent.values()):.0f} "
            + ", ".join(f"{name} {seconds:.1f}" for name, seconds in rows if seconds > 0.5)
        )
        for each in self.near:
            terminalreporter.write_line(f"dear: {each}; mark it, or make it cheaper", yellow=True)
        for each in self.wrong:
            terminalreporter.write_line(f"OVER BUDGET: {each}", red=True)


def _layer(name: str) -> str:
    parts = name.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"
