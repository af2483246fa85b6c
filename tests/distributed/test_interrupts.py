"""Ctrl-C that the main thread cannot hear of is known to others; nobody else's signals are touched."""

import signal
import sys

import pytest
from tests.distributed.running import run_all

from drivetrain.distributed.signals import Signals, current

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals to itself")


@pytest.mark.real("processes send themselves signals")
def test_an_interrupt_is_the_main_threads_or_known_to_others() -> None:
    cases = ("heard", "unheard", "copy")
    found = run_all("signals.py", {case: {"case": case} for case in cases})
    assert {case: (each.code, each.errors) for case, each in found.items()} == dict.fromkeys(cases, (0, []))


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    interrupts = Signals((), (signal.SIGINT,), lambda _: None, print)
    interrupts.open()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.close()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
    assert before is not signal.default_int_handler


def test_one_that_listens_for_interrupts_alone_makes_way_for_a_run() -> None:
    interrupts = Signals((), (signal.SIGINT,), lambda _: None, print)
    of_run = Signals((signal.SIGTERM,), (signal.SIGINT,), lambda _: None, print)
    interrupts.open()
    of_run.open()
    assert current() is of_run
    interrupts.close()
    assert current() is of_run
    of_run.close()
    assert (current(), signal.getsignal(signal.SIGINT)) == (None, signal.default_int_handler)
