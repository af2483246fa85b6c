"""DeepSpeed's ZeRO gives what one process gives, and its checkpoints are everyone's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import (
    CheckpointError,
    ConfigError,
    DeepSpeedConfig,
    Engine,
    Freeze,
    LambdaCallback,
    OptimizerConfig,
    StrategyError,
    TaskModule,
    Trainer,
)
from drivetrain.checkpoint import load_weights
from drivetrain.strategies import SingleDevice, Strategy
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing import run_distributed
from drivetrain.testing.strategies.check import CHECKS, check_strategy
from drivetrain.testing.strategies.resume import check_resume

deepspeed = pytest.importorskip("deepspeed")
from drivetrain.strategies.deepspeed.library import library  # noqa: E402
from drivetrain.strategies.deepspeed.strategy import DeepSpeed  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

QUIET: dict[str, Any] = {"checkpoint": False, "loggers": (), "progress_bar": False}


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
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 1), (3, 2), (3, 4)])
def test_deepspeed_stage_conforms_in_all_else(stage: int, world_size: int) -> None:
    usual = world_size == 2 and stage
    check_strategy(
        zero(stage), world_size, checks=[name for name in CHECKED if not usual or name not in FIRST]
    )


@pytest.mark.nightly
def test_freeze_until_needs_stage_0() -> None:
    check_strategy(zero(0), checks=["parameters_may_be_unfrozen"])
    for stage in (1, 2, 3):
        strategy = DeepSpeedConfig(stage=stage)
        Trainer(strategy=strategy, max_epochs=1, callbacks=[Freeze("encoder")])
        with pytest.raises(StrategyError, match=r"'deepspeed': DeepSpeed updates .*flat tensor.*until=None"):
            Trainer(strategy=strategy, max_epochs=1, callbacks=[Freeze("encoder", until=3)])


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_mixed_precision_conforms_where_it_is_exact(stage: int) -> None:
    checks = ["all_ranks_see_the_same", "checkpoints_have_plain_names", "resume_is_bitwise"]
    check_strategy(zero(stage), checks=checks, precision="bf16-mixed")


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, "offload_parameters": "cpu"}])
def test_deepspeed_offloading_conforms(options: dict[str, Any]) -> None:
    checks = ["same_as_the_big_batch", "resume_is_bitwise", "resume_on_another_number_of_processes"]
    check_strategy(zero(**options, offload_optimizer="cpu"), checks=checks)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("names", "world_sizes", "pairs"),
    [
        (("single", "fsdp", "zero3"), (1, 2), 25),
        (("zero1", "zero3"), (2, 4), 16),
    ],
)
def test_deepspeed_checkpoints_are_resumed_by_every_other_strategy(
    names: tuple[str, ...], world_sizes: tuple[int, ...], pairs: int
) -> None:
    makers = {
        "single": lambda _: SingleDevice("cpu"),
        "fsdp": lambda world_size: FSDP(world_size=world_size),
        "zero1": zero(1),
        "zero3": zero(3),
    }
    assert check_resume({name: makers[name] for name in names}, world_sizes) == pairs


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 22) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randn(count, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Plain(TaskModule):
    def __init__(self, width: int = 15) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)))
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(self.first(x).tanh()))
        return out

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["y"])


class Decayed(Plain):
    def configure_optimizers(self) -> Any:
        return OptimizerConfig("adamw", lr=1e-2, weight_decay=0.5)


def made(kind: type[Plain] = Decayed) -> Plain:
    torch.manual_seed(0)
    return kind()


def weights(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in task.parameters()])


def fitted(task: TaskModule, strategy: Any = "single", **options: Any) -> Tensor:
    arguments = {"max_epochs": 1, "batch_size": 2, **QUIET, **options}
    Trainer(strategy=strategy, **arguments).fit(task, Rows())
    return weights(task)


def gathering(into: list[Tensor]) -> LambdaCallback:
    """Puts the whole weights at the end of training into a list, and changes what it was given."""

    def gather(run: Any) -> None:
        whole = [run.full_tensor(each) for each in run.task.parameters()]
        into.append(torch.cat([each.detach().reshape(-1) for each in whole]))
        for each in whole:
            each.detach().zero_()

    return LambdaCallback(on_fit_end=gather)


def _mixed(expected: Tensor) -> None:
    for stage in (1, 2, 3):
        strategy = DeepSpeed(DeepSpeedConfig(stage=stage), world_size=2)
        whole: list[Tensor] = []
        found = fitted(made(Chosen), strategy, precision="bf16-mixed", callbacks=[gathering(whole)])
        assert torch.equal(whole[0], found), "all of the exact weights, and copies"
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=0.0)
        assert (found != found.bfloat16().float()).float().mean() > 0.9, (
            "float32 weights, and not rounded ones"
        )


@pytest.mark.nightly
def test_deepspeed_mixed_precision_learns_in_float32() -> None:
    run_distributed(_mixed, fitted(made(Chosen), batch_size=4))


def _after_a_run(expected: Tensor) -> None:
    plain = vars(nn.Linear(1, 1)).keys()
    for stage in (1, 3):
        task = made()
        fitted(task, DeepSpeed(DeepSpeedConfig(stage=stage), world_size=2))
        assert all(type(each) is nn.Parameter for each in task.parameters())
        assert task.last.weight.shape == (3, 15)
        assert vars(task.last).keys() == plain
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.modules())
        torch.testing.assert_close(weights(task), expected)
        fitted(task, DeepSpeed(DeepSpeedConfig(stage=4 - stage), world_size=2))
        found = [
            Trainer(strategy=each, batch_size=2, **QUIET).validate(task, Rows())
            for each in (DeepSpeed(DeepSpeedConfig(stage=3), world_size=2), SingleDevice("cpu"))
        ]
        assert found[0] == pytest.approx(found[1])


@pytest.mark.nightly
def test_task_is_an_ordinary_module_after_a_run_under_deepspeed() -> None:
    expected = fitted(made(), batch_size=4)
    run_distributed(_after_a_run, expected)


def _from_meta(expected: Tensor) -> None:
    # Without it so small a parameter would stay whole in every process.
    divided = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    for precision in ("32", "bf16-mixed"):
        with torch.device("meta"):
            task = Decayed()
        torch.manual_seed(0)
        strategy = DeepSpeed(DeepSpeedConfig(stage=3, config=divided), world_size=2)
        sizes: set[int] = set()
        look = LambdaCallback(
            on_fit_start=lambda run, sizes=sizes: sizes.update(each.numel() for each in run.task.parameters())
        )
        whole: list[Tensor] = []
        found = fitted(task, strategy, precision=precision, callbacks=[look, gathering(whole)])
        assert sizes == {0}, "every parameter is divided"
        assert torch.equal(whole[0], found)
        tolerance = 1e-6 if precision == "32" else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.nightly
def test_deepspeed_task_from_the_meta_device_has_the_values_of_one_that_was_made_whole() -> None:
    run_distributed(_from_meta, fitted(made(), batch_size=4))


def own_loop(strategy: Any, batch_size: int, directory: str | None = None) -> Tensor:
    """Outputs and norms after a loop of one's own; with a directory, also left, and gone back to."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 3))
    engine = Engine(strategy=strategy)
    model, optimizer = engine.prepare(net, lambda each: torch.optim.AdamW(each, lr=1e-2))
    one = torch.ones(1, 8)

    def outputs() -> Tensor:
        with torch.no_grad():
            return model(one).reshape(-1)

    def further() -> Tensor:
        engine.backward(model(one).square().sum(), 1)
        engine.step(optimizer)
        return outputs()

    norms = []
    batches = engine.prepare_data(torch.utils.data.DataLoader(Rows(), batch_size=batch_size))
    for number, batch in enumerate(batches, 1):
        engine.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"]))
        if number % 2 == 0:
            norm = engine.step(optimizer, max_grad_norm=0.05).grad_norm
            assert norm is not None
            norms.append(norm)
    found = outputs()
    if directory is not None:
        engine.save(directory, model=model, optimizer=optimizer)
        after = further()
        assert not torch.equal(after, found)
        engine.load(directory, model=model, optimizer=optimizer)
        assert torch.equal(outputs(), found)
        assert torch.equal(further(), after), "with the optimizer's states of then"
    engine.teardown()
    return torch.cat([found, torch.stack(norms)])


def _loops(expected: Tensor, directory: str) -> None:
    for stage in (1, 2, 3):
        strategy = DeepSpeed(DeepSpeedConfig(stage=stage), world_size=2)
        found = own_loop(strategy, 2, f"{directory}/{stage}")
        torch.testing.assert_close(found, expected, msg=lambda text, stage=stage: f"stage {stage}: {text}")


@pytest.mark.nightly
def test_engine_under_deepspeed_makes_the_updates_of_one_process(tmp_path: Path) -> None:
    run_distributed(_loops, own_loop("single", 4), str(tmp_path))
    for stage in (1, 2, 3):
        stored = load_weights(tmp_path / str(stage))
        assert sorted(stored) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert all(each.dtype == torch.float32 for each in stored.values())


class Duel(Plain):
    def training_step(self, batch: Any) -> Any:
        yield "default", self.loss(self(batch["x"]), batch)


class Wasteful(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Chosen(Plain):
    def __init__(self, name: str = "sgd") -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        return OptimizerConfig(self.name, lr=1e-2)


def _refused() -> None:
    def of(task: Plain, stage: int, **config: Any) -> Any:
        strategy = DeepSpeed(DeepSpeedConfig(stage=stage, config=config), world_size=1)
        return lambda: fitted(task, strategy)

    unused, nothing = (
        "got no gradient: spare.weight, spare.bias",
        "nothing to train: none of its 8 parameters",
    )
    matrices = "works on whole matrices. Use strategy 'ddp' with it"
    assert_refused(
        (ConfigError, StrategyError),
        {
            "generator": (of(Duel(), 2), "generator", "'deepspeed' cannot run", "engine has one"),
            "unused in shards": (of(Wasteful(), 1), unused),
            "unused in stage 3": (of(Wasteful(), 3), unused),
            "factored": (of(Chosen("adafactor"), 2), f"Adafactor {matrices}"),
            "orthogonal": (of(Chosen("muon"), 2), f"Muon {matrices}"),
            "scalar": (of(Scaled(), 0), "'scale' is a scalar", "the shape (1,)"),
            "scalar in shards": (of(Scaled(), 3), "'scale' is a scalar, which cannot be sharded"),
            "frozen": (of(Frozen(), 1), nothing),
            "frozen in stage 3": (of(Frozen(), 3), nothing),
            "both": (of(Chosen(), 1, optimizer={"type": "AdamW"}), "both choose an optimizer"),
        },
    )


@pytest.mark.nightly
def test_deepspeed_refusals() -> None:
    run_distributed(_refused, world_size=1)


CONFIGURED: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}


def _configured() -> None:
    from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR

    for kind in (WarmupDecayLR, WarmupLR, WarmupCosineLR):
        rates: list[float] = []
        note = LambdaCallback(
            on_step_start=lambda run, rates=rates: rates.extend(run.learning_rates().values())
        )
        params = {"warmup_num_steps": 3, **({} if kind is WarmupLR else {"total_num_steps": "auto"})}
        config = {**CONFIGURED, "scheduler": {"type": kind.__name__, "params": params}}
        strategy = DeepSpeed(DeepSpeedConfig(config=config), world_size=1)
        fitted(made(Plain), strategy, callbacks=[note], max_grad_norm=1.0)
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1e-2)
        theirs: Any = kind(
            optimizer, warmup_num_steps=3, **({} if kind is WarmupLR else {"total_num_steps": 11})
        )
        expected = []
        for _ in range(11):
            expected.append(optimizer.param_groups[0]["lr"])
            theirs.step()
        assert rates == pytest.approx(expected), kind.__name__


@pytest.mark.nightly
def test_optimizer_and_schedule_of_the_configuration_are_deepspeeds() -> None:
    run_distributed(_configured, world_size=1)


def _uneven(path: str) -> None:
    strategy = DeepSpeed(DeepSpeedConfig(stage=1), world_size=1)
    trainer = Trainer(
        strategy=strategy, max_epochs=2, batch_size=2, loggers=(), progress_bar=False, run_dir=path
    )
    with pytest.raises(CheckpointError, match="have had different numbers of updates"):
        trainer.fit(made(), Rows(), resume="auto")


@pytest.mark.nightly
def test_checkpoint_of_parameters_that_were_not_always_used_is_refused(tmp_path: Path) -> None:
    def skip(run: Any) -> None:
        if run.progress.updates == 3:
            run.task.first.bias.grad = None

    callbacks = [LambdaCallback(on_before_optimizer_step=skip)]
    trainer = Trainer(
        max_epochs=1, batch_size=2, loggers=(), progress_bar=False, run_dir=tmp_path, callbacks=callbacks
    )
    trainer.fit(made(), Rows())
    run_distributed(_uneven, str(tmp_path), world_size=1)


def test_plan_tells_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    task = Regression()
    assert Trainer(strategy="zero2", max_epochs=1, **QUIET).plan(task, pairs()).strategy.endswith("stage 2")
    assert "strategy deepspeed, ZeRO stage 2" in capsys.readouterr().out


# What is not in its parameters' dtype.


class Mixture(TaskModule):
    """A frozen part in 16 bits, and norms, of which the first gets inputs in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(8))
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.inner(self.first(self.given(x)))
        frozen = self.frozen(middle.bfloat16()).to(middle.dtype)
        out: Tensor = self.last(frozen.tanh())
        return out.float()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1e-2)


def mixed(strategy: Any, precision: str, **options: Any) -> Mixture:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    task = Mixture()
    trainer = quiet(strategy=strategy, precision=precision, max_epochs=1, **options)
    trainer.fit(task, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return task


def _mixture(path: str) -> None:
    before = Mixture()
    for precision in ("32", "bf16-mixed"):
        expected = mixed(DDP(world_size=2), precision).state_dict()
        tolerance = 1e-5 if precision == "32" else 5e-3
        for stage in (1, 3):
            directory = f"{path}/{precision}-{stage}"
            strategy = DeepSpeed(DeepSpeedConfig(stage=stage), world_size=2)
            task = mixed(strategy, precision, checkpoint=True, run_dir=directory)
            for name, each in task.state_dict().items():
                torch.testing.assert_close(each, expected[name], atol=tolerance, rtol=0.0)
            assert not torch.equal(task.inner.weight, before.inner.weight)
            assert not any(each._forward_hooks or each._forward_pre_hooks for each in task.modules())
            stored = load_weights(directory)
            assert torch.equal(stored["frozen.weight"], before.frozen.weight)
            assert stored["frozen.weight"].dtype == torch.bfloat16
            assert stored["inner.running_mean"].dtype == torch.float32


@pytest.mark.nightly
def test_norms_compute_in_float32_and_a_frozen_part_in_16_bits_is_stored_as_it_is(tmp_path: Path) -> None:
    run_distributed(_mixture, str(tmp_path))
