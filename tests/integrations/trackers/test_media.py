"""Images, sound and the like in the files of each tracker."""

import base64
import importlib.util
import io
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.integrations.trackers.kept import run_program

pillow = pytest.importorskip("PIL.Image")
pytest.importorskip("plotly")

STARTS = {
    b"\x89PNG": "image",
    b"GIF8": "video",
    b"RIFF": "audio",
    b"<!doctype html": "plotly figure",  # of plotly 7
    b"<html": "plotly figure",
    b'"""A fit': "file",
    b"**x**": "text",
    b'{"columns": ["a"]': "table",
    b'{"columns":["a"]': "table",
    b"a\r\n1": "table",
    b"| a |": "table",
    b'{"edges"': "histogram",
    b'{"version"': "histogram",
}
ALL = {*STARTS.values()}
FILES = {"image", "video", "audio"}
ROWS = {
    "wandb": ({"mode": "offline"}, {*FILES, "plotly figure", "table"}),  # and a histogram in its history
    "mlflow": ({"tracking_uri": "sqlite:///here.db"}, ALL - {"histogram"}),
    "trackio": ({}, FILES),  # and the others in its database
    "dvclive": ({"options": {"save_dvc_exp": False, "dvcyaml": None}}, {"image"}),
    "comet": ({"online": False}, ALL),
    "clearml": ({"project": "digits", "offline": True}, ALL),
    "swanlab": ({"mode": "offline"}, {"image", "video", "plotly figure", "text", "table"}),
    "neptune": ({"project": "a/digits", "mode": "offline"}, ALL),
    "aim": ({}, {*FILES, "text", "table", "histogram"}),
}


def stored(name):  # what a tracker has stored beside numbers, as kinds and contents
    if name == "aim":
        return [(kind, base64.b64decode(each)) for kind, each in json.loads(run_program("aim_media.py"))]
    if name == "comet":
        (path,) = Path("run/comet").glob("*.zip")
        with zipfile.ZipFile(path) as archive:
            lines = map(json.loads, archive.read("messages.json").decode().splitlines())
            uploads = [each["payload"] for each in lines if each["type"] == "file_upload"]
            media = [each for each in uploads if each["additional_params"]["step"] is not None]
            contents = [archive.read(each["file_path"]) for each in media]
    else:
        folder = "upload_path" if name == "neptune" else "media"
        contents = [
            each.read_bytes() for each in Path().rglob("*") if folder in each.parts and each.is_file()
        ]
    if name == "neptune":  # has pictures in its file of values
        (path,) = Path(".neptune").glob("offline/run__*/data-1.log")
        lines = [json.loads(line)["obj"] for line in path.read_text().splitlines()]
        values = [each for line in lines if line["type"] == "LogImages" for each in line["values"]]
        contents += [base64.b64decode(each["value"]["data"]) for each in values]
    found = [(next((k for s, k in STARTS.items() if each.startswith(s)), "?"), each) for each in contents]
    if name == "clearml":  # has plots in its file of values, and artifacts in a folder
        (path,) = Path().glob("cache/offline/*/metrics.jsonl")
        events = [each for line in path.read_text().splitlines() for each in json.loads(line)]
        found += [(each["metric"], b"") for each in events if each["type"] == "plot"]
        found += [("file", each.read_bytes()) for each in path.parent.rglob("media-file*/media.py")]
    return found


@pytest.mark.landing
@pytest.mark.parametrize("name", ROWS)
def test_a_tracker_has_the_media_of_each_log_point(name, tmp_path):
    package = {"comet": "comet_ml"}.get(name, name)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make trackers` installs it")
    options, kinds = ROWS[name]
    places = {
        "TRACKIO_DIR": str(tmp_path),
        "CLEARML_CACHE_DIR": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    run_program("media.py", name, json.dumps(options), **places)
    found = stored(name)
    assert kinds <= {kind for kind, _ in found}
    pictures = [np.asarray(pillow.open(io.BytesIO(each))) for kind, each in found if kind == "image"]
    assert len(pictures) == 2  # of 2 and 4 steps
    assert all(each[1, 2].tolist() == [6, 6, 18] for each in pictures)
    twice = Counter(kind for kind, _ in found)
    assert twice["video"] in (0, 2)
