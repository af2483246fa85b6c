"""What `make gpu` measures, at a small size on the CPU: its parts, its watch for waits, and its page."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu import ways
from gpu.__main__ import main
from gpu.journal import Journal
from gpu.page import PAGE, README, page, readme, status, stored
from gpu.parts import PARTS
from gpu.plan import PLAN
from gpu.profiles import summary
from gpu.waits import without_waiting
from gpu.ways import BARE, SynchronisedClock, Way, prepared, take_turns
from gpu.works import SMALL, Amount, Images, Shape
from peers import HAND
from workloads import TINY, Clock

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu` runs the parts themselves")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:  # leave other libraries out, whose imports take seconds
    monkeypatch.setattr(ways, "PACKAGES", dict.fromkeys(ways.PACKAGES, "no_such_package"))


def rows_of(part: str, directory: Path) -> list[dict[str, Any]]:
    path = directory / "rows.jsonl"
    assert main([part, "--size", "small", "--rows", str(path)]) == 0
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = {
    "facts": {"fact": 7},
    "mlp": {"turn": 4, "left out": 6},
    "gpt2": {"plan": 1, "turn": 4, "left out": 3},
    "resnet": {"turn": 4},
    "saves": {"saves": 3},
    "memory": {"memory": 4},
    "profile": {"profile": 6, "waits": 1},
    "fp8": {"turn": 2},
}
"""The rows of each part, by kind."""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_writes_its_rows_and_its_tables(part: str, tmp_path: Path, alone: None) -> None:
    if part == "fp8":
        pytest.importorskip("torchao", reason="float8 needs it")
    rows = rows_of(part, tmp_path)
    assert rows.pop() == {"part": part, "kind": "end", "failed": False}
    kinds = [row["kind"] for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == ROWS[part]
    made = page(report(part, rows))
    for row in rows:
        assert row.get("contestant", row.get("policy", row.get("case", ""))) in made
    turns = {row["contestant"]: row for row in rows if row["kind"] == "turn"}
    if part in ("gpt2", "resnet"):
        before, after = turns[HAND]["loss"]
        assert after < before
        for row in turns.values():
            assert row["loss"] == pytest.approx([before, after], abs=0.03 * (before - after)), row
    if part == "memory":
        assert [row.get("micro_batch") for row in rows] == [1, 1, None, 1]
        assert any("micro_batch='auto'" in line for line in rows[2]["said"])


def report(part: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    outcome = {"name": part, "outcome": "passed", "reason": "", "code": 0, "took": 3.0, "tests": []}
    outcome["begun"] = "2026-11-28T10:00:00"
    device = {
        "gpu": "NVIDIA H100",
        "torch": "2.11",
        "cuda": "13.0",
        "capability": [9, 0],
        "memory": 85 * 10**9,
    }
    made = {"begun": "2026-11-28T10:00:00", "size": "full", "python": "3.12", "seconds": 400.0, "refused": ""}
    return {
        **made,
        "device": device,
        "installed": {},
        "missing": {},
        "parts": [{**outcome, "rows": rows}],
        **more,
    }


def test_page_and_readme_say_what_has_run(tmp_path: Path) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(stored()), "python benchmarks/gpu/page.py writes it"
    text = README.read_text(encoding="utf-8")
    assert text == readme(text, stored())
    assert "Nothing has run on a GPU yet" in page(None)
    assert all(f"| {each.name} |" in page(None) for each in PLAN)
    assert set(PARTS) == {each.name for each in PLAN if not each.is_test}
    done = report("facts", [])
    assert f"[one {done['device']['gpu']}](docs/explanation/gpu.md) |" in readme(text, done)
    assert "not yet run" in status(report("facts", [], size="small"))
    assert "not yet run" in status(report("facts", [], refused="no GPU", parts=[]))


def test_ratios_are_medians_to_the_loop_of_the_same_round() -> None:
    def row(contestant: str, round_: int, *seconds: float) -> dict[str, Any]:
        named = {"kind": "turn", "work": "GPT", "micro_batches": 1, "contestant": contestant, "beside": HAND}
        told = {"round": round_, "unit": "tokens", "units": 100, "flops": 4e12, "peak_flops": 1e13}
        rest = {"first_step": 9.0, "loss": [2.0, 1.0], "allocated": 2**30, "reserved": 2**31}
        return {**named, **told, **rest, "seconds": seconds}

    rows = [row(HAND, 0, 1.1, 1.0), row("ours", 0, 1.2), row(HAND, 1, 2.0), row("ours", 1, 2.2)]
    rows += [{"kind": "error", "what": "GPT: Lightning", "error": "ValueError: no"}]
    made = page(report("gpt2", rows))
    assert "| GPT, ours | 1,700.00 ms | 1.150 | 59 tokens/s | 23.5% | 9.0 s | 1.00 | 2.00 | 2 to 1 |" in made
    assert "- failed: GPT: Lightning: ValueError: no" in made


def test_what_fails_or_would_take_too_long_costs_one_row(tmp_path: Path, alone: None) -> None:
    journal = Journal(tmp_path / "rows.jsonl", "mlp")
    broken = Way("broken", options={"strategy": "nowhere"})
    amount = Amount(4, 2, 1)
    take_turns(journal, (broken, *BARE), TINY, amount, SMALL, "cpu", precision="32", rounds=(0, 1))
    rows = [json.loads(line) for line in journal.path.read_text(encoding="utf-8").splitlines()]
    assert [row["kind"] for row in rows].count("error") == 2
    assert [row["kind"] for row in rows].count("turn") == 4
    assert journal.failed
    journal.until = 0.0
    take_turns(journal, BARE, TINY, amount, SMALL, "cpu", precision="32")
    last = json.loads(journal.path.read_text(encoding="utf-8").splitlines()[-1])
    assert (last["kind"], last["why"]) == ("left out", "no time was left")


class Reads(TorchDispatchMode):
    """Raises where a number is read while waits are errors, as torch does on a GPU."""

    mode = "default"

    def set(self, mode: str) -> None:
        self.mode = mode

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if self.mode == "error" and function.overloadpacket.__name__ == "_local_scalar_dense":
            raise RuntimeError("called a synchronizing CUDA operation")
        return function(*arguments, **(keywords or {}))


@contextmanager
def watched(net: Any = None) -> Iterator[tuple[Any, Reads]]:
    with prepared(TINY, Amount(20, 20, 5), SMALL, "cpu", "32") as job, Reads() as reads:
        job.clock = Clock()
        if net is not None:
            job.net = net(job.net)
        yield job, reads


class Reading(torch.nn.Module):  # A model that reads a number in each forward
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x * max(1.0, x.sum().item()))


def test_waits_are_errors_between_log_points_only() -> None:
    with watched() as (job, reads):
        # 26 steps, of which 3 warm up, 2 log, and after the last one the means are read.
        assert without_waiting(job, reads.set) == 20
        assert reads.mode == "default"
    with watched(Reading) as (job, reads):
        with pytest.raises(RuntimeError, match="synchronizing"):
            without_waiting(job, reads.set)
        assert reads.mode == "default"


def test_a_trace_gives_the_idle_share_and_the_waits() -> None:
    def event(kind: str, name: str, start: float, long: float) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": start, "dur": long, "ph": "X"}

    events = [
        event("kernel", "a", 0, 10),
        event("kernel", "b", 5, 15),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 10),
        event("cuda_runtime", "cudaStreamSynchronize", 0, 3),
        event("cuda_runtime", "cudaLaunchKernel", 0, 3),
        event("cpu_op", "aten::mm", 0, 100),
        {"ph": "M", "name": "process_name"},
    ]
    assert summary(events, 2) == {"kernels": 1, "waits": 0.5, "pageable": 0.5, "idle": pytest.approx(0.25)}
    assert summary(events[-2:], 1)["idle"] is None


def test_sizes_are_those_of_the_papers() -> None:
    with torch.device("meta"):
        gpt, net = Shape().work().model(), Images().model()
    assert sum(each.numel() for each in gpt.parameters()) == pytest.approx(124.4e6, rel=2e-3)
    assert sum(each.numel() for each in net.parameters()) == 25_557_032
    assert Shape().flops() == pytest.approx(0.860e9 * 1024, rel=2e-3)
    assert Images().flops() == pytest.approx(3 * 2 * 4.09e9, rel=1e-2)
    waited: list[int] = []
    clock = SynchronisedClock(2, 3, lambda: waited.append(len(clock.times)))
    for _ in range(9):
        clock()
    assert waited == [2, 5, 8], "at the begin of a block only"
