"""DeepSpeed's own optimizers: what checkpoints are told of them, and how they are compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet, variant
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CheckpointError, DeepSpeedConfig, LambdaCallback, TaskModule
from drivetrain.strategies.deepspeed import adam
from drivetrain.testing import run_distributed

deepspeed = pytest.importorskip("deepspeed")
from drivetrain.strategies.deepspeed.library import library  # noqa: E402
from drivetrain.strategies.deepspeed.strategy import DeepSpeed  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def weights_after(
    run_dir: str, stage: int, offload: str | None, stop: int | None = None, resume: str = "auto"
) -> Tensor:  # of two epochs of six steps, as far as they were not made there before
    settings = {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.1}
    config = {"optimizer": {"type": "AdamW", "params": settings}}
    chosen = DeepSpeedConfig(stage=stage, offload_optimizer=offload, config=config)
    halt = LambdaCallback(on_step_end=lambda run: run.stop("half") if run.progress.steps == stop else None)
    options = {"checkpoint": True, "run_dir": run_dir, "callbacks": [halt]}
    trainer = quiet(strategy=DeepSpeed(chosen, world_size=2), max_epochs=2, **options)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    task = variant(configure_optimizers=TaskModule.configure_optimizers)()  # the configuration has one
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
    trainer.fit(task, data, resume=resume)
    return torch.cat([each.detach().reshape(-1) for each in task.parameters()])


def _goes_on(path: str) -> None:
    whole = weights_after(f"{path}/whole", 2, "cpu")
    weights_after(f"{path}/same", 2, "cpu", stop=4)
    weights_after(f"{path}/other", 1, None, stop=8, resume=f"{path}/same")  # torch's own
    assert torch.equal(weights_after(f"{path}/same", 2, "cpu"), whole), "bit for bit"
    torch.testing.assert_close(weights_after(f"{path}/other", 3, "cpu"), whole)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", ["DeepSpeedCPUAdam", "FusedAdam"])
def test_deepspeeds_adam_is_stored_as_torchs(name: str, decoupled: bool) -> None:
    import deepspeed.ops.adam as theirs

    kind = getattr(theirs, name)
    optimizer: Any = object.__new__(kind)  # whose constructor would compile it
    own = {"lr": 0.1, "betas": (0.9, 0.99), "bias_correction": True, "step": 0}
    optimizer.adam_w_mode, optimizer.param_groups = decoupled, [own]
    copy = adam.state_carrier(optimizer)
    assert type(copy) is (torch.optim.AdamW if decoupled else torch.optim.Adam)
    stored = adam.checkpoint_settings(optimizer, own)
    torchs = type(copy)([nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.9, 0.99)).param_groups[0]
    assert {**torchs, **stored} == torchs
    count = adam.checkpoint_slot(optimizer, "step", 3)
    assert torch.equal(count, torch.tensor(3.0))
    assert type(adam.native_slot(optimizer, "step", count)) is int

    copy.param_groups = [{**torchs, "lr": 0.2}]
    adam.check_settings(optimizer, copy)
    assert adam.native_settings(optimizer, own, copy.param_groups[0]) == {"lr": 0.2, "betas": (0.9, 0.99)}
    for setting, value in (("amsgrad", True), ("maximize", True), ("decoupled_weight_decay", not decoupled)):
        copy.param_groups = [{**torchs, setting: value}]
        told = f"{setting}={value}, which DeepSpeed's {name} does not support"
        with pytest.raises(CheckpointError, match=told):
            adam.check_settings(optimizer, copy)


@pytest.mark.nightly
def test_cpu_adam_is_compiled_and_stored_as_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "extensions" / "drivetrain" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()  # a stale one
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O1 -g0\n', encoding="utf-8")  # in half of the time
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    library("cpu")  # once, of which both processes are copies
    run_distributed(_goes_on, str(tmp_path), timeout=600)
    assert list(folder.glob("*.so"))
