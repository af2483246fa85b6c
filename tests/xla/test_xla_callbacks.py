"""Callbacks under XLA: the report, a profile, histograms, and callbacks that read and change weights."""

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
from torch.utils.data import DataLoader

from drivetrain import ConfigError, Trainer
from drivetrain.callbacks import XLAReport
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
    said = [line for line in done.stderr.splitlines() if "curves: " not in line]
    assert (done.returncode, done.stdout, said) == (0, shown, [])


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


def _sent(found: dict[str, Found]) -> dict[str, Any]:
    """With arrays in place of tensors, whose memory would end with the process."""
    return {name: (values, [each.numpy() for each in weights]) for name, (values, weights) in found.items()}


def _found(name: str, devices: int) -> dict[str, Any]:
    strategy = make(name, devices=devices)
    return _sent({each: fitted(strategy(1), 1, made()) for each, made in EXAMPLES.items()})


@pytest.fixture(scope="module")
def expected() -> Any:
    return apart(lambda: _sent(by_one_process()))


def test_callbacks_read_and_change_weights_as_on_the_cpu(expected: Any) -> None:
    found = apart(_found, "xla_fsdp", 2)
    for each in EXAMPLES:
        both = (found[each], expected[each])
        assert_alike(*((values, list(map(torch.from_numpy, w))) for values, w in both))
