"""A Hub on this machine, and a token that must appear nowhere."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKEN = "hf_markerTokenThatMustNeverBeSeen"


class Hub:  # a server in a program of its own; its repositories stay when it is killed
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.start()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:  # at the port that it had before
        words = map(str, (Path(__file__).with_name("server.py"), self.folder, self.port, TOKEN))
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def commits(self, name: str = "org--line") -> list[str]:
        return list(json.loads((self.folder / "repositories" / f"{name}.json").read_text())["messages"])

    def paths(self) -> list[str]:
        return [json.loads(each)[1] for each in (self.folder / "requests.jsonl").read_text().splitlines()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    folder.mkdir()
    quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    for name, value in {"HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), **quiet}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would outlive the test
    served = Hub(folder)
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    yield served
    served.kill()
