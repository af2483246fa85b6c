"""Callbacks under XLA: the report, a profile, histograms, and callbacks that read and change weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.test_whole_weights import EXAMPLES, Found, assert_alike, by_one_process, fitted
from tests.support.xla import apart, make, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, OptimizerConfig, Profile, StrategyError, TaskModule, Trainer, XLAReport
from drivetrain.callbacks import WeightHistograms
from drivetrain.testing.strategies.tasks import Sequences, Tokens

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "strategies" / "xla.md"


def test_page_prints_what_it_shows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# file: train_xla.py\n.*?)^```$", text, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    Path("train_xla.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "train_xla.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")


def test_xla_report_has_compilations_at_each_log_point() -> None:
    def run() -> str:
        report = XLAReport(show=False)
        data = DataLoader(Sequences(8), batch_size=4)
        trainer("xla", log_every="1 step", callbacks=[report]).fit(Tokens(), data)
        return report.text

    text = apart(run)
    assert "CompileTime" in text
    assert "TotalSamples" in text
    with pytest.raises(ConfigError, match="XLAReport on 'cpu'"):
        Trainer(max_steps=1, strategy="cpu", callbacks=[XLAReport()])


@pytest.mark.parametrize("name", ["xla", "xla_fsdp"])
def test_profile_table_counts_the_phases(name: str, tmp_path: Path) -> None:
    def run() -> dict[str, int]:
        with pytest.raises(StrategyError, match=r"torch\.profiler cannot see the operations on XLA"):
            trainer(name, callbacks=[Profile(folder=tmp_path)])
        data = DataLoader(Sequences(8), batch_size=4)
        trainer(name, callbacks=[Profile(kinds="table", folder=tmp_path)]).fit(Tokens(), data)
        content = json.loads(next(tmp_path.glob("*.json")).read_text(encoding="utf-8"))
        assert content["device"] == "xla"
        return {each["name"]: each["calls"] for each in content["phases"]}

    found = apart(run)
    phases = ("data", "transfer", "step", "forward", "backward", "optimizer")
    assert {each: found[each] for each in phases} == dict.fromkeys(phases, 4)


class Still(TaskModule):
    """Weights that do not move, one of them not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.tensor([1.0, float("nan"), -float("inf"), -2.0]))

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.net(batch), batch[:, :4]) + 0 * self.unused[0]}

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1e-30)


class Kept:
    """A logger that keeps the counts it is given."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def log_metrics(self, metrics: Any, step: int) -> None: ...

    def log_histograms(self, histograms: Any, step: int) -> None:
        for name, each in histograms.items():
            self.found[f"{name} {step}"] = (list(each.counts), each.minimum, each.maximum, each.nonfinite)

    def log_config(self, config: Any) -> None: ...

    def close(self) -> None: ...


def histograms(of: Any) -> dict[str, Any]:
    kept = Kept()
    options = {"max_steps": 4, "log_every": 2, "loggers": [kept], "callbacks": [WeightHistograms()]}
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    of(**options).fit(Still(), data)
    return kept.found


@pytest.mark.parametrize(("name", "devices"), [("xla", 1), ("xla_fsdp_v2", 2)])
def test_histograms_of_weights_are_those_of_the_cpu(name: str, devices: int) -> None:
    def run() -> None:
        quiet: dict[str, Any] = {"progress_bar": False, "checkpoint": False}
        found = histograms(lambda **options: trainer(name, None, devices, **options))  # XLA is opened first
        expected = histograms(lambda **options: Trainer(strategy="cpu", **quiet, **options))
        assert expected["weights/unused 2"][3] == 2
        assert found == expected

    apart(run)


def _sent(found: dict[str, Found]) -> dict[str, Any]:
    """With arrays in place of tensors, whose memory would end with the process."""
    return {name: (values, [each.numpy() for each in weights]) for name, (values, weights) in found.items()}


def _plain() -> dict[str, Any]:
    return _sent(by_one_process())


def _found(name: str, devices: int) -> dict[str, Any]:
    strategy = make(name, devices=devices)
    return _sent({each: fitted(strategy(1), 1, made()) for each, made in EXAMPLES.items()})


@pytest.fixture(scope="module")
def expected() -> Any:
    return apart(_plain)


@pytest.mark.parametrize(("name", "devices"), [("xla_fsdp", 1), ("xla_fsdp_v2", 2)])
def test_callbacks_read_and_change_weights_as_on_the_cpu(
    name: str, devices: int, expected: dict[str, Any]
) -> None:
    found = apart(_found, name, devices)
    for each in EXAMPLES:
        assert_alike(
            *((values, list(map(torch.from_numpy, w))) for values, w in (found[each], expected[each]))
        )
