"""The parts of `make gpu` in their order, and the time of each; needs nothing but the standard library."""

from __future__ import annotations

from typing import NamedTuple

LIMIT = 480.0
"""Seconds for everything."""


class Planned(NamedTuple):
    """A part of the run.

    Attributes:
        name: Also of its files.
        seconds: That it may take at least. What the parts before have not used is its as well.
        what: It shows.
        is_test: Whether it is tests/gpu/test_<name>.py; else it is a part of `python -m gpu`.
    """

    name: str
    seconds: float
    what: str
    is_test: bool = False


PLAN = (
    Planned("facts", 6, "the machine: versions, C compiler, clocks, other processes on the GPU"),
    Planned("waits", 25, "tests in which a wait of the host for the GPU is an error", True),
    Planned(
        "mlp",
        60,
        "a `Linear(32, 2)` and a model of 50 layers, 1 and 8 micro-batches: cost of the loop itself",
    ),
    Planned(
        "gpt2", 130, "GPT-2 124M, bf16, compiled: tokens/s, model FLOPs utilisation, memory beside `plan`'s"
    ),
    Planned("training", 45, "tests of strategies, optimizers, accumulation, copies, resume, saving", True),
    Planned("resnet", 30, "ResNet-50, bf16, channels last, batches of 256 images"),
    Planned("saves", 30, "GPT-2 with synchronous saves and with saves in the background"),
    Planned("memory", 35, "GPT-2 with a batch that does not fit: the error, and `micro_batch='auto'`"),
    Planned("profile", 35, "kernels, idle share and waits of a step; waits of GPT-2 as errors"),
    Planned("fp8", 30, "GPT-2 in float8 beside bf16, where torchao is installed"),
    Planned("precisions", 45, "tests of every precision", True),
)
