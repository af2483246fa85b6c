"""From a Trainer's arguments to a run: data in all its forms, and what is decided for the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from drivetrain import (
    CheckpointConfig,
    ConfigError,
    DataError,
    LambdaCallback,
    ModelSummary,
    ProgressBar,
    Totals,
)
from drivetrain.core.progress import Progress
from drivetrain.testing.distributed import run_distributed


class Module:
    """A data module; counts how often each of its loaders is made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def train_data(self) -> Any:
        self.made.append("train")
        return pairs(10)

    def validation_data(self) -> Any:
        self.made.append("validation")
        return pairs(4)

    def test_data(self) -> Any:
        self.made.append("test")
        return {"near": pairs(4), "far": pairs(6)}

    def predict_data(self) -> Any:
        self.made.append("predict")
        return pairs(3)


def test_a_data_module_gives_each_verb_its_data() -> None:
    task, right = Regression(), Regression()
    module = Module()
    result = quiet(max_epochs=1).fit(task, module)
    expected = quiet(max_epochs=1).fit(right, pairs(10), pairs(4))
    assert weights(task) == weights(right)
    assert result.metrics == expected.metrics
    assert quiet().validate(task, module) == quiet().validate(task, pairs(4))
    assert set(quiet().test(task, module)) == {"test/near/loss", "test/far/loss"}
    assert len(quiet().predict(task, module)) == 2
    assert sorted(module.made) == ["predict", "test", "train", "validation", "validation"]  # each when needed


def test_a_dataset_is_collated_as_the_task_says() -> None:
    class Doubled(Regression):
        def collate_function(self) -> Any:
            return lambda samples: [2 * torch.stack(column) for column in zip(*samples, strict=True)]

    data = pairs(6).dataset
    found = quiet(batch_size=4).predict(Doubled(), data)
    right = quiet().predict(Regression(), [2 * data.tensors[0][:4], 2 * data.tensors[0][4:]])  # type: ignore[attr-defined]
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)


def test_validation_data_may_be_given_beside_a_data_module() -> None:
    task = Regression()
    result = quiet(max_epochs=1).fit(task, Module(), {"mine": pairs(2)})
    assert "validation/mine/loss" in result.metrics


def test_a_data_module_without_what_is_needed_says_what_it_has() -> None:
    class Half:
        def train_data(self) -> Any:
            return pairs()

    assert quiet(max_epochs=1).fit(Regression(), Half()).progress.updates == 5
    with pytest.raises(ConfigError, match=r"Half has no predict_data\(\)"):
        quiet().predict(Regression(), Half())


def dataset() -> TensorDataset:
    features = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, features.sum(1, keepdim=True))


def test_a_bare_dataset_is_batched_and_shuffled_in_training_alone() -> None:
    seen: list[Tensor] = []
    keep = LambdaCallback(on_step_end=lambda run: seen.append(run.window.micro_batches[0].batch[0]))
    trainer = quiet(max_epochs=1, batch_size=4, callbacks=[keep])
    trainer.fit(Regression(), dataset())
    assert [len(each) for each in seen] == [4, 4, 1]
    everything = torch.cat(seen)
    assert not torch.equal(everything, dataset().tensors[0])
    assert torch.equal(everything.sort(0).values, dataset().tensors[0].sort(0).values)
    predicted = torch.cat(trainer.predict(Regression(), dataset()))
    with torch.no_grad():
        assert torch.allclose(predicted, Regression()(dataset().tensors[0]))


def test_a_bare_dataset_needs_a_batch_size() -> None:
    with pytest.raises(DataError, match=r"Trainer\(batch_size=32\)"):
        quiet(max_epochs=1).fit(Regression(), dataset())


class Table:
    """Samples as the datasets package gives them: dicts, also many at once, and no class of torch's."""

    def __init__(self, many: bool = True) -> None:
        self.rows = [{"x": [float(i), 1.0, 0.0, 2.0], "y": float(i)} for i in range(9)]
        if many:
            self.__getitems__ = lambda indices: [self[each] for each in indices]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"x": torch.tensor(row["x"]), "y": row["y"]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


class Named(Regression):
    """A regression whose batches are dicts."""

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["y"].float()[:, None])


@pytest.mark.parametrize("many", [True, False])
def test_an_object_with_a_length_that_is_indexed_is_a_dataset(many: bool) -> None:
    seen: list[Tensor] = []
    keep = LambdaCallback(on_step_end=lambda run: seen.append(run.window.micro_batches[0].batch["y"]))
    trainer = quiet(max_epochs=1, batch_size=4, callbacks=[keep])
    trainer.fit(Named(), Table(many), Table(many))
    assert [len(each) for each in seen] == [4, 4, 1]
    assert torch.cat(seen).tolist() != list(range(9))  # shuffled
    assert sorted(torch.cat(seen).tolist()) == list(range(9))
    assert [len(each) for each in trainer.predict(Named(), Table(many))] == [4, 4, 1]


def test_such_a_dataset_needs_no_iter_and_a_batch_size() -> None:
    class Bare:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.full((4,), float(index)), torch.zeros(1)

    assert quiet(max_epochs=1, batch_size=4).fit(Regression(), Bare()).progress.updates == 2
    with pytest.raises(DataError, match=r"Bare, which .*without a batch size. Give Trainer\(batch_size=32\)"):
        quiet(max_epochs=1).fit(Regression(), Bare())
    with pytest.raises(DataError, match=r"without a batch size"):
        quiet().validate(Regression(), Bare())


@pytest.mark.parametrize("name", ["batch_size", "num_workers"])
@pytest.mark.parametrize("make", [list, tuple, iter])
def test_settings_for_a_dataset_are_refused_with_ready_batches(make: Any, name: str) -> None:
    data = make(list(pairs()))
    with pytest.raises(ConfigError, match=rf"{name}=2.*{type(data).__name__}, which is read as ready"):
        quiet(max_epochs=1, **{name: 2}).fit(Regression(), data)


def test_any_iterable_of_batches_will_do() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from pairs()

    assert quiet(max_steps=12).fit(Regression(), Endless()).progress.updates == 12


@pytest.mark.parametrize("wrong", [3, "path", torch.ones(3, 4), None])
def test_data_of_an_unknown_kind_is_refused_with_what_is_allowed(wrong: Any) -> None:
    with pytest.raises(DataError, match="Allowed: a DataLoader, a Dataset"):
        quiet(max_epochs=1).fit(Regression(), wrong)


def test_training_data_cannot_be_named_loaders() -> None:
    with pytest.raises(ConfigError, match="only evaluation takes named loaders"):
        quiet(max_epochs=1).fit(Regression(), {"a": pairs()})


def test_the_first_named_loader_ranks_keepers_unless_told_otherwise(tmp_path: Path) -> None:
    class Planted(Regression):
        """The near loader gets better, the far one worse."""

        def validation_step(self, batch: Any) -> Tensor:
            return torch.tensor(float(len(batch[0]) == 2) * epoch[0] - float(len(batch[0]) == 4) * epoch[0])

    epoch = [0]

    def count(run: Any) -> None:
        epoch[0] = run.progress.epoch

    loaders = {"near": pairs(4, 4), "far": pairs(2, 2)}
    for name, policy, best in (
        ("default", True, "update-00000015"),
        ("far", CheckpointConfig(by="validation/far/loss"), "update-00000005"),
    ):
        trainer = quiet(
            max_epochs=3,
            checkpoint=policy,
            run_dir=tmp_path / name,
            callbacks=[LambdaCallback(on_epoch_start=count)],
        )
        result = trainer.fit(Planted(), pairs(), loaders)
        assert result.best_checkpoint is not None
        assert result.best_checkpoint.endswith(best)


def test_a_progress_bar_and_a_summary_of_ones_own_replace_ours() -> None:
    found: list[list[str]] = []
    look = LambdaCallback(on_fit_start=lambda run: found.append([type(c).__name__ for c in run.callbacks]))
    for own in ((), (ProgressBar(),), (ModelSummary(),)):
        quiet(max_steps=1, progress_bar=True, callbacks=[look, *own]).fit(Regression(), pairs())
    assert [each.count("ProgressBar") for each in found] == [1, 1, 1]
    assert [each.count("ModelSummary") for each in found] == [1, 1, 1]


@pytest.mark.parametrize("given", [{"num_workers": 2}, {"batch_size": 16}])
def test_settings_for_a_bare_dataset_are_refused_with_a_loader(given: dict[str, Any]) -> None:
    name = next(iter(given))
    trainer = quiet(max_steps=1, **given)
    asks: list[tuple[Any, ...]] = [(pairs(),), (pairs(), pairs(4)), (pairs(), {"one": pairs(4)})]
    for act in (trainer.fit, trainer.plan):
        for data in asks:
            with pytest.raises(
                ConfigError, match=rf"{name}=.* is a DataLoader with {name}=[02].*DataLoader\("
            ):
                act(Regression(), *data)


def test_settings_for_a_bare_dataset_are_used_for_the_validation_or_said_twice() -> None:
    bare = TensorDataset(torch.zeros(4, 4), torch.zeros(4, 1))
    trainer = quiet(max_steps=1, num_workers=1, batch_size=4)
    trainer.fit(Regression(), pairs(), bare)
    trainer.fit(Regression(), pairs(batch_size=4, num_workers=1))
    trainer.fit(Regression(), bare, pairs())
    trainer.validate(Regression(), pairs())  # of a trainer that was made for a fit


def test_a_bare_dataset_has_its_own_batch_size_and_collation_in_evaluations() -> None:
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
    with pytest.raises(ConfigError, match=r"collate=.* is for data.*DataLoader\(\.\.\., collate_fn"):
        trainer.fit(Regression(), pairs())
    with pytest.raises(ConfigError, match=r"evaluation_batch_size=5\) is for data.*batch_size=5"):
        trainer.fit(Regression(), dataset(), pairs(batch_size=2))
    trainer.fit(Regression(), dataset(), pairs(batch_size=5))
    for verb, stage_name in ((trainer.validate, "validation"), (trainer.predict, "predict")):
        with pytest.raises(
            ConfigError, match=rf"evaluation_batch_size=5\) is for data.*the {stage_name} data"
        ):
            verb(Regression(), pairs(batch_size=2))
    trainer.validate(Regression(), {"a": dataset(), "b": pairs(batch_size=2)})


def test_a_collation_of_a_stream_that_is_read_as_batches_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset())

    message = r"without batch_size an IterableDataset \(Stream\) is read as ready batches"
    trainer = quiet(max_epochs=1, collate=list)
    for data in ((Stream(),), (pairs(collate_fn=list), Stream())):
        with pytest.raises(ConfigError, match=message):
            trainer.fit(Regression(), *data)


def test_the_order_of_the_data_may_have_a_seed_of_its_own() -> None:
    def run(**options: Any) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        keep = LambdaCallback(on_step_end=lambda run: seen.append(run.window.micro_batches[0].batch[0]))
        task = Regression(dropout=0.5)
        quiet(max_epochs=1, batch_size=9, callbacks=[keep], **options).fit(task, dataset())
        return torch.cat(seen), task.line.weight.detach()

    (order, weights), (same, _), (_, dropped) = (
        run(seed=1),
        run(seed=2, data_seed=1),
        run(seed=1, data_seed=1),
    )
    assert torch.equal(order, same)
    assert torch.equal(weights, dropped)
    assert not torch.equal(order, run(seed=1, data_seed=2)[0])
    assert not torch.equal(weights, run(seed=2, data_seed=1)[1])


def test_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        def log_config(self, config: Any) -> None:
            self.name = config["trainer"]["run_name"]

        def log_metrics(self, metrics: Any, step: int) -> None: ...

        def close(self) -> None: ...

    monkeypatch.chdir(tmp_path)
    logger = Named()
    result = quiet(max_steps=1, run_name="warm-up 3", loggers=["csv", logger]).fit(Regression(), pairs())
    assert result.run_dir is not None
    assert result.run_dir.name.startswith("warm-up 3-")
    assert logger.name == "warm-up 3"


def test_train_metrics_can_be_left_out_of_training() -> None:
    from torchmetrics import MeanAbsoluteError

    class Measured(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"error": MeanAbsoluteError()}

    with_them = quiet(max_epochs=1).fit(Measured(), pairs(), pairs(4)).metrics
    without = quiet(max_epochs=1, train_metrics=False).fit(Measured(), pairs(), pairs(4)).metrics
    assert set(with_them) - set(without) == {"train/error"}
    assert "validation/error" in without


def test_reading_the_best_checkpoint_does_not_touch_the_directory_of_a_run_in_progress(
    tmp_path: Path,
) -> None:
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=tmp_path)
    trainer.fit(Regression(), pairs(), pairs(4))
    being_written = tmp_path / "checkpoints" / ".saving-update-00000006-ab12"
    being_written.mkdir()
    trainer.validate(Regression(), pairs(4), checkpoint="best")
    assert being_written.exists()


class Counting(Regression):
    """Keeps the totals that `configure_optimizers` sees."""

    seen: Totals | None = None

    def configure_optimizers(self) -> Any:
        type(self).seen = self.totals
        return super().configure_optimizers()


def test_the_optimizers_are_configured_with_the_length_of_the_fit_known() -> None:
    class Own(Counting):
        pass

    task, in_hook = Own(), []
    trainer = quiet(
        max_epochs=3,
        gradient_accumulation_steps=2,
        callbacks=[LambdaCallback(on_fit_start=lambda run: in_hook.append(run.totals))],
    )
    trainer.fit(task, pairs(10))
    assert in_hook == [Own.seen]
    assert Own.seen == Totals(
        updates=9,
        epochs=3,
        updates_per_epoch=3,
        max_epochs=3,
        end=(3, 0),
        gradient_accumulation_steps=2,
        samples_per_update=4,
        world_size=1,
    )
    assert task.totals == Totals()  # nothing is planned any more
    Own.seen = None
    trainer.plan(task, pairs(10))
    assert [Own.seen] == in_hook
    assert task.totals == Totals()


def test_a_fit_without_a_known_length_says_so_to_the_task() -> None:
    class Own(Counting):
        pass

    quiet(max_time=0.01).fit(Own(), pairs(10))
    assert Own.seen is not None
    assert (Own.seen.updates, Own.seen.updates_per_epoch, Own.seen.max_seconds) == (None, 5, 0.01)


def _totals_on_a_rank() -> Totals | None:
    class Own(Counting):
        pass

    quiet(strategy="ddp", max_steps=4).fit(Own(), pairs(16))
    return Own.seen


def test_the_totals_of_several_ranks_count_all_of_them() -> None:
    first, second = run_distributed(_totals_on_a_rank)
    assert first == second
    assert first is not None
    assert (first.world_size, first.samples_per_update, first.updates_per_epoch) == (2, 4, 4)


@pytest.mark.parametrize(("name", "what"), [("totals", "planned length"), ("progress", "progress")])
def test_a_task_cannot_hide_what_it_knows_of_the_fit(name: str, what: str) -> None:
    task = Regression()
    with pytest.raises(ConfigError, match=rf"Regression\.{name} is the {what}.*Choose another name"):
        setattr(task, name, torch.zeros(2))

    Own = type("Own", (Regression,), {name: lambda self: None})
    with pytest.raises(ConfigError, match=rf"Own\.{name} hides"):
        quiet(max_steps=1).fit(Own(), pairs())


def test_a_task_knows_its_epoch_also_after_a_resume(tmp_path: Path) -> None:
    class Own(Regression):
        seen: ClassVar[list[tuple[int, int]]] = []

        def training_step(self, batch: Any) -> Any:
            self.seen.append((self.progress.epoch, self.progress.updates))
            return super().training_step(batch)

    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True}
    task = Own()
    quiet(max_steps=3, **options).fit(task, pairs(4))
    assert task.progress == Progress()
    quiet(max_epochs=3, **options).fit(Own(), pairs(4), resume="auto")
    assert Own.seen == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
