"""What a step leaves in attributes of the task, wherever it is, comes back at a resume to the bit."""

import argparse
import random
import re
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

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


class Memory:
    __slots__ = ("count", "rows")

    def __init__(self) -> None:
        self.count, self.rows = 0, deque[Any](maxlen=3)

    def add(self, value: Tensor) -> float:
        self.count += 1
        self.rows.append((value, self.count))
        return sum(value.sum().item() * number for value, number in self.rows)

    def state_dict(self) -> Any:
        return {"count": self.count, "rows": [*self.rows]}

    def load_state_dict(self, state: Any) -> None:
        self.count, self.rows = state["count"], deque(state["rows"], maxlen=3)


def count(task: Any) -> float:
    task.count, task.best, task.history = (
        task.count + 1,
        min(task.best, -task.count),
        [*task.history, task.best],
    )
    return task.count + len(task.history)


def draw(task: Any) -> float:
    if not task.other:
        task.other = task.drawn[2:]
        del task.early
    first = task.drawn[1].random() + task.other[0]["numpy"].random()
    return first + torch.rand(1, generator=task.drawn[0]).item()


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
    task.names[f"{number}"] = number
    task.window.append(number)
    task.names.move_to_end("first")
    task.array[number % 4] += number
    task.turned = (task.turned * 1.1).t()
    return sum(task.counts.values()) + task.array.sum() + sum(task.window) + task.turned[0, 1].item()


def cool(task: Any) -> float:
    task.dropout.p += 0.01
    return float(task.dropout.p)


def refer(task: Any) -> float:  # what is one object stays one, and weights and parents are found
    if not task.shared:
        task.shared.append([1.0])
        task.others = {"one": task.shared[0], "w": task.line.weight, "task": task}
        task.others["self"] = task.others
    task.shared[0].append(task.shared[0][-1] * 1.5)
    return task.others["self"]["one"][-1] + task.others["w"].sum().item() + task.others["task"].shared[0][-1]


def keep(**values: Any) -> Touch:
    return lambda task: vars(task).update(deepcopy(values))


def begin_drawing(task: Any) -> None:
    task.drawn = [torch.Generator().manual_seed(3), random.Random(4), {"numpy": np.random.default_rng(5)}]
    task.other, task.early = None, 1


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
CONTAINERS: dict[str, Any] = {"counts": defaultdict(float), "tally": Counter(), "names": OrderedDict(first=1)}
CONTAINERS["window"] = deque(maxlen=2)

KEPT: dict[str, tuple[Touch, Touch]] = {
    "numbers and a list": (keep(count=0, best=float("inf"), history=[]), count),
    "a replay memory of the user's class": (
        lambda task: setattr(task, "memory", Memory()),
        lambda task: task.memory.add(task.line.weight.detach().clone()),
    ),
    "generators, and an attribute that goes": (begin_drawing, draw),
    "a hidden state that is reset": (begin_reset, reset),
    "a queue, counts in a module, a buffer": (begin_queue, queue),
    "an average of weights, a hidden module": (begin_average, average),
    "an optimizer of the task's own": (begin_learning, learn),
    "containers and arrays": (keep(**ARRAYS, **CONTAINERS), collect),
    "a dropout rate": (keep(), cool),
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


def test_validations_leave_generators_as_they_were(tmp_path: Path) -> None:
    found = []
    for where, last in (("whole", None), ("parts", 1), ("parts", None)):
        stop = LambdaCallback(on_step_end=lambda run, last=last: run.stop("") if last else None)
        task = Recurrent()
        options = {"max_epochs": 2, "checkpoint": True, "run_dir": tmp_path / where, "callbacks": [stop]}
        quiet(**options).fit(task, pairs(8), pairs(4), resume="auto")
        found.append(task.noise.get_state().tolist())
    assert found[0] == found[2] != found[1]


class Note:
    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value


class Row(NamedTuple):
    value: int


@dataclass
class Settings:
    rate: float = 1.0


WEIGHT = nn.Parameter(torch.ones(3))

NAMED: dict[str, tuple[Any, ...]] = {  # a value, what changes it or takes its place, and how it is named
    "a function in a dict": ({"n": 1}, lambda value: value.update(then=print), r"^kept\['then'\]: builtin_"),
    "a row in a list": ((1, []), lambda value: value[1].append(Row(1)), r"^kept\[1\]\[0\]: tests.*Row$"),
    "a class in a state": (Memory(), lambda value: setattr(value, "count", int), r"\(\)\['count'\]: type$"),
    "a data class": (Settings(), lambda value: setattr(value, "rate", 2.0), "Settings$"),
    "a generator of the fit's own": (None, torch.Generator(), r"^torch\._C\.Generator$"),
    "a view of a weight": (None, WEIGHT.detach()[:2], r"^a view of 'weight'$"),
    "an array of another byte order": (np.ones(2, ">f4"), lambda value: value.fill(2), r"^numpy\.ndarray$"),
    "a namespace": (argparse.Namespace(), lambda value: setattr(value, "rate", 1)),
    "a date": (datetime(2020, 1, 1), datetime(2020, 1, 2)),
    "a dict of a class": (UserDict(), lambda value: value.update(rate=1)),
    "an object in an object": (Note("a", Note("b", 1)), lambda value: setattr(value.value, "value", 2)),  # type: ignore[arg-type]
    "a number beside an object": ([Note("a", 1), 1], lambda value: value.append(2)),
    "dates of numpy": (np.array(["2020"], "M8[Y]"), lambda value: value.fill("2021")),
    "tensors as keys": ({torch.zeros(1): 0}, lambda value: value.update(dict.fromkeys(value, 1))),
    "a module of the fit's own": ([], lambda value: value.append(nn.Linear(1, 1))),
    "over 60 MB of text": ("", "a" * (61 << 20)),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_changed_value_that_no_checkpoint_holds_is_named(name: str) -> None:
    value, change, *named = NAMED[name]
    task = Task(lambda task: vars(task).update(kept=value), count)
    task.weight = WEIGHT
    state = AttributeState(task)
    assert (state.gather(), state.lost) == ([{}], {})
    task.kept = (change(value), value)[1] if type(change) is FunctionType else change
    assert ("kept" in state.gather()[0], [*state.lost]) == (False, ["kept"])
    assert all(re.search(each, state.lost["kept"]) for each in named), state.lost
