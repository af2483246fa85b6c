"""The use of the machine: the values of psutil, over ranks, and what a machine does not tell."""

import logging
import math
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.callbacks import DeviceStats

OF_HOST = {"cpu_percent": 12.0, "memory_percent": 34.0, "swap_percent": 5.0, "process_cpu_percent": 90.0}
OF_HOST |= {"process_memory_bytes": 1000.0, "disk_free_bytes": 2000.0}
RATES = {"disk_read", "disk_written", "network_sent", "network_received"}
RATES = {f"{each}_bytes_per_second" for each in RATES}


def values(metrics: Any) -> dict[str, float]:
    return {name[len("device/") :]: each for name, each in metrics.items() if name.startswith("device/")}


def psutil_of(patch: pytest.MonkeyPatch, memory: float = 1000.0) -> None:
    """Let psutil tell `OF_HOST`, and counters that grow by 10, 20, 30 and 40 a reading."""
    process = SimpleNamespace(cpu_percent=lambda: 90.0, memory_info=lambda: SimpleNamespace(rss=memory))
    reads, writes, sent, received = (count(step=step) for step in (10, 20, 30, 40))
    for name, told in {
        "cpu_percent": lambda: 12.0,
        "virtual_memory": lambda: SimpleNamespace(percent=34.0),
        "swap_memory": lambda: SimpleNamespace(percent=5.0),
        "Process": lambda: process,
        "disk_usage": lambda path: SimpleNamespace(free=2000.0),
        "disk_io_counters": lambda: SimpleNamespace(read_bytes=next(reads), write_bytes=next(writes)),
        "net_io_counters": lambda: SimpleNamespace(bytes_sent=next(sent), bytes_recv=next(received)),
    }.items():
        patch.setattr(psutil, name, told)


def test_the_values_are_those_of_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"max_steps": 2, "log_every": 2, "run_dir": tmp_path / "new"}
    found = values(quiet(**options, callbacks=[DeviceStats()]).fit(Regression(), pairs()).metrics)
    assert {"memory_percent", "process_memory_bytes"} <= found.keys() <= {*OF_HOST, *RATES}  # of the machine
    assert all(math.isfinite(each) for each in found.values())
    psutil_of(monkeypatch)
    with heard("DeviceStats", logging.INFO) as texts:
        found = values(quiet(**options, callbacks=[DeviceStats()]).fit(Regression(), pairs()).metrics)
    assert texts == ["DeviceStats: the device is 'cpu', and no values of a GPU are logged"]
    assert found.keys() == {*OF_HOST, *RATES}
    assert {name: found[name] for name in OF_HOST} == OF_HOST
    assert all(found[name] > 0 for name in RATES)
    for name in found:  # which no comparison of two runs compares
        assert any(fnmatchcase(f"device/{name}", each) for each in DeviceStats.timed_names)


def on_ranks() -> list[dict[str, float]]:
    found = []
    for over_ranks in ("each", "max", "mean"):
        with pytest.MonkeyPatch.context() as patch:
            psutil_of(patch, 1000.0 * (1 + torch.distributed.get_rank()))
            callbacks = [DeviceStats(over_ranks=over_ranks)]
            trainer = quiet(strategy="ddp", devices=2, max_steps=2, log_every=2, callbacks=callbacks)
            found.append(values(trainer.fit(Regression(), pairs()).metrics))
    return found


def test_ranks_are_joined_or_shown_one_by_one() -> None:
    first, second = on_two_ranks(on_ranks)
    assert first == second
    each, largest, mean = first
    assert [each[f"rank{rank}/process_memory_bytes"] for rank in (0, 1)] == [1000.0, 2000.0]
    assert {name.partition("/")[2] for name in each} == {*OF_HOST, *RATES} == largest.keys()
    assert (largest["process_memory_bytes"], mean["process_memory_bytes"]) == (2000.0, 1500.0)
    assert mean["memory_percent"] == 34.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_its_values() -> None:
    trainer = quiet(strategy="cuda", max_steps=2, log_every=1, callbacks=[DeviceStats()])
    found = values(trainer.fit(Regression(), pairs()).metrics)
    assert found["cuda_reserved_bytes"] >= found["cuda_allocated_bytes"] > 0
    assert found["gpu_memory_used_bytes"] >= found["cuda_reserved_bytes"]
    assert 0 < found["gpu_memory_percent"] <= 100
    assert 0 <= found["gpu_utilisation_percent"] <= 100
    assert 10 < found["gpu_temperature_celsius"] < 110
    assert 10 < found["gpu_power_watts"] < 2000
