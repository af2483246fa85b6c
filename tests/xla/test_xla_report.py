"""The report of what XLA compiled and ran."""

from __future__ import annotations

import pytest
from tests.support.xla import apart, trainer
from torch.utils.data import DataLoader

from drivetrain import ConfigError, Trainer, XLAReport
from drivetrain.testing.strategies.tasks import Sequences, Tokens


def test_each_log_point_reports_compilations() -> None:
    def run() -> str:
        report = XLAReport(show=False)
        data = DataLoader(Sequences(8), batch_size=4)
        trainer("xla", log_every="1 step", callbacks=[report]).fit(Tokens(), data)
        return report.text

    text = apart(run)
    assert "CompileTime" in text
    assert "TotalSamples" in text


def test_another_device_has_nothing_to_report() -> None:
    with pytest.raises(ConfigError, match="XLAReport on 'cpu'"):
        Trainer(max_steps=1, strategy="cpu", callbacks=[XLAReport()])
