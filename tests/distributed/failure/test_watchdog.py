"""A hang ends the process with its stacks; work, however slow its steps, does not."""

import threading
from pathlib import Path

import pytest
from tests.distributed.running import run_all

from drivetrain.distributed.failure.location import Phase
from drivetrain.distributed.failure.watchdog import EXIT_HANG, Watchdog


@pytest.mark.real("processes hang and are ended")
def test_a_process_that_hangs_is_ended_with_its_stacks_and_a_code_of_its_own() -> None:
    """Also if it cannot report: without a standard error or a directory."""
    kinds = ("plain", "no description", "no standard error", "no directory")
    found = run_all("watchdog.py", {kind: {"kind": kind} for kind in kinds})
    assert {kind: each.code for kind, each in found.items()} == dict.fromkeys(kinds, EXIT_HANG)
    assert EXIT_HANG == 75
    written = Path("plain/made/here/hang-stacks.txt").read_text(encoding="utf-8")
    for text in ("\n".join(found["plain"].errors), written):
        assert "no progress for 0.3 seconds (step 7, epoch 1)" in text
        assert "stuck_in_a_collective" in text, "the stack of the main thread is shown"
        assert "exit 75" in text
    for kind in ("plain", "no directory"):
        cause = "drivetrain: no progress for 0.3 seconds (step 7, epoch 1); exit code 75"
        assert found[kind].errors[-1] == cause
    undescribed = "\n".join(found["no description"].errors)
    assert "at an unknown location: ZeroDivisionError: division by zero" in undescribed
    assert "stuck_in_a_collective" in undescribed


class Watched:  # a watchdog of ten seconds without its thread, and what it sees
    def __init__(self) -> None:
        self.progress, self.phase = 0, Phase.WORKS
        self.watchdog = Watchdog(10.0, lambda: self.progress, str, phase=lambda: self.phase)

    def hangs_after(self, seconds: int) -> bool:  # no sooner
        return [self.watchdog._is_hang(1.0) for _ in range(seconds)] == [False] * (seconds - 1) + [True]


def test_the_time_without_progress_counts_from_the_last_progress() -> None:
    watched = Watched()
    for _ in range(5):
        watched.progress += 1
        assert not any(watched.watchdog._is_hang(1.0) for _ in range(10)), "one look sees it, nine do not"
    watched.progress += 1
    assert watched.hangs_after(11)


def test_a_save_or_a_compilation_has_longer_and_the_body_of_a_loop_no_limit() -> None:
    watched = Watched()
    watched.watchdog._is_hang(1.0)
    watched.phase = Phase.OUTSIDE
    assert not any(watched.watchdog._is_hang(1.0) for _ in range(10_000))
    watched = Watched()
    watched.watchdog._is_hang(1.0)
    watched.phase = Phase.OPAQUE
    assert not any(watched.watchdog._is_hang(1.0) for _ in range(3600))
    assert any(watched.watchdog._is_hang(1.0) for _ in range(20))


def test_its_thread_ends_with_it_at_once() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), Watchdog(3600, lambda: 0, lambda: ""):  # noqa: PT012
        assert threading.active_count() == before + 1
        raise KeyError
    assert threading.active_count() == before
