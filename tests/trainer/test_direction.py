"""Which way a value is better: from the metric, from its name, or from the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain import CheckpointConfig, ConfigError, EarlyStopping, OptimizerConfig, TorchSchedule
from drivetrain.core.direction import direction_of

PATIENT = {"patience": 0, "threshold": 0.0}


class Epochs:  # a metric that grows by each evaluation
    def __init__(self, higher_is_better: bool | None = None) -> None:
        self.higher_is_better = higher_is_better
        self.count = 0

    def update(self, *_: Any) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> float:
        self.count += 1
        return float(self.count)


def task(schedule: Any) -> Regression:
    metrics = {"f1": Epochs(), "goodness": Epochs(), "goods": Epochs(True), "costs": Epochs(False)}
    made = variant(metrics=lambda self: metrics)
    return made(schedule if callable(schedule) else OptimizerConfig("sgd", lr=0.1, **schedule))


def plateau(metric: str) -> dict[str, Any]:
    return {"schedule": "reduce_on_plateau", "schedule_options": {"metric": metric, **PATIENT}}


def torch_plateau(metric: str, *mode: str) -> Any:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        return optimizer, TorchSchedule(ReduceLROnPlateau(optimizer, *mode, **PATIENT), metric=metric)

    return make


def test_what_compares_values_knows_which_way_is_better(tmp_path: Path) -> None:
    options = {"max_epochs": 3, "train_metrics": False, "run_dir": tmp_path}
    policy = CheckpointConfig(every=None, keep_last=0, best=1, by="validation/goods")
    stops = [EarlyStopping("validation/f1", patience=1), EarlyStopping("validation/costs", patience=2)]
    trained = task(plateau("validation/f1"))
    trainer = quiet(checkpoint=policy, callbacks=stops, **options)
    result = trainer.fit(trained, pairs(4), pairs(2))
    assert "validation/costs did not improve on 1" in result.stop_reason
    assert str(result.best_checkpoint).endswith("step-00000006")
    assert quiet(**options).validate(trained, pairs(2), checkpoint="best")
    chosen = quiet(
        max_epochs=3, train_metrics=False, callbacks=[EarlyStopping("validation/f1", "min", patience=1)]
    )
    assert chosen.fit(task(torch_plateau("validation/f1", "max")), pairs(4), pairs(2)).progress.epoch == 2


def test_an_unknown_direction_is_refused_at_the_start(tmp_path: Path) -> None:
    def fit(schedule: Any = None, **options: Any) -> Any:
        trainer = quiet(max_epochs=1, run_dir=tmp_path, train_metrics=False, **options)
        return lambda: trainer.fit(task(schedule or {}), pairs(4), pairs(2))

    name = "validation/goodness"
    table: dict[str, tuple[Any, ...]] = {
        "checkpoint": (
            fit(checkpoint=CheckpointConfig(by=name)),
            f"by='{name}', mode='max'",
            "higher_is_better",
        ),
        "stopping": (fit(callbacks=[EarlyStopping(name)]), f"EarlyStopping('{name}', mode='max')"),
        "plateau": (fit(plateau(name)), f"schedule_options={{'metric': '{name}', 'mode': 'max'}}"),
        "torch's default": (fit(torch_plateau(name)), "is unknown", "mode='min')"),
        "torch's wrong default": (fit(torch_plateau("validation/f1")), "more of 'validation/f1' is better"),
    }
    assert_refused(ConfigError, table)


LESS = (
    "loss val_loss valloss perplexity word_error_rate WER MeanSquaredError NRMSE top_1_error bits_per_byte"
    " accuracy_error false_positive_rate log_loss kl_divergence negative_log_likelihood"
)
MORE = (
    "accuracy valAccuracy top5_acc MulticlassF1Score f1_macro BinaryAUROC mIoU mAP50 recall@10 rougeL bleu4"
    " neg_mean_squared_error exact_match log_prob R2Score errors/accuracy accuracy/0"
)


def test_a_well_known_name_says_which_way_is_better() -> None:
    assert {name: direction_of(name) for name in LESS.split()} == dict.fromkeys(LESS.split(), "min")
    assert {name: direction_of(name) for name in MORE.split()} == dict.fromkeys(MORE.split(), "max")
    assert [direction_of(name) for name in ("score", "objective", "latency", "mapping", "")] == [None] * 5
