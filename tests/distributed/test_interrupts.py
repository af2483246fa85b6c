"""Ctrl-C that the main thread cannot hear of is known to others; nobody else's signals are touched."""

import signal
import sys

import pytest
from tests.distributed.running import run_all

from drivetrain.distributed.interrupts import Interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals to itself")


@pytest.mark.real("processes send themselves signals")
def test_an_interrupt_is_the_main_threads_or_known_to_others() -> None:
    cases = ("heard", "unheard", "own_handler", "copy")
    found = run_all("signals.py", {case: {"case": case} for case in cases})
    assert {case: (each.code, each.errors) for case, each in found.items()} == dict.fromkeys(cases, (0, []))


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    interrupts = Interrupts()
    interrupts.open()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.close()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
    assert before is not signal.default_int_handler
