"""Run one part: `python -m gpu PART [--size full] [--rows FILE] [--until TIME]`.

The exit code is 0, or 1 where something failed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

from gpu.journal import Journal
from gpu.parts import PARTS
from gpu.works import SIZES


def main(arguments: list[str] | None = None) -> int:
    """Run a part on the GPU, or on the CPU where there is none."""
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", choices=SIZES, default="full", help="small: seconds on a CPU")
    parser.add_argument("--rows", type=Path, default=Path("gpu-rows.jsonl"), help="a file to append to")
    parser.add_argument("--until", type=float, default=float("inf"), help="in seconds since 1970")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # of the libraries, of one another
    journal = Journal(options.rows, options.part, options.until)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # for tiny models, on machines that have other work
    with journal.attempt(options.part):
        PARTS[options.part](journal, SIZES[options.size], device)
    journal.write("end", failed=journal.failed)
    return int(journal.failed)


if __name__ == "__main__":
    sys.exit(main())
