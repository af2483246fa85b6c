"""Callbacks that read and change weights: the same under every strategy, however it divides them."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DeepSpeedConfig, FSDPConfig, LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.core.registry import is_installed
from drivetrain.testing.distributed import run_distributed

ROOT = Path(__file__).resolve().parents[2]
FEATURES = torch.randn(36, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(FEATURES, FEATURES.sum(1, keepdim=True) + 1)

DIVIDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
ZERO3 = DeepSpeedConfig(stage=3, config=DIVIDED)
"""In which small parameters are divided, too."""
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Curve(TaskModule):  # a task whose loss looks at a parameter that may be divided again by then
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(1))  # of no block, so that it stays gathered after a forward

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    def loss(self, outputs: Tensor, batch: Any) -> dict[str, Tensor]:
        norm = self.net[0].weight.detach().norm()
        return {"loss": F.mse_loss(outputs, batch[1]), "norm": norm}


def example(page: str, name: str) -> type[Callback]:  # a callback of a page's
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (block,) = [each for each in blocks if f"class {name}(" in each]
    namespace: dict[str, Any] = {"__name__": "page"}
    before = [node for each in blocks[: blocks.index(block)] for node in ast.parse(each).body]
    for node in before:
        if re.match(r"(import|from) (torch|drivetrain)", ast.unparse(node)):
            exec(ast.unparse(node), namespace)
    exec(compile(block.partition("\ntrainer = ")[0], page, "exec", dont_inherit=True), namespace)
    kind: type[Callback] = namespace[name]
    return kind


class Noted(Callback):  # all that is logged, in order
    def __init__(self) -> None:
        self.values: list[tuple[str, float]] = []

    def on_log(self, run: Any) -> None:
        weight = run.full_tensor(run.task.net[0].weight)
        assert weight.shape == (8, 4)
        assert run.full_tensor(weight) is weight
        sharded = hasattr(run.task.net[0].weight, "full_tensor")
        run.log("own", (run.task.net[0].weight if sharded else weight).norm())
        self.values += run.logged.items()


EXAMPLES: dict[str, Callable[[], Any]] = {
    "WeightNorm": lambda: example("README.md", "WeightNorm")(),
    "Averages": lambda: example("docs/how-to/callbacks-in-detail.md", "Averages")(0.8),  # type: ignore[call-arg]
}

Found = tuple[list[tuple[str, float]], list[Tensor]]
"""What was logged, and the weights at the end."""


def fitted(strategy: Any, size: int, callback: Callback, **options: Any) -> Found:
    noted, task = Noted(), Curve()
    settings = {"max_epochs": 2, "log_every": "2 steps", "devices": size, **options}
    trainer = quiet(strategy=strategy, callbacks=[callback, noted], **settings)
    resume = "auto" if options.get("run_dir") else None
    trainer.fit(task, DataLoader(DATA, batch_size=8 // size), DataLoader(DATA, batch_size=5), resume=resume)
    return noted.values, [each.detach() for each in task.parameters()]


def assert_alike(found: Found, expected: Found) -> None:
    names, weights = [name for name, _ in expected[0]], expected[1]
    assert [name for name, _ in found[0]] == names
    for (name, value), (_, other) in zip(found[0], expected[0], strict=True):
        assert value == pytest.approx(other, rel=1e-4), name
    torch.testing.assert_close(found[1], weights, rtol=1e-4, atol=1e-5)


def by_one_process() -> dict[str, Found]:
    found = {name: fitted("cpu", 1, made()) for name, made in EXAMPLES.items()}
    last = [dict(values)["validation/loss"] for values, _ in found.values()]
    assert last[0] != pytest.approx(last[1], rel=1e-2), "the average makes no difference to look for"
    return found


class Calls(Callback):  # calls the model, and a part of it, in several hooks, on one rank alone
    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.found: list[Tensor] = []

    def _call(self, run: Any) -> None:
        if not self.is_on:
            return
        with run.gathered() as task:
            for _ in range(2 * run.is_main):
                self.found += [task(FEATURES[:3]), task.net[0](FEATURES[:2])]
                assert not self.found[-1].requires_grad
                assert not task.training
                # transformers' generate would wait for the other ranks
                assert not any(getattr(each, "_is_fsdp_managed_module", False) for each in task.modules())

    on_fit_start = on_micro_batch_end = on_before_optimizer_step = on_log = _call
    on_evaluation_start = on_evaluation_end = on_fit_end = _call


def _called(strategy: Any, size: int) -> list[Tensor]:
    calls = Calls()
    options = {"max_epochs": 1, "log_every": "4 steps"}
    found, without = (fitted(strategy, size, each, **options) for each in (calls, Calls(is_on=False)))
    assert all(torch.equal(*each) for each in zip(found[1], without[1], strict=True)), "it trains otherwise"
    return calls.found


def _alike(strategy: Any, directory: Path, expected: dict[str, Found]) -> None:
    norm, averages = EXAMPLES.values()
    plain, whole = fitted(strategy, 2, norm()), fitted(strategy, 2, averages())
    assert_alike(plain, expected["WeightNorm"])
    assert_alike(whole, expected["Averages"])
    for mine, other in zip(whole[1], plain[1], strict=True):
        assert torch.equal(mine, other), "evaluating with the average has changed the weights"
    kept = {"run_dir": directory, "checkpoint": True}
    fitted(strategy, 2, averages(), max_epochs=1, **kept)
    resumed = fitted(strategy, 2, averages(), **kept)
    losses = [dict(each[0])["validation/loss"] for each in (resumed, whole)]
    assert losses[0] == losses[1], "the average is not resumed"


@needs_gloo
@pytest.mark.heavy("the only test of both pages' callbacks on shards")
def test_callbacks_read_and_change_weights_of_fsdp_as_of_one_process(tmp_path: Path) -> None:
    on_two_ranks(_alike, FSDPConfig(wrap=("Linear",)), tmp_path, by_one_process())


@needs_gloo
def test_a_rank_alone_calls_the_gathered_model_in_every_hook() -> None:
    expected = _called("cpu", 1)
    found, nothing = on_two_ranks(_called, FSDPConfig(wrap=("Linear",)), 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not nothing


def _through_dcp(folder: Path, strategy: Any, size: int, reads: bool) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp

    def copy(run: Any) -> None:
        with run.engine.checkpoint_layout(write=reads):
            act = dcp.load if reads else dcp.save
            act(run.task.state_dict(), checkpoint_id=str(folder))

    rate = 0.0 if reads else 0.1
    task = type("Trained", (Curve,), {"configure_optimizers": lambda self: OptimizerConfig("sgd", lr=rate)})()
    callback = LambdaCallback(**{"on_fit_start" if reads else "on_fit_end": copy})
    trainer = quiet(strategy=strategy, devices=size, max_epochs=1, callbacks=[callback])
    trainer.fit(task, DataLoader(DATA, batch_size=4))
    return [each.detach() for each in task.parameters()]


@needs_gloo
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoints_are_written_and_read_on_any_number_of_ranks(tmp_path: Path) -> None:
    fsdp = FSDPConfig(wrap=("Linear",))
    (of_two, _), of_one = (
        on_two_ranks(_through_dcp, tmp_path / "two", fsdp, 2, False),
        _through_dcp(tmp_path / "one", "cpu", 1, False),
    )
    torch.testing.assert_close(_through_dcp(tmp_path / "two", "cpu", 1, True), of_two, rtol=0, atol=0)
    for read in on_two_ranks(_through_dcp, tmp_path / "one", fsdp, 2, True):
        torch.testing.assert_close(read, of_one, rtol=0, atol=0)


@needs_gloo
@pytest.mark.parametrize("part", ["net.0", ""])
def test_an_error_for_shards_in_a_hook_says_how_to_gather_them(part: str) -> None:
    early = LambdaCallback(on_fit_start=lambda run: run.task.get_submodule(part)(FEATURES))
    with pytest.raises(RuntimeError) as caught:
        fitted(FSDPConfig(wrap=("Linear",)), 1, early)
    torch.distributed.destroy_process_group()
    assert "with run.gathered():" in "".join(caught.value.__notes__)


@needs_gloo
@pytest.mark.nightly
@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_callbacks_read_and_change_weights_of_zero3_as_of_one_process(tmp_path: Path) -> None:
    run_distributed(_alike, ZERO3, tmp_path, by_one_process())
    found, _ = run_distributed(_called, ZERO3, 2)
    torch.testing.assert_close(found, _called("cpu", 1), rtol=1e-4, atol=1e-5)
