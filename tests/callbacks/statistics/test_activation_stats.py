"""Statistics of activations: their numbers over micro-batches and ranks, hooks, and resumes."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Blocks, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import CompileConfig, OptimizerConfig, Run
from drivetrain.callbacks import ActivationStats, Callback, LambdaCallback
from drivetrain.callbacks.statistics.activation_stats import STATISTICS
from drivetrain.core.errors import ConfigError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)))


def task(block: type[nn.Module] = Block) -> Blocks:
    return Blocks(block, 4, OptimizerConfig("sgd", lr=0.001))


def rows(count: int = 16, seed: int = 1, size: int = 4) -> DataLoader[Any]:
    """A loader of rows of four features around 5, `size` in a batch."""
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)) + 5
    return DataLoader(features, batch_size=size)


# The statistics of all outputs of a block's activation in a step, at once; and what was logged.
class ByHand(Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.expected: list[dict[str, float]] = []

    def on_fit_start(self, run: Run) -> None:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.outputs.append(output.detach().double().flatten())

        self.handle = run.task.blocks[1].act.register_forward_hook(note)

    def on_step_start(self, run: Run) -> None:
        self.outputs: list[Tensor] = []

    def on_log(self, run: Run) -> None:
        if "train/loss" not in run.logged:
            return
        values = torch.cat(run.engine.ranks.all_gather(torch.cat(self.outputs)))
        found = {name: each for name, each in run.logged.items() if name.endswith("/blocks.1.act")}
        if found:  # of rank 0, whose values are those of all ranks after this hook
            self.logged.append({name.split("/")[1]: each for name, each in found.items()})
            parts = (values.mean(), values.std(correction=0), values.min(), values.max())
            numbers = dict(zip(("mean", "std", "min", "max"), map(float, parts), strict=True))
            self.expected.append({**numbers, "zeros": float((values == 0).double().mean())})

    def on_fit_end(self, run: Run) -> None:
        self.handle.remove()


def by_hand_and_stats(data: Any, validation: Any = None, **options: Any) -> tuple[ByHand, dict[str, float]]:
    by_hand = ByHand()
    callbacks = [ActivationStats(patterns="blocks.*", statistics=STATISTICS), by_hand]
    options = {"max_epochs": 2, "log_every": "1 step", "gradient_accumulation_steps": 2, **options}
    return by_hand, quiet(**options, callbacks=callbacks).fit(task(), data, validation).metrics


def test_the_numbers_are_those_of_all_outputs_of_the_step_a_recomputed_one_once() -> None:
    for again in (False, True):
        # Micro-batches of 3, 3, 3, 3, 3 and 1 rows.
        memory = {"activation_checkpointing": again}
        by_hand, _ = by_hand_and_stats(rows(size=3), rows(4), memory=memory)
        assert len(by_hand.logged) == 6
        for logged, expected in zip(by_hand.logged, by_hand.expected, strict=True):
            assert logged == pytest.approx(expected, rel=1e-6)
            assert 0 < logged["zeros"] < 1


def hooks_of(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in model.modules())


def test_modules_have_hooks_in_logged_steps_alone() -> None:
    hooks, watched = [], task()
    count = LambdaCallback(on_before_optimizer_step=lambda run: hooks.append(hooks_of(run.task)))
    callbacks = [ActivationStats(patterns=["blocks.*.act", "head"], every="8 steps"), count]
    quiet(max_steps=13, log_every="4 steps", callbacks=callbacks).fit(watched, rows(80))
    # Log points follow steps 4, 8, 12 and 13, and the first at or after each eighth is taken.
    assert [step for step, count in enumerate(hooks, 1) if count] == [8]
    assert hooks[7] == 4
    assert hooks_of(watched) == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's compiler itself
def test_compiled_blocks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's compiler has a bar of tqdm's, whose thread stays.
    monkeypatch.setattr("torch.hub.tqdm.monitor_interval", 0)
    eager = CompileConfig(backend="eager")

    def measured(compile: Any, *callbacks: Any) -> tuple[dict[str, float], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer = quiet(max_steps=4, log_every="3 steps", compile=compile, callbacks=callbacks)
        metrics = trainer.fit(task(), rows()).metrics
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return {name: each for name, each in metrics.items() if "activations" in name}, graphs

    compiled, graphs = measured(eager, ActivationStats())
    expected, _ = measured(False, ActivationStats(patterns=["blocks.?", "head"]))
    assert compiled == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert graphs == measured(eager)[1] > 0  # hooks break nothing


def test_modules_inside_of_compiled_code_are_refused_by_name() -> None:
    for scope, others in (("blocks", "'blocks.1'"), ("step", "none matches")):
        compile = CompileConfig(backend="eager", scope=scope)
        trainer = quiet(max_steps=1, compile=compile, callbacks=[ActivationStats(patterns="blocks.1*")])
        with pytest.raises(ConfigError, match=r"'blocks.1[a-z.]*' is inside of compiled code.*" + others):
            trainer.fit(task(), rows())


def on_ranks(strategy: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    # The last row is of the first rank, and the second one runs a placeholder.
    by_hand, metrics = by_hand_and_stats(rows(13, size=2), strategy=strategy, devices=2)
    return by_hand.logged, dict(metrics)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_means_over_ranks_are_those_of_one_process(strategy: str) -> None:
    (first, metrics), (_, others) = on_two_ranks(on_ranks, strategy)
    assert metrics == others
    by_hand, _ = by_hand_and_stats(rows(13))
    assert len(first) == 4
    assert first == [pytest.approx(each, rel=1e-5, abs=1e-6) for each in by_hand.logged]
