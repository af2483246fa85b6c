"""From a Trainer's arguments to a run: data in all its forms, and what is decided for the user."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, OptimizerConfig, TorchSchedule
from drivetrain.core.calendar import RunLength
from drivetrain.core.progress import Progress
from drivetrain.distributed.processes import local_rank, once_per_machine, world_size
from drivetrain.task.model_info import ModelInfo


def test_a_data_module_gives_each_verb_its_data() -> None:
    made: list[str] = []  # each when needed

    def data(verb: str, loaders: Any) -> Any:
        return lambda: (made.append(verb), loaders)[1]

    two = {"near": pairs(4), "far": pairs(6)}
    training = {"train_data": data("train", pairs(10)), "validation_data": data("validation", pairs(4))}
    rest = {"test_data": data("test", two), "predict_data": data("predict", pairs(3))}
    task, right, module = Regression(), Regression(), SimpleNamespace(**training, **rest)
    result = quiet(max_epochs=1).fit(task, module)
    expected = quiet(max_epochs=1).fit(right, pairs(10), pairs(4))
    assert weights(task) == weights(right)
    assert result.metrics == expected.metrics
    assert quiet().validate(task, module) == quiet().validate(task, pairs(4))
    assert set(quiet().test(task, module)) == {"test/near/loss", "test/far/loss"}
    assert len(quiet().predict(task, module)) == 2
    assert sorted(made) == ["predict", "test", "train", "validation", "validation"]
    mine = quiet(max_epochs=1).fit(task, module, {"mine": pairs(2)})
    assert "validation/mine/loss" in mine.metrics
    half = SimpleNamespace(train_data=pairs)
    assert quiet(max_epochs=1).fit(Regression(), half).progress.steps == 5


def dataset() -> TensorDataset:
    features = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, features.sum(1, keepdim=True))


def seen_in(data: Any, task: Any = None, key: Any = 0, **options: Any) -> tuple[list[Tensor], Any]:
    seen: list[Tensor] = []
    keep = LambdaCallback(on_step_end=lambda run: seen.append(run.window.micro_batches[0].batch[key]))
    trainer = quiet(**{"max_epochs": 1, "batch_size": 4, "callbacks": [keep], **options})
    trainer.fit(task or Regression(), data)
    return seen, trainer


def test_a_dataset_is_batched_and_shuffled_in_training_alone() -> None:
    seen, trainer = seen_in(dataset())
    assert [len(each) for each in seen] == [4, 4, 1]
    everything, given = torch.cat(seen), dataset().tensors[0]
    assert not torch.equal(everything, given)
    assert torch.equal(everything.sort(0).values, given.sort(0).values)
    predicted = torch.cat(trainer.predict(Regression(), dataset()))
    with torch.no_grad():
        assert torch.allclose(predicted, Regression()(given))


def test_columns_train_and_are_evaluated_as_the_dataset_of_their_rows() -> None:
    x, y = dataset().tensors
    named = variant(loss=lambda self, outputs, batch: F.mse_loss(outputs, batch["y"]))
    both = SimpleNamespace(train_data=lambda: (x, y), validation_data=lambda: (x, y))
    trainer, expected = quiet(max_epochs=2, batch_size=4), Regression()
    wanted = trainer.fit(expected, dataset(), dataset()).metrics
    for make, data in (
        (Regression, (x, y)),
        (Regression, (x.numpy(), y.numpy())),
        (named, {"features": x, "y": y}),
        (Regression, both),
    ):
        task = make()
        assert trainer.fit(task, data, None if data is both else data).metrics == wanted
        assert weights(task) == weights(expected)
        assert trainer.plan(make(), data).steps == 6
    assert trainer.validate(expected, {"a": (x, y)})["validation/a/loss"] == wanted["validation/loss"]
    mean = variant(loss=lambda self, outputs, batch: outputs.mean())
    seen, _ = seen_in([x[:2], x[2:4]], mean(), slice(None), batch_size=None)
    assert [len(each) for each in seen] == [2, 2]  # a list has batches


class Table:  # samples as the datasets package gives them: dicts, and no class of torch's
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index), 1.0, 0.0, 2.0]), "y": float(index)}


def test_an_object_with_a_length_that_is_indexed_is_a_dataset() -> None:
    named = {
        "forward": lambda self, x: self.line(x),
        "loss": lambda self, outputs, batch: F.mse_loss(outputs, batch["y"].float()[:, None]),
    }
    seen, trainer = seen_in(Table(), variant(**named)(), "y")
    assert [len(each) for each in seen] == [4, 4, 1]
    assert torch.cat(seen).tolist() != list(range(9))  # shuffled
    assert sorted(torch.cat(seen).tolist()) == list(range(9))
    assert [len(each) for each in trainer.predict(variant(**named)(), Table())] == [4, 4, 1]


def test_a_dataset_has_its_own_batch_size_and_collation_in_evaluations() -> None:
    sizes: dict[str, list[int]] = {"train": [], "validation": [], "predict": []}

    def collate(samples: list[Any]) -> Any:
        sizes[stage[0]].append(len(samples))
        return [torch.stack(each) for each in zip(*samples, strict=True)]

    stage = ["train"]
    follow = LambdaCallback(
        on_evaluation_start=lambda run: stage.__setitem__(0, run.stage),
        on_evaluation_end=lambda run: stage.__setitem__(0, "train"),
    )
    options: Any = {"batch_size": 4, "evaluation_batch_size": 5, "callbacks": [follow]}
    trainer = quiet(max_epochs=1, collate=collate, **options)
    trainer.fit(Regression(), dataset(), dataset())
    trainer.predict(Regression(), dataset())
    assert sizes == {"train": [4, 4, 1], "validation": [5, 4], "predict": [5, 4]}
    assert trainer.to_json()["collate"].endswith(".collate")
    info = ModelInfo(collate=lambda samples: [samples[0][0][None]])
    first = variant(model_info=lambda self: info)()
    assert [len(each) for each in quiet(batch_size=4).predict(first, dataset())] == [1, 1, 1]


def test_data_seed_is_for_the_order_of_the_data_alone() -> None:
    def run(**options: Any) -> tuple[Tensor, Tensor]:
        task = Regression(dropout=0.5)
        seen, _ = seen_in(dataset(), task, batch_size=9, **options)
        return torch.cat(seen), task.line.weight.detach()

    order, weights = run(seed=1)
    assert torch.equal(order, run(seed=2, data_seed=1)[0])
    assert torch.equal(weights, run(seed=1, data_seed=1)[1])
    assert not torch.equal(order, run(seed=1, data_seed=2)[0])
    assert not torch.equal(weights, run(seed=2, data_seed=1)[1])


def test_run_name_names_the_run() -> None:
    told: list[Any] = []
    ignore = {"log_metrics": lambda metrics, step: None, "close": lambda: None}
    logger = SimpleNamespace(log_config=told.append, **ignore)
    result = quiet(max_steps=1, run_name="warm-up 3", loggers=["csv", logger]).fit(Regression(), pairs())
    assert result.run_dir is not None
    assert result.run_dir.name.startswith("warm-up 3-")
    assert told[0]["trainer"]["run_name"] == "warm-up 3"


class Counting(Regression):  # keeps the length that `configure_optimizers` sees
    def configure_optimizers(self) -> Any:
        self.seen = [*getattr(self, "seen", []), self.run_length]
        return super().configure_optimizers()


def test_the_length_of_the_fit_is_known_when_optimizers_are_configured() -> None:
    task, in_hook = Counting(), []
    watch = [LambdaCallback(on_fit_start=lambda run: in_hook.append(run.length))]
    trainer = quiet(max_epochs=3, gradient_accumulation_steps=2, callbacks=watch)
    trainer.fit(task, pairs(10))
    whole = {"steps": 9, "epochs": 3, "steps_per_epoch": 3, "max_epochs": 3, "end": (3, 0)}
    each = {"gradient_accumulation_steps": 2, "samples_per_step": 4, "world_size": 1}
    assert in_hook == task.seen == [RunLength(**whole, **each)]
    assert task.run_length == RunLength()  # nothing is planned any more
    quiet(max_time=0.01).fit(task, pairs(10))  # no known length
    length = task.seen[-1]
    assert (length.steps, length.steps_per_epoch, length.max_seconds) == (None, 5, 0.01)


def length_on_a_rank() -> RunLength:
    task = Counting()
    options = {"max_epochs": 3, "gradient_accumulation_steps": 2, "strategy": "ddp", "devices": 2}
    quiet(**options).fit(task, pairs(19))
    (length,) = task.seen
    return length


def test_the_length_counts_all_ranks() -> None:
    each = {"gradient_accumulation_steps": 2, "samples_per_step": 8, "world_size": 2}
    whole = {"steps": 9, "epochs": 3, "steps_per_epoch": 3, "max_epochs": 3, "end": (3, 0)}
    assert on_two_ranks(length_on_a_rank) == [RunLength(**whole, **each)] * 2


def test_a_task_knows_its_progress_also_after_a_resume(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def step(self: Any, batch: Any) -> Any:
        seen.append((self.progress.epoch, self.progress.steps))
        return Regression.training_step(self, batch)

    task = variant(training_step=step)()
    quiet(max_steps=3, run_dir=tmp_path, checkpoint=True).fit(task, pairs(4))
    assert task.progress == Progress()
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True).fit(task, pairs(4), resume="auto")
    assert seen == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]


class Data:  # writes down its calls, of the newest object: a plan restores the attributes of the object
    calls: ClassVar[list[Any]]

    def __init__(self) -> None:
        type(self).calls = []
        self.epochs = 0

    def begin(self, verb: str, task: Any) -> None:
        self.calls.append(("begin", verb, type(task).__name__, world_size()))

    def end(self, verb: str) -> None:
        self.calls.append(("end", verb))

    def train_data(self) -> Any:
        self.calls.append("train")
        return pairs(10)

    def validation_data(self) -> Any:
        self.calls.append("validation")
        return pairs(4)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(("load", state))


def test_each_verb_begins_its_data_and_ends_it_after_the_last_callback_or_an_error() -> None:
    for verb in ("fit", "validate", "plan"):
        data = Data()
        getattr(quiet(max_epochs=1), verb)(Regression(), data)
        name = "fit" if verb == "plan" else verb
        first, *asked, last = data.calls
        assert (first, last) == (("begin", name, "Regression", 1), ("end", name))
        assert set(asked) == ({"validation"} if verb == "validate" else {"validation", "train"})
    data = Data()
    finish = LambdaCallback(on_fit_end=lambda run: data.calls.append("finished"))
    quiet(max_epochs=1, callbacks=[finish]).fit(Regression(), data)
    assert data.calls[-2:] == ["finished", ("end", "fit")]

    def fail() -> Any:
        raise ValueError("no such file")

    failing: Any = Data()
    failing.train_data = fail
    with pytest.raises(ValueError, match="no such file"):
        quiet(max_epochs=1).fit(Regression(), failing)
    assert failing.calls[-1] == ("end", "fit")


def test_the_state_of_the_data_is_in_a_checkpoint(tmp_path: Path) -> None:
    options = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(every="1 epoch")}
    data = Data()
    count = LambdaCallback(on_epoch_end=lambda run: setattr(data, "epochs", data.epochs + 1))
    quiet(max_epochs=2, callbacks=[count], **options).fit(Regression(), data)
    again = Data()
    quiet(max_epochs=3, **options).fit(Regression(), again, resume="auto")
    assert ("load", {"epochs": 2}) in again.calls


def prepared(path: Path) -> tuple[int, bool]:
    """The size of the job when the data begins, and whether the file was there for this rank."""
    seen: list[Any] = []

    def prepare() -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{local_rank()}\n")

    def begin(verb: str, task: Any) -> None:
        once_per_machine(prepare)
        seen.append((world_size(), path.exists()))

    data: Any = Data()
    data.begin = begin
    quiet(max_epochs=1, strategy="ddp", devices=2).fit(Regression(), data)
    return tuple(seen[0])


def test_data_begins_when_the_ranks_are_connected_and_is_prepared_once(tmp_path: Path) -> None:
    assert on_two_ranks(prepared, tmp_path / "prepared") == [(2, True), (2, True)]
    assert (tmp_path / "prepared").read_text(encoding="utf-8") == "0\n"


def test_schedules_whose_values_never_come_are_refused_and_late_ones_told() -> None:
    def fit(options: dict[str, Any], validation: Any = None, **settings: Any) -> Any:
        def make(parameters: list[Any]) -> Any:
            optimizer = torch.optim.SGD(parameters, lr=0.8)
            return optimizer, TorchSchedule(ReduceLROnPlateau(optimizer, patience=0, threshold=9), **options)

        named = OptimizerConfig("sgd", lr=0.1, schedule="reduce_on_plateau")
        task, trainer = Regression(make if options else named), quiet(**{"max_epochs": 4, **settings})
        return lambda: (trainer.fit(task, pairs(), validation), task)[1]

    by_epoch = {"every": "1 epoch"}
    table: dict[str, tuple[Any, ...]] = {
        "named": (fit({}, pairs(4), validate_every=None), "never validates", "`validate_every`"),
        "torch's": (fit({"metric": "validation/loss"}, pairs(4), validate_every=None), "never validates"),
        "no data": (fit({"metric": "validation/loss", **by_epoch}), "never validates"),
        "of training": (fit({"metric": "train/loss"}, pairs(4)), "which no validation", "every='1 epoch'"),
        "of a test": (fit({"metric": "test/loss", **by_epoch}), "which a fit does not give"),
    }
    assert_refused(ConfigError, table)
    fit({"metric": "train/loss", **by_epoch}, log_every=100)()  # which logs each epoch in time for it
