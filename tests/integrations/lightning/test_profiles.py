"""The table of a profile beside Lightning's SimpleProfiler, on the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")

from tests.integrations.lightning.equality import made, under_lightning, under_ours  # noqa: E402
from tests.integrations.lightning.modules import Classifier  # noqa: E402

from drivetrain import Callback, ConfigError, Profile  # noqa: E402
from drivetrain.integrations.lightning import from_lightning_arguments  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]

PHASES = {
    "data": "[_TrainingEpochLoop].train_dataloader_next",
    "step": "run_training_batch",
    "forward": "[Strategy]SingleDeviceStrategy.training_step",
    "backward": "[Strategy]SingleDeviceStrategy.backward",
    "optimizer": "[LightningModule]Classifier.optimizer_step",
    "clip": "[LightningModule]Classifier.configure_gradient_clipping",
    "validation step": "[Strategy]SingleDeviceStrategy.validation_step",
    "validation data": "[_EvaluationLoop].val_next",
    "Watch.on_epoch_end": "[Callback]Watch.on_train_epoch_end",
    "Watch.on_step_end": "[Callback]Watch.on_train_batch_end",
}
"""Phases that both have, under our name and theirs."""

PER_UPDATE = ("step", "Watch.on_step_end")
"""Phases that Lightning has for each micro-batch, and we for each update."""


class Watch(Callback):
    def on_epoch_end(self, run: Any) -> None: ...

    def on_step_end(self, run: Any) -> None: ...


@pytest.mark.parametrize("accumulation", [1, 2])
def test_phases_are_called_as_often_as_simple_profiler_says(accumulation: int, tmp_path: Path) -> None:
    profiler = pl.profilers.SimpleProfiler()
    watch = type("Watch", (pl.Callback,), {"on_train_epoch_end": _nothing, "on_train_batch_end": _nothing})
    options: dict[str, Any] = {"max_epochs": 3}
    under_lightning(
        made(Classifier),
        **options,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        callbacks=[watch()],
        profiler=profiler,
    )
    profile = Profile(kinds="table", folder=tmp_path)
    options |= {"gradient_accumulation_steps": accumulation, "max_grad_norm": 1.0}
    under_ours(made(Classifier), **options, callbacks=[Watch(), profile])
    (path,) = tmp_path.glob("*.json")
    ours = {each["name"]: each["calls"] for each in json.loads(path.read_text())["phases"]}
    theirs = {name: len(seconds) for name, seconds in profiler.recorded_durations.items()}
    for name in PER_UPDATE:
        ours[name] *= accumulation
    assert {name: ours[name] for name in PHASES} == {name: theirs[other] for name, other in PHASES.items()}


def _nothing(*_: Any) -> None: ...


def test_profilers_of_arguments_become_kinds(tmp_path: Path) -> None:
    def kinds(profiler: Any) -> list[tuple[str, ...]]:
        trainer = from_lightning_arguments(
            max_epochs=1, default_root_dir=str(tmp_path), profiler=profiler
        ).trainer
        return [each.kinds for each in trainer.callbacks if isinstance(each, Profile)]

    assert [kinds(name) for name in (None, "simple", "advanced", "pytorch")] == (
        [[], [("table",)], [("python",)], [("trace",)]]
    )
    assert kinds(pl.profilers.SimpleProfiler(dirpath=tmp_path)) == [("table",)]
    for wrong, told in (
        ("xla", "torch_xla.debug.profiler"),
        ("simpel", "Did you mean 'simple'"),
        (pl.profilers.PyTorchProfiler(), r"PyTorchProfiler\(...\) cannot be taken over"),
    ):
        with pytest.raises(ConfigError, match=told):
            kinds(wrong)
