"""DeepSpeed's ZeRO gives what one process gives, and its checkpoints are everyone's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.resuming import check_resume
from tests.strategies.test_rank_parts import refused
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn

from drivetrain import DeepSpeedConfig, Engine, Freeze, LambdaCallback, OptimizerConfig, TaskModule, Trainer
from drivetrain.checkpoint import export_weights, load_weights
from drivetrain.core.errors import CheckpointError, ConfigError, StrategyError
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing import run_distributed
from drivetrain.testing.strategies.check import CHECKS, check_strategy

deepspeed = pytest.importorskip("deepspeed")
from drivetrain.strategies.deepspeed.library import library  # noqa: E402
from drivetrain.strategies.deepspeed.strategy import DeepSpeed  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

# Without it so small a parameter would stay whole in every process.
DIVIDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def zero(stage: int, **options: Any) -> Callable[[int], Strategy]:
    config = DeepSpeedConfig(stage=stage, **options)
    return lambda world_size: DeepSpeed(config, world_size=world_size)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    library("cpu")  # once, of which all processes are copies


CHECKED = [name for name in CHECKS if name != "generator_steps"]
"""DeepSpeed's engine has one optimizer; see `test_deepspeed_refusals`."""
FIRST = ["same_as_the_big_batch", "frozen_and_tied", "resume_is_bitwise"]


@pytest.mark.landing
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_stage_conforms(stage: int) -> None:
    check_strategy(zero(stage), checks=FIRST)


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 4)])
def test_deepspeed_stage_conforms_in_all_else(stage: int, world_size: int) -> None:
    usual = world_size == 2 and stage
    names = [name for name in CHECKED if not usual or name not in FIRST]
    check_strategy(zero(stage), world_size, checks=names)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, "offload_parameters": "cpu"}])
def test_deepspeed_offloading_conforms(options: dict[str, Any]) -> None:
    checks = ["same_as_the_big_batch", "resume_is_bitwise", "resume_on_another_number_of_processes"]
    check_strategy(zero(**options, offload_optimizer="cpu"), checks=checks)


@pytest.mark.nightly
def test_deepspeed_checkpoints_are_resumed_by_every_other_strategy() -> None:
    others: Any = {"single": lambda _: SingleDevice("cpu"), "fsdp": lambda size: FSDP(world_size=size)}
    assert check_resume({**others, "zero3": zero(3)}, (1, 2)) == 25
    assert check_resume({"zero1": zero(1), "zero3": zero(3)}, (2, 4)) == 16


def weights(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in task.parameters()])


def fitted(task: Any, strategy: Any = "cpu", batch: int = 4, resume: Any = None, **more: Any) -> Tensor:
    trainer = quiet(**{"strategy": strategy, "max_epochs": 1, **more})
    trainer.fit(task, pairs(22, batch), resume=resume)
    return weights(task)


class Plain(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])


def _mixed(expected: Tensor) -> None:
    for stage in (1, 2, 3):
        task = Regression()
        found = fitted(task, zero(stage)(2), 2, precision="bf16-mixed")
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=0.0)
        assert (found != found.bfloat16().float()).any(), "float32 weights, and not rounded ones"
        assert all(type(each) is nn.Parameter for each in task.parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.modules())


@pytest.mark.nightly
def test_deepspeed_mixed_precision_learns_in_float32_and_leaves_an_ordinary_task() -> None:
    run_distributed(_mixed, fitted(Regression()))
    checks = ["all_ranks_see_the_same", "checkpoints_have_plain_names", "resume_is_bitwise"]
    check_strategy(zero(3), checks=checks, precision="bf16-mixed")


def _from_meta(weights: str | None, precision: str) -> None:
    found, sizes = [], set[int]()
    look = LambdaCallback(on_fit_start=lambda run: sizes.update(p.numel() for p in run.task.parameters()))
    torch.manual_seed(0)
    whole = Plain()
    with torch.device("meta"):
        task = Plain()
    for each in (whole, task):
        torch.manual_seed(0)
        if weights is not None:
            each.load_weights(weights)
        found.append(fitted(each, zero(3, config=DIVIDED)(2), 2, callbacks=[look], precision=precision))
        assert sizes == {0}, "every parameter is divided"
    torch.testing.assert_close(*found, atol=1e-7, rtol=0.0)  # DeepSpeed's buffers may be aligned otherwise


@pytest.mark.nightly
def test_deepspeed_task_from_the_meta_device_is_as_one_that_was_made_whole(tmp_path: Path) -> None:
    export_weights(Plain().state_dict(), tmp_path / "model.safetensors")
    run_distributed(_from_meta, None, "32")
    run_distributed(_from_meta, str(tmp_path), "32")
    run_distributed(_from_meta, str(tmp_path), "bf16-mixed")


def own_loop(strategy: Any, batch_size: int, directory: str | None = None) -> Tensor:  # outputs and norms
    torch.manual_seed(0)
    engine, one, norms = Engine(strategy=strategy), torch.ones(1, 4), []
    model, optimizer = engine.prepare(Plain().net, lambda each: torch.optim.AdamW(each, lr=1e-2))

    def further() -> Tensor:
        engine.backward(model(one).square().sum(), 1)
        engine.step(optimizer)
        return model(one).detach().reshape(-1)

    for number, (x, y) in enumerate(engine.prepare_data(pairs(22, batch_size)), 1):
        engine.backward(nn.functional.mse_loss(model(x), y), len(x))
        if number % 2 == 0:
            norms.append(engine.step(optimizer, max_grad_norm=0.05).grad_norm)
    found = model(one).detach().reshape(-1)
    if directory is not None:
        engine.save(directory, model=model, optimizer=optimizer)
        after = further()
        assert not torch.equal(after, found)
        engine.load(directory, model=model, optimizer=optimizer)
        assert torch.equal(further(), after), "with the weights and the optimizer's states of then"
    engine.teardown()
    return torch.cat([found, torch.stack(norms)])  # type: ignore[arg-type]


@pytest.mark.nightly
def test_engine_under_deepspeed_makes_the_steps_of_one_process(tmp_path: Path) -> None:
    def loops(expected: Tensor) -> None:
        for stage in (1, 2, 3):
            torch.testing.assert_close(own_loop(zero(stage)(2), 2, f"{tmp_path}/{stage}"), expected)

    run_distributed(loops, own_loop("cpu", 4))
    for stage in (1, 2, 3):
        stored = load_weights(tmp_path / str(stage))
        assert sorted(stored) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert all(each.dtype == torch.float32 for each in stored.values())


def extended(optimizer: Any = None, **parts: Any) -> Regression:  # a task with parameters that no step uses
    task = Regression(optimizer)
    for name, each in parts.items():
        setattr(task, name, each)
    return task


def _refused() -> None:
    def of(task: TaskModule, stage: int, data: Any = None) -> Any:
        strategy = DeepSpeed(DeepSpeedConfig(stage=stage), world_size=1)
        return lambda: quiet(strategy=strategy, max_epochs=1).fit(task, data or pairs())

    def frozen(callback: Freeze) -> Any:
        return lambda: Trainer(strategy="zero2", max_epochs=1, callbacks=[callback])

    frozen(Freeze("line"))()
    unused = "got no gradient: spare.weight, spare.bias"
    own = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam"})
    cases: dict[str, Any] = {
        "generator": (
            of(Duel(), 2, [duels()[0]]),
            "Duel.training_step, a generator, with strategy 'deepspeed'",
            "engine has one",
        ),
        "unused in stage 3": (of(extended(spare=nn.Linear(2, 2)), 3), unused, "of an earlier step"),
        "orthogonal": (of(extended(OptimizerConfig("muon", lr=0.1)), 2), "Muon is not known to compute"),
        "own": (of(extended(own), 0), "FusedAdam is DeepSpeed's own, and its state fits no other strategy"),
        **{
            f"unused in stage {stage}": (of(extended(spare=nn.Linear(2, 2)), stage), unused)
            for stage in (0, 1, 2)
        },
        "scalar": (of(extended(scale=nn.Parameter(torch.tensor(1.0))), 3), "'scale' is a scalar"),
        "empty": (of(extended(none=nn.Parameter(torch.zeros(0, 3))), 2), "'none' of shape (0, 3) has no"),
        "frozen": (of(Regression().requires_grad_(False), 1), "nothing to train: none of its 2"),
        "unfrozen": (frozen(Freeze("line", until=3)), "DeepSpeed updates", "flat tensor", "until=None"),
    }
    assert_refused((ConfigError, StrategyError), cases)


@pytest.mark.nightly
def test_deepspeed_refusals() -> None:
    run_distributed(_refused, world_size=1)


def _different_parts() -> list[str]:
    steps = [([0, 1], [0, 2])] * 2
    found = [refused(zero(stage)(2), steps, update=True) for stage in (2, 3)]
    return [*found, refused(zero(3)(2), [([0], [1])], train=False)]


@pytest.mark.landing
def test_deepspeed_refuses_ranks_that_run_different_parts() -> None:
    first, second = run_distributed(_different_parts)
    assert first == second
    assert first == [
        "rank 0 has the gradient of 'blocks.1.0.bias'; rank 1 has the gradient of 'blocks.2.0.bias'",
        "rank 0 runs 'blocks.1.0'; rank 1 runs 'blocks.2.0'",
        "rank 0 runs 'blocks.0.0'; rank 1 runs 'blocks.1.0'",
    ]


def _uneven(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="have had different numbers of steps"):
        fitted(Plain(), zero(1)(1), run_dir=directory, checkpoint=True, resume="auto", max_epochs=2)


@pytest.mark.nightly
def test_deepspeed_refuses_a_checkpoint_of_parameters_that_were_not_always_used(tmp_path: Path) -> None:
    def skip(run: Any) -> None:
        if run.progress.steps == 3:
            run.task.net[0].bias.grad = None

    skipping = LambdaCallback(on_before_optimizer_step=skip)
    fitted(Plain(), run_dir=tmp_path, checkpoint=True, callbacks=[skipping])
    run_distributed(_uneven, tmp_path, world_size=1)


def test_plan_tells_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert quiet(strategy="zero2", max_epochs=1).plan(Regression(), pairs()).strategy.endswith("stage 2")
    assert "strategy deepspeed, ZeRO stage 2" in capsys.readouterr().out
