"""Trackers that keep local files alone, which are read back."""

import csv
import importlib.util
import json
import sqlite3
from pathlib import Path

import pytest
from tests.integrations.trackers.kept import assert_each_value_once, killed_twice


def installed(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; `make trackers` installs it")


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
