"""What is computed again in backward finds what the forward found, and writes nothing twice."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Blocks, quiet
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from drivetrain import CompileConfig, FSDPConfig, LambdaCallback, MemoryConfig, OptimizerConfig
from drivetrain.strategies.transforms.recompute import forget, recompute

SIZE = 6
AGAIN = MemoryConfig(activation_checkpointing=True)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Normed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(self.line, nn.BatchNorm1d(SIZE))  # type: ignore[assignment]


class Spectral(Part):
    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.line)


class Drawing(Part):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x) * random.random()) * float(np.random.randn())


KINDS: list[type[nn.Module]] = [Normed, Spectral, Drawing]


class Deep(Blocks):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__(kind, SIZE, OptimizerConfig("sgd", lr=0.1))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Of the first, which is all zeros, some buffers keep their value.
    return [torch.zeros(4, SIZE), *(torch.randn(4, SIZE, generator=generator) for _ in range(4))]


def state(task: nn.Module) -> dict[str, list[Any]]:
    return {name: each.tolist() for name, each in task.state_dict().items()}


def fit(kind: type[nn.Module], spec: Any, **options: Any) -> dict[str, list[Any]]:
    task = Deep(kind)
    memory = MemoryConfig(activation_checkpointing=spec) if spec else None
    quiet(**{"max_epochs": 2, "memory": memory, **options}).fit(task, batches())
    return state(task)


def test_recomputed_buffers_and_draws_are_those_of_one_forward() -> None:
    wrong = []
    for kind in KINDS:
        plain = fit(kind, None)
        for spec in (True, "selective", ("blocks.1", "blocks.2.line")):
            if fit(kind, spec) != plain:
                wrong.append(f"{kind.__name__}: {spec}")
    assert not wrong


@pytest.mark.heavy("two ranks, with and without recomputation")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_recomputed_buffers_and_draws_are_those_of_one_forward_on_two_ranks() -> None:
    def compare() -> list[str]:
        wrong = []
        for kind in (Normed, Drawing):
            options: dict[str, Any] = {"devices": 2, "max_epochs": 1}
            plain, again = (fit(kind, each, strategy="ddp", **options) for each in (False, True))
            config = [FSDPConfig(activation_checkpointing=each) for each in ("full", False)]
            full, off = (fit(kind, None, strategy=each, **options) for each in config)
            wrong += [kind.__name__] * (plain != again or full != off)
        return wrong

    assert on_two_ranks(compare) == [[], []]


def gradients(kind: type[nn.Module], again: bool, backward: Callable[[nn.Module, Tensor], None]) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    task = Deep(kind)
    recompute(task, "full" if again else False)
    backward(task, batches()[1])
    forget(task)
    return [each.grad.tolist() for each in task.parameters()], state(task)


def test_block_that_is_used_twice_is_recomputed_each_time() -> None:
    def twice(task: nn.Module, x: Tensor) -> None:
        (task(x) + task(x)).square().mean().backward()

    for kind in (Normed, Spectral):
        assert gradients(kind, True, twice) == gradients(kind, False, twice)


def test_recomputed_task_is_copied_and_pickled_while_it_trains() -> None:
    copies: list[Any] = []

    def take(run: Any) -> None:
        copies.append(copy.deepcopy(run.task))

    task = Deep(Normed)
    callback = LambdaCallback(on_fit_end=take)
    quiet(max_epochs=1, memory=AGAIN, callbacks=[callback]).fit(task, batches())
    (copied,) = copies
    assert state(pickle.loads(pickle.dumps(copied))) == state(task)
    quiet(max_epochs=1, memory=AGAIN).fit(copied, batches())
    assert state(copied) != state(task)
    assert all("forward" not in vars(each) for each in task.modules())


@pytest.fixture
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch imports to compile would begin a thread of tqdm's."""
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)


def compiled(test: Callable[..., None]) -> Callable[..., None]:
    for warning in (
        ".*torch.jit.script_method. is deprecated:DeprecationWarning",
        "The .grad attribute of a Tensor",
        "Dynamo does not know how to trace the builtin",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return pytest.mark.usefixtures("no_monitor")(test)


@compiled
def test_compiled_recomputation_is_that_of_one_forward() -> None:
    options = {"compile": CompileConfig(scope="task", backend="aot_eager"), "max_epochs": 1}
    assert fit(Drawing, True, **options) == fit(Drawing, None, **options)


class InPlace(nn.Sequential):  # writes over results that "selective" keeps
    def __init__(self) -> None:
        lines = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        super().__init__(lines[0], nn.ReLU(inplace=True), lines[1], nn.SiLU(inplace=True))


def test_selective_recomputation_refuses_results_that_were_written_over() -> None:
    with pytest.raises(RuntimeError, match=r"cached during selective.*has been mutated"):
        fit(InPlace, "selective")
    assert fit(InPlace, True) == fit(InPlace, None)


@compiled
def test_compiled_selective_recomputation_may_write_in_place() -> None:
    config = CompileConfig(backend="aot_eager")
    found = fit(InPlace, "selective", compile=config)
    assert found == fit(InPlace, None, compile=config) == fit(InPlace, None)
