"""Compiled runs: what is compiled how often, the same numbers, and an ordinary task afterwards."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from drivetrain import (
    CheckpointConfig,
    CompileConfig,
    ConfigError,
    Engine,
    LambdaCallback,
    OptimizerConfig,
    StrategyError,
    TaskModule,
    Throughput,
    Trainer,
)
from drivetrain.strategies.fsdp.strategy import FSDP, FSDPConfig
from drivetrain.testing.distributed import run_distributed

# torch hides this warning of its own from users, in a way that does not stop it from being an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    # Its compiler, when it is imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"),
]

SIZE, WORDS = 8, 11
WHOLE = CompileConfig(backend="aot_eager", fullgraph=True)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mix = nn.Linear(SIZE, 3 * SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Words(TaskModule):
    """A small language model with tied embeddings."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        loss = F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
        return {"loss": loss, "perplexity": loss.exp()}

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def sequences(*sizes: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"tokens": torch.randint(WORDS, (size, 7), generator=generator)} for size in sizes]


TRAINING, VALIDATION = sequences(4, 4, 4, 3), sequences(6, 6, 5)


def fit(compile: Any, task: TaskModule | None = None, **options: Any) -> tuple[Any, dict[str, float]]:
    task = Words() if task is None else task
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


# What is compiled, and how often.


def test_a_class_is_compiled_once_for_training_and_once_for_evaluation_whatever_the_sizes_of_batches() -> (
    None
):
    fit(WHOLE, max_epochs=3)  # of two blocks, a short last batch in each epoch, and other sizes in evaluation
    assert compiled() == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("scope", ["blocks", "task", "step"])
def test_a_compiled_run_has_the_numbers_of_one_that_is_not(scope: str) -> None:
    class Fresh(Words):
        """A class of which nothing is known when it is compiled."""

    plain = fit(False)
    config = CompileConfig(scope=scope, backend="aot_eager", fullgraph=True)
    assert fit(config, Fresh()) == plain
    assert compiled() == 2


@pytest.mark.full
def test_it_has_them_with_accumulation_and_clipping() -> None:
    options: Any = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}
    assert fit(WHOLE, **options) == fit(False, **options)
    assert compiled() == 2


@pytest.mark.full
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_it_is_near_them_in_every_precision(precision: str) -> None:
    plain, found = (
        quiet(max_epochs=2, compile=each, precision=precision).fit(Words(), TRAINING, VALIDATION).metrics
        for each in (False, WHOLE)
    )
    assert compiled() == 2
    assert found == pytest.approx(plain, rel=0.02)


@pytest.mark.full
def test_it_has_them_with_frozen_weights_and_those_stay() -> None:
    def frozen() -> Words:
        task = Words()
        task.blocks[1].requires_grad_(False)
        return task

    task = frozen()
    assert fit(WHOLE, task) == fit(False, frozen())
    assert torch.equal(task.blocks[1].up.weight, Words().blocks[1].up.weight)  # type: ignore[union-attr]


def test_of_a_task_without_repeated_blocks_all_of_the_forward_is_compiled() -> None:
    plain, task = Regression(), Regression()
    quiet(max_epochs=2).fit(plain, pairs())
    quiet(max_epochs=2, compile=WHOLE).fit(task, pairs())
    assert weights(task) == weights(plain)
    assert compiled() == 1


def test_of_a_task_without_a_forward_each_submodule_is_compiled_and_it_may_have_several_optimizers() -> None:
    plain, task = Duel(), Duel()
    data = [{"real": torch.randn(5, 4), "noise": torch.randn(5, 2)} for _ in range(3)]
    quiet(max_epochs=1).fit(plain, data)
    quiet(max_epochs=1, compile={"backend": "aot_eager", "fullgraph": True}).fit(task, data)
    assert weights(task) == weights(plain)
    assert compiled() >= 2


@pytest.mark.full
def test_what_its_user_compiles_is_left_alone() -> None:
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph.forward

    task = Words()
    task.blocks[1].compile(backend=backend)
    theirs = task.blocks[1]._compiled_call_impl
    quiet(max_steps=1, compile=WHOLE).fit(task, TRAINING)
    assert len(seen) == 1
    assert task.blocks[1]._compiled_call_impl is theirs


# Afterwards.


def test_the_task_is_an_ordinary_module_afterwards_and_can_be_trained_again() -> None:
    task = Words()
    before = [set(vars(each)) for each in task.modules()]
    fit(WHOLE, task)
    assert [set(vars(each)) for each in task.modules()] == before
    counters.clear()
    task(TRAINING[0]["tokens"])
    assert compiled() == 0
    fit(WHOLE, task, max_epochs=1)
    assert compiled() == 2  # of the first run nothing was left
    assert [set(vars(each)) for each in task.modules()] == before


@pytest.mark.full
def test_the_task_is_an_ordinary_module_after_an_error_too() -> None:
    def fail(_: Any) -> None:
        raise KeyError("mine")

    task = Words()
    before = [set(vars(each)) for each in task.modules()]
    with pytest.raises(KeyError, match="mine"):
        fit(WHOLE, task, callbacks=[LambdaCallback(on_step_end=fail)])
    assert [set(vars(each)) for each in task.modules()] == before


@pytest.mark.full
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copy_that_is_made_during_the_run_computes_with_its_own_weights(how: str) -> None:
    given = []

    def take(run: Any) -> None:
        if how == "copied":
            given.append(copy.deepcopy(run.task))
        else:
            buffer = io.BytesIO()
            torch.save(run.task, buffer)
            buffer.seek(0)
            given.append(torch.load(buffer, weights_only=False))

    fit(WHOLE, max_epochs=1, callbacks=[LambdaCallback(on_epoch_end=take)])
    (taken,) = given
    with torch.no_grad():
        taken.blocks[0].down.bias.fill_(7.0)
        expected = Words()
        expected.load_state_dict(taken.state_dict())
        assert torch.equal(taken(TRAINING[0]["tokens"]), expected(TRAINING[0]["tokens"]))
    assert compiled() == 2  # those of the run


def test_checkpoints_have_the_names_of_a_run_that_is_not_compiled(tmp_path: Path) -> None:
    policy = CheckpointConfig(by=None, best=0)
    quiet(max_epochs=1, compile=WHOLE, run_dir=tmp_path, checkpoint=policy).fit(Words(), TRAINING)
    names = set(Words().state_dict())
    assert set(load_file(tmp_path / "model.safetensors")) | {"head.weight"} == names
    task = Words()
    resumed = quiet(max_epochs=2, run_dir=tmp_path, checkpoint=policy).fit(task, TRAINING, resume="auto")
    plain, _ = fit(False, validate_every=None)
    assert resumed.progress.updates == 8
    assert weights(task) == plain


class Layer(nn.Module):
    """A layer that is quick to compile."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.line, self.dropout = nn.Linear(SIZE, SIZE), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.line(x)))


def layered(dropout: float) -> Words:
    task = Words()
    task.blocks = nn.ModuleList(Layer(dropout) for _ in range(2))
    return task


def run_by_default(directory: Path) -> tuple[float, float, bool]:
    """Losses without and with compilation, and whether a resumed run is the same as a whole one."""

    def run(steps: int, task: Words, compile: bool = True, resume: str | None = None) -> float:
        policy = CheckpointConfig(every="1 step", by=None, best=0) if resume else False
        trainer = quiet(max_steps=steps, compile=compile, run_dir=directory, log_every=1, checkpoint=policy)
        return trainer.fit(task, TRAINING, resume=resume).metrics["train/loss"]

    torch.set_num_threads(1)
    losses = [run(8, layered(0.0), compile=each) for each in (False, True)]
    whole, resumed = layered(0.3), layered(0.3)
    run(8, whole)
    run(6, layered(0.3), resume="auto")
    run(8, resumed, resume="auto")
    return losses[0], losses[1], weights(resumed) == weights(whole)


@pytest.mark.full
def test_a_compiled_run_is_near_one_that_is_not_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """By the backend that is used by default. The run is left in its second epoch, when it has already seen
    the first one's short batch, which the resumed run has not.
    """
    # In a process of its own, as torch's compiler leaves threads and variables of the environment behind.
    ((plain, found, same),) = run_distributed(run_by_default, tmp_path, world_size=1, timeout=240)
    assert found == pytest.approx(plain, rel=1e-5)
    assert same


# The time that it takes.


def test_compiling_is_told_once_and_is_no_part_of_the_time_of_training() -> None:
    parts: dict[str, float] = {}
    keep = LambdaCallback(on_fit_end=lambda run: parts.update(run.timing))
    options: Any = {"log_every": 1, "checkpoint": False, "loggers": (), "strategy": "cpu"}
    speed = Throughput(measure_flops=False)
    trainer = Trainer(max_epochs=2, compile=WHOLE, callbacks=[speed, keep], **options)
    with heard("compiled 2 x Block in ", logging.INFO) as texts:
        result = trainer.fit(Words(), TRAINING, VALIDATION)
    assert len(texts) == 1
    # Compiling a layer takes a hundred times as long as running two of them.
    assert parts["compile"] > parts["compute"] + parts["evaluation"]
    assert min(parts["compute"], parts["evaluation"]) > 0
    assert result.metrics["throughput/compile_seconds"] == 0  # since the log point before


def test_a_run_that_is_not_compiled_has_no_such_time() -> None:
    parts: dict[str, float] = {}
    fit(False, callbacks=[LambdaCallback(on_fit_end=lambda run: parts.update(run.timing))])
    assert "compile" not in parts


# A loop of one's own, and several processes.


def test_an_engine_compiles_any_module() -> None:
    def train(compile: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        with Engine(strategy="cpu", compile=compile) as engine:
            model = nn.Sequential(nn.Embedding(WORDS, SIZE), *(Block() for _ in range(2)))
            wrapped, optimizer = engine.prepare(model, lambda given: torch.optim.SGD(given, lr=0.1))
            assert list(wrapped.state_dict()) == list(model.state_dict())
            for batch in TRAINING:
                loss = wrapped(batch["tokens"]).square().mean()
                engine.backward(loss)
                engine.step(optimizer)
                losses.append(float(loss.detach()))
        assert not any("forward" in vars(each) for each in model.modules())
        return losses

    plain = train(False)
    assert train(WHOLE) == plain
    assert compiled() == 1


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


@pytest.mark.full
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("strategy", "again"),
    # Without gradients, in evaluation, nothing is computed again.
    [("ddp", 0), (FSDPConfig(activation_checkpointing="selective"), 1)],
    ids=["ddp", "fsdp"],
)
def test_several_processes_compile_their_blocks_without_a_break(strategy: Any, again: int) -> None:
    assert run_distributed(alike, strategy) == [(True, 2, 0, again)] * 2


# Errors.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("yes", "compile (unless it is a CompileConfig or a mapping) must be True or False"),
        ({"scop": "task"}, "compile has no option 'scop'. Did you mean 'scope'?"),
        ({"scope": "block"}, "unknown scope of compilation 'block'. Did you mean 'blocks'?"),
        (
            {"mode": "max-autotunes"},
            "unknown mode of torch.compile 'max-autotunes'. Did you mean 'max-autotune'?",
        ),
        ({"backend": "aot_eger"}, "unknown backend of torch.compile 'aot_eger'. Did you mean 'aot_eager'?"),
        ({"options": {"max_autotun": True}}, "has no option 'max_autotun'. Did you mean 'max_autotune'?"),
        ({"options": {}, "mode": "default"}, "takes mode or options, not both"),
        ({"fullgraph": "no"}, "CompileConfig(fullgraph=...) must be True or False"),
        ({"dynamic": "no"}, "CompileConfig(dynamic=...), unless it is None, must be True or False"),
        ({"options": 3}, "CompileConfig(options=...) must be a mapping, not 3"),
    ],
)
def test_what_is_no_way_to_compile_is_refused_when_the_trainer_is_made(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(compile=given)
    assert message in str(caught.value)


def test_a_mapping_of_torchs_own_options_is_taken() -> None:
    quiet(max_steps=1, compile={"disable": True}).fit(Words(), TRAINING)
    assert compiled() == 0
    quiet(max_steps=1, compile={"backend": "eager", "dynamic": True, "mode": None}).fit(Words(), TRAINING)
    assert compiled() == 1


@pytest.mark.parametrize("scope", ["task", "step"])
def test_what_is_gathered_block_by_block_is_not_compiled_as_one(scope: str) -> None:
    with pytest.raises(StrategyError, match=f"compile scope '{scope}' with strategy 'fsdp'.*scope='blocks'"):
        Trainer(strategy=FSDP(world_size=2), compile=CompileConfig(scope=scope))


def test_steps_of_several_optimizers_and_modules_without_a_step_have_no_scope_step() -> None:
    config = CompileConfig(scope="step", backend="eager")
    with pytest.raises(ConfigError, match=r"Duel\.training_step is a generator"):
        quiet(max_epochs=1, compile=config).fit(Duel(), [duels()[0]])
    with (
        Engine(strategy="cpu", compile=config) as engine,
        pytest.raises(ConfigError, match=r"Linear has none\. Use scope 'task' or 'blocks'"),
    ):
        engine.prepare(nn.Linear(2, 1))


def test_a_block_that_cannot_be_compiled_is_named_with_what_to_do() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    with pytest.raises(ConfigError) as caught:
        fit(CompileConfig(backend=broken))
    assert "'blocks.0' (Block.forward) could not be compiled" in str(caught.value)
    assert "no such instruction" in str(caught.value)
    assert "compile=False runs without" in str(caught.value)


class Reads(Words):
    """Has a forward that depends on a value."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (2 if self.head.weight.sum().item() > 0 else 1)


def test_a_break_is_an_error_if_none_is_allowed_and_says_how_to_allow_it() -> None:
    with pytest.raises(ConfigError, match=r"'Reads' \(Reads.forward\) could not.*fullgraph=False runs"):
        fit(CompileConfig(scope="task", backend="eager", fullgraph=True), Reads())
    assert fit(CompileConfig(scope="task", backend="eager"), Reads()) == fit(False, Reads())
