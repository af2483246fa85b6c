"""What a step leaves in attributes of the task, wherever it is, comes back at a resume to the bit."""

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import CheckpointConfig, LambdaCallback, rank
from drivetrain.distributed.ranks import Ranks
from drivetrain.task.attribute_state import AttributeState

Touch = Callable[[Any], Any]
POLICY = CheckpointConfig(every="2 steps", by=None)


class Task(Regression):  # a step depends on what `touch` makes of the attributes
    def __init__(self, begin: Touch, touch: Touch) -> None:
        super().__init__()
        self.touch = touch
        begin(self)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch) * (1 + 0.01 * self.touch(self))
        LOSSES.append(loss.item())
        return loss


LOSSES: list[float] = []  # of this process


def train(
    run_dir: Path, make: Callable[[], Task], steps: int = 8, **options: Any
) -> tuple[list[float], Task]:
    LOSSES.clear()
    task = make()
    options = {"max_steps": steps, "checkpoint": POLICY, "run_dir": run_dir, **options}
    quiet(**options).fit(task, pairs(8), resume="auto")
    return LOSSES.copy(), task


def both(folder: Path, make: Callable[[], Task], **options: Any) -> tuple[Task, Task]:
    """Compare a fit with one that is resumed after three steps, and return both tasks."""
    whole, one = train(folder / "whole", make, **options)
    first, _ = train(folder / "parts", make, 3, **options)
    second, other = train(folder / "parts", make, **options)
    assert first + second == whole
    assert len(set(whole)) == len(whole)
    return one, other


Row = namedtuple("Row", "value number")


@dataclass(frozen=True)
class Settings:
    temperature: float = 1.0


class Phase(Enum):
    WARM, COLD = 1.5, 0.5


class Memory:
    __slots__ = ("count", "rows")

    def __init__(self) -> None:
        self.count, self.rows = 0, deque[Any](maxlen=3)

    def add(self, value: Tensor) -> float:
        self.count += 1
        self.rows.append(Row(value, self.count))
        return sum(each.value.sum().item() * each.number for each in self.rows)

    def state_dict(self) -> Any:
        return {"count": self.count, "rows": self.rows}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.rows = state["count"], state["rows"]


def count(task: Any) -> float:
    task.count, task.best, task.history = (
        task.count + 1,
        min(task.best, -task.count),
        [*task.history, task.best],
    )
    return task.count + len(task.history)


def lazily(task: Any) -> float:
    if task.late is None:
        task.late = torch.Generator().manual_seed(3), random.Random(4), {"numpy": np.random.default_rng(5)}
        task.other = task.late
        del task.early
    draw = task.late[1].random() + task.other[2]["numpy"].random()
    return draw + torch.rand(1, generator=task.late[0]).item()


def reset(task: Any) -> float:  # one tensor is replaced, which was another one's at the beginning
    task.count += 1
    task.hidden = (task.initial if task.count % 5 == 0 else task.hidden) + 1
    return task.hidden.sum().item() + task.initial.sum().item()


def queue(task: Any) -> float:
    task.queue[task.pointer] = task.pointer + task.queue.sum()
    task.pointer = (task.pointer + 1) % 3
    task.line.usage[task.pointer] += 1
    task.mean.mul_(0.9).add_(task.queue.mean())
    return task.queue.sum().item() + (task.line.usage[0] + task.mean).item()


def average(task: Any) -> float:
    with torch.no_grad():
        for name, each in task.shadow["weights"].items():
            each.lerp_(task.get_parameter(name), 0.1)
        task.hidden_copy[0].weight.mul_(0.9)
    return (
        sum(each.sum().item() for each in task.shadow["weights"].values())
        + task.hidden_copy[0].weight.sum().item()
    )


def learn(task: Any) -> float:
    task.optimizer_of_own.zero_grad()
    (task.latent - 3).square().sum().backward()
    task.optimizer_of_own.step()
    return task.latent.sum().item()


def collect(task: Any) -> float:
    number = len(task.seen)
    task.seen.add(number * 7)
    task.counts[number % 2, "a"] += 1.5
    task.tally[number % 3] += number
    task.names[f"{number}"] = complex(number, 1)
    task.names.move_to_end("first")
    task.array[number % 4] += number
    task.turned = (task.turned * 1.1).t()
    return (
        sum(task.counts.values()) + task.array.sum() + abs(task.names[f"{number}"]) + task.turned[0, 1].item()
    )


def cool(task: Any) -> float:
    task.settings = replace(task.settings, temperature=task.settings.temperature * 0.9)
    task.phase = Phase.COLD if task.settings.temperature < 0.8 else Phase.WARM
    task.dropout.p += 0.01
    task.shape = torch.Size([*task.shape, 2])
    return task.settings.temperature * task.phase.value + task.dropout.p + len(task.shape)


def refer(task: Any) -> float:  # what is one object stays one, and views of weights and parents are found
    if not task.shared:
        task.shared.append([1.0])
        task.others = {"one": task.shared[0], "view": task.line.weight.detach()[:, :2], "task": task}
        task.others["self"] = task.others
    task.shared[0].append(task.shared[0][-1] * 1.5)
    return (
        task.others["self"]["one"][-1] + task.others["view"].sum().item() + task.others["task"].shared[0][-1]
    )


def keep(**values: Any) -> Touch:
    return lambda task: vars(task).update(deepcopy(values))


def begin_queue(task: Any) -> None:
    task.queue, task.pointer, task.line.usage = torch.zeros(3), 0, torch.zeros(3)
    task.register_buffer("mean", torch.zeros(()), persistent=False)


def begin_average(task: Any) -> None:
    task.shadow = {"weights": {name: each.detach().clone() for name, each in task.named_parameters()}}
    task.hidden_copy = [deepcopy(task.line)]


def begin_learning(task: Any) -> None:
    task.latent = torch.zeros(2, requires_grad=True)
    task.optimizer_of_own = torch.optim.Adam([task.latent], lr=0.1)


def begin_reset(task: Any) -> None:
    task.initial, task.count = torch.zeros(2), 0
    task.hidden = task.initial


ARRAYS = {"array": np.zeros(4), "turned": torch.arange(6.0).reshape(2, 3).t(), "seen": {0}}
CONTAINERS = {"counts": defaultdict(float), "tally": Counter(), "names": OrderedDict(first=1)}

KEPT: dict[str, tuple[Touch, Touch]] = {
    "numbers and a list": (keep(count=0, best=float("inf"), history=[]), count),
    "a replay memory of the user's class": (
        lambda task: setattr(task, "memory", Memory()),
        lambda task: task.memory.add(task.line.weight.detach().clone()),
    ),
    "generators that are made late, and an attribute that goes": (
        keep(late=None, other=None, early=1),
        lazily,
    ),
    "a hidden state that is reset": (begin_reset, reset),
    "a queue, counts in a module, a buffer": (begin_queue, queue),
    "an average of weights, a hidden module": (begin_average, average),
    "an optimizer of the task's own": (begin_learning, learn),
    "containers and arrays": (keep(**ARRAYS, **CONTAINERS), collect),
    "a frozen data class, a dropout rate": (
        keep(settings=Settings(), phase=None, shape=torch.Size([])),
        cool,
    ),
    "shared objects": (keep(shared=[], others=None), refer),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_steps_leave_in_attributes_is_that_of_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    begin, touch = KEPT[name]
    with heard() as said:
        both(tmp_path, lambda: Task(begin, touch))
    assert not [each for each in said if "attribute" in each]


class Recurrent(Task):  # of each rank's own; a best value on the first rank alone
    def __init__(self) -> None:
        super().__init__(keep(hidden=None, best=0.0, noise=torch.Generator().manual_seed(rank())), self.step)

    @torch.compiler.disable
    def step(self, task: Any) -> float:
        self.hidden = torch.rand(1, generator=self.noise) + (0.0 if self.hidden is None else self.hidden)
        self.best += rank() == 0
        return self.hidden.item() + self.best


def on_ranks(folder: Path) -> list[Any]:
    for strategy in ("ddp", "fsdp"):
        _, task = both(folder / strategy, Recurrent, strategy=strategy, devices=2)
    return [task.best, round(task.hidden.item(), 4)]


def test_each_rank_has_its_own_and_one_more_has_those_of_the_first(tmp_path: Path) -> None:
    (first, hidden), (second, other) = on_two_ranks(on_ranks, tmp_path)
    assert (first, second) == (8.0, 0.0)
    assert hidden != other
    train(tmp_path / "one", Recurrent, 3)
    bests = on_two_ranks(lambda: train(tmp_path / "one", Recurrent, 4, strategy="ddp", devices=2)[1].best)
    assert bests == [4.0, 3.0]


class Handle:  # an object that no file can make
    pass


def test_what_cannot_be_stored_is_named_once_at_a_save_and_at_the_resume(tmp_path: Path) -> None:
    def open_one(task: Any) -> float:
        task.handle, task.scaled = task.handle or Handle(), task.scaled * 2
        return 1.0

    def make() -> Task:
        return Task(keep(handle=None, scaled=torch.ones(2).to_sparse()), open_one)

    with heard() as said:
        train(tmp_path, make, 6)
        train(tmp_path, make, 8)
    lost = [each for each in said if each.startswith("training changes what no checkpoint can hold: ")]
    assert len(lost) == 2  # one in each fit
    assert "'handle' (tests.checkpoint.test_attributes.Handle), 'scaled' (torch.Tensor) of Task." in lost[1]
    assert len([each for each in said if "does not bring back 'handle', 'scaled' of Task" in each]) == 1


def lost_of_second() -> tuple[Any, Any]:
    ranks = Ranks.of_job()
    task = Task(keep(handle=None, count=0, same=0, big=torch.zeros(9)), count)
    state = AttributeState(task, ranks=ranks)
    task.handle, task.count, task.same = Handle() if ranks.rank else None, ranks.rank + 1, 5
    return state.gather(), state.lost


def test_what_one_rank_loses_is_named_and_equal_values_are_sent_by_the_first_alone() -> None:
    (nodes, lost), (of_second, _) = on_two_ranks(lost_of_second)
    assert (nodes, of_second) == ([{"count": 1, "same": 5}, {"count": 2}], [])
    assert lost == {"handle": "tests.checkpoint.test_attributes.Handle on rank 1"}


class Noisy(Regression):  # has an extra state, which sets an attribute
    def __init__(self) -> None:
        super().__init__()
        self.count, self.noise = 0, torch.Generator()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.count += 1
        return super().loss(outputs, batch) * torch.rand(1, generator=self.noise).sum()

    def get_extra_state(self) -> int:
        return 100

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_own_extra_states_come_after_attributes(tmp_path: Path) -> None:
    trainer = quiet(max_steps=3, checkpoint=True, run_dir=tmp_path)
    trainer.fit(first := Noisy(), pairs())
    trainer.fit(task := Noisy(), pairs(), resume="auto")
    assert (first.count, task.count) == (3, 100)
    assert torch.equal(task.noise.get_state(), first.noise.get_state())


def test_validations_leave_generators_as_they_were(tmp_path: Path) -> None:
    found = []
    for where, last in (("whole", None), ("parts", 1), ("parts", None)):
        stop = LambdaCallback(on_step_end=lambda run, last=last: run.stop("") if last else None)
        task = Recurrent()
        options = {"max_epochs": 2, "checkpoint": True, "run_dir": tmp_path / where, "callbacks": [stop]}
        quiet(**options).fit(task, pairs(8), pairs(4), resume="auto")
        found.append(task.noise.get_state().tolist())
    assert found[0] == found[2] != found[1]
