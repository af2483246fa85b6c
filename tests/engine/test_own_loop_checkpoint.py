"""Checkpoints of your own loop (`Engine.save` and `load`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.refusals import assert_refused
from tests.support.tasks import pairs
from torch import nn
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

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


def shuffled() -> DataLoader[Any]:
    features = torch.randn(14, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("in_memory", [False, True], ids=["loader", "list"])
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_your_own_loop_resumes_bitwise(stop: int, in_memory: bool, tmp_path: Path) -> None:
    data = list(shuffled()) if in_memory else shuffled()
    whole = Loop(data).run(2)
    torch.manual_seed(stop)  # the engine's seed decides, from the first draw on
    first = Loop(data).run(2, until=stop)
    path = str(tmp_path / "saved")
    first.engine.save(path, **first.parts(), note={"lr": [0.5]})
    second = Loop(data)
    torch.manual_seed(99)
    assert second.engine.load(path, **second.parts()) == {"note": {"lr": [0.5]}}
    second.run(2)
    assert first.seen + second.seen == whole.seen
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert weights(second.model) == weights(whole.model)
    for file in (tmp_path / "saved").iterdir():  # nothing in it is pickled
        assert file.suffix in (".safetensors", ".json")
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
    fresh = network()  # and its keys are those of the module that was given
    Engine("cpu").load(path, model=fresh)
    assert weights(fresh) == weights(first.model.task)


def test_several_modules_and_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    def made() -> tuple[Engine, dict[str, Any], dict[str, Any]]:
        engine, models, optimizers = Engine("cpu"), {}, {}
        for name, size in (("first", 2), ("second", 3)):
            models[name], optimizers[name] = engine.prepare(nn.Linear(size, 1), torch.optim.Adam)
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
        assert str(other_optimizers[name].state_dict()) == str(optimizers[name].state_dict())


def test_refusals_of_save_and_load_leave_nothing_behind(tmp_path: Path) -> None:
    path, engine = str(tmp_path / "saved"), Engine("cpu")
    network_there = str(tmp_path / "network")
    alone = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    cases: dict[str, tuple[Any, ...]] = {
        "optimizer alone": (lambda: engine.save(path, optimizer=alone), "give the model too"),
        "no module": (lambda: engine.save(path, model="weights"), "model must be a module"),
        "no optimizer": (lambda: engine.save(path, model=nn.Linear(1, 1), optimizer=3), "optimizer must"),
        "unknown object": (lambda: engine.save(path, thing=object()), "thing"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
    assert list(tmp_path.iterdir()) == []
    engine.save(path, epoch=3)
    Engine("cpu").save(network_there, model=network())
    engine.backward(torch.ones((), requires_grad=True))
    cases: dict[str, tuple[Any, ...]] = {
        "a name that was not saved": (lambda: engine.load(path, epochs=0), "'epochs'", "'epoch'"),
        "one that is there": (lambda: Engine("cpu").save(path, epoch=4), "there already"),
        "another network": (lambda: engine.load(network_there, model=nn.Linear(4, 6)), "'weight'"),
        "between backward and step": (lambda: engine.save(path + "2"), "make the step first"),
    }
    assert_refused((ConfigError, CheckpointError), cases)
    assert Engine("cpu").load(path) == {"epoch": 3}


def test_evaluation_data_counts_into_no_progress_and_does_not_move_the_training() -> None:
    engine = Engine("cpu")
    batches = list(engine.prepare_data(pairs(5), training=False))
    assert [len(features) for features, _ in batches] == [2, 2, 1]
    assert (engine.progress.samples, engine.progress.epoch) == (0, 0)
    data, found = list(shuffled()), []
    for evaluate in (True, False):
        loop = Loop(data)
        evaluation = loop.engine.prepare_data(pairs(5, shuffle=True), training=False)
        for _ in loop.steps(1):
            if evaluate:
                with torch.no_grad():
                    loop.model.eval()
                    sum(float(loop.model(features).sum()) for features, _ in evaluation)
                    loop.model.train()
        found.append(weights(loop.model))
    assert found[0] == found[1]


def test_training_data_knows_its_length_and_each_epoch_has_its_own_order() -> None:
    engine = Engine("cpu")
    data = engine.prepare_data(shuffled())
    assert len(data) == 4
    epochs = [torch.cat([target for _, target in data]) for _ in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(0).values for epoch in epochs))
    assert engine.progress.epoch == 2
