"""Nothing given is silently ignored: what would have no effect is an error with the way out."""

from typing import Any

import pytest
from tests.promises.example import QUIET, Line, batches
from tests.support.refusals import assert_refused

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    DataError,
    DDPConfig,
    EarlyStopping,
    OptimizerConfig,
    Trainer,
)


def trainer(**options: Any) -> Trainer:
    return Trainer(**{"max_steps": 1, "strategy": "cpu", "checkpoint": False, **QUIET, **options})


class Misspelt(Callback):
    def on_step_ended(self, run: Any) -> None:
        """Nobody calls it."""


class Ported(Line):
    def train_dataloader(self) -> Any:
        """Nobody calls it either."""


class OtherColumns(Line):
    def forward(self, features: Any) -> Any:
        return super().forward(features)


def test_what_would_be_ignored_is_an_error_that_names_the_way_out() -> None:
    assert_refused(
        (ConfigError, DataError),
        {
            "argument": (lambda: trainer(max_epoch=3), "max_epoch", "'max_epochs'"),
            "another library's": (lambda: trainer(accumulate_grad_batches=2), "gradient_accumulation_steps"),
            "option": (lambda: OptimizerConfig("adamw", lr=1.0, weight_decy=0.1), "weight_decay"),
            "schedule": (lambda: OptimizerConfig("adamw", lr=1.0, schedule="cosinus"), "'cosine'"),
            "policy": (lambda: trainer(checkpoint=CheckpointConfig(save_top_k=1)), "'best'"),
            "strategy": (lambda: trainer(strategy="ddpp"), "'ddp'"),
            "strategy's option": (lambda: DDPConfig(bucket_md=50), "'bucket_mb'"),
            "precision": (lambda: trainer(precision="bf16"), "'bf16-mixed'"),
            "hook": (lambda: trainer(callbacks=[Misspelt()]), "on_step_ended", "'on_step_end'"),
            "method": (lambda: trainer().fit(Ported(), batches(2, 1)), "train_dataloader", "train_data"),
            "column": (lambda: trainer().fit(OtherColumns(), batches(2, 1)), "features", "'x'"),
        },
    )


def test_a_metric_that_never_comes_is_an_error_before_the_run_has_passed() -> None:
    stopping = EarlyStopping("validation/accurcy")
    with pytest.raises(ConfigError, match="validation/loss"):
        trainer(callbacks=[stopping], max_epochs=2, max_steps=None).fit(Line(), batches(2, 1), batches(2, 1))
