"""Checkpoints of the trained parameters alone: a resume is exact, and a different frozen part is an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
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
from drivetrain.checkpoint.weights.frozen import check_left_out
from drivetrain.cli.main import main
from drivetrain.core.registry import is_installed
from drivetrain.task.model_info import ModelInfo

ONLY = CheckpointConfig(every="2 steps", keep_last=None, by=None, parameters="trainable")
ALL = CheckpointConfig(every="2 steps", keep_last=None, by=None)


# A frozen base with a tied name and running statistics, and an adapter that is trained.
class Adapted(TaskModule):
    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.same = self.base[0]
        torch.manual_seed(5)
        self.adapter = nn.Sequential(nn.Dropout(0.25), nn.Linear(8, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.adapter(self.base(features))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.05)


BUFFERS = {f"base.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
KEPT = {"adapter.1.weight", "adapter.1.bias", *BUFFERS}


def fit(directory: Any, task: Any = None, resume: str | None = None, **options: Any) -> tuple[Any, Any]:
    task = Adapted() if task is None else task
    trainer = quiet(**{"max_steps": 4, "checkpoint": ONLY, "run_dir": directory, **options})
    return task, trainer.fit(task, pairs(32, 4), resume=resume)


def test_a_checkpoint_of_trainable_parameters_has_them_and_all_buffers_and_resumes_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, _ = fit(tmp_path / "straight", max_steps=8, checkpoint=ALL)
    _, first = fit(tmp_path / "run")
    verify(first.last_checkpoint)
    assert set(load_weights(first.last_checkpoint)) == set(load_file(first.model_path)) == KEPT
    exported = str(tmp_path / "weights.safetensors")
    assert main(["checkpoint", "export", first.last_checkpoint, exported]) == 0
    assert "not in there: 6 frozen parameters" in capsys.readouterr().out
    assert "the other 6 are frozen" in Adapted().load_weights(exported).note
    assert set(load_file(exported)) == KEPT
    resumed, _ = fit(tmp_path / "run", max_steps=8, resume="auto")
    assert weights(resumed) == weights(straight)


def test_a_resume_or_load_with_another_frozen_part_is_refused(tmp_path: Path) -> None:
    _, only = fit(tmp_path / "only")
    last = only.last_checkpoint
    fit(tmp_path / "all", checkpoint=ALL)

    def change(run: Any) -> None:
        with torch.no_grad():
            run.task.base[0].weight.mul_(0.9)

    def resume(task: Any = None, directory: str = "only", **options: Any) -> Any:
        return lambda: fit(tmp_path / directory, task, max_steps=8, resume="auto", **options)

    changing = [LambdaCallback(on_step_end=change)]
    table: dict[str, tuple[Any, ...]] = {
        "values": (resume(Adapted(seed=4)), "'base.0.weight' has other values (hash ", "same pretrained"),
        "trained": (resume(Adapted().requires_grad_(True)), "'base.0.bias' is not frozen here"),
        "dtype": (resume(Adapted().bfloat16()), "'base.0.bias'", "float32 there, bfloat16 here"),
        "as all": (resume(checkpoint=ALL), "trained parameters only", "parameters='trainable'"),
        "all": (resume(directory="all"), "holds all parameters", "parameters='all'"),
        "changed": (lambda: fit(tmp_path / "c", callbacks=changing), "'base.0.weight' is frozen, but was"),
        "load_weights": (lambda: Adapted(seed=4).load_weights(last), "other values"),
        "a file": (lambda: Adapted(seed=4).load_weights(only.model_path), "other values"),
        "verb": (lambda: quiet().validate(Adapted(seed=4), pairs(4), checkpoint=only.model_path), "values"),
    }
    assert_refused(CheckpointError, table)


def test_weights_of_trainable_parameters_load_onto_the_same_frozen_part(tmp_path: Path) -> None:
    task, result = fit(tmp_path)
    assert weights(Adapted.from_checkpoint(result.last_checkpoint)) == weights(task)
    fresh, same = Adapted(), Adapted()
    quiet().validate(fresh, pairs(4), checkpoint=result.last_checkpoint)
    assert weights(fresh) == weights(task)
    assert set(Adapted(seed=4).load_weights(result.last_checkpoint, strict=False).loaded) == KEPT
    report = same.load_weights(tmp_path)
    assert (set(report.loaded), report.missing) == (KEPT, ())
    assert "the other 6 are frozen, and left out there" in str(report)
    assert weights(same) == weights(task)
    half = Adapted().to(torch.bfloat16)
    half.load_weights(tmp_path)
    torch.testing.assert_close(half.adapter[1].weight, task.adapter[1].weight.bfloat16())


def on_a_rank(name: str, directory: Path) -> list[Any]:
    strategy: Any = DeepSpeedConfig(stage=int(name[-1])) if name.startswith("zero") else name
    straight, _ = fit(directory / "straight", strategy=strategy, max_steps=8, checkpoint=ALL)
    fit(directory / "run", strategy=strategy)
    task, result = fit(directory / "run", strategy=strategy, max_steps=8, resume="auto")
    assert set(load_weights(result.last_checkpoint)) == KEPT
    return [weights(straight), weights(task)]


needs_deepspeed = pytest.mark.skipif(not is_installed("deepspeed"), reason="needs it")


@pytest.mark.parametrize(
    "strategy", ["fsdp", pytest.param("zero-3", marks=[needs_deepspeed, pytest.mark.nightly])]
)
def test_trainable_parameters_of_two_ranks_resume_exactly_on_one_rank(strategy: str, tmp_path: Path) -> None:
    for straight, resumed in on_two_ranks(on_a_rank, strategy, tmp_path):
        assert straight == resumed
    with warned("goes on with 4 samples per step"):
        _, result = fit(tmp_path / "run", max_steps=10, resume="auto")
    assert result.progress.steps == 10
    assert set(load_weights(result.last_checkpoint)) == KEPT


class Named(Adapted):  # leaves out what it is given, and has a buffer that training does not change
    def __init__(self, *left_out: str, code: int = 7) -> None:
        super().__init__()
        self.base.register_buffer("codes", torch.full((4,), code, dtype=torch.uint8))
        self.left_out = ("base.0.weight", *left_out)

    def model_info(self) -> ModelInfo:
        return ModelInfo(left_out=self.left_out)


POLICY = CheckpointConfig(every="2 steps", by=None)


def saved(directory: Path, *left_out: str, **options: Any) -> Any:
    return fit(directory, Named(*left_out), checkpoint=POLICY, **options)[1]


def _leave_out_codes(directory: Path, strategy: str = "cpu", size: int = 1) -> None:
    result = saved(directory, "base.codes", strategy=strategy, devices=size)
    lacking = {"base.0.weight", "base.codes"}
    assert set(Named().state_dict()) - set(load_weights(result.last_checkpoint)) == lacking
    saved(directory, "base.codes", strategy=strategy, devices=size, max_steps=8, resume="auto")


def test_names_that_are_left_out_are_those_of_frozen_parameters_and_unchanged_buffers(tmp_path: Path) -> None:
    _leave_out_codes(tmp_path / "one")
    on_two_ranks(_leave_out_codes, tmp_path / "two", "ddp", 2)
    other = Named("base.codes", code=8)
    resume = lambda: fit(tmp_path / "one", other, "auto", checkpoint=POLICY, max_steps=9)  # noqa: E731
    cases: dict[str, tuple[Any, ...]] = {
        "misspelt": (lambda: saved(tmp_path, "base.0.wieght"), "Did you mean 'base.0.weight'?"),
        "trained": (lambda: saved(tmp_path, "adapter.1.weight"), "'adapter.1.weight', which is trained"),
        "text": (lambda: check_left_out(Named(), "base.codes"), "left_out='base.codes'", "list of names"),
        "changed": (lambda: saved(tmp_path, "base.1.running_mean"), "training has changed it"),
        "another": (resume, "'base.codes' has other values"),
    }
    assert_refused((CheckpointError, ConfigError), cases)
