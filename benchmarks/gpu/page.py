"""The page of a run on a GPU: `python benchmarks/gpu/page.py [gpu.json]` writes docs/explanation/gpu.md.

Given the gpu.json of a run, it stores it beside the page first, and writes the cell of README's table of
strategies that says what has run. Without one stored, both say that nothing has. Only the standard library is
needed, since `make gpu` makes its report with this on any machine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.plan import LIMIT, PLAN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "gpu.md"
STORED = PAGE.with_suffix(".json")
README = ROOT / "README.md"

GOAL = 1.01
"""Our step's time over that of the hand-written loop compiled in the same way."""

Rows = list[dict[str, Any]]
Report = dict[str, Any]


def stored() -> Report | None:
    """Return the report beside the page; None if there is none."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else None


def status(report: Report | None) -> str:
    """Return README's words for what has run on a GPU."""
    link = "[`make gpu`](docs/explanation/gpu.md)"
    if report is None or report["refused"] or report["size"] != "full":
        return f"the same code as on the CPU; not yet run on a GPU ({link} would)"
    parts = report["parts"]
    tests = [test["outcome"] for part in parts for test in part["tests"]]
    failed = tests.count("failed")
    tested = f"[one {report['device']['gpu']}](docs/explanation/gpu.md)"
    return f"{tested}, where {failed} of {len(tests)} tests failed" if failed else tested


def readme(text: str, report: Report | None) -> str:
    """Return README with what has run on a GPU in the row of "cuda"."""
    row = r'^(\| `"cuda"` \|[^|]*\| ).*( \|)$'
    return re.sub(row, lambda found: f"{found[1]}{status(report)}{found[2]}", text, flags=re.MULTILINE)


_HEAD = f"""# On a GPU

`make gpu` runs the tests of `tests/gpu` and measures, on a machine with one NVIDIA GPU. It installs nothing,
needs no network, and takes at most {LIMIT / 60:.0f} minutes. Its report has the form of this page, which
`python benchmarks/gpu/page.py gpu.json` makes of the report's numbers.
"""

_NOTHING = """
**Nothing has run on a GPU yet.** No figure of this project was measured on one. Tests run the parts that
measure on a CPU, with tiny models: that shows that the program works, and nothing about a GPU.
"""

_METHOD = f"""
## How it is measured

- Each part is a process with a time limit, and writes each row as it comes. A part that is ended keeps its
  rows. `make gpu GPU="--only mlp fp8"` runs parts again and keeps the report's others.
- Contestants take turns in one process, in another order in each round. A time is that of the fastest block
  of a turn; the device is waited for where a block begins and ends. A ratio is to the loop beside it in the
  same round, and is the median of the rounds.
- Our default compiles each block by itself, so its ratio is to a hand-written loop that does the same. Ours
  compiled as a whole, and the other libraries, are measured beside a loop compiled as a whole. The goal for
  ours is {GOAL:g}.
- Utilisation is that of model FLOPs: 6 for a parameter and token, and 12 x layers x width x length for
  attention ([PaLM](https://arxiv.org/abs/2204.02311), appendix B), over the dense bf16 peak of the GPU's data
  sheet.
- The loss is that of one sample before and after. Contestants that do the same work end at nearly the same.
"""


def page(report: Report | None) -> str:
    """Return the page, in Markdown."""
    if report is not None:
        return f"{_HEAD}\n" + "\n".join(_results(report)).strip() + f"\n{_METHOD}"
    rows = [(each.name, each.what, f"{each.seconds:.0f}") for each in PLAN]
    lines = _table(("part", "what it shows", "seconds"), rows)
    lines[1] = "| --- | --- | ---: |"
    return f"{_HEAD}{_NOTHING}\n" + "\n".join(lines) + f"\n{_METHOD}"


def _results(report: Report) -> list[str]:
    lines: list[str] = []
    if report["refused"]:
        lines += [f"Nothing was run: {report['refused']}.", ""]
    if report["size"] != "full":
        lines += [
            f"**Size: {report['size']}.** These figures try the program out; they say nothing more.",
            "",
        ]
    device = report["device"]
    if device.get("gpu"):
        capability = ".".join(map(str, device["capability"]))
        memory = f"{device['memory'] / 2**30:.0f} GiB, compute capability {capability}"
        lines += [f"{device['gpu']}, {memory}, CUDA {device['cuda']}.", ""]
    versions = {"Python": report["python"], **report["installed"]}
    lines += [f"{report['begun'][:16].replace('T', ' ')} UTC, {report['seconds']:.0f} seconds."]
    lines += [", ".join(f"{name} {each}" for name, each in versions.items()) + ".", ""]
    lines += [report["note"], ""] if "note" in report else []
    lines += [f"- Not installed: `{name}`, for {use}." for name, use in report["missing"].items()]
    parts = report["parts"]
    if parts:
        lines += ["", "| part | begun | outcome | exit code | seconds | tests passed | failed | skipped |"]
        lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for part in parts:
        outcomes = [each["outcome"] for each in part["tests"]]
        counts = [str(outcomes.count(what)) if outcomes else "" for what in ("passed", "failed", "skipped")]
        said = part["outcome"] + (f": {part['reason']}" if part["reason"] else "")
        code = "" if part["code"] is None else part["code"]
        begun, took = part["begun"][11:16], f"{part['took']:.0f}"
        lines.append(f"| {part['name']} | {begun} | {said} | {code} | {took} | {' | '.join(counts)} |")
    for part in parts:
        lines += _part(part)
    return lines


def _part(part: dict[str, Any]) -> list[str]:
    rows: Rows = part["rows"]
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in {row["kind"] for row in rows}}
    found: list[str] = []
    for kind, table in _TABLES.items():
        if kind in kinds:
            found += ["", *table(kinds[kind])]
    for row in kinds.get("plan", []):
        sizes = ", ".join(f"{name} {_gib(size) or 'unknown'}" for name, size in row["memory"].items())
        whole = _gib(sum(size or 0 for size in row["memory"].values()))
        lacks = "Nothing is compiled in it, and what kernels take for themselves is not in it."
        found += ["", f"`plan` forecasts {whole} GiB for a step: {sizes}. {lacks}"]
    for row in kinds.get("waits", []):
        found += ["", f"{row['work']}: {row['watched']} of {row['steps']} steps with waits as errors."]
    notes = [
        f"- {row['contestant']}, {row['work']}: left out, {row['why']}" for row in kinds.get("left out", [])
    ]
    notes += [f"- failed: {row['what']}: {row['error']}" for row in kinds.get("error", [])]
    others = [each for each in part["tests"] if each["outcome"] != "passed"]
    notes += [f"- {each['outcome']}: `{each['name']}`: {each['reason']}" for each in others]
    found += ["", *notes] if notes else []
    return ["", f"## {part['name']}", *found] if found else []


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    first, *others = heads
    lines = [f"| {' | '.join([first, *others])} |", "| --- |" + " ---: |" * len(others)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _turns(rows: Rows) -> list[str]:
    spent: dict[tuple[str, int, str], dict[int, Any]] = {}
    for row in rows:
        spent.setdefault((row["work"], row["micro_batches"], row["contestant"]), {})[row["round"]] = row
    lines = []
    for (work, k, contestant), rounds in spent.items():
        first = next(iter(rounds.values()))
        beside = spent.get((work, k, first["beside"]), {})
        best = {number: min(row["seconds"]) for number, row in rounds.items()}
        ratios = [each / min(beside[n]["seconds"]) for n, each in best.items() if n in beside]
        seconds = median(best.values())
        rate = first["units"] / seconds
        known = first["flops"] and first["peak_flops"]
        lines.append([
            f"{work}, {contestant}" if k == 1 else f"{work}, {k} micro-batches, {contestant}",
            _time(seconds),
            f"{median(ratios):.3f}" if ratios else "",
            f"{rate:,.0f} {first['unit']}/s",
            f"{first['flops'] / seconds / first['peak_flops']:.1%}" if known else "",
            f"{max(row['first_step'] for row in rounds.values()):.1f} s",
            _gib(first["allocated"]),
            _gib(first["reserved"]),
            f"{first['loss'][0]:.4g} to {first['loss'][1]:.4g}",
        ])  # fmt: skip
    heads = ("contestant", "step", "times the loop beside it", "rate", "utilisation", "first step",
             "peak GiB", "held GiB", "loss")  # fmt: skip
    return _table(heads, lines)


def _facts(rows: Rows) -> list[str]:
    return [f"- {row['name']}: {row['value']}" for row in rows]


def _saves(rows: Rows) -> list[str]:
    plain = next((row["seconds"] for row in rows if not row["saves"]), None)
    lines = []
    for row in rows:
        cost = (row["seconds"] - (plain or 0)) * row["steps"] / (row["saves"] or 1)
        added = _time(cost) if row["saves"] and plain is not None else ""
        gaps = (_time(row["median_gap"]), _time(row["longest_gap"]))
        lines.append([row["policy"], str(row["saves"]), _time(row["seconds"]), added, *gaps])
    return _table(("saves", "number", "step", "added by a save", "median gap", "longest gap"), lines)


def _memory(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        failed = "error" in row
        found = row["error"].replace("|", "/") if failed else str(row["micro_batch"])
        others = (
            ("", "", "") if failed else (_time(row["seconds"]), _gib(row["allocated"]), _gib(row["reserved"]))
        )
        lines.append([row["case"], str(row["rows"]), found, *others])
    return _table(("batch", "rows", "micro-batch, or the error", "step", "peak GiB", "held GiB"), lines)


def _profile(rows: Rows) -> list[str]:
    lines = []
    for row in rows:
        name = f"{row['work']}, {row['micro_batches']} micro-batches, {row['contestant']}"
        idle = "" if row["idle"] is None else f"{row['idle']:.1%}"
        lines.append([name, idle, *(f"{row[each]:,.4g}" for each in ("kernels", "waits", "pageable"))])
    return _table(("steps of", "GPU idle", "kernels of a step", "waits", "pageable copies"), lines)


_TABLES = {"fact": _facts, "turn": _turns, "saves": _saves, "memory": _memory, "profile": _profile}


def main(arguments: list[str] | None = None) -> None:
    """Store the report that is given, if one is; write the page and README's cell."""
    for given in (sys.argv[1:] if arguments is None else arguments)[:1]:
        STORED.write_text(Path(given).read_text(encoding="utf-8"), encoding="utf-8")
    report = stored()
    PAGE.write_text(page(report), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()
