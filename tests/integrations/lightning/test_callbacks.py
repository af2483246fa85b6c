"""Callbacks beside Lightning's callbacks of the same kind, on the same run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.lightning.equality import both, data_of, made, under_lightning, under_ours, weights_of

from drivetrain import WeightAverage
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.integrations.lightning import as_task, from_lightning_arguments

callbacks = Lazy("lightning.pytorch.callbacks")
modules = Lazy("tests.integrations.lightning.modules")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")


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
    assert [each.step for each in entries if "val_loss" in each.best] == loss
    assert [each.step for each in entries if "val_acc" in each.best] == accuracy
    assert [each.step for each in entries if "3 epochs" in each.resume] == third
    assert {each.step for each in entries} == {*loss, *accuracy, *third, result.progress.steps}


def test_early_stopping_ends_after_the_same_step() -> None:
    for options in (
        {"monitor": "train_loss_epoch", "patience": 2, "min_delta": 0.05, "check_on_train_epoch_end": True},
        {"monitor": "val_acc", "mode": "max", "patience": 2},
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


def test_an_exponential_average_is_lightnings() -> None:
    theirs = {"max_epochs": 2, "callbacks": [callbacks.EMAWeightAveraging(decay=0.9)]}
    ours = {"max_epochs": 2, "callbacks": [WeightAverage("ema", decay=0.9)]}
    one, other, *_ = both(modules.Classifier, theirs, ours)
    torch.testing.assert_close(weights_of(other), weights_of(one), rtol=0, atol=1e-6)
