"""Callbacks beside Lightning's callbacks of the same kind, on the same run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.lightning.equality import (
    both,
    data_of,
    differences,
    made,
    under_lightning,
    under_ours,
    weights_of,
)
from torch import nn
from torch.nn import functional as F

from drivetrain import Callback, Freeze, Profile, WeightAverage
from drivetrain.callbacks import summarize
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.integrations.lightning import as_task, from_lightning_arguments

callbacks = Lazy("lightning.pytorch.callbacks")
modules = Lazy("tests.integrations.lightning.modules")
pl = Lazy("lightning.pytorch")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)


# Checkpoints and early stopping.


def test_several_model_checkpoints_keep_the_same_steps(tmp_path: Path) -> None:
    def savers(*folders: Path) -> list[Any]:
        return [
            callbacks.ModelCheckpoint(folders[0], monitor="val_loss", save_top_k=2),
            callbacks.ModelCheckpoint(folders[1], monitor="val_acc", mode="max", save_top_k=3),
            callbacks.ModelCheckpoint(folders[2], every_n_epochs=3, save_top_k=-1),
        ]

    def steps(folder: Path) -> list[int]:
        return sorted(int(re.findall(r"step=(\d+)", each.name)[0]) for each in folder.glob("*.ckpt"))

    theirs = [tmp_path / name for name in ("loss", "accuracy", "each-third")]
    classifier, options = modules.Classifier, {"max_epochs": 7, "enable_checkpointing": True}
    under_lightning(made(classifier), callbacks=savers(*theirs), **options)
    given = {"logger": False, "enable_progress_bar": False, "callbacks": savers(*[tmp_path / "ours"] * 3)}
    trainer = from_lightning_arguments(max_epochs=7, **given).trainer
    result = trainer.fit(as_task(made(classifier)), *data_of(made(classifier)))
    entries = read_index(str(tmp_path / "ours" / "checkpoints")) or []
    loss, accuracy, third = (steps(each) for each in theirs)
    assert [each.update for each in entries if "val_loss" in each.keeper] == loss
    assert [each.update for each in entries if "val_acc" in each.keeper] == accuracy
    assert [each.update for each in entries if "3 epochs" in each.resume] == third
    assert {each.update for each in entries} == {*loss, *accuracy, *third, result.progress.updates}


def test_early_stopping_ends_after_the_same_update() -> None:
    for options in (
        {"monitor": "train_loss_epoch", "patience": 2, "min_delta": 0.05, "check_on_train_epoch_end": True},
        {"monitor": "val_acc", "mode": "max", "patience": 2},
        {"monitor": "val_acc", "mode": "max", "patience": 9, "divergence_threshold": 0.8},
        {"monitor": "val_loss", "patience": 9, "stopping_threshold": 0.3},
        {"monitor": "not_there", "patience": 1, "strict": False},
    ):
        stopping = callbacks.EarlyStopping(**options)
        values = under_lightning(made(modules.Classifier), max_epochs=12, callbacks=[stopping])
        given = {"logger": False, "callbacks": [callbacks.EarlyStopping(**options)]}
        mapped = from_lightning_arguments(max_epochs=1, **given).trainer
        (ours,) = (each for each in mapped.callbacks if type(each).__name__ == "EarlyStopping")
        if options["monitor"] == "train_loss_epoch":
            ours.metric = "train_loss"
        _, result = under_ours(made(modules.Classifier), max_epochs=12, callbacks=[ours])
        assert result.progress.epoch == len(values["val_loss"]), options
        assert (result.progress.epoch < 12) == options.get("strict", True), options


# Averages, accumulation by schedule.


def test_an_exponential_average_is_lightnings() -> None:
    theirs = {"max_epochs": 2, "callbacks": [callbacks.EMAWeightAveraging(decay=0.9)]}
    ours = {"max_epochs": 2, "callbacks": [WeightAverage("ema", decay=0.9)]}
    one, other, *_ = both(modules.Classifier, theirs, ours)
    close(other, one)


def accumulated(epochs: int, batches: int, stages: dict[int, int]) -> tuple[Any, Any, dict[str, Any]]:
    class Watching(modules.Classifier):  # type: ignore[name-defined,misc]
        """Keeps what the trainer says of its accumulation."""

        seen: tuple[Any, ...] = ()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            now = (self.current_epoch, self.global_step, self.trainer.accumulate_grad_batches)
            self.seen = (*self.seen, now)

    options: dict[str, Any] = {"max_epochs": epochs, "limit_train_batches": batches}
    scheduler = callbacks.GradientAccumulationScheduler(dict(stages))
    own = {f"{epoch} epochs": number for epoch, number in stages.items()}
    ours = {**options, "gradient_accumulation_steps": own}
    one, other, logged, found = both(Watching, {**options, "callbacks": [scheduler]}, ours)
    return one, other, differences(logged, found)


def by_hand(divisor: int) -> Any:
    """One epoch of five batches in windows of four; the last, of one batch, is divided by `divisor`."""
    module = made(modules.Classifier)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in zip(range(5), modules.loader(), strict=False):
        (F.cross_entropy(module.net(x), y) / (4 if number < 4 else divisor)).backward()
        if number >= 3:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module.net)


def test_accumulation_by_schedule_is_lightnings_but_for_a_short_last_window() -> None:
    theirs, ours, different = accumulated(5, 4, {0: 4, 1: 2, 3: 1})
    close(ours, theirs)
    assert ours.seen == theirs.seen
    assert not [name for name in different if not name.startswith("train_")]
    theirs, ours, _ = accumulated(1, 5, {0: 4, 7: 1})
    torch.testing.assert_close(weights_of(ours.net), by_hand(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(weights_of(theirs.net), by_hand(4), rtol=0, atol=1e-6)
    assert (by_hand(1) - by_hand(4)).abs().max() > 1e-3


# Freezing, beside `BackboneFinetuning`.


def backbones(norm: Any) -> tuple[Any, Any]:
    """A module for Lightning, and one with the rates of `BackboneFinetuning`: the backbone grows by half in
    each epoch. A batch norm has the head's rate: under Lightning it trains from the start.
    """

    class Theirs(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 8), norm(8), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.05)

    class Ours(Theirs):
        def configure_optimizers(self) -> Any:
            first = [self.head, self.backbone[1]] if norm is nn.BatchNorm1d else [self.head]
            rest = [each for each in self.backbone if each not in first]
            parts = [[p for each in part for p in each.parameters()] for part in (first, rest)]
            groups = [{"params": parts[0], "lr": 0.05}, {"params": parts[1], "lr": 0.01}]
            optimizer = torch.optim.AdamW(groups)
            rates = [lambda epoch: 1.0, lambda epoch: 1.5 ** max(0, epoch - 1)]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    return Theirs, Ours


def finetuning() -> Any:
    options = {"unfreeze_backbone_at_epoch": 1, "backbone_initial_lr": 0.01, "train_bn": False}
    return callbacks.BackboneFinetuning(lambda_func=lambda epoch: 1.5, **options)


def test_freeze_trains_an_unfrozen_backbone_as_lightning() -> None:
    for norm, excluded in ((nn.LayerNorm, ()), (nn.BatchNorm1d, "backbone.1")):
        theirs, ours = map(made, backbones(norm))
        under_lightning(theirs, max_epochs=3, callbacks=[finetuning()])
        freeze = Freeze("backbone", until="1 epoch", exclude=excluded)
        under_ours(ours, max_epochs=3, callbacks=[freeze])
        close(ours, theirs)
    theirs, ours = map(made, backbones(nn.BatchNorm1d))
    before = weights_of(ours.backbone)
    under_lightning(theirs, max_epochs=1, callbacks=[finetuning()])
    under_ours(ours, max_epochs=1, callbacks=[Freeze("backbone")])
    assert torch.equal(weights_of(ours.backbone), before)
    assert not torch.allclose(weights_of(theirs.backbone[1]), weights_of(ours.backbone[1]), atol=1e-2)


# Profiles and summaries.

PHASES: dict[str, Any] = {"data": "[_TrainingEpochLoop].train_dataloader_next", "step": "run_training_batch"}
PHASES |= {"forward": "[Strategy]SingleDeviceStrategy.training_step"}
PHASES |= {"backward": "[Strategy]SingleDeviceStrategy.backward"}
PHASES |= {"optimizer": "[LightningModule]Classifier.optimizer_step"}
PHASES |= {"clip": "[LightningModule]Classifier.configure_gradient_clipping"}
PHASES |= {"validation step": "[Strategy]SingleDeviceStrategy.validation_step"}
PHASES |= {"validation data": "[_EvaluationLoop].val_next"}
PHASES |= {"Watch.on_epoch_end": "[Callback]Watch.on_train_epoch_end"}
PHASES |= {"Watch.on_step_end": "[Callback]Watch.on_train_batch_end"}
"""Phases that both have, under our name and theirs."""


def test_profile_counts_phases_as_simple_profiler(tmp_path: Path) -> None:
    profiler, nothing = pl.profilers.SimpleProfiler(), lambda *_: None
    methods = {"on_train_epoch_end": nothing, "on_train_batch_end": nothing}
    theirs = {"profiler": profiler, "callbacks": [type("Watch", (pl.Callback,), methods)()]}
    theirs |= {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    under_lightning(made(modules.Classifier), **theirs)
    watch = type("Watch", (Callback,), {"on_epoch_end": nothing, "on_step_end": nothing})()
    ours = {"callbacks": [watch, Profile(kinds="table", folder=tmp_path)], "max_epochs": 2}
    under_ours(made(modules.Classifier), **ours, gradient_accumulation_steps=2, max_grad_norm=1.0)
    (path,) = tmp_path.glob("*.json")
    calls = {each["name"]: each["calls"] for each in json.loads(path.read_text())["phases"]}
    for name in ("step", "Watch.on_step_end"):  # for each micro-batch in Lightning, for each update here
        calls[name] *= 2
    counted = {name: len(profiler.recorded_durations[other]) for name, other in PHASES.items()}
    assert {name: calls[name] for name in PHASES} == counted


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
    net[2].weight = net[0].weight
    net[1].requires_grad_(False)
    return net


def test_summarize_gives_lightnings_parameters_shapes_and_operations() -> None:
    convolutions = (nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 64, 2))
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    for net, example in (
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.ones(5, 8)),
        (nn.Sequential(*convolutions), torch.ones(2, 3, 8, 8)),
        (_tied(), torch.ones(2, 5, dtype=torch.int64)),
        (attention, torch.ones(3, 5, 8)),
    ):

        class Lit(pl.LightningModule):  # type: ignore[name-defined,misc]
            example_input_array = example

            def forward(self, x: torch.Tensor) -> Any:
                return self.net(x)

        module = Lit()
        module.net = net
        theirs = pl.utilities.model_summary.ModelSummary(module, max_depth=-1)
        ours = summarize(module, depth=9, batch=example)
        counted = (ours.total.parameters, ours.total.trainable)
        assert counted == (theirs.total_parameters, theirs.trainable_parameters)
        by_name = {each.name: each for each in ours.modules}
        for name, count, sizes in zip(theirs.layer_names, theirs.param_nums, theirs.out_sizes, strict=True):
            row = by_name[name]
            assert row.parameters + row.shared == count
            if isinstance(sizes, list) and row.outputs is not None:
                shapes = [each for each in sizes if isinstance(each, list)] or [sizes]  # "?" is no tensor
                assert [list(each) for each in row.outputs] == shapes
        if net is not attention:  # torch's counter does not know the fused kernel that Lightning's run takes
            assert ours.total.forward_flops == theirs.total_flops
