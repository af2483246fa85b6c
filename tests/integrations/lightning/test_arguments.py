"""The arguments of Lightning's Trainer become a Trainer, and nothing among them is ignored in silence."""

import dataclasses
import inspect
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.support.refusals import assert_refused
from tests.support.site import site_script
from tests.support.tasks import Regression, pairs

from drivetrain import CheckpointConfig, DDPConfig, LambdaCallback, Trainer
from drivetrain.callbacks import DeviceStats, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.integrations.lightning import arguments_table as table
from drivetrain.integrations.lightning import from_lightning_arguments
from drivetrain.integrations.lightning.arguments import DEFAULTS
from drivetrain.strategies.precision.registry import PRECISIONS

lightning = Lazy("lightning")
loggers = Lazy("lightning.pytorch.loggers")
profilers = Lazy("lightning.pytorch.profilers")
strategies = Lazy("lightning.pytorch.strategies")
theirs = Lazy("lightning.pytorch.callbacks")


def mapped(**arguments: Any) -> Trainer:
    return from_lightning_arguments(**{"max_epochs": 1, **arguments}).trainer


def test_the_installed_release_has_no_argument_without_a_row_and_the_page_is_current() -> None:
    from lightning.pytorch.callbacks import __all__ as all_callbacks
    from lightning.pytorch.loggers import __all__ as all_loggers

    parameters = inspect.signature(lightning.Trainer).parameters
    assert sorted(parameters) == sorted(table.ROWS)
    defaults = {name: each.default for name, each in parameters.items() if each.default is not None}
    assert defaults == DEFAULTS
    available = strategies.StrategyRegistry.available_strategies()
    assert sorted(available) == sorted(set(table.STRATEGIES) - {"auto", "dp"})
    assert {name for name in all_callbacks if not name.startswith("Spike")} <= table.CALLBACKS.keys()
    assert {*all_loggers, "Logger", "NeptuneLogger"} == table.LOGGERS.keys()
    assert set(table.PRECISIONS.values()) <= set(PRECISIONS)
    printer = site_script("print_lightning_arguments")
    text = printer.PAGE.read_text(encoding="utf-8")
    assert printer.table() in text, "run docs/site/print_lightning_arguments.py"


def _shown(trainer: Trainer) -> str:
    made = {each.name: getattr(trainer, each.name) for each in dataclasses.fields(trainer)}
    made["callbacks"] = [type(each).__name__ for each in trainer.callbacks]
    return repr(made)


def test_every_mapped_argument_has_an_effect_and_every_other_is_named() -> None:
    wrong = []
    for name, row in table.ROWS.items():
        default = DEFAULTS.get(name)
        other = (not default) if isinstance(default, bool) else "x"
        if row.status == table.IGNORED:
            (line,) = from_lightning_arguments(max_epochs=1, **{name: other}).differences
            wrong += [] if line == (name, other, f"ignored: {row.text}") else [line]
        elif row.status == table.REFUSED:
            call = lambda name=name, other=other: mapped(**{name: other})  # noqa: E731
            assert_refused(ConfigError, {name: (call, f"{name}={other!r}: {row.text}")})
            wrong += [] if mapped(**{name: default}) == mapped() else [name]
        elif name != "sync_batchnorm":  # needs GPUs; see below
            example = [LambdaCallback(on_fit_end=print)] if name == "callbacks" else row.example
            base = {"max_epochs": 4, "devices": 1, **row.needs}
            base.pop(name, None)
            before, after = (from_lightning_arguments(**base, **more) for more in ({}, {name: example}))
            found = [each for each in after.differences if (each.name, each.text) == (name, row.differs)]
            if _shown(before.trainer) == _shown(after.trainer) or len(found) != bool(row.differs):
                wrong.append(name)
    assert not wrong


def test_the_defaults_are_lightnings() -> None:
    trainer, differences = from_lightning_arguments()
    assert [(each.name, each.value) for each in differences] == [("max_epochs", 1000)]
    assert (trainer.max_epochs, trainer.loggers, trainer.sanity_validation) == (1000, ("tensorboard",), 2)
    assert (str(trainer.validate_every), str(trainer.log_every)) == ("1 epoch", "50 steps")
    assert trainer.checkpoint == CheckpointConfig(every="1 epoch", keep_last=1, best=0, by=None)
    assert (trainer.strategy, trainer.max_grad_norm, trainer.deterministic) == ("auto", None, False)


def test_values_become_ours() -> None:
    scheduler = theirs.GradientAccumulationScheduler
    off = {"checkpoint": False, "loggers": (), "progress_bar": False, "log_every": None}
    unused, value = "ddp_find_unused_parameters_true", {"gradient_clip_algorithm": "value"}
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"max_epochs": -1, "max_steps": 5}, {"max_epochs": None, "max_steps": 5}),
        ({"max_epochs": None, "max_time": {"hours": 1}}, {"max_epochs": None, "max_time": 3600.0}),
        ({"max_time": "01:00:00:10"}, {"max_time": 86410.0}),
        ({"limit_train_batches": 1}, {"limit_train_batches": 1}),
        ({"limit_val_batches": 0}, {"validate_every": None, "sanity_validation": None}),
        ({"val_check_interval": 0.25}, {"validate_every": "0.25 epochs"}),
        ({"val_check_interval": 100, "accumulate_grad_batches": 4}, {"validate_every": "25 steps"}),
        ({"val_check_interval": 9, "check_val_every_n_epoch": None}, {"validate_every": "9 steps"}),
        ({"val_check_interval": "00:00:10:00"}, {"validate_every": "600 seconds"}),
        ({"gradient_clip_val": 2, **value}, {"max_grad_value": 2, "max_grad_norm": None}),
        ({"callbacks": scheduler({2: 4})}, {"gradient_accumulation_steps": {0: 1, "2 epochs": 4}}),
        ({"callbacks": scheduler({0: 8}), "val_check_interval": 0.5}, {"validate_every": "0.5 epochs"}),
        ({"fast_dev_run": 3}, {"dry_run": 3}),
        ({"barebones": True}, off),
        ({"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, {"strategy": "cpu", "devices": 2}),
        ({"strategy": "ddp_spawn", "devices": 2}, {"strategy": "ddp"}),
        ({"strategy": unused, "devices": 2}, {"strategy": DDPConfig(find_unused_parameters=True)}),
        ({"strategy": "deepspeed_stage_3_offload", "devices": 2}, {"strategy": "zero3_offload"}),
        ({"strategy": "single_device"}, {"strategy": "auto", "devices": 1}),
    ]
    wrong = []
    for given, expected in rows:
        trainer = mapped(**given)
        for name, value in expected.items():
            found = getattr(trainer, name)
            if (str(found) if isinstance(value, str) else found) != value:
                wrong.append((given, name, found))
    for name in table.PRECISIONS:
        for each in {name, int(name) if name.isdigit() else name}:
            found = mapped(precision=each).precision.name  # type: ignore[union-attr]
            wrong += [] if found == table.PRECISIONS[name] else [({"precision": each}, "precision", found)]
    assert not wrong


def test_switches_of_torch_hold_for_the_length_of_a_run() -> None:
    def switches() -> tuple[bool, ...]:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        tries = torch.backends.cudnn.benchmark
        return torch.are_deterministic_algorithms_enabled(), warns, tries, torch.is_anomaly_enabled()

    seen: list[Any] = []

    def look(run: Any) -> None:
        seen.append(switches())
        if len(seen) == 3:
            raise KeyboardInterrupt

    before = switches()
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "devices": 1}
    given = {"deterministic": "warn", "benchmark": True, "detect_anomaly": True, "accelerator": "cpu"}
    trainer = mapped(**quiet, **given, callbacks=LambdaCallback(on_step_end=look))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Regression(), pairs())
    assert seen == [(True, True, True, True)] * 3
    assert switches() == before == (False, False, False, False)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="some of it is about a machine without GPUs")
def test_refusals() -> None:
    own = type("Own", (theirs.LearningRateMonitor,), {})()
    scheduler, saver = theirs.GradientAccumulationScheduler({2: 4}), theirs.ModelCheckpoint
    swa = theirs.StochasticWeightAveraging(0.1)
    epochs = "check_val_every_n_epoch"
    rows: list[tuple[Any, ...]] = [
        ({"max_epochs": -1}, "would have no end"),
        ({"max_epochs": None, "max_time": "12 hours"}, '"DD:HH:MM:SS"'),
        ({"val_check_interval": 0.5, epochs: 2}, "one of the two"),
        ({"val_check_interval": 10, "accumulate_grad_batches": 4}, "multiple of accumulate_grad_batches=4"),
        ({"callbacks": scheduler, "accumulate_grad_batches": 4}, "one of the two"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "both"}, "gradient_clip_algorithm='both'"),
        ({"strategy": "dpp"}, "Did you mean 'dp'"),
        ({**table.ROWS["sync_batchnorm"].needs, "sync_batchnorm": True}, "sync_batchnorm"),
        ({"gpus": 2}, "no argument 'gpus'", "devices=N, accelerator='gpu'"),
        ({"replace_sampler_ddp": False}, "give use_distributed_sampler"),
        ({"_target_": "lightning.Trainer"}, "a key of hydra"),
        ({"callbacks": [swa]}, "callbacks has StochasticWeightAveraging"),
        ({"callbacks": saver(), "enable_checkpointing": False}, "checkpoints are off"),
        ({"logger": "tb"}, "unknown logger 'tb'", "tensorboard"),
        ({"callbacks": [own]}, "Own, a subclass of Lightning's LearningRateMonitor"),
    ]
    cases = {str(given): (lambda given=given: mapped(**given), *words) for given, *words in rows}
    assert_refused((ConfigError, StrategyError), cases)


def test_model_checkpoint_becomes_a_checkpoint_policy(tmp_path: Path) -> None:
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
    named = from_lightning_arguments(max_epochs=1, callbacks=theirs.ModelCheckpoint(filename="a/{epoch}"))
    assert "filename='a/{epoch}' is not used" in "\n".join(map(str, named.differences))


def test_other_callbacks_and_loggers_become_ours(tmp_path: Path) -> None:
    own = LambdaCallback(on_fit_end=lambda run: None)
    limits = {"min_delta": 0.1, "patience": 0, "stopping_threshold": 2.0, "divergence_threshold": -1.0}
    stopping = theirs.EarlyStopping("val_loss", mode="max", strict=False, check_finite=False, **limits)
    timer, monitors = theirs.Timer("00:00:30:00"), (theirs.LearningRateMonitor(), theirs.DeviceStatsMonitor())
    tables = [
        loggers.CSVLogger(tmp_path, "a"),
        loggers.TensorBoardLogger(tmp_path, "b", version=3, log_graph=True),
    ]
    trainer = mapped(callbacks=[stopping, *monitors, timer, own], max_time="00:01:00:00", logger=tables)
    first, *others = trainer.callbacks
    assert [type(each) for each in others] == [LearningRateMonitor, DeviceStats, LambdaCallback]
    assert others[-1] is own
    assert isinstance(first, EarlyStopping)
    assert (first.metric, first.mode, first.patience, first.threshold) == ("val_loss", "max", 1, 0.1)
    assert (first.stop_at, first.diverged_at, first.strict, first.check_finite) == (2.0, -1.0, False, False)
    assert trainer.max_time == pytest.approx(1800, abs=1)
    table_, board = trainer.loggers
    assert table_.path.parent == tmp_path / "a" / "version_0"  # type: ignore[union-attr]
    assert board.directory == tmp_path / "b" / "version_3"  # type: ignore[union-attr]
    assert board._graph is True  # type: ignore[union-attr]
    strange = loggers.WandbLogger(experiment=object())  # type: ignore[arg-type]
    cases = {
        "wandb": (lambda: mapped(logger=loggers.WandbLogger(prefix="a")), "WandbLogger(prefix='a') has no"),
        "another run": (lambda: mapped(logger=strange), "has a run that is not the open one"),
    }
    assert_refused(ConfigError, cases)
    (saving,) = mapped(logger=loggers.WandbLogger(log_model=True)).loggers
    assert saving.artifacts == "best"  # type: ignore[union-attr]
    (bar,) = mapped(enable_model_summary=False).callbacks
    assert isinstance(bar, ProgressBar)
    (summary,) = mapped(enable_progress_bar=False).callbacks
    assert isinstance(summary, ModelSummary)
