"""Images, sound and the like in the files of each tracker."""

import importlib.util
import json

import numpy as np
import pytest
from tests.integrations.trackers.kept import run_program

pillow = pytest.importorskip("PIL.Image")
LOCAL = {"options": {"save_dvc_exp": False, "dvcyaml": None}}


@pytest.mark.landing
@pytest.mark.parametrize(
    ("name", "options", "kinds"),
    [
        ("wandb", {"mode": "offline"}, {".png", ".wav", ".gif", ".json"}),
        ("mlflow", {"tracking_uri": "sqlite:///here.db"}, {".png", ".wav", ".gif", ".json", ".md", ".py"}),
        ("trackio", {}, {".png", ".wav", ".gif"}),
        ("dvclive", LOCAL, {".png"}),
    ],
)
def test_a_tracker_has_the_media_of_each_log_point(name, options, kinds, tmp_path):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; `make trackers` installs it")
    run_program("media.py", name, json.dumps(options), TRACKIO_DIR=str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if "media" in path.parts]  # the working directory too
    assert kinds <= {path.suffix for path in files}
    pictures = [np.asarray(pillow.open(path)) for path in files if path.suffix == ".png"]
    assert len(pictures) == 2  # of 2 and 4 steps
    assert all(each[1, 2].tolist() == [6, 6, 18] for each in pictures)
