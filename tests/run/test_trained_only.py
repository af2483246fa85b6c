"""Checkpoints of the trained parameters alone: a resume is exact, and a different frozen part is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import FEATURES, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DeepSpeedConfig,
    LambdaCallback,
    OptimizerConfig,
    TaskModule,
)
from drivetrain.checkpoint import load_weights, verify
from drivetrain.cli.main import main
from drivetrain.core.registry import is_installed
from drivetrain.testing.distributed import run_distributed

ONLY = CheckpointConfig(every="2 steps", keep_last=None, by=None, parameters="trainable")
ALL = CheckpointConfig(every="2 steps", keep_last=None, by=None)


class Adapted(TaskModule):
    """A frozen base with a tied name and running statistics, and an adapter that is trained."""

    def __init__(self, seed: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width))
        self.base.requires_grad_(False)
        self.same = self.base[0]
        torch.manual_seed(5)
        self.adapter = nn.Sequential(nn.Dropout(0.25), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.adapter(self.base(features))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.05)


BUFFERS = {f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
TRAINED = {"adapter.1.weight", "adapter.1.bias"}


def fit(directory: Any, task: TaskModule | None = None, **options: Any) -> tuple[TaskModule, Any]:
    task = Adapted() if task is None else task
    resume = options.pop("resume", None)
    trainer = quiet(**{"max_steps": 4, "checkpoint": ONLY, "run_dir": directory, **options})
    return task, trainer.fit(task, pairs(32, 4), resume=resume)


def test_a_checkpoint_has_trained_parameters_and_all_buffers_and_resumes_bitwise(tmp_path: Path) -> None:
    straight, _ = fit(tmp_path / "straight", max_steps=8, checkpoint=ALL)
    _, first = fit(tmp_path / "run")
    verify(first.last_checkpoint)
    assert set(load_weights(first.last_checkpoint)) == TRAINED | BUFFERS
    assert set(load_file(first.model_path)) == TRAINED | BUFFERS
    resumed, _ = fit(tmp_path / "run", max_steps=8, resume="auto")
    assert weights(resumed) == weights(straight)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: Adapted(seed=4), r"'base\.0\.weight' has other values.*same pretrained model"),
        (
            lambda: Adapted(width=9),
            r"'base\.0\.weight' has the shape \[8, 4\] there, \[9, 4\] here",
        ),
        (lambda: Adapted().requires_grad_(True), r"'base\.0\.bias' is not frozen here"),
        (lambda: Adapted().bfloat16(), r"'base\.0\.bias' has the dtype float32 there, bfloat16 here"),
    ],
)
def test_a_resume_with_another_frozen_part_is_refused(task: Any, message: str, tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, task(), max_steps=8, resume="auto")


def test_a_resume_takes_what_the_checkpoint_holds(tmp_path: Path) -> None:
    _, only = fit(tmp_path / "only")
    with pytest.raises(CheckpointError, match=r"trained parameters only\. Resume .*parameters='trainable'"):
        fit(tmp_path / "only", max_steps=8, checkpoint=ALL, resume=only.last_checkpoint)
    fit(tmp_path / "all", checkpoint=ALL)
    with pytest.raises(CheckpointError, match=r"holds all parameters.*Resume with parameters='all'"):
        fit(tmp_path / "all", max_steps=8, resume="auto")


def test_a_frozen_parameter_that_training_changes_is_an_error_and_no_loss(tmp_path: Path) -> None:
    def change(run: Any) -> None:
        with torch.no_grad():
            run.task.base[0].weight.mul_(0.9)

    averages = LambdaCallback(on_step_end=change)
    with pytest.raises(CheckpointError, match=r"'base\.0\.weight' is frozen, but was changed in training"):
        fit(tmp_path, callbacks=[averages])


def test_weights_are_read_back_onto_the_same_frozen_part(tmp_path: Path) -> None:
    task, result = fit(tmp_path)
    assert weights(Adapted.from_checkpoint(result.last_checkpoint)) == weights(task)
    fresh = Adapted()
    quiet().validate(fresh, pairs(4), checkpoint=result.last_checkpoint)
    assert weights(fresh) == weights(task)
    with pytest.raises(CheckpointError, match="has other values"):
        Adapted.from_checkpoint(result.last_checkpoint, seed=4)
    with pytest.raises(CheckpointError, match="has other values"):
        quiet().validate(Adapted(seed=4), pairs(4), checkpoint=result.last_checkpoint)
    other, same = Adapted(seed=4), Adapted()
    with pytest.raises(CheckpointError, match="has other values"):
        other.load_weights(result.last_checkpoint)
    report = other.load_weights(result.last_checkpoint, strict=False)
    assert set(report.loaded) == TRAINED | BUFFERS
    report = same.load_weights(tmp_path)
    assert (set(report.loaded), report.missing) == (TRAINED | BUFFERS, ())
    assert "the other 6 are frozen, and left out there" in str(report)
    assert weights(same) == weights(task)
    half = Adapted().to(torch.bfloat16)
    half.load_weights(tmp_path)
    torch.testing.assert_close(half.adapter[1].weight, task.adapter[1].weight.bfloat16())


def test_an_export_says_what_is_not_in_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = fit(tmp_path / "run")
    assert main(["checkpoint", "export", result.last_checkpoint, str(tmp_path / "weights.safetensors")]) == 0
    assert "not in there: 6 frozen parameters" in capsys.readouterr().out
    assert set(load_file(tmp_path / "weights.safetensors")) == TRAINED | BUFFERS


def _strategy(name: str) -> Any:
    if not name.startswith("zero"):
        return name
    return DeepSpeedConfig(stage=int(name[-1]))


def _on_a_rank(name: str, directory: str, half: bool) -> dict[str, Any]:
    strategy = _strategy(name)
    if half:
        fit(Path(directory, "run"), strategy=strategy)
        task, result = fit(Path(directory, "run"), strategy=strategy, max_steps=8, resume="auto")
        assert set(load_weights(result.last_checkpoint)) == TRAINED | BUFFERS
    else:
        task, _ = fit(Path(directory, "straight"), strategy=strategy, max_steps=8, checkpoint=ALL)
    return weights(task)


ZERO = [
    pytest.param(f"zero-{stage}", marks=pytest.mark.skipif(not is_installed("deepspeed"), reason="needs it"))
    for stage in (1, 2, 3)
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *ZERO])
def test_two_ranks_resume_bitwise(strategy: str, tmp_path: Path) -> None:
    resumed = run_distributed(_on_a_rank, strategy, str(tmp_path), True)
    assert resumed == run_distributed(_on_a_rank, strategy, str(tmp_path), False)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    run_distributed(_on_a_rank, "fsdp", str(tmp_path), True)
    with warned("goes on with 4 samples per update"):
        _, result = fit(tmp_path / "run", max_steps=10, resume="auto")
    assert result.progress.updates == 10
    assert set(load_weights(result.last_checkpoint)) == TRAINED | BUFFERS


class Quantised(TaskModule):
    """A frozen base with weights of 8 bits, and a head that is trained."""

    def __init__(self, seed: int = 3) -> None:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(32, 1)
        quantize_(self.base, Int8WeightOnlyConfig())

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.base(features))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


@pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
@pytest.mark.filterwarnings("ignore")  # torchao's own, at its import
def test_a_quantised_base_is_trained_around_and_never_in_a_file(tmp_path: Path) -> None:
    def fit(directory: Path, steps: int, checkpoint: Any) -> Tensor:
        task = Quantised()
        quiet(max_steps=steps, run_dir=directory, checkpoint=checkpoint).fit(task, pairs(12), resume="auto")
        return task.head.weight.detach().clone()

    for refused in (True, ALL):
        with pytest.raises(ConfigError, match=r"cannot hold 'base\.0\.weight', a torchao\..*='trainable'"):
            fit(tmp_path / "all", 2, refused)
    whole = fit(tmp_path / "whole", 6, ONLY)
    fit(tmp_path / "parts", 4, ONLY)
    assert torch.equal(fit(tmp_path / "parts", 6, ONLY), whole)
    assert set(load_weights(tmp_path / "parts")) == {"head.weight", "head.bias"}
