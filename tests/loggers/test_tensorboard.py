"""The TensorBoard logger, read back by TensorBoard's own reader."""

import json
import math
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from drivetrain.loggers import TensorBoardLogger


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in tags}


def texts(directory: Path) -> list[str]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    reader.Reload()
    if "config/text_summary" not in reader.Tags()["tensors"]:
        return []
    return [each.tensor_proto.string_val[0].decode() for each in reader.Tensors("config/text_summary")]


def log(directory: Path, *losses: tuple[int, float], state: object = None) -> dict[str, object]:
    logger = TensorBoardLogger(directory)
    if state is not None:
        logger.load_state_dict(state)
    for step, loss in losses:
        logger.log_metrics({"loss": loss}, step)
    logger.close()
    return json.loads(json.dumps(logger.state_dict()))


def test_tensorboard_shows_what_was_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.close()
    assert not list(tmp_path.iterdir())  # nothing is made until something is logged
    logger.log_config({"lr": 0.1, "limit": math.inf})
    logger.log_metrics({"train/loss": 0.5, "train/odd": math.nan}, step=50)
    logger.log_metrics({"train/loss": 0.375}, step=100)
    logger.close()
    found = scalars(tmp_path)
    assert found["train/loss"] == [(50, 0.5), (100, 0.375)]
    assert math.isnan(found["train/odd"][0][1])
    (text,) = texts(tmp_path)
    assert json.loads(text) == {"lr": 0.1, "limit": "Infinity"}
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    stored = reader.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    info = HParamsPluginData.FromString(stored).session_start_info  # of the tab that compares runs
    assert info.hparams["lr"].number_value == 0.1


def test_a_log_point_is_one_event_that_is_on_disk_when_the_call_returns(tmp_path):
    before = set(threading.enumerate())
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({f"m{number}": 1.0 for number in range(20)}, step=1)
    (path,) = tmp_path.glob("*tfevents*")
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert [len(event.summary.value) for event in events] == [20]
    assert set(threading.enumerate()) == before
    logger.close()
    logger.close()
    logger.log_metrics({"m1": 0.5}, 2)  # goes on in the same file
    logger.close()
    assert scalars(tmp_path)["m1"] == [(1, 1.0), (2, 0.5)]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("config_first", [True, False])
def test_after_a_resume_nothing_stands_twice(tmp_path, config_first):
    first = TensorBoardLogger(tmp_path)
    first.log_config({"lr": 0.1})
    first.log_metrics({"loss": 1.0}, 1)
    first.log_metrics({"validation": 9.0}, 1)
    state = json.loads(json.dumps(first.state_dict()))
    first.log_metrics({"loss": 0.9}, 2)
    first.log_metrics({"loss": 0.8}, 3)
    first.close()
    resumed = TensorBoardLogger(tmp_path)
    if config_first:
        resumed.log_config({"lr": 0.1})
    resumed.load_state_dict(state)
    if not config_first:
        resumed.log_config({"lr": 0.1})
    resumed.log_metrics({"loss": 0.7}, 2)
    resumed.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, pytest.approx(0.7))], "validation": [(1, 9.0)]}
    assert len(texts(tmp_path)) == 1


def test_a_resume_hides_what_its_checkpoint_does_not_hold(tmp_path):
    state = log(tmp_path / "1", (1, 1.0))
    log(tmp_path / "2", (1, 1.0), (2, 0.9))
    log(tmp_path / "2", state=state)  # and logs nothing more
    assert scalars(tmp_path / "2") == {"loss": [(1, 1.0)]}
    nothing = log(tmp_path / "3")
    log(tmp_path / "3", (0, 1.0))
    log(tmp_path / "3", (0, 0.5), state=nothing)
    assert scalars(tmp_path / "3") == {"loss": [(0, 0.5)]}
    log(tmp_path / "new", (11, 0.5), state={"step": 10, "config": ""})
    assert scalars(tmp_path / "new") == {"loss": [(11, 0.5)]}
