"""A Hub on this machine, and a token that must appear nowhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKEN = "hf_markerTokenThatMustNeverBeSeen"


class Hub:
    """A server in a program of its own; its repositories stay when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        program = Path(__file__).with_name("server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(self.folder), str(self.port), TOKEN], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """Kill the server with everything that it is doing."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def requests(self) -> list[tuple[str, str, bool]]:
        """The method and path of each request, and whether it had a token."""
        return [tuple(json.loads(each)) for each in (self.folder / "requests.jsonl").read_text().splitlines()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, at which the client of this process and of its children looks."""
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "hub"
    folder.mkdir()
    for name, value in {
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would outlive the test
    monkeypatch.chdir(tmp_path)
    served = Hub(folder)
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    yield served
    served.kill()
    assert os.environ["HF_TOKEN"] == TOKEN
