"""A process of their own for contestants that change what is for all of a process; `turns.py` starts it.

    python benchmarks/place.py CLOCK CONTESTANT...

Reads a question per line, writes an answer per line, and ends with its input.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from rows import BY_NAME
from turns import Place, answer, silenced
from workloads import CLOCKS, Clock


def main(clock: str, names: list[str]) -> None:
    """Answer until nobody asks."""
    torch.set_num_threads(1)
    Clock.read = CLOCKS[clock]
    # Answers alone go to where they are read; what contestants print does not.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with silenced():
        place = Place(names)
    for line in sys.stdin:
        print(json.dumps(answer(place, json.loads(line), BY_NAME)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
