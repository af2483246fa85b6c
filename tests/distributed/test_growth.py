"""What one rank exchanges in each part of a run: nothing grows faster than the number of ranks."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch._C import _distributed_c10d as recorder
from torch.distributed import distributed_c10d

from drivetrain import Callback, CheckpointConfig
from drivetrain.distributed.failure.messages import TIMING, Cause, LocalLine
from drivetrain.distributed.failure.monitor import Monitor
from drivetrain.testing import run_distributed

SIZES = (2, 8, 64)
WIDTH = {"Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1}


class CountingStore:
    made = 0

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            CountingStore.made += len(arguments[0]) if name == "multi_get" else 1
            return found(*arguments)

        return (
            counted if name in ("set", "get", "multi_get") else found
        )  # the others are asked again and again


class Growth:  # of a rank: collectives, bytes that it gets, and operations of the store, since the last part
    def __init__(self) -> None:
        self.last, self.store, self.found = -1, 0, dict[str, tuple[int, int, int]]()

    def part(self, name: str) -> None:
        entries = json.loads(recorder._dump_fr_trace_json())["entries"]
        new = [each for each in entries if each["record_id"] > self.last]
        self.last = entries[-1]["record_id"]
        sizes = [
            WIDTH[dtype] * torch.Size(shape).numel()
            for each in new
            for dtype, shape in zip(each["output_dtypes"], each["output_sizes"], strict=True)
        ]
        store, self.store = CountingStore.made - self.store, CountingStore.made
        self.found[name] = (len(new), sum(sizes), store)


class Parts(Callback):
    def __init__(self, growth: Growth, begin: str) -> None:
        self.growth, self.begin = growth, begin

    def on_fit_start(self, run: Any) -> None:
        self.growth.part(self.begin)

    def on_step_end(self, run: Any) -> None:
        step = run.progress.steps
        self.growth.part(
            {1: "first step", 5: "log point", 7: "save", 9: "first resumed step"}.get(step, "step")
        )


def measured(directory: str) -> dict[str, tuple[int, int, int]]:
    found: Callable[[], Any] = distributed_c10d._get_default_store
    store = CountingStore(found())
    distributed_c10d._get_default_store = lambda: store
    growth = Growth()
    checkpoint = CheckpointConfig(directory=directory, every="6 steps")
    last = None
    for begin, steps in (("start", 8), ("resume", 9)):
        if last is not None:
            growth.part("end of a fit")
        options = {"checkpoint": checkpoint, "log_every": "4 steps", "callbacks": [Parts(growth, begin)]}
        trainer = quiet(
            strategy="ddp", devices=torch.distributed.get_world_size(), max_steps=steps, **options
        )
        last = trainer.fit(Regression(), pairs(1000), resume=last).last_checkpoint
    distributed_c10d._get_default_store = found
    return growth.found


@pytest.mark.parametrize("size", [2, 8, 64, 512])
def test_a_failure_is_one_message_of_the_same_length_to_each_rank_and_no_collective(size: int) -> None:
    monitor = Monitor(size, "127.0.0.1", TIMING, None)
    lines = [LocalLine() for _ in range(size)]
    state = {
        "where": "step 7",
        "progress": 7,
        "signs": None,
        "phase": "works",
        "collective": "",
        "passed": -1,
    }
    for rank, line in enumerate(lines):
        monitor.add(line.other, {"rank": rank, "machine": None, "pid": 1, **state})
        assert [each["kind"] for each in line.receive()] == ["beat"]
    cause = Cause("error", size - 1, "step 7", "ValueError: boom").to_json()
    monitor._take(monitor._peers[size - 1], {"kind": "cause", "cause": cause, **state})
    assert [line.receive() for line in lines] == [[{"kind": "cause", "cause": cause}]] * size
    monitor.close()


@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="gloo")
def test_what_a_rank_exchanges_grows_at_most_with_their_number(tmp_path: Any) -> None:
    table = {
        size: run_distributed(measured, str(tmp_path / str(size)), world_size=size, timeout=300)
        for size in SIZES
    }
    smallest, middle = table[SIZES[0]], table[SIZES[1]]
    for size, of_ranks in table.items():
        for rank, parts in enumerate(of_ranks):
            for name, (collectives, received, operations) in parts.items():
                at_first, then = smallest[min(rank, 1)][name], middle[min(rank, 1)][name]
                line = then[1] + (then[1] - at_first[1]) / (SIZES[1] - SIZES[0]) * (size - SIZES[1])
                assert collectives == at_first[0], (size, rank, name)
                assert received <= (at_first[1] if name == "step" else 1.01 * line), (size, rank, name)
                assert operations <= at_first[2] + (1 if rank else 3 * (size - 2)), (size, rank, name)
    assert smallest[1]["step"] == (1, 4 * sum(each.numel() for each in Regression().parameters()), 0)
