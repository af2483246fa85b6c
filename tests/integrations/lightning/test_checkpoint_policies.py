"""Several policies of checkpoints, and early stopping, beside Lightning's callbacks on the same run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from tests.integrations.lightning.equality import data_of, made, under_lightning, under_ours  # noqa: E402
from tests.integrations.lightning.modules import Classifier  # noqa: E402

from drivetrain.checkpoint.saving.index import read_index  # noqa: E402
from drivetrain.integrations.lightning import as_task, from_lightning_arguments  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]


def steps(folder: Path) -> list[int]:
    return sorted(int(re.findall(r"step=(\d+)", each.name)[0]) for each in folder.glob("*.ckpt"))


def test_several_model_checkpoints_keep_the_same_steps(tmp_path: Path) -> None:
    def callbacks(*folders: Path) -> list[Any]:
        return [
            ModelCheckpoint(folders[0], monitor="val_loss", save_top_k=2),
            ModelCheckpoint(folders[1], monitor="val_acc", mode="max", save_top_k=3),
            ModelCheckpoint(folders[2], every_n_epochs=3, save_top_k=-1),
        ]

    theirs = [tmp_path / name for name in ("loss", "accuracy", "each-third")]
    under_lightning(made(Classifier), max_epochs=10, callbacks=callbacks(*theirs), enable_checkpointing=True)
    trainer = from_lightning_arguments(
        max_epochs=10, callbacks=callbacks(*[tmp_path / "ours"] * 3), logger=False, enable_progress_bar=False
    ).trainer
    result = trainer.fit(as_task(made(Classifier)), *data_of(made(Classifier)))
    entries = read_index(str(tmp_path / "ours" / "checkpoints")) or []
    loss, accuracy, third = (steps(each) for each in theirs)
    assert [each.update for each in entries if "val_loss" in each.keeper] == loss
    assert [each.update for each in entries if "val_acc" in each.keeper] == accuracy
    assert [each.update for each in entries if "3 epochs" in each.resume] == third
    assert {each.update for each in entries} == {*loss, *accuracy, *third, result.progress.updates}


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "train_loss_epoch", "patience": 2, "min_delta": 0.05, "check_on_train_epoch_end": True},
        {"monitor": "val_acc", "mode": "max", "patience": 2},
        {"monitor": "val_acc", "mode": "max", "patience": 9, "divergence_threshold": 0.8},
        {"monitor": "val_loss", "patience": 9, "stopping_threshold": 0.3},
        {"monitor": "not_there", "patience": 1, "strict": False},
    ],
    ids=lambda options: options["monitor"] + "-" + [*options][-1],
)
def test_early_stopping_ends_after_the_same_update(options: dict[str, Any]) -> None:
    stopping = EarlyStopping(**options)
    values = under_lightning(made(Classifier), max_epochs=12, callbacks=[stopping])
    mapped = from_lightning_arguments(max_epochs=1, callbacks=[EarlyStopping(**options)], logger=False)
    (ours,) = (each for each in mapped.trainer.callbacks if type(each).__name__ == "EarlyStopping")
    if options["monitor"] == "train_loss_epoch":
        ours.metric = "train_loss"
    _, result = under_ours(made(Classifier), max_epochs=12, callbacks=[ours])
    assert result.progress.epoch == len(values["val_loss"])
    assert (result.progress.epoch < 12) == options.get("strict", True)
