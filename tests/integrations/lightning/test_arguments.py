"""The arguments of Lightning's Trainer become a Trainer, and nothing among them is ignored in silence."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs

from drivetrain import (
    CheckpointConfig,
    ConfigError,
    DDPConfig,
    DeviceStats,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    StrategyError,
    Trainer,
)

pytest.importorskip("lightning")

import lightning
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
from lightning.pytorch import callbacks as theirs
from lightning.pytorch import loggers
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from drivetrain.integrations.lightning import arguments_table as table
from drivetrain.integrations.lightning import from_lightning_arguments
from drivetrain.integrations.lightning.arguments import DEFAULTS
from drivetrain.strategies.precision.registry import PRECISIONS


def mapped(**arguments: Any) -> Trainer:
    return from_lightning_arguments(**{"max_epochs": 1, **arguments}).trainer


# The tables.


def test_the_installed_release_has_no_argument_without_a_row() -> None:
    parameters = inspect.signature(lightning.Trainer).parameters
    assert sorted(parameters) == sorted(table.ROWS)
    defaults = {name: each.default for name, each in parameters.items() if each.default is not None}
    assert defaults == DEFAULTS
    assert sorted(StrategyRegistry.available_strategies()) == sorted(set(table.STRATEGIES) - {"auto", "dp"})
    assert {name for name in theirs.__all__ if not name.startswith("Spike")} <= table.CALLBACKS.keys()
    assert set(loggers.__all__) | {"Logger"} == table.LOGGERS.keys()
    assert set(table.PRECISIONS.values()) <= set(PRECISIONS)


def test_the_printed_tables_are_current() -> None:
    from tests.support.lightning_arguments_page import PAGE
    from tests.support.lightning_arguments_page import table as printed

    assert printed() in PAGE.read_text(encoding="utf-8"), (
        "run python -m tests.support.lightning_arguments_page"
    )


def _shown(trainer: Trainer) -> str:
    made = {each.name: getattr(trainer, each.name) for each in dataclasses.fields(trainer)}
    made["callbacks"] = [type(each).__name__ for each in trainer.callbacks]
    return repr(made)


@pytest.mark.parametrize("name", [name for name, row in table.ROWS.items() if row.status == table.MAPPED])
def test_a_mapped_argument_has_an_effect(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    row = table.ROWS[name]
    example = [LambdaCallback(on_fit_end=print)] if name == "callbacks" else row.example
    base = {"max_epochs": 4, "devices": 1, **row.needs}
    base = {key: value for key, value in base.items() if key != name}
    if name == "sync_batchnorm":  # needs GPUs
        with pytest.raises(StrategyError, match="sync_batchnorm"):
            from_lightning_arguments(**base, sync_batchnorm=True)
        return
    before, after = from_lightning_arguments(**base), from_lightning_arguments(**{**base, name: example})
    assert _shown(before.trainer) != _shown(after.trainer)
    assert [each.text for each in after.differences if each.name == name and each.text == row.differs] == (
        [row.differs] if row.differs else []
    )


@pytest.mark.parametrize("name", [name for name, row in table.ROWS.items() if row.status != table.MAPPED])
def test_what_is_not_mapped_is_said(name: str) -> None:
    row, default = table.ROWS[name], DEFAULTS.get(name)
    value = (not default) if isinstance(default, bool) else "x"
    if row.status == table.IGNORED:
        (line,) = from_lightning_arguments(max_epochs=1, **{name: value}).differences
        assert line == (name, value, f"ignored: {row.text}")
        return
    with pytest.raises(ConfigError, match=f"{name}={value!r}: {re.escape(row.text)}"):
        from_lightning_arguments(max_epochs=1, **{name: value})
    assert mapped(**{name: default}) == mapped()


# Values.


def test_the_defaults_are_lightnings() -> None:
    trainer, differences = from_lightning_arguments()
    assert [(each.name, each.value) for each in differences] == [("max_epochs", 1000)]
    assert (trainer.max_epochs, trainer.loggers, trainer.sanity_validation) == (1000, ("tensorboard",), 2)
    assert (str(trainer.validate_every), str(trainer.log_every)) == ("1 epoch", "50 steps")
    assert trainer.checkpoint == CheckpointConfig(every="1 epoch", keep_last=1, best=0, by=None)
    assert (trainer.strategy, trainer.max_grad_norm, trainer.deterministic) == ("auto", None, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_epochs": -1, "max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_epochs": None, "max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_epochs": 2, "max_steps": -1}, {"max_epochs": 2, "max_steps": None}),
        ({"max_epochs": None, "max_time": {"hours": 1}}, {"max_epochs": None, "max_time": 3600.0}),
        ({"max_time": "01:00:00:10"}, {"max_time": 86410.0}),
        ({"max_time": timedelta(minutes=2)}, {"max_time": 120.0}),
        ({"limit_train_batches": 1.0}, {"limit_train_batches": None}),
        ({"limit_train_batches": 1}, {"limit_train_batches": 1}),
        ({"limit_train_batches": 0.5, "limit_test_batches": 7.0}, {"limit_train_batches": 0.5}),
        ({"limit_val_batches": 0}, {"validate_every": None, "sanity_validation": None}),
        ({"limit_val_batches": 0.5}, {"limit_validation_batches": 0.5}),
        ({"val_check_interval": 0.25}, {"validate_every": "0.25 epochs"}),
        ({"val_check_interval": 100}, {"validate_every": "100 steps"}),
        ({"val_check_interval": 100, "accumulate_grad_batches": 4}, {"validate_every": "25 steps"}),
        ({"val_check_interval": 9, "check_val_every_n_epoch": None}, {"validate_every": "9 steps"}),
        ({"val_check_interval": "00:00:10:00"}, {"validate_every": "600 seconds"}),
        ({"check_val_every_n_epoch": 3}, {"validate_every": "3 epochs"}),
        ({"num_sanity_val_steps": 0}, {"sanity_validation": None}),
        ({"gradient_clip_val": 0.5}, {"max_grad_norm": 0.5, "max_grad_value": None}),
        ({"gradient_clip_val": 0}, {"max_grad_norm": None}),
        (
            {"gradient_clip_val": 2, "gradient_clip_algorithm": "value"},
            {"max_grad_value": 2, "max_grad_norm": None},
        ),
        (
            {"callbacks": theirs.GradientAccumulationScheduler({0: 8, 4: 4}), "val_check_interval": 0.5},
            {"gradient_accumulation_steps": {0: 8, "4 epochs": 4}, "validate_every": "0.5 epochs"},
        ),
        (
            {"callbacks": theirs.GradientAccumulationScheduler({2: 4})},
            {"gradient_accumulation_steps": {0: 1, "2 epochs": 4}},
        ),
        ({"fast_dev_run": True}, {"try_out": "batches"}),
        ({"fast_dev_run": 3}, {"try_out": 3}),
        ({"overfit_batches": 2}, {"try_out": "overfit", "limit_train_batches": 2}),
        ({"overfit_batches": 0.1}, {"try_out": "overfit", "limit_train_batches": 0.1}),
        ({"barebones": True}, {"checkpoint": False, "loggers": (), "progress_bar": False, "log_every": None}),
        ({"devices": -1}, {"devices": "auto"}),
        ({"devices": "1"}, {"devices": 1}),
        ({"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, {"strategy": "cpu", "devices": 2}),
        ({"strategy": "ddp_spawn", "devices": 2}, {"strategy": "ddp"}),
        (
            {"strategy": "ddp_find_unused_parameters_true", "devices": 2},
            {"strategy": DDPConfig(find_unused_parameters=True)},
        ),
        ({"strategy": "fsdp", "devices": 2}, {"strategy": "fsdp"}),
        ({"strategy": "deepspeed_stage_3_offload", "devices": 2}, {"strategy": "zero3_offload"}),
        ({"strategy": "deepspeed", "devices": 2}, {"strategy": "zero2"}),
        ({"strategy": "single_device"}, {"strategy": "auto", "devices": 1}),
        ({"logger": False}, {"loggers": ()}),
        ({"enable_checkpointing": False}, {"checkpoint": False}),
    ],
)
def test_a_value_is_ours(given: dict[str, Any], expected: dict[str, Any]) -> None:
    trainer = mapped(**given)
    for name, value in expected.items():
        found = getattr(trainer, name)
        assert (str(found) if isinstance(value, str) else found) == value, name


@pytest.mark.parametrize("name", table.PRECISIONS)
def test_a_precision_is_that_of_the_same_numbers(name: str) -> None:
    for given in {name, int(name) if name.isdigit() else name}:
        assert mapped(precision=given).precision.name == table.PRECISIONS[name]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_epochs": -1}, "the training would have no end"),
        ({"max_epochs": None, "max_time": "12 hours"}, 'give "DD:HH:MM:SS"'),
        ({"limit_train_batches": 0}, "leave out the call of trainer.fit"),
        ({"limit_test_batches": -1}, "all batches are the default"),
        ({"limit_val_batches": 2.5}, "which must be whole"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, "give one of the two"),
        ({"val_check_interval": 10, "accumulate_grad_batches": 4}, "a multiple of accumulate_grad_batches=4"),
        (
            {"callbacks": theirs.GradientAccumulationScheduler({2: 4}), "accumulate_grad_batches": 4},
            "leave one of the two out, as in Lightning",
        ),
        (
            {"callbacks": theirs.GradientAccumulationScheduler({2: 4}), "val_check_interval": 10},
            "a changing number of updates",
        ),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "give a number of batches"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "both"}, "gradient_clip_algorithm='both'"),
        ({"deterministic": "warn"}, "warn_only=True"),
        ({"fast_dev_run": True, "overfit_batches": 1}, "leave one of the two out"),
        ({"barebones": True, "logger": True}, "logger is given too"),
        ({"barebones": True, "enable_progress_bar": True}, "enable_progress_bar=True is given too"),
        ({"strategy": DDPStrategy()}, "an object of DDPStrategy cannot be taken over"),
        ({"strategy": "dp"}, 'use strategy="ddp"'),
        ({"strategy": "dpp"}, "Did you mean 'dp'"),
        ({"strategy": "deepspeed_stage_3_offload_nvme"}, "DeepSpeedConfig(config=...)"),
        ({"accelerator": "hpu"}, "accelerator='hpu'"),
        ({"accelerator": "gpu", "strategy": "fsdp"}, "runs on what there is, which is 'cpu'"),
        ({"sync_batchnorm": True, "devices": 2}, "name the strategy too"),
        ({"devices": "x"}, "give a number, a list"),
        ({"precision": "transformer-engine"}, 'precision="fp8"'),
        ({"precision": "8"}, "precision='8'"),
        ({"gpus": 2}, "Lightning's Trainer has no argument 'gpus'"),
        ({"callbacks": [{"class_path": "x.EarlyStopping"}]}, "a description that LightningCLI reads"),
        (
            {"callbacks": [theirs.StochasticWeightAveraging(0.1)]},
            "callbacks has StochasticWeightAveraging: give Trainer",
        ),
        (
            {"callbacks": [theirs.ModelCheckpoint("b"), theirs.ModelCheckpoint("a")]},
            "a' in number 2. directory is of the run: give all the same",
        ),
        (
            {"callbacks": [theirs.ModelCheckpoint(), theirs.ModelCheckpoint(save_weights_only=True)]},
            "resumable=True in the first",
        ),
        ({"callbacks": theirs.ModelCheckpoint(), "enable_checkpointing": False}, "checkpoints are off"),
        ({"callbacks": theirs.ModelCheckpoint(), "barebones": True}, "checkpoints are off"),
        ({"callbacks": theirs.LearningRateMonitor(log_momentum=True)}, "run.log(name, value)"),
        ({"logger": loggers.CSVLogger("a", prefix="p")}, "CSVLogger(prefix='p') has no counterpart"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="some of it is about a machine without GPUs")
def test_what_cannot_be_taken_over_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_lightning_arguments(**{"max_epochs": 1, **given})


# Objects.


def test_a_model_checkpoint_is_a_policy(tmp_path: Path) -> None:
    def policy(**options: Any) -> Any:
        return mapped(callbacks=[theirs.ModelCheckpoint(**options)]).checkpoint

    best = policy(monitor="val_loss", save_top_k=3, mode="max", dirpath=tmp_path, save_weights_only=True)
    assert (best.by, best.best, best.mode, best.keep_last) == ("val_loss", 3, "max", 1)
    assert (str(best.directory), best.resumable, str(best.every)) == (str(tmp_path), False, "1 epoch")
    assert (policy(save_top_k=-1).keep_last, policy(save_top_k=-1).by) == (None, None)
    assert policy(monitor="val_loss", save_top_k=-1).keep_last is None
    assert str(policy(every_n_train_steps=20).every) == "20 steps"
    assert str(policy(every_n_epochs=2).every) == "2 epochs"
    assert str(policy(train_time_interval=timedelta(minutes=5)).every) == "300 seconds"
    assert policy(save_top_k=0).every is None
    assert policy(filename="{epoch:02d}-{val/loss:.2f}").name == "epoch={epoch:02d}-val_loss={val/loss:.2f}"
    assert policy(filename="a-{step}-{v}", auto_insert_metric_name=False).name == "a-{v}"
    assert policy(filename="{step}").name is None
    named = from_lightning_arguments(max_epochs=1, callbacks=theirs.ModelCheckpoint(filename="a/{epoch}"))
    assert "filename='a/{epoch}' is not used" in "\n".join(map(str, named.differences))


def test_several_model_checkpoints_are_several_policies() -> None:
    given = from_lightning_arguments(
        max_epochs=1,
        callbacks=[
            theirs.ModelCheckpoint(monitor="val_loss", save_top_k=3, filename="a"),
            theirs.ModelCheckpoint(every_n_epochs=10, save_top_k=-1, filename="b"),
        ],
    )
    first, second = given.trainer.checkpoint
    assert (first.by, first.best, first.keep_last, first.name) == ("val_loss", 3, 1, None)
    assert (second.by, str(second.every), second.keep_last) == (None, "10 epochs", None)
    assert "their filenames differ" in "\n".join(map(str, given.differences))


def test_other_callbacks_and_loggers_are_ours(tmp_path: Path) -> None:
    own = LambdaCallback(on_fit_end=lambda run: None)
    stopping = theirs.EarlyStopping(
        "val_loss",
        min_delta=0.1,
        patience=0,
        mode="max",
        stopping_threshold=2.0,
        divergence_threshold=-1.0,
        strict=False,
        check_finite=False,
    )
    trainer = mapped(
        callbacks=[
            stopping,
            theirs.LearningRateMonitor(),
            theirs.Timer("00:00:30:00"),
            own,
            theirs.DeviceStatsMonitor(),
        ],
        max_time="00:01:00:00",
        logger=[loggers.CSVLogger(tmp_path, "a"), loggers.TensorBoardLogger(tmp_path, "b", version=3)],
    )
    first, second, third, fourth = trainer.callbacks
    assert isinstance(first, EarlyStopping)
    assert (first.metric, first.mode, first.patience, first.threshold, first.stop_at) == (
        "val_loss", "max", 1, 0.1, 2.0,
    )  # fmt: skip
    assert (first.diverged_at, first.strict, first.check_finite) == (-1.0, False, False)
    assert isinstance(second, LearningRateMonitor)
    assert third is own
    assert isinstance(fourth, DeviceStats)
    assert trainer.max_time == pytest.approx(1800, abs=1)
    table_, board = trainer.loggers
    assert table_.path.parent == tmp_path / "a" / "version_0"  # type: ignore[union-attr]
    assert board.directory == tmp_path / "b" / "version_3"  # type: ignore[union-attr]
    (bar,) = mapped(enable_model_summary=False).callbacks
    assert isinstance(bar, ProgressBar)
    (summary,) = mapped(enable_progress_bar=False).callbacks
    assert isinstance(summary, ModelSummary)


def test_a_subclass_of_the_users_is_refused_because_its_methods_would_not_be_called() -> None:
    class Patient(theirs.EarlyStopping):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    class Own(theirs.Callback):
        pass

    with pytest.raises(
        ConfigError, match=r"Patient, a subclass of Lightning's EarlyStopping: what it overrides"
    ):
        mapped(callbacks=Patient("x"))
    with pytest.raises(
        ConfigError, match=r"Own, a subclass of Lightning's Callback: write it as a drivetrain"
    ):
        mapped(callbacks=[Own()])


def test_the_trainer_trains(tmp_path: Path) -> None:
    trainer, _ = from_lightning_arguments(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        limit_train_batches=0.5,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=theirs.ModelCheckpoint(monitor="validation/loss"),
        logger=loggers.CSVLogger(tmp_path, "csv"),
    )
    result = trainer.fit(Regression(), pairs(16, 2), pairs(4))
    assert (result.progress.updates, result.progress.epoch) == (6, 3)
    assert result.best_checkpoint is not None
    assert (tmp_path / "csv" / "version_0" / "metrics.csv").exists()
