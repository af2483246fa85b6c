"""Arguments of callbacks that are refused, with the word that helps."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.fragile import GOOD, Fragile, marked
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, Regression, duels, pairs, quiet, variant
from torch.utils.data import default_collate

from drivetrain import callbacks as cb
from drivetrain.core.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.strategies import STRATEGIES
from drivetrain.task.model_info import ModelInfo

ONE = {"wait": 1, "warmup": 1, "active": 1}


def test_arguments_of_callbacks_that_act_are_refused() -> None:
    stopping, spike, average = cb.EarlyStopping, cb.LossSpike, cb.WeightAverage
    freeze, cut = cb.Freeze, cb.SequenceLength
    table: dict[str, tuple[Any, ...]] = {
        "mode": (partial(stopping, mode="mn"), "'mn'", "did you mean 'min'"),
        "metric": (partial(stopping, metric=None), "metric=", "'validation/loss'"),
        "threshold": (partial(stopping, threshold=-0.1), "threshold=", "at least 0"),
        "strict": (partial(stopping, strict=1), "strict"),
        "limits, max": (partial(stopping, stop_at=0.5, diverged_at=0.9, mode="max"), "the worse of the two"),
        "min_delta": (partial(stopping, min_delta=0.1), "threshold"),
        "roll back": (partial(spike, "rollback"), "by name, as in LossSpike(metric=...)"),
        "limit of skip": (partial(spike, max_in_a_row=3), "'max_in_a_row'", "'window'"),
        "decay 1": (partial(average, decay=1.0), "below 1"),
        "every of time": (partial(average, every="10 minutes"), "every=", "cannot be a time"),
        "decay of swa": (partial(average, kind="swa", decay=0.9), "decay is for 'ema' alone"),
        "no pattern": (partial(freeze, {}), "needs a pattern"),
        "until twice": (partial(freeze, {"encoder": None}, until=3), "leave out until="),
        "until of time": (partial(freeze, "encoder", until="10 minutes"), "'10 minutes'"),
        "misspelt until": (partial(freeze, "encoder", unitl="2 epochs"), "did you mean 'until'"),
        "point of time": (partial(cut, {0: 8, "1 hour": 16}, "tokens"), "epochs, samples or tokens"),
        "dimension 0": (partial(cut, 8, fields={"labels": 0}), "dimension 0 counts samples"),
        "hook": (partial(cb.LambdaCallback, on_step_ends=print), "did you mean 'on_step_end'"),
    }
    assert_refused(ConfigError, table)


def test_arguments_of_callbacks_that_watch_are_refused() -> None:
    profile, stats = cb.Profile, cb.DeviceStats
    matching = quiet(max_steps=1, callbacks=[cb.WeightAverage(parameters="lin.*")])
    table: dict[str, tuple[Any, ...]] = {
        "kind": (partial(profile, kinds="traces"), "did you mean 'trace'"),
        "ranks": (partial(profile, all_ranks="all"), "all_ranks", "True or False"),
        "misspelt active": (partial(profile, {**ONE, "actve": 1}), "did you mean 'active'"),
        "schedule of a table": (partial(profile, ONE, "table"), "no effect on 'table'"),
        "misspelt option": (partial(profile, options={"record_shape": True}), "did you mean 'record_shapes'"),
        "no active step": (partial(profile, {**ONE, "active": 0}), "'active': 0", "Example: {'wait': 8"),
        "schedule": (partial(profile, lambda number: 3), "takes the arguments", "'wait': 8"),
        "no wait": (partial(profile, {"warmup": 1, "active": 1}), "'wait'", "Example: {'wait': 8"),
        "interval of time": (partial(stats, every="10 minutes"), "every=", "whole epochs"),
        "over_ranks": (partial(stats, over_ranks="sum"), "over_ranks", "'sum'"),
        "module": (partial(cb.summarize, "net"), "module", "'net'"),
        "no decay": (partial(cb.WeightAverage, decay=()), "decay=()"),
        "a decay twice": (partial(cb.WeightAverage, decay=(0.9, 0.9)), "different numbers"),
        "a glob": (partial(cb.WeightAverage, parameters=3), "a glob", "not 3"),
        "no match": (partial(matching.fit, Regression(), pairs()), "'lin.*' in WeightAverage(parameters=)"),
        "no average yet": (partial(cb.WeightAverage().used(0.999).__enter__), "decay=0.999"),
        "ignore": (partial(cb.NonFiniteDetector, "mask"), "ignore='mask'"),
    }  # fmt: skip
    assert_refused(ConfigError, table)


def test_callbacks_that_do_not_fit_the_trainer_are_refused_when_it_is_made(tmp_path: Path) -> None:
    def with_callbacks(*callbacks: Any, **options: Any) -> Any:
        return partial(quiet, max_steps=1, callbacks=callbacks, **options)

    ramp = cb.SequenceLength({0: 4, "9 samples": 8}, "tokens")
    table: dict[str, tuple[Any, ...]] = {
        "two averages": (with_callbacks(cb.WeightAverage(), cb.WeightAverage("swa")), "2 WeightAverage"),
        "two freezes": (with_callbacks(cb.Freeze("a"), cb.Freeze("b")), "2 Freeze", "one another"),
        "profile without a directory": (with_callbacks(cb.Profile()), "Trainer(run_dir="),
        "skipped samples": (with_callbacks(ramp, on_bad_batch="skip"), "on_bad_batch='skip'"),
        "detector": (with_callbacks(cb.NonFiniteDetector(), compile=True), "compile=False"),
    }  # fmt: skip
    assert_refused(ConfigError, table)


def test_strategies_that_cannot_do_what_a_callback_asks_are_refused_by_name() -> None:
    def on(callback: Any, name: str) -> Any:
        return lambda: callback.check_trainer(quiet(), object.__new__(STRATEGIES[name]))

    hiding = SimpleNamespace(name="mine", refuses={"local_parts": "hidden"}.get)
    shards = partial(cb.GradientNorms().check_trainer, quiet(), hiding)
    table: dict[str, tuple[Any, ...]] = {
        "average": (on(cb.WeightAverage(), "deepspeed"), "'deepspeed'", "own"),
        "norms": (on(cb.GradientNorms(), "deepspeed"), "GradientNorms with strategy 'deepspeed'"),
        "shards": (shards, "GradientNorms with strategy 'mine': hidden"),
    }  # fmt: skip
    for name in ("deepspeed", "xla"):
        strategy = SimpleNamespace(name=name, device=torch.device("cpu" if name == "deepspeed" else "xla"))
        check = partial(cb.MemoryReport().check_trainer, quiet(), strategy)
        table[f"memory {name}"] = (check, f"MemoryReport with strategy '{name}'")
    assert_refused(StrategyError, table)


def test_a_fit_refuses_names_that_match_nothing_with_the_nearest(tmp_path: Path) -> None:
    def fit(callback: Any, task: Any = None, data: Any = None, **options: Any) -> Any:
        trainer = quiet(max_epochs=1, log_every="2 steps", callbacks=[callback], **options)
        return lambda: trainer.fit(task or Regression(), data or pairs())

    fragile = Fragile(), marked([GOOD] * 16, 2)
    saves: Any = {"run_dir": tmp_path / "saves", "checkpoint": True}
    batch = [default_collate(duels())]
    table: dict[str, tuple[Any, ...]] = {
        "spike": (fit(cb.LossSpike(metric="los")), "metric='los'", "did you mean 'loss'"),
        "spike of several": (fit(cb.LossSpike(), Duel(), batch), "'loss'", "'discriminator_loss'"),
        "detector": (fit(cb.NonFiniteDetector(["net*", "nett*"]), *fragile), "'nett*'"),
        "late assets": (
            fit(cb.LambdaCallback(on_step_end=lambda run: run.add_assets([])), **saves), "for on_fit_start"),
        "assets": (
            fit(cb.Callback(), variant(model_info=lambda self: ModelInfo(assets=[3]))(), **saves),
            "variant.model_info()[0]", "a int"),
        "assets nowhere": (partial(quiet, assets={"text": print}), "checkpoint=False saves none"),
    }  # fmt: skip
    assert_refused(ConfigError, table)


def test_missing_packages_are_errors_that_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "drivetrain.integrations.psutil.device_stats.is_installed"
    monkeypatch.setattr(where, lambda package: False)
    monkeypatch.setattr(torch.version, "hip", None)
    make = partial(quiet, max_steps=1, callbacks=[cb.DeviceStats()])
    words = ("'psutil'", "pip install 'drivetrain[stats]'")
    assert_refused(MissingDependencyError, {"psutil": (make, *words)})
    monkeypatch.setattr(where, lambda package: package == "psutil")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    check = partial(cb.DeviceStats().check_trainer, quiet(), on_gpu)
    assert_refused(MissingDependencyError, {"gpu": (check, "NVIDIA GPU", "'nvidia-ml-py'")})
    make()
