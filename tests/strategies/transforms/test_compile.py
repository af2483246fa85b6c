"""Compiled runs: what is compiled how often, the same numbers, and an ordinary task afterwards."""

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.tasks import Blocks, Duel, Regression, pairs, quiet
from torch import Tensor, nn
from torch._dynamo.utils import counters

from drivetrain import (
    CheckpointConfig,
    CompileConfig,
    ConfigError,
    Engine,
    LambdaCallback,
    OptimizerConfig,
    TaskModule,
    Throughput,
)
from drivetrain.core.types import StepOutput
from drivetrain.strategies.fsdp.strategy import FSDPConfig
from drivetrain.strategies.single import SingleDevice
from drivetrain.strategies.transforms.compile import Compilation
from drivetrain.testing.distributed import run_distributed

pytestmark = [
    # torch hides this warning of its own from users, in a way that does not stop it from being an error.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Its compiler, when it is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
]

SIZE = 8
WHOLE = CompileConfig(backend="aot_eager", fullgraph=True)
LAST = CheckpointConfig(by=None, best=0)


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


def deep(dropout: float = 0.0) -> Blocks:
    torch.manual_seed(0)
    return Blocks(lambda: Layer(dropout), SIZE, OptimizerConfig("adamw", lr=0.01))


def batches(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, SIZE, generator=generator) for size in sizes]


TRAINING, VALIDATION = batches(4, 4, 4, 3), batches(6, 6, 5)


def fit(compile: Any, task: TaskModule | None = None, **options: Any) -> tuple[Any, dict[str, float]]:
    task = deep() if task is None else task
    result = quiet(**{"max_epochs": 2, "compile": compile, **options}).fit(task, TRAINING, VALIDATION)
    return weights(task), result.metrics


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count compilations from zero: none of what earlier tests have taught torch's compiler of our code."""
    torch._dynamo.reset()
    counters.clear()
    # torch's compiler has a bar of tqdm's, whose thread stays.
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)
    yield
    counters.clear()


def compiled() -> int:
    return counters["stats"]["unique_graphs"]


def names(task: nn.Module) -> list[set[str]]:
    return [set(vars(each)) for each in task.modules()]


def test_compiled_blocks_train_the_same_and_leave_an_ordinary_task() -> None:
    parts: dict[str, float] = {}
    keep = LambdaCallback(on_fit_end=lambda run: parts.update(run.timing))
    plain = fit(False, max_epochs=3, log_every=1, callbacks=[keep])
    assert "compile" not in parts
    task = deep()
    before = names(task)
    options: dict[str, Any] = {"max_epochs": 3, "log_every": 1}
    speed = Throughput(measure_flops=False)
    with heard("compiled 3 x Layer in ", logging.INFO) as texts:
        found = fit(WHOLE, task, callbacks=[speed, keep], progress_bar=True, **options)
    assert len(texts) == 1
    # Of three blocks (the first one's input needs no gradient), of two sizes each, and of evaluation.
    assert (compiled(), len(counters["graph_break"])) == (3, 0)
    assert found[0] == plain[0]
    assert plain[1].items() <= found[1].items()
    # Compiling is no part of the time of training; it takes a hundred times as long as running two layers.
    assert parts["compile"] > parts["compute"] + parts["evaluation"]
    assert names(task) == before
    counters.clear()
    task(TRAINING[0])
    assert compiled() == 0

    def fail(_: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):  # and once more, of which nothing is left after an error
        fit(WHOLE, task, callbacks=[LambdaCallback(on_step_end=fail)])
    assert compiled() == 2
    assert names(task) == before


def test_outputs_of_cuda_graphs_are_kept_after_the_next_step() -> None:
    place, config = torch.zeros(3), CompileConfig(mode="reduce-overhead")
    step = Compilation(config, SingleDevice("cpu")).marking(
        lambda batch: StepOutput(place.sum(), {"logits": place.fill_(batch)})
    )
    first, _ = step(1.0), step(2.0)
    assert first.outputs["logits"].tolist() == [1.0, 1.0, 1.0], "a metric may keep them"


def test_a_task_that_is_compiled_as_one_trains_the_same() -> None:
    assert fit(CompileConfig(scope="task", backend="aot_eager", fullgraph=True)) == fit(False)
    assert compiled() == 2


def test_compile_takes_the_forward_of_a_task_without_blocks_and_the_modules_of_one_without_forward() -> None:
    eager = {"backend": "eager", "fullgraph": True}
    plain, task = Regression(), Regression()
    quiet(max_epochs=2).fit(plain, pairs())
    quiet(max_epochs=2, compile=eager).fit(task, pairs())
    assert weights(task) == weights(plain)
    assert compiled() == 1
    first, second = Duel(), Duel()  # with several optimizers
    data = [{"real": torch.randn(5, 4), "noise": torch.randn(5, 2)} for _ in range(3)]
    quiet(max_epochs=1).fit(first, data)
    quiet(max_epochs=1, compile=eager).fit(second, data)
    assert weights(second) == weights(first)
    assert compiled() >= 3


def test_compile_leaves_alone_what_its_user_compiles() -> None:
    task, seen = deep(), []
    task.blocks[1].compile(backend=lambda graph, _: seen.append(graph) or graph.forward)
    theirs = task.blocks[1]._compiled_call_impl
    quiet(max_steps=1, compile={"backend": "eager"}).fit(task, TRAINING)
    assert len(seen) == 1
    assert task.blocks[1]._compiled_call_impl is theirs


def test_copy_of_a_compiled_task_computes_with_its_own_weights() -> None:
    given = []

    def take(run: Any) -> None:
        given.append(copy.deepcopy(run.task))

    fit({"backend": "eager"}, max_epochs=1, callbacks=[LambdaCallback(on_epoch_end=take)])
    before, expected = compiled(), deep()
    with torch.no_grad():
        given[0].blocks[0].line.bias.fill_(7.0)
        expected.load_state_dict(given[0].state_dict())
        assert torch.equal(given[0](TRAINING[0]), expected(TRAINING[0]))
    assert before == compiled() > 0


@pytest.mark.parametrize("whole_run", [True, False])
def test_checkpoint_of_a_compiled_run_or_submodule_has_plain_names_and_is_resumed_without(
    whole_run: bool, tmp_path: Path
) -> None:
    def trained(name: str, compiled: bool, epochs: int, resume: str | None = None) -> Any:
        task = Regression()
        if compiled and not whole_run:
            task.line = torch.compile(task.line, backend="eager")  # type: ignore[assignment]
        compile = {"backend": "eager"} if compiled and whole_run else False
        trainer = quiet(max_epochs=epochs, run_dir=tmp_path / name, checkpoint=LAST, compile=compile)
        trainer.fit(task, pairs(), resume=resume)
        return [each.tolist() for each in task.parameters()]

    straight = trained("straight", False, 4)
    for first in (True, False):
        trained(str(first), first, 2)
        assert trained(str(first), not first, 4, resume="auto") == straight
        stored = load_file(tmp_path / str(first) / "model.safetensors")
        assert set(stored) == {"line.weight", "line.bias"}


def run_by_default(directory: Path) -> tuple[float, float, bool]:
    """Losses without and with compilation, and whether a resumed run is the same as a whole one."""

    def run(steps: int, task: TaskModule, compile: bool = True, resume: str | None = None) -> float:
        policy = CheckpointConfig(every="1 step", by=None, best=0) if resume else False
        trainer = quiet(max_steps=steps, compile=compile, run_dir=directory, log_every=1, checkpoint=policy)
        return trainer.fit(task, TRAINING, resume=resume).metrics["train/loss"]

    torch.set_num_threads(1)
    losses = [run(8, deep(), compile=each) for each in (False, True)]
    whole, resumed = deep(0.3), deep(0.3)
    run(8, whole)
    run(6, deep(0.3), resume="auto")
    run(8, resumed, resume="auto")
    return losses[0], losses[1], weights(resumed) == weights(whole)


@pytest.mark.landing
def test_default_backend_is_near_plain_torch_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    # The run is left in its second epoch, after a short batch that the resumed run has not seen. In a process
    # of its own, as torch's compiler leaves threads and variables of the environment behind.
    ((plain, found, same),) = run_distributed(run_by_default, tmp_path, world_size=1)
    assert found == pytest.approx(plain, rel=1e-5)
    assert same


def test_engine_compiles_any_module() -> None:
    def train(compile: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        with Engine(strategy="cpu", compile=compile) as engine:
            model = nn.Sequential(*(Layer() for _ in range(2)))
            wrapped, optimizer = engine.prepare(model, lambda given: torch.optim.SGD(given, lr=0.1))
            assert list(wrapped.state_dict()) == list(model.state_dict())
            for batch in TRAINING:
                loss = wrapped(batch).square().mean()
                engine.backward(loss)
                engine.step(optimizer)
                losses.append(float(loss.detach()))
        return losses

    assert train({"backend": "eager", "fullgraph": True}) == train(False)
    assert compiled() == 2


def alike(strategy: Any) -> tuple[bool, int, int, int]:
    """Whether the numbers are those without compilation; graphs, breaks, and graphs that compute again."""
    again = []

    def backend(graph: Any, inputs: Any) -> Any:
        again.append(any("checkpoint" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.set_num_threads(1)
    options: Any = {"devices": 2, "strategy": strategy}
    plain = fit(False, **options)
    counters.clear()
    found = fit(CompileConfig(backend=backend, fullgraph=True), **options)
    return found == plain, compiled(), len(counters["graph_break"]), sum(again)


@pytest.mark.landing
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_several_processes_compile_their_blocks_without_a_break() -> None:
    selective = FSDPConfig(activation_checkpointing="selective")
    # Without gradients, in evaluation, nothing is computed again.
    for strategy, again in (("ddp", 0), (selective, 2)):
        assert run_distributed(alike, strategy) == [(True, 3, 0, again)] * 2


class Reads(Blocks):
    def __init__(self) -> None:
        super().__init__(Layer, SIZE, OptimizerConfig("sgd", lr=0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.head.weight.sum().item() > 0 else 1)


def test_what_cannot_be_compiled_is_named_with_the_way_out() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    with pytest.raises(ConfigError, match=r"'blocks.0' \(Layer.forward\) could not be.*compile=False"):
        fit(CompileConfig(backend=broken))
    with pytest.raises(ConfigError, match=r"'Reads' \(Reads.forward\) could not.*fullgraph=False runs"):
        fit(CompileConfig(scope="task", backend="eager", fullgraph=True), Reads())
    assert fit(CompileConfig(scope="task", backend="eager"), Reads()) == fit(False, Reads())
