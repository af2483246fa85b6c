"""The use of the machine: its values beside psutil's, over ranks, and what a machine does not tell."""

from __future__ import annotations

import json
import logging
import mmap
import socket
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, ConfigError, DeviceStats, MissingDependencyError, Run
from drivetrain.callbacks.statistics import device_stats
from drivetrain.testing import run_distributed

OF_HOST = {
    "cpu_percent",
    "memory_percent",
    "swap_percent",
    "process_cpu_percent",
    "process_memory_bytes",
    "disk_free_bytes",
    "disk_read_bytes_per_second",
    "disk_written_bytes_per_second",
    "network_sent_bytes_per_second",
    "network_received_bytes_per_second",
}
SENT = 8 << 20


class Busy(Callback):
    """Sends bytes to itself and computes in each update."""

    def on_step_start(self, run: Run) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        with server, socket.create_connection(server.getsockname()) as out, server.accept()[0] as end:
            for _ in range(SENT >> 16):
                out.sendall(bytes(1 << 16))
                left = 1 << 16
                while left:
                    left -= len(end.recv(left))


def values(metrics: Any) -> dict[str, float]:
    return {name[len("device/") :]: each for name, each in metrics.items() if name.startswith("device/")}


def test_the_values_are_those_of_psutil(tmp_path: Path) -> None:
    before = psutil.net_io_counters().bytes_sent
    with heard("DeviceStats", logging.INFO) as texts:
        result = quiet(
            max_steps=2, log_every=2, run_dir=tmp_path / "new", callbacks=[Busy(), DeviceStats()]
        ).fit(Regression(), pairs())
    found = values(result.metrics)
    told = {name for name in OF_HOST if not any(name in each for each in texts)}
    assert found.keys() == told  # a container may have no disk of its own
    assert texts[0] == "DeviceStats: the device is 'cpu', and no values of a GPU are logged"
    assert found["memory_percent"] == pytest.approx(psutil.virtual_memory().percent, abs=20)
    assert found["disk_free_bytes"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.2)
    assert found["process_memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert found["process_cpu_percent"] >= 0  # 0 between two ticks of a slow clock
    assert 0 <= found["cpu_percent"] <= 100
    if psutil.net_io_counters().bytes_sent - before >= 2 * SENT:  # the machine counts what it sends to itself
        assert found["network_sent_bytes_per_second"] > 0
        assert found["network_received_bytes_per_second"] > 0


def test_a_rate_is_the_growth_since_the_last_value(monkeypatch: pytest.MonkeyPatch) -> None:
    times, counts = iter([10.0, 12.0, 12.5]), iter([100, 160, 170])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    rate = device_stats._Rate(lambda: next(counts))
    assert [rate(), rate(), rate()] == [0.0, 30.0, 20.0]


def test_a_value_that_the_machine_does_not_tell_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)  # as without /proc/diskstats
    with heard("does not tell", logging.INFO) as texts:
        result = quiet(max_steps=4, log_every=1, callbacks=[DeviceStats()]).fit(Regression(), pairs())
    assert len(texts) == 1
    assert "disk_read_bytes_per_second, disk_written_bytes_per_second" in texts[0]
    assert not any("disk_read" in name for name in values(result.metrics))
    assert "disk_free_bytes" in values(result.metrics)


def test_intervals_and_a_resume_give_the_log_points_of_an_uninterrupted_run(tmp_path: Path) -> None:
    def points(folder: str, updates: int, resume: str | None = None) -> list[int]:
        options = {"max_steps": updates, "log_every": "3 steps", "loggers": "jsonl", "checkpoint": True}
        quiet(**options, run_dir=tmp_path / folder, callbacks=[DeviceStats(every="5 steps")]).fit(
            Regression(), pairs(40), resume=resume
        )
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        return [row["step"] for row in map(json.loads, lines) if "device/cpu_percent" in row]

    assert points("straight", 15) == [6, 12, 15]
    points("resumed", 9)
    assert points("resumed", 15, "auto") == [6, 12, 15]
    names = [f"device/{name}" for name in OF_HOST]  # which no comparison of two runs compares
    assert all(any(fnmatchcase(name, each) for each in DeviceStats.timed_names) for name in names)


def _on_ranks(over_ranks: str) -> dict[str, float]:
    options = {"strategy": "ddp", "devices": 2, "max_steps": 2, "log_every": 2}
    result = quiet(**options, callbacks=[_Larger(), DeviceStats(over_ranks=over_ranks)]).fit(
        Regression(), pairs()
    )
    return values(result.metrics)


class _Larger(Callback):
    """Takes memory on the second rank."""

    def on_fit_start(self, run: Run) -> None:
        size = 64 << 20
        if run.engine.ranks.rank == 1:  # of the system: a heap may have that much free
            self.held = mmap.mmap(-1, size)
            self.held.write(b"1" * size)


@pytest.mark.parametrize("over_ranks", ["each", "max", pytest.param("mean", marks=pytest.mark.full)])
def test_ranks_are_joined_or_shown_one_by_one(over_ranks: str) -> None:
    first, second = run_distributed(_on_ranks, over_ranks)
    assert first == second
    if over_ranks == "each":
        small, large = (first[f"rank{rank}/process_memory_bytes"] for rank in (0, 1))
        assert large - small > 32 << 20
        assert {name.partition("/")[2] for name in first} <= OF_HOST
    else:
        assert first.keys() <= OF_HOST


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="unknown over_ranks of DeviceStats 'sum'"):
        DeviceStats(over_ranks="sum")
    with pytest.raises(ConfigError, match=r"DeviceStats\(every=\) takes steps or whole epochs"):
        DeviceStats(every="1 minute")


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_stats, "is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"'psutil'.*pip install 'drivetrain\[stats\]'"):
        quiet(max_steps=1, callbacks=[DeviceStats()])
    monkeypatch.setattr(device_stats, "is_installed", lambda package: package == "psutil")
    monkeypatch.setattr(torch.version, "hip", None)
    on_gpu: Any = type("OnGPU", (), {"device": torch.device("cuda")})
    with pytest.raises(MissingDependencyError, match=r"DeviceStats on an NVIDIA GPU needs.*'nvidia-ml-py'"):
        DeviceStats().check_trainer(quiet(), on_gpu)
    quiet(max_steps=1, callbacks=[DeviceStats()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_its_values() -> None:
    found = values(
        quiet(strategy="cuda", max_steps=2, log_every=1, callbacks=[DeviceStats()])
        .fit(Regression(), pairs())
        .metrics
    )
    assert found["cuda_reserved_bytes"] >= found["cuda_allocated_bytes"] > 0
    assert found["gpu_memory_used_bytes"] >= found["cuda_reserved_bytes"]
    assert 0 < found["gpu_memory_percent"] <= 100
    assert 0 <= found["gpu_utilisation_percent"] <= 100
    assert 10 < found["gpu_temperature_celsius"] < 110
    assert 10 < found["gpu_power_watts"] < 2000
