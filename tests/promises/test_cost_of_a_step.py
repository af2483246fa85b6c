"""A step costs what a hand-written loop costs: its calls are counted, since times depend on the machine."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

from tests.promises.example import QUIET, Line, batches

import drivetrain
from drivetrain import Trainer

PACKAGE = str(drivetrain.__path__[0])


def calls(steps: int) -> Counter[str]:  # the calls of the package's functions in a fit, by name
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_qualname] += 1

    data = list(batches(steps, 1))
    trainer = Trainer(max_epochs=1, strategy="cpu", checkpoint=False, log_every=1000, **QUIET)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        trainer.fit(Line(), data)
    finally:
        sys.setprofile(before)
    return found


def test_a_step_adds_a_few_calls_to_forward_backward_and_step() -> None:
    short, long = calls(20), calls(120)
    added = {name: (long[name] - short[name]) / 100 for name in long if long[name] != short[name]}
    assert sum(added.values()) <= 60, added


def test_options_that_are_not_used_cost_nothing() -> None:
    """No call is made for evaluations, checkpoints, loggers or callbacks that there are none of."""
    short, long = calls(20), calls(120)
    added = {name.partition(".")[0] for name in long if long[name] != short[name]}
    assert not {name for name in added if name.endswith(("Callback", "Checkpoints", "Logger", "Evaluation"))}
