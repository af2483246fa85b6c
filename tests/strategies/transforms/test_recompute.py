"""What is computed again in backward finds what the forward found, and writes nothing twice."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import BLOCKS, Blocks, quiet
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from drivetrain import (
    CompileConfig,
    FSDPConfig,
    LambdaCallback,
    MemoryConfig,
    OptimizerConfig,
)
from drivetrain.strategies.transforms.recompute import Recomputation
from drivetrain.testing.distributed import run_distributed

SIZE = 6


class Normed(nn.Module):
    """Batch norm, whose kernel writes to running statistics uncounted."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.line(x)))


class Spectral(nn.Module):
    """A weight that depends on buffers to which each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.line = spectral_norm(nn.Linear(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Averaging(nn.Module):
    """A mean that is written to past torch's count, and one that is replaced; beside one made when called."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)
        self.register_buffer("mean", torch.ones(SIZE))
        self.register_buffer("other", torch.ones(SIZE))
        self.register_buffer("calls", None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.line(x) * self.mean + self.other)
        self.mean.data.mul_(0.5).add_(y.detach().mean(0))
        self.other = 0.5 * self.other + y.detach().mean(0)
        self.calls = torch.zeros(()) if self.calls is None else self.calls + 1
        return x + y * self.calls.cos()


class Drawing(nn.Module):
    """Draws from Python's and numpy's global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x) * random.random()) * float(np.random.randn())


KINDS: list[type[nn.Module]] = [Normed, Spectral, Averaging, Drawing]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [True, "selective", ("blocks.1", "blocks.2.line")], ids=str)
def test_buffers_and_draws_are_those_of_one_forward(kind: type[nn.Module], spec: Any) -> None:
    assert fit(kind, spec) == fit(kind, None)


def in_ddp(kind: type[nn.Module], again: bool) -> Any:
    return fit(kind, again, strategy="ddp", devices=2)


def in_fsdp(kind: type[nn.Module], again: bool) -> Any:
    strategy = FSDPConfig(activation_checkpointing="full" if again else False)
    return fit(kind, None, strategy=strategy, devices=2)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("run", [in_ddp, in_fsdp])
@pytest.mark.parametrize("kind", [Normed, Drawing])
def test_so_it_is_on_several_processes(run: Any, kind: type[nn.Module]) -> None:
    assert run_distributed(run, kind, True) == run_distributed(run, kind, False)


@pytest.mark.parametrize("kind", [Normed, Spectral])
def test_a_block_that_is_used_twice_is_computed_each_time_from_what_it_found(kind: type[nn.Module]) -> None:
    def gradients(again: bool) -> tuple[Any, Any]:
        task = Deep(kind)
        taken = Recomputation(task, "full") if again else None
        x = batches()[1]
        (task(x) + task(x)).square().mean().backward()
        if taken is not None:
            taken.remove()
        return [each.grad.tolist() for each in task.parameters()], state(task)

    assert gradients(True) == gradients(False)


def test_a_graph_is_gone_through_twice() -> None:
    def gradients(again: bool) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        task = Deep(Drawing)
        taken = Recomputation(task, "full") if again else None
        loss = task(batches()[1]).square().mean()
        loss.backward(retain_graph=True)
        random.random()
        loss.backward()
        if taken is not None:
            taken.remove()
        return [each.grad.tolist() for each in task.parameters()]

    np.random.seed(0)
    expected = gradients(False)
    np.random.seed(0)
    assert gradients(True) == expected


def test_nothing_is_kept_of_buffers_that_stay_as_they_are() -> None:
    class Masked(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(SIZE))

    task = Deep(Masked)
    taken = Recomputation(task, "full")
    original = torch.Tensor.clone
    masks: list[weakref.ref[Tensor]] = []

    def clone(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = original(tensor, *args, **kwargs)
        masks.append(weakref.ref(made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        loss = task(batches()[1]).sum()
    held = [each for each in masks if each() is not None]
    loss.backward()
    taken.remove()
    assert (len(masks), held) == (BLOCKS, [])


def test_a_task_is_copied_and_pickled_while_it_trains() -> None:
    copies: list[Any] = []

    def take(run: Any) -> None:
        copies.extend([copy.deepcopy(run.task), pickle.loads(pickle.dumps(run.task))])

    task = Deep(Normed)
    memory = MemoryConfig(activation_checkpointing=True)
    callback = LambdaCallback(on_fit_end=take)
    quiet(max_epochs=1, memory=memory, callbacks=[callback]).fit(task, batches())
    assert len(copies) == 2
    for each in copies:
        assert state(pickle.loads(pickle.dumps(each))) == state(task)
        before = state(task)
        each.train()(batches()[1]).sum().backward()
        assert state(task) == before
        quiet(max_epochs=1, memory=memory).fit(each, batches())
    assert state(copies[0]) == state(copies[1])
    assert all("forward" not in vars(each) for each in task.modules())


def test_a_forward_of_a_modules_own_is_computed_again_and_put_back() -> None:
    task = Deep(Normed)
    block, calls = task.blocks[0], []
    own = block.forward

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return own(x)

    block.forward = counted  # type: ignore[method-assign]
    memory = MemoryConfig(activation_checkpointing=True)
    quiet(max_steps=1, memory=memory).fit(task, batches())
    assert (len(calls), block.forward) == (2, counted)


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
@pytest.mark.parametrize(
    ("kind", "scope", "spec"),
    [
        pytest.param(Normed, "task", True, marks=pytest.mark.full),
        (Normed, "step", "selective"),
        pytest.param(Normed, "blocks", ("blocks.*.line",), marks=pytest.mark.full),
        pytest.param(Spectral, "task", "selective", marks=pytest.mark.full),
        (Spectral, "blocks", True),
        (Drawing, "task", True),
    ],
    ids=str,
)
def test_so_it_is_in_whatever_is_compiled(kind: type[nn.Module], scope: str, spec: Any) -> None:
    config = CompileConfig(scope=scope, backend="aot_eager")
    assert fit(kind, spec, compile=config) == fit(kind, None, compile=config)


class InPlace(nn.Sequential):
    """Writes over results that "selective" keeps."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Linear(SIZE, SIZE), nn.SiLU(inplace=True)
        )


def test_what_was_kept_and_then_written_over_is_not_used() -> None:
    with pytest.raises(RuntimeError, match=r"cached during selective.*has been mutated"):
        fit(InPlace, "selective")
    assert fit(InPlace, True) == fit(InPlace, None)


@compiled
@pytest.mark.parametrize("scope", ["blocks", "step"])
def test_compiled_blocks_may_write_in_place_and_nothing_warns_of_it(
    scope: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._logging._internal import warning_once

    warning_once.cache_clear()
    config = CompileConfig(scope=scope, backend="aot_eager")
    found = fit(InPlace, "selective", compile=config)
    assert found == fit(InPlace, None, compile=config)
    assert found == fit(InPlace, None)
    assert "torch.utils.checkpoint" not in caplog.text


@compiled
def test_blocks_are_compiled_once_and_computed_again_within() -> None:
    from torch._dynamo import lookup_backend

    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return lookup_backend("aot_eager")(graph, inputs)

    memory = MemoryConfig(activation_checkpointing=True)
    for scope in ("blocks", "task"):
        graphs.clear()
        config = CompileConfig(scope=scope, backend=backend)
        quiet(max_epochs=1, memory=memory, compile=config).fit(Deep(Normed), batches())
        # The first block's input needs no gradient, which the others' do.
        assert len(graphs) == (2 if scope == "blocks" else 1)
        assert "".join(graphs).count("ops.higher_order.tag_activation_checkpoint(") == (
            2 if scope == "blocks" else BLOCKS
        )


@compiled
def test_what_is_compiled_in_a_block_that_is_computed_again_stays_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Normed() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)) * random.random()

    options = {"compile": CompileConfig(backend=backend)}

    class Outer(Deep):
        def __init__(self) -> None:
            super().__init__(Normed)
            self.blocks = nn.ModuleList([Inner()])

    found = []
    for spec in (None, ("Inner",)):
        graphs.clear()
        task = Outer()
        for each in task.parameters():
            nn.init.constant_(each, 0.3)
        memory = MemoryConfig(activation_checkpointing=spec) if spec else None
        quiet(max_epochs=1, memory=memory, **options).fit(task, batches())
        assert graphs
        found.append(state(task))
    assert found[0] == found[1]
