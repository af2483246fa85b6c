"""Checkpoints of a loop of one's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import pairs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CheckpointError, ConfigError, Engine


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))


class Loop:
    """A loop with dropout over shuffled data, which can be left and gone on with anywhere."""

    def __init__(self, data: Any) -> None:
        self.engine = Engine("cpu", seed=3)
        self.model, self.optimizer = self.engine.prepare(
            network(), lambda params: torch.optim.AdamW(params, lr=0.05)
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.data = self.engine.prepare_data(data)
        self.seen: list[list[float]] = []

    def steps(self, epochs: int) -> Iterator[int]:
        while self.engine.progress.epoch < epochs:
            for features, target in self.data:
                self.engine.backward(F.mse_loss(self.model(features), target))
                self.engine.step(self.optimizer, max_grad_norm=1.0)
                self.schedule.step()
                self.seen.append(target.flatten().tolist())
                yield self.engine.progress.updates

    def run(self, epochs: int, until: int = 99) -> Loop:
        for updates in self.steps(epochs):
            if updates == until:
                break
        return self

    def save(self, path: Path) -> None:
        self.engine.save(
            str(path), model=self.model, optimizer=self.optimizer, schedule=self.schedule, note={"lr": [0.5]}
        )

    def load(self, path: Path) -> dict[str, Any]:
        return self.engine.load(str(path), model=self.model, optimizer=self.optimizer, schedule=self.schedule)


def shuffled() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(14, 4, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("in_memory", [False, True], ids=["loader", "list"])
@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_a_loop_goes_on_bitwise_from_its_checkpoint(stop: int, in_memory: bool, tmp_path: Path) -> None:
    data = list(shuffled()) if in_memory else shuffled()
    whole = Loop(data).run(2)
    torch.manual_seed(stop)
    first = Loop(data).run(2, until=stop)
    first.save(tmp_path / "saved")
    second = Loop(data)
    torch.manual_seed(99)
    assert second.load(tmp_path / "saved") == {"note": {"lr": [0.5]}}
    second.run(2)
    assert first.seen + second.seen == whole.seen
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert weights(second.model) == weights(whole.model)


@pytest.mark.parametrize("in_memory", [False, True], ids=["loader", "list"])
def test_the_seed_of_the_engine_decides_from_the_first_draw_on(in_memory: bool) -> None:
    results = []
    for seed in (1, 2):
        loop = Loop(list(pairs()) if in_memory else pairs())
        torch.manual_seed(seed)
        results.append(weights(loop.run(1).model))
    assert results[0] == results[1]


def test_keys_are_those_of_the_module_that_was_given(tmp_path: Path) -> None:
    loop = Loop(shuffled()).run(1)
    loop.save(tmp_path / "saved")
    fresh = network()
    Engine("cpu").load(str(tmp_path / "saved"), model=fresh)
    assert weights(fresh) == weights(loop.model.task)


def test_several_modules_and_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    def made() -> tuple[Engine, dict[str, Any], dict[str, Any]]:
        engine = Engine("cpu")
        models, optimizers = {}, {}
        for name, size in (("first", 2), ("second", 3)):
            models[name], optimizers[name] = engine.prepare(
                nn.Linear(size, 1), lambda params: torch.optim.Adam(params, lr=0.1)
            )
        return engine, models, optimizers

    engine, models, optimizers = made()
    for name, size in (("first", 2), ("second", 3)):
        engine.backward(models[name](torch.ones(1, size)).sum())
        engine.step(optimizers[name])
    engine.save(str(tmp_path / "saved"), model=models, optimizer=optimizers)
    other, others, other_optimizers = made()
    other.load(str(tmp_path / "saved"), model=others, optimizer=other_optimizers)
    assert other.progress.updates == 2
    for name, model in models.items():
        assert weights(model) == weights(others[name])
        for mine, right in zip(
            other_optimizers[name].state.values(), optimizers[name].state.values(), strict=True
        ):
            assert {key: value.tolist() for key, value in mine.items()} == {
                key: value.tolist() for key, value in right.items()
            }


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    Loop(shuffled()).run(1).save(tmp_path / "saved")
    for file in (tmp_path / "saved").iterdir():
        assert file.suffix in (".safetensors", ".json")
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, ConfigError, "give the model too"),
        ({"model": "weights"}, ConfigError, "model must be a module"),
        ({"model": nn.Linear(1, 1), "optimizer": 3}, ConfigError, "optimizer must be"),
        ({"thing": object()}, CheckpointError, "thing"),
    ],
    ids=["optimizer alone", "no module", "no optimizer", "unknown object"],
)
def test_what_cannot_be_saved_is_refused_and_leaves_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Engine("cpu").save(str(tmp_path / "saved"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    Loop(shuffled()).run(1).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"missing 'weight'"):
        Engine("cpu").load(str(tmp_path / "saved"), model=nn.Linear(4, 6))


def test_a_name_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    Engine("cpu").save(str(tmp_path / "saved"), epoch=3)
    with pytest.raises(CheckpointError, match=r"nothing named 'epochs'; it has \['epoch'\]"):
        Engine("cpu").load(str(tmp_path / "saved"), epochs=0)


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    Engine("cpu").save(str(tmp_path / "saved"), epoch=3)
    with pytest.raises(CheckpointError, match="there already"):
        Engine("cpu").save(str(tmp_path / "saved"), epoch=4)
    assert Engine("cpu").load(str(tmp_path / "saved")) == {"epoch": 3}


def test_evaluation_data_counts_into_no_progress() -> None:
    engine = Engine("cpu")
    batches = list(engine.prepare_data(pairs(5), training=False))
    assert [len(features) for features, _ in batches] == [2, 2, 1]
    assert (engine.progress.samples, engine.progress.epoch) == (0, 0)


def test_an_evaluation_between_two_steps_does_not_move_the_training() -> None:
    data = list(shuffled())

    def train(evaluate: bool) -> Any:
        loop = Loop(data)
        evaluation = loop.engine.prepare_data(pairs(5, shuffle=True), training=False)
        for _ in loop.steps(1):
            if evaluate:
                with torch.no_grad():
                    loop.model.eval()
                    sum(float(loop.model(features).sum()) for features, _ in evaluation)
                    loop.model.train()
        return weights(loop.model)

    assert train(True) == train(False)


def test_training_data_knows_its_length_and_each_epoch_has_its_own_order() -> None:
    engine = Engine("cpu")
    data = engine.prepare_data(shuffled())
    assert len(data) == 4
    epochs: list[Tensor] = [torch.cat([target for _, target in data]) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(0).values for epoch in epochs))
    assert engine.progress.epoch == 2
