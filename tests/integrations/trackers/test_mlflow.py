"""MLflow, whose database is read back."""

import importlib.util
import socket
import sqlite3
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.trackers.kept import ROOT, assert_each_value_once, killed_twice, run_program

from drivetrain.run.record import git_state

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed; `make trackers` installs it"
)
METRICS = """select step, key, value from metrics join runs using (run_uuid)
    where runs.name = ? and key not like 'system/%'"""
TAGS = "select value from tags where key = 'mlflow.source.git.commit'"


def rows(path: str, query: str, *values: Any) -> list[Any]:
    with sqlite3.connect(path) as database:
        found = database.execute(query, values).fetchall()
    database.close()
    return found


@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_a_killed_fit_goes_on_in_the_same_run_with_each_value_once_the_commit_and_the_machine():
    given = {"tracking_uri": f"sqlite:///{Path('here.db').absolute()}"}
    measures = tuple(map(int, version("mlflow").split(".")[:2])) >= (3, 5)
    measured = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "1", "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1"}
    killed_twice("mlflow", given, given, **(measured if measures else {}))
    assert_each_value_once(rows("here.db", METRICS, "run"))
    of_machine = rows("here.db", "select step from metrics where key = 'system/cpu_utilization_percentage'")
    assert len({*of_machine}) == len(of_machine)
    assert bool(of_machine) is measures
    state = git_state(ROOT)
    assert rows("here.db", TAGS) == ([] if state is None else [(state["commit"],)])
    assert rows("here.db", "select name, status from runs") == [("run", "FINISHED")]


@pytest.mark.nightly
@pytest.mark.real("kills a server")
def test_a_server_that_dies_in_the_middle_gets_each_value_in_the_end():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = run_program("mlflow_served.py", port, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert_each_value_once(rows("served.db", METRICS, "run"))
    assert rows("served.db", "select name, status from runs order by name") == [
        ("job", "RUNNING"),  # the job ends it
        ("run", "FINISHED"),
    ]
    assert {step for step, _, _ in rows("served.db", METRICS, "job")} == {1, 2}
    ((text,),) = rows("served.db", "select value from params where key like '%text' and length(value) > 500")
    assert text == "x" * 5997 + "..."
    assert len(list(Path("stored").rglob("config.json"))) == 2
    assert len(list(Path("stored").rglob("weights/model.safetensors"))) == 1
    assert "MLflow cannot be opened: no server answers at" in out
    assert "MLFLOW_TRACKING_URI" in out
    assert not Path("without/config.json").exists()


@pytest.mark.landing
@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
def test_the_logger_of_lightning_becomes_ours_with_its_arguments():
    assert run_program("mlflow_of_lightning.py") == "digits small 1 {'loss': 1.0} all\n"


@pytest.mark.nightly
def test_a_registered_model_is_loaded_by_another_process_without_its_module_and_has_a_signature():
    run_program("mlflow_registered.py")
    found = run_program("mlflow_registered.py", "load").splitlines()
    assert found[-3:] == ["True False", "(-1, 4) (-1, 1) Regression", "(3, 1)"]
    assert rows("here.db", "select name, version, run_id from model_versions") == [
        ("lines", 1, rows("here.db", "select run_uuid from runs")[0][0])
    ]
