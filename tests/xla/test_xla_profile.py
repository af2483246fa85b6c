"""The table of a profile under XLA, and what XLA has instead of traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.xla import apart, trainer
from torch.utils.data import DataLoader

from drivetrain import Profile, StrategyError
from drivetrain.testing.strategies.tasks import Sequences, Tokens


@pytest.mark.parametrize("name", ["xla", "xla_fsdp"])
def test_the_table_counts_the_phases(name: str, tmp_path: Path) -> None:
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
