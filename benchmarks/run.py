"""Everything that is measured, ours and every other library that is installed: `make bench`.

Writes results.md, results.json and a plot of each table to a directory; prints what it finds as it goes. The
goals are printed beside the figures; this program judges nothing but that all do the same work.

    make bench [BENCH="--quick"]
    python benchmarks/run.py [--quick] [--only TEXT ...] [--contestants NAME ...] [--rounds 9]
                             [--steps 500] [--clock cpu] [--output DIRECTORY] [--list]
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from peers import ROSTER, installed
from plots import plot
from report import Report
from sections import SECTIONS, Plan, choices
from workloads import CLOCKS, Clock

HERE = Path(__file__).parent


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    made = Plan(installed(arguments.contestants), arguments.only)
    if arguments.quick:
        made = replace(made, rounds=3, steps=100, starts=1, gigabytes=0.1, saves=2, several=(200, 4))
    if arguments.rounds:
        made = replace(made, rounds=arguments.rounds)
    made = replace(made, clock=arguments.clock)
    return replace(made, steps=arguments.steps) if arguments.steps else made


def list_rows() -> None:
    """Print what there is to choose from."""
    print("\n".join(choices()))
    print(f"\ncontestants: {', '.join(ROSTER)}")
    print(f"installed: {', '.join(installed())}")


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes; the figures are rough")
    parser.add_argument(
        "--only", nargs="+", default=[], help="rows whose table or name has one of these texts"
    )
    parser.add_argument("--contestants", nargs="+", help="only these, and the hand-written loop")
    parser.add_argument("--rounds", type=int, help="turns of each contestant in a row")
    parser.add_argument("--steps", type=int, help="of the smallest models in a turn")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that others use too"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--list", action="store_true", help="print the rows and the contestants, and end")
    arguments = parser.parse_args(argv)
    if arguments.list:
        list_rows()
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the libraries' own, of one another
    plan = plan_of(arguments)
    unknown = [text for text in arguments.only if not any(text.lower() in row.lower() for row in choices())]
    if unknown:
        listed = "\n  ".join(choices())
        parser.error(f"no row has {unknown[0]!r} in its table or name; there are\n  {listed}")
    Clock.read = CLOCKS[plan.clock]
    command = shlex.join(["python", "benchmarks/run.py", *(sys.argv[1:] if argv is None else argv)])
    report = Report(arguments.output, command)
    for section in SECTIONS:
        for table in section(plan):
            report.add(table)
            plot(table, plan.names, arguments.output)
    print(f"{report.directory}/results.md")


if __name__ == "__main__":
    main()
