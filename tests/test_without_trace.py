"""What runs the user's code for our own purposes leaves no trace: plans, finders, averages, sanity checks."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import OptimizerConfig, WeightAverage
from drivetrain.core.random_streams import generator_state
from drivetrain.loggers import TensorBoardLogger


def add_generators(owner: Any) -> None:
    owner.calls, owner.torch, owner.python = 0, torch.Generator().manual_seed(1), random.Random(1)
    owner.numpy, owner.legacy = np.random.default_rng(1), np.random.RandomState(1)


def draw(owner: Any) -> Tensor:  # from a generator of each kind, and from those of the process
    owner.calls += 1
    noise = (
        owner.numpy.random()
        + owner.legacy.rand()
        + owner.python.random()
        + random.random()
        + np.random.rand()
    )
    return torch.rand((), generator=owner.torch) + torch.rand(()) + noise


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        add_generators(self)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return draw(self) + torch.arange(4) * index, torch.ones(1)


class Stateful(Regression):
    """A task whose forward changes all that a module can hold but its weights."""

    def __init__(self, spoils: bool = True) -> None:
        super().__init__(OptimizerConfig("sgd", lr=1e-3))
        self.spoils = spoils
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("later", None)
        self.log, self.best = list[Any](), {"loss": [1.0]}
        self.table, self.array = torch.zeros(3), np.zeros(3)
        add_generators(self)
        self.line.extra = [torch.Generator().manual_seed(2)]  # in a module of torch

    def inputs(self, batch: Any) -> Any:
        self.calls += 1
        return super().inputs(batch)

    def forward(self, features: Tensor) -> Tensor:
        noise = draw(self) + torch.rand((), generator=self.line.extra[0])
        self.array[1] += 1
        self.later, self.best["more"], self.cached = torch.ones(2), 2.0, 3.0
        self.log.append(1)
        self.best["loss"].append(2.0)
        self.norm.register_forward_hook(lambda *_: None)
        if type(features) is Tensor:
            with torch.no_grad():
                self.seen += 1
                self.table[1] += 1
        outputs = self.line(self.norm(features)) * noise
        if self.spoils:
            self.norm.eval()
            self.norm.weight.requires_grad_(False)
        return outputs


def plain(value: Any) -> Any:
    """All that an object holds, as numbers and texts."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist(), getattr(value, "requires_grad", None), plain(getattr(value, "grad", None))
    if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)):
        return plain(generator_state(value))
    if isinstance(value, dict):
        return {name if isinstance(name, str) else 0: plain(each) for name, each in value.items()}, len(value)
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    if isinstance(value, (nn.Module, Noisy)):
        return plain(vars(value))
    if isinstance(value, DataLoader):
        return [
            plain(each) for each in (value.dataset, value.generator, vars(value.sampler).get("generator"))
        ]
    return value if isinstance(value, (int, float, str, type(None))) else str(type(value))


def process() -> Any:
    return plain([torch.get_rng_state(), random.getstate(), np.random.get_state()])


VERBS: dict[str, Any] = {
    "plan": lambda trainer, task, data: trainer.plan(task, data, data),
    "rate": lambda trainer, task, data: trainer.find_learning_rate(task, data, steps=20),
    "size": lambda trainer, task, data: trainer.find_batch_size(task, data, memory="1 GiB", largest=4),
}


@pytest.mark.parametrize("is_loader", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_does_not_train_leaves_the_task_its_data_and_the_process_as_they_were(
    verb: str, is_loader: bool
) -> None:
    task, data, size = Stateful(), Noisy(), {"batch_size": 4}
    if is_loader and verb != "size":  # which takes a dataset
        data, size = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3)), {}
    before = plain([task, data]), process()
    VERBS[verb](quiet(max_epochs=1, **size), task, data)
    assert (plain([task, data]), process()) == before


def fitted(*callbacks: Any, **options: Any) -> tuple[Any, Stateful]:
    task, data = Stateful(spoils=False), Noisy()
    trainer = quiet(max_epochs=1, batch_size=4, callbacks=callbacks, **options)
    trainer.fit(task, data, data)
    found = {name: plain(each) for name, each in vars(task).items() if name != "_modules"}
    return (found, plain(task.line.extra), plain(data)), task


@pytest.mark.parametrize("option", ["sanity_validation", "graph"])
def test_a_validation_before_training_and_a_graph_leave_no_trace(option: str, tmp_path: Path) -> None:
    graph = {"loggers": TensorBoardLogger(tmp_path, graph=True), "log_every": 1}
    with heard("Tracing failed sanity checks"):  # of a forward that draws
        (without, plain_task), (found, task) = fitted(), fitted(**{"graph": graph}.get(option, {option: 2}))
    assert found == without
    assert all(map(torch.equal, task.state_dict().values(), plain_task.state_dict().values()))


def test_the_pass_of_an_average_changes_the_statistics_of_norms_alone() -> None:
    (without, plain_task), (found, task) = fitted(), fitted(WeightAverage("swa"))
    assert found == without
    assert not torch.equal(task.norm.running_mean, plain_task.norm.running_mean)


class Drawing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.line.own = torch.Generator().manual_seed(1)

    def forward(self, features: Tensor) -> Tensor:
        return self.line(features) * torch.rand((), generator=self.line.own)


def test_a_generator_in_a_module_of_torch_is_resumed(tmp_path: Path) -> None:
    found = []
    for ends in ((2, 4), (4,)):
        for end in ends:
            task, folder = Drawing(), tmp_path / str(ends)
            quiet(max_steps=end, run_dir=folder, checkpoint=True).fit(task, pairs(), resume="auto")
        found.append(plain(task.line))
    assert found[0] == found[1]
