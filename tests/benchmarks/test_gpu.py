"""What runs on a GPU, with a tiny model on the CPU."""

from __future__ import annotations

import pytest
import torch

from gpu import PEAKS, Shape, SynchronisedClock, peak, seconds, table, without_waiting
from peers import HAND, OURS

TINY = Shape(layers=1, width=16, heads=2, size=32, length=8, rows=2)


@pytest.mark.parametrize("name", [HAND, OURS])
def test_a_contestant_trains_in_bf16(name: str) -> None:
    assert seconds(name, TINY, "cpu", updates=6, block=3, compiled=False) > 0


def test_between_log_points_every_wait_is_an_error_and_nothing_is_left_behind() -> None:
    modes: list[str] = []
    watched = without_waiting(TINY, "cpu", 20, modes.append, compiled=False)
    # 26 updates, of which 3 warm up and 2 log.
    assert watched == modes.count("error") == 21
    assert modes[2:4] == ["default", "error"]
    assert modes[9] == modes[19] == "default"
    assert modes[-1] == "default"


def test_a_wait_that_fails_reaches_the_caller_and_nothing_is_left_behind() -> None:
    modes: list[str] = []

    def refuse(mode: str) -> None:
        modes.append(mode)
        if modes.count("error") == 2 and mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        without_waiting(TINY, "cpu", 20, refuse, compiled=False)
    assert modes[-2:] == ["error", "default"]


def test_the_device_is_waited_for_where_a_block_begins_and_nowhere_else() -> None:
    waited: list[int] = []
    clock = SynchronisedClock(2, 3, lambda: waited.append(len(clock.times)))
    for _ in range(9):
        clock()
    assert waited == [2, 5, 8]


def test_flops_of_gpt_2_and_peaks() -> None:
    # 6 x 124.5 million and 12 x 12 x 768 x 1,024.
    parameters = sum(each.numel() for each in Shape().work().model().parameters())
    assert parameters == pytest.approx(124.4e6, rel=2e-3)
    assert Shape().flops(parameters) == pytest.approx(0.860e9, rel=2e-3)
    assert peak("NVIDIA H200") == PEAKS["H200"] * 1e12
    assert peak("Something new") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_it_is_said_so() -> None:
    assert table([HAND, OURS], 1).notes == ["Skipped: there is no GPU here."]
