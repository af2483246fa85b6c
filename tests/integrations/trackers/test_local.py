"""Trackers that keep local files alone, which are read back."""

import csv
import importlib.util
import json
import sqlite3
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.integrations.trackers.kept import assert_each_value_once, killed_twice, run_program


def installed(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; `make trackers` installs it")


def begin_repository() -> None:
    """One with a commit, whose remote has a password."""
    commit = "-c user.name=me -c user.email=me@example.org commit -q --allow-empty -m x"
    for words in ("init -q", "remote add origin https://me:hush@example.org/digits", commit):
        subprocess.run(["git", *words.split()], check=True)


@installed("trackio")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_trackio_goes_on_in_the_same_run_with_each_value_once(tmp_path):
    killed_twice("trackio", {"project": "digits"}, {"project": "digits"}, TRACKIO_DIR=str(tmp_path))
    with sqlite3.connect(tmp_path / "digits.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    database.close()
    assert len({name for name, _, _ in rows}) == 1
    assert_each_value_once((step, *each) for _, step, values in rows for each in json.loads(values).items())


@installed("dvclive")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_dvclive_goes_on_in_the_same_files_with_each_value_once():
    given = {"options": {"save_dvc_exp": False, "dvcyaml": None}}
    killed_twice("dvclive", given, given)
    found = []
    for path in Path("run/dvclive/plots/metrics").rglob("*.tsv"):
        name = path.relative_to("run/dvclive/plots/metrics").with_suffix("").as_posix()
        with path.open() as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        found += [(int(each["step"]), name, float(each[path.stem])) for each in rows]
    assert_each_value_once(found)
    assert "max_epochs" in Path("run/dvclive/params.yaml").read_text()


@installed("comet_ml")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_comet_goes_on_in_archives_of_one_experiment_with_each_value_once():
    begin_repository()
    killed_twice("comet", {"project": "digits", "online": False, "artifacts": "best"})
    messages, about = [], []
    for path in Path("run/comet").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            messages += map(json.loads, archive.read("messages.json").decode().splitlines())
            about.append(json.loads(archive.read("experiment.json")))
    assert len({each["offline_id"] for each in about}) == 1
    assert sorted(each["resume_strategy"] for each in about) == ["create", "get", "get"]
    assert {each["project_name"] for each in about} == {"digits"}
    found = [each["payload"]["metric"] for each in messages if each["type"] == "metric_msg"]
    assert_each_value_once(
        (each["step"], each["metricName"], each["metricValue"])
        for each in found
        if "/" in each["metricName"] or each["metricName"] == "epoch"  # and no measurement of the machine
    )
    text = json.dumps(messages)
    assert "trainer.max_epochs" in text
    assert "model.safetensors" in text
    assert "Linear(in_features=4" in text  # the model
    assert "hush" not in text
    assert not Path("run/comet/unfinished.json").exists()


@installed("comet_ml")
@installed("lightning")
@pytest.mark.landing
def test_the_comet_logger_of_lightning_becomes_ours_and_its_experiment_stays_open():
    assert run_program("comet_of_lightning.py") == "digits True True\n"


@installed("clearml")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_clearml_goes_on_in_the_same_session_with_each_value_once():
    place = {"CLEARML_CACHE_DIR": str(Path("cache").absolute()), "HOME": str(Path.cwd())}
    given = {"project": "digits", "offline": True, "artifacts": "best"}
    killed_twice("clearml", given, given, **place)
    (session,) = Path("cache/offline").glob("offline-*.zip")
    with zipfile.ZipFile(session) as archive:
        lines = [json.loads(line) for line in archive.read("metrics.jsonl").decode().splitlines()]
        task = json.loads(archive.read("task.json"))
    found = [each for line in lines for each in line if not each["metric"].startswith(":")]
    assert_each_value_once(
        (each["iter"], f"{each['variant']}/{each['metric']}".removeprefix("epoch/"), each["value"])
        for each in found
    )
    assert task["hyperparams"]["General"]["trainer.max_epochs"]["value"] == "2"
    assert any(each["key"].startswith("weights") for each in task["execution"]["artifacts"])


@installed("swanlab")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_swanlab_goes_on_under_the_same_id_with_each_value_once():
    begin_repository()
    killed_twice("swanlab", {"project": "digits", "mode": "offline", "artifacts": "best"})
    paths = sorted(Path("run/swanlog").glob("run-*/*.swanlab"))
    assert len({path.name for path in paths}) == 1
    out = run_program("swanlab_records.py", *map(str, paths))
    rows, saved = json.loads(out)
    assert_each_value_once((step, name, value) for step, name, value in rows)
    assert any("model.safetensors" in each for each in saved)
    assert not [each for each in Path("run/swanlog").rglob("*.json") if "hush" in each.read_text()]


@installed("neptune")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_neptune_goes_on_with_each_value_once():
    given = {"project": "a/digits", "mode": "offline", "artifacts": "best", "namespace": "small"}
    killed_twice("neptune", given, given)
    lines = [
        json.loads(line)["obj"]
        for path in Path(".neptune/offline").glob("run__*/data-*.log")
        for line in path.read_text().splitlines()
    ]
    values = [
        each for each in lines if each["type"] == "LogFloats" and each["path"][:2] == ["small", "metrics"]
    ]
    assert_each_value_once(
        (value["step"], "/".join(each["path"][2:]), value["value"])
        for each in values
        for value in each["values"]
    )
    assert ["small", "config", "trainer", "max_epochs"] in [each["path"] for each in lines]
    assert any("upload" in each["type"].lower() for each in lines if each["path"][:2] == ["small", "weights"])
    assert len({each["values"][0] for each in lines if each["path"] == ["sys", "group_tags"]}) == 1


@installed("aim")
@pytest.mark.landing
@pytest.mark.real("kills a fit twice")
def test_aim_goes_on_in_the_same_run_with_each_value_once():
    begin_repository()
    given = {"experiment": "digits", "artifacts": "best"}
    killed_twice("aim", given, given)
    rows, name, experiment, config, git = json.loads(run_program("aim_values.py"))
    assert_each_value_once((step, *each) for step, *each in rows)
    assert git["commit"]["hash"] == config["run"]["git"]["commit"]
    assert (name, experiment, config["trainer"]["max_epochs"]) == ("run", "digits", 2)
    assert list(Path("run/aim-artifacts").rglob("model.safetensors"))
