"""The TensorBoard logger, read back by TensorBoard's own reader."""

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from drivetrain.loggers import TensorBoardLogger


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) by tag."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return {
        tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def texts(directory: Path) -> list[str]:
    reader = EventAccumulator(str(directory), size_guidance={"tensors": 0})
    reader.Reload()
    if "config/text_summary" not in reader.Tags()["tensors"]:
        return []
    return [each.tensor_proto.string_val[0].decode() for each in reader.Tensors("config/text_summary")]


def test_tensorboard_shows_what_was_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"train/loss": 0.5, "train/accuracy": 0.25}, step=50)
    logger.log_metrics({"train/loss": 0.375}, step=100)
    logger.close()
    assert scalars(tmp_path) == {"train/loss": [(50, 0.5), (100, 0.375)], "train/accuracy": [(50, 0.25)]}


def test_not_a_number_is_shown_and_not_left_out(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"train/loss": math.nan}, step=1)
    logger.close()
    ((_, value),) = scalars(tmp_path)["train/loss"]
    assert math.isnan(value)


def test_a_log_point_is_one_event_that_is_on_disk_when_the_call_returns(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({f"m{number}": 1.0 for number in range(20)}, step=1)
    (path,) = tmp_path.glob("*tfevents*")
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert [len(event.summary.value) for event in events] == [20]
    logger.close()


def test_nothing_is_made_or_imported_until_something_is_logged(tmp_path):
    code = (
        "import sys; from drivetrain.loggers import TensorBoardLogger; "
        f"logger = TensorBoardLogger({str(tmp_path / 'run')!r}); logger.close(); "
        "assert not any(name.split('.')[0] == 'tensorboard' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not (tmp_path / "run").exists()


def test_the_configuration_is_shown_as_text(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_config({"lr": 0.1, "limit": math.inf})
    logger.close()
    (text,) = texts(tmp_path)
    assert json.loads(text) == {"lr": 0.1, "limit": "Infinity"}


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


def test_a_resumed_run_that_logs_nothing_more_hides_what_its_checkpoint_does_not_hold(tmp_path):
    first = TensorBoardLogger(tmp_path)
    first.log_metrics({"loss": 1.0}, 1)
    state = first.state_dict()
    first.log_metrics({"loss": 0.9}, 2)
    first.close()
    resumed = TensorBoardLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0)]}


def test_resuming_before_anything_was_logged_hides_everything(tmp_path):
    state = TensorBoardLogger(tmp_path).state_dict()
    first = TensorBoardLogger(tmp_path)
    first.log_metrics({"loss": 1.0}, 0)
    first.close()
    resumed = TensorBoardLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 0.5}, 0)
    resumed.close()
    assert scalars(tmp_path) == {"loss": [(0, 0.5)]}


def test_resuming_in_an_empty_directory_goes_on(tmp_path):
    logger = TensorBoardLogger(tmp_path / "new")
    logger.load_state_dict({"step": 10, "config": ""})
    assert not (tmp_path / "new").exists()
    logger.log_metrics({"loss": 0.5}, 11)
    logger.close()
    assert scalars(tmp_path / "new") == {"loss": [(11, 0.5)]}


def test_a_new_run_sets_the_files_of_an_earlier_one_aside(tmp_path):
    for value in (1.0, 2.0):
        logger = TensorBoardLogger(tmp_path)
        logger.log_metrics({"loss": value}, 1)
        logger.close()
    assert scalars(tmp_path / "earlier-1") == {"loss": [(1, 1.0)]}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["earlier-1"]


def test_close_leaves_no_thread_and_logging_goes_on_in_the_same_file(tmp_path):
    before = set(threading.enumerate())
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    assert set(threading.enumerate()) == before
    logger.close()
    logger.close()
    logger.log_metrics({"loss": 0.5}, 2)
    logger.close()
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 0.5)]}
    assert len(list(tmp_path.iterdir())) == 1


def hparams_tab(directory: Path) -> list[dict[str, dict[str, object]]]:
    """The rows that TensorBoard's own plugin shows, in the order of the runs' names."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(directory))
    multiplexer.Reload()
    context = TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(directory)))
    answer = list_session_groups.Handler(
        RequestContext(),
        backend_context.Context(context),
        "",
        api_pb2.ListSessionGroupsRequest(
            start_index=0, slice_size=10, allowed_statuses=api_pb2.Status.values()
        ),
    ).run()
    groups = sorted(answer.session_groups, key=lambda group: group.sessions[0].name)

    def plain(value):
        return getattr(value, value.WhichOneof("kind"))

    return [
        {
            "hparams": {name: plain(each) for name, each in group.hparams.items()},
            "metrics": {each.name.tag: each.value for each in group.metric_values},
        }
        for group in groups
    ]


def test_the_tab_hparams_compares_runs_by_their_configuration_and_last_values(tmp_path):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        logger = TensorBoardLogger(tmp_path / name)
        logger.log_config({"trainer": {"seed": 3, "run_dir": None, "compile": False}, "task": {"lr": rate}})
        logger.log_metrics({"validation/loss": 1.0}, 1)
        logger.log_metrics({"validation/loss": rate}, 2)
        logger.close()
    shown = hparams_tab(tmp_path)
    assert [sorted(row["hparams"].items()) for row in shown] == [
        [("task.lr", rate), ("trainer.compile", False), ("trainer.seed", 3)] for rate in (0.1, 0.2)
    ]
    assert [row["metrics"] for row in shown] == [
        {"validation/loss": pytest.approx(rate)} for rate in (0.1, 0.2)
    ]
