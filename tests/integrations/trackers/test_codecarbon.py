"""CodeCarbon, whose offline tracker measures this machine."""

import importlib.util
import json
from pathlib import Path

import pytest
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs

from drivetrain import ConfigError, Trainer
from drivetrain.integrations.trackers import CodeCarbon

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("codecarbon") is None,
    reason="codecarbon is not installed; `make trackers` installs it",
)


@pytest.mark.landing
def test_energy_and_emissions_are_logged_and_go_on_after_a_resume():
    def fit(epochs, resume=None):
        carbon = CodeCarbon("DEU", options={"measure_power_secs": 1})
        quiet = {"strategy": "cpu", "progress_bar": False, "run_dir": "run", "loggers": "csv"}
        trainer = Trainer(max_epochs=epochs, callbacks=[carbon], **quiet)
        result = trainer.fit(Regression(), pairs(), resume=resume)
        notes = map(json.loads, Path("run/ledger.jsonl").read_text().splitlines())
        return result, [each for each in notes if each["event"] == "emissions"]

    first, _ = fit(2)
    result, notes = fit(3, "auto")
    energy = [row["carbon/energy_kwh"] for row in result.history if "carbon/energy_kwh" in row]
    epochs = [row["carbon/epoch_energy_kwh"] for row in result.history if "carbon/epoch_energy_kwh" in row]
    assert energy == sorted(energy)
    assert 0 < first.metrics["carbon/energy_kwh"] < result.metrics["carbon/energy_kwh"]
    assert len(epochs) == 3
    assert min(epochs) >= 0
    assert sum(epochs) == pytest.approx(energy[-1])
    assert notes[-1]["emissions_kg"] > 0
    assert len(notes) == 2


def test_refusals():
    cases = {
        "country": (lambda: CodeCarbon("DEV"), "Did you mean"),
        "option": (lambda: CodeCarbon("DEU", options={"regio": "x"}), "Did you mean 'region'"),
    }
    assert_refused(ConfigError, cases)
