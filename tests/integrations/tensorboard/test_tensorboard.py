"""The TensorBoard logger, read back by TensorBoard's own reader."""

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tests.support.messages import warned
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import CheckpointConfig, ConfigError
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


def rows_of_tab_hparams(directory: Path):
    """The rows that TensorBoard shows on its tab HParams: arguments, and the last values of metrics."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(directory))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(directory))
    context = backend_context.Context(TBContext(data_provider=provider))
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING, api_pb2.STATUS_SUCCESS]
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=9, allowed_statuses=statuses, include_metrics=True
    )
    found = list_session_groups.Handler(RequestContext(), context, "", request).run()
    return [
        (
            {name: value.number_value for name, value in each.hparams.items()},
            {each.name.tag: (each.training_step, each.value) for each in each.metric_values},
        )
        for each in found.session_groups
    ]


def test_the_tab_hparams_has_the_final_metrics_of_each_run():
    for run, steps in (("runs/a", 5), ("runs/b", 10)):
        trainer = quiet(max_steps=steps, log_every=2, loggers="tensorboard", run_dir=run)
        result = trainer.fit(Regression(), pairs(), pairs(4))
        rows = rows_of_tab_hparams(Path("runs"))
        (metrics,) = [values for arguments, values in rows if arguments["trainer.max_steps"] == steps]
        for name in ("train/loss", "validation/loss"):
            assert metrics[name] == (steps, pytest.approx(result.metrics[name]))
    assert len(rows) == 2
    assert scalars(Path("runs/b"))["epoch"][-1] == (10, 2.0)


def test_a_writer_of_the_program_gets_everything_and_stays_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    def fit(steps):
        writer = SummaryWriter("own")
        writer.add_scalar("mine", 1.0, 0)
        loggers, saves = TensorBoardLogger(writer=writer), CheckpointConfig(every="2 steps", best=0)
        quiet(max_steps=steps, log_every=1, loggers=loggers, run_dir="run", checkpoint=saves).fit(
            Regression(), pairs(), resume="auto"
        )
        writer.add_scalar("mine", 2.0, 9)
        writer.close()

    fit(2)
    first = scalars(Path("own"))["train/loss"]
    fit(4)
    assert scalars(Path("own"))["train/loss"][:2] == first
    assert [step for step, _ in scalars(Path("own"))["train/loss"]] == [1, 2, 3, 4]
    assert scalars(Path("own"))["mine"][-1] == (9, 2.0)
    assert texts(Path("own"))
    assert rows_of_tab_hparams(Path("own"))


def test_the_tab_graphs_has_the_model_once_also_after_a_resume_and_training_stays_the_same():
    drawing = variant(forward=lambda self, features: self.line(features) + torch.rand(1))

    def fit(directory, graph, steps=4, task=drawing):
        made, saves = task(), CheckpointConfig(every="2 steps", best=0)
        trainer = quiet(
            max_steps=steps,
            log_every=1,
            loggers=TensorBoardLogger(graph=graph),
            run_dir=directory,
            checkpoint=saves,
        )
        trainer.fit(made, pairs(), resume="auto")
        events = [
            each for path in Path(directory).glob("*tfevents*") for each in EventFileLoader(str(path)).Load()
        ]
        return made.line.weight.tolist(), [each.graph_def for each in events if each.graph_def]

    fit("with", True, steps=2)
    weights, (graph,) = fit("with", True)
    names = {node.name for node in GraphDef.FromString(graph).node}
    assert {"Linear[line]", "weight"} <= {part for name in names for part in name.split("/")}
    assert fit("without", False) == (weights, [])
    untraceable = variant(forward=lambda self, features: self.line(features)[: int("a tensor")])
    untraceable.training_step = lambda self, batch: self.line(batch[0]).mean()
    with warned("cannot trace the model: invalid literal for int") as said:
        assert fit("untraceable", True, task=untraceable)[1] == []
    assert len(said) == 1


def test_refusals():
    def fits(logger, **options):
        return lambda: quiet(max_steps=1, loggers=logger, **options).fit(Regression(), pairs())

    cases = {
        "neither": (lambda: TensorBoardLogger().log_metrics({}, 1), "needs a directory"),
        "both": (lambda: TensorBoardLogger("runs", writer=object()), "not both"),
        "no directory": (fits(TensorBoardLogger()), "or the Trainer a run_dir"),
        "sharded": (fits(TensorBoardLogger("runs", graph=True), strategy="fsdp"), "sharded over ranks"),
        "no writer": (lambda: TensorBoardLogger(writer=open), "is no SummaryWriter"),
    }
    assert_refused(ConfigError, cases)
    torch.distributed.destroy_process_group()  # of the sharded fit; one that fails leaves it
