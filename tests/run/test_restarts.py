"""Runs that are left, killed at a border, or already over when they are resumed: nothing is lost, nothing
repeated.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DataError,
    EarlyStopping,
    LambdaCallback,
    OptimizerConfig,
    Trainer,
)


class Killed(BaseException):
    """Ends a run from inside, as a signal would."""


def metric_rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("left_at", [3, 7, 10, 14])
def test_leaving_the_loop_keeps_what_was_due_at_that_update(tmp_path: Path, left_at: int) -> None:
    def train(run_dir: Path, leave: int | None = None) -> Regression:
        options = {"patience": 0, "threshold": 0.5}
        plateau = OptimizerConfig("sgd", lr=0.05, schedule="reduce_on_plateau", schedule_options=options)
        task = Regression(plateau)
        often = {"validate_every": "7 steps", "log_every": 7}
        trainer = quiet(max_epochs=4, checkpoint=True, loggers="csv", run_dir=run_dir, **often)
        steps = trainer.steps(task, pairs(), pairs(seed=1), resume="auto")
        for step in steps:
            if step.update + 1 == leave:
                break
        steps.close()
        return task

    straight = train(tmp_path / "straight")
    train(tmp_path / "left", left_at)
    resumed = train(tmp_path / "left")
    assert weights(resumed) == weights(straight)
    validated = [row["step"] for row in metric_rows(tmp_path / "left") if row["validation/loss"]]
    assert validated == ["7", "14"]


class Stream:
    """Batches without an end, with a state of its own that outlives an epoch."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.drawn)
            self.drawn += 1
            features = torch.randn(2, 4, generator=generator)
            yield [features, features.sum(1, keepdim=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Rewound(Stream):
    """Six batches; a state that was loaded counts for the next iteration only."""

    def __init__(self) -> None:
        super().__init__()
        self._go_on = False

    def __iter__(self) -> Iterator[list[Tensor]]:
        if not self._go_on:
            self.drawn = 0
        self._go_on = False
        endless = super().__iter__()
        while self.drawn < 6:
            yield next(endless)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._go_on = True


@pytest.mark.parametrize(("kind", "limit"), [(Stream, 4), (Rewound, None), (Rewound, 4)])
@pytest.mark.parametrize("killed_at", [3, 4, 5, 6, 8])
def test_data_with_a_state_goes_on_from_any_update(
    tmp_path: Path, kind: type[Stream], limit: int | None, killed_at: int
) -> None:
    def train(run_dir: Path, kill: int | None = None) -> Regression:
        def at(run: Any) -> None:
            if run.progress.updates == kill:
                raise Killed

        task = Regression()
        trainer = quiet(
            max_steps=12,
            limit_train_batches=limit,
            run_dir=run_dir,
            callbacks=[LambdaCallback(on_step_start=at)],
            checkpoint=CheckpointConfig(every="1 step", by=None),
        )
        trainer.fit(task, kind(), resume="auto")
        return task

    straight = train(tmp_path / "straight")
    with pytest.raises(Killed):
        train(tmp_path / "killed", killed_at)
    assert weights(train(tmp_path / "killed")) == weights(straight)


def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    class KilledWhenStopped(Callback):
        def on_checkpoint_saved(self, run: Any) -> None:
            if run.stop_reason:
                raise Killed

    def trainer(*more: Any, patience: int = 2) -> Trainer:
        stopping = EarlyStopping(mode="max", patience=patience)
        return quiet(max_epochs=20, run_dir=tmp_path, checkpoint=True, callbacks=[stopping, *more])

    task = Regression()
    with pytest.raises(Killed):
        trainer(KilledWhenStopped()).fit(task, pairs(), pairs())
    for _ in range(2):
        resumed = Regression()
        result = trainer().fit(resumed, pairs(), pairs(), resume="auto")
        assert result.progress.epoch == 3
        assert result.stop_reason.startswith("early stopping")
        assert weights(resumed) == weights(task)
    assert trainer(patience=4).fit(Regression(), pairs(), pairs(), resume="auto").progress.epoch == 5


@pytest.mark.parametrize(("limit", "value"), [("max_epochs", 2), ("max_steps", 7)])
def test_a_checkpoint_past_the_end_of_the_run_is_refused(tmp_path: Path, limit: str, value: int) -> None:
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    with pytest.raises(
        CheckpointError, match=f"past the end.*update 15 in epoch 3.*{limit}={value}"
    ) as caught:
        quiet(run_dir=tmp_path, checkpoint=True, **{limit: value}).fit(Regression(), pairs(), resume="auto")
    assert not any("resume='auto'" in note for note in caught.value.__notes__)


class Constant:
    """A metric that no checkpoint can hold."""

    def update(self, *inputs: Any) -> None:
        """Nothing."""

    def compute(self) -> float:
        return 7.0

    def reset(self) -> None:
        """Nothing."""


def test_a_metric_that_cannot_be_stored_is_refused_before_training(tmp_path: Path) -> None:
    class Measured(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"constant": Constant()}

        def training_step(self, batch: Any) -> Any:
            raise AssertionError("trained")

    with pytest.raises(CheckpointError, match=r"'constant' .*no state_dict"):
        quiet(max_epochs=1, run_dir=tmp_path, checkpoint=True).fit(Measured(), pairs())


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_a_declared_metric_may_not_take_the_name_of_a_returned_value(stage: str) -> None:
    class Measured(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"loss": Constant()}

    trainer = quiet(max_epochs=1, log_every=1)
    with pytest.raises(ConfigError, match=r"returns a value 'loss', and metrics\(\) declares one"):
        trainer.fit(Measured(), pairs()) if stage == "training" else trainer.validate(Measured(), pairs())


def test_evaluation_counts_the_samples_that_the_loader_would_drop() -> None:
    whole = quiet().validate(Regression(), pairs(count=11, batch_size=4))
    assert quiet().validate(Regression(), pairs(count=11, batch_size=4, drop_last=True)) == whole
    assert sum(map(len, quiet().predict(Regression(), pairs(count=11, batch_size=4, drop_last=True)))) == 11
    trained = quiet(max_epochs=1).fit(Regression(), pairs(count=11, batch_size=4, drop_last=True))
    assert trained.progress.samples == 8


def test_a_list_of_loaders_is_refused_with_the_way_to_name_them() -> None:
    with pytest.raises(DataError, match=r"a list of loaders.*\{\"first\": loader"):
        quiet(max_epochs=1).fit(Regression(), pairs(), [pairs(), pairs()])


def test_a_loss_without_a_graph_is_refused() -> None:
    class Detached(Regression):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return super().loss(outputs, batch).detach()

    with pytest.raises(ConfigError, match="depends on no parameter"):
        quiet(max_epochs=1).fit(Detached(), pairs())


def test_a_tensor_with_a_graph_can_be_logged() -> None:
    def log_norm(run: Any) -> None:
        run.log("norm", run.task.line.weight.norm())

    trainer = quiet(max_epochs=1, log_every=1, callbacks=[LambdaCallback(on_log=log_norm)])
    result = trainer.fit(Regression(), pairs())
    assert result.metrics["norm"] > 0


@pytest.mark.parametrize(
    ("given", "ours"),
    [("accumulate_grad_batches", "gradient_accumulation_steps"), ("gradient_clip_val", "max_grad_norm")],
)
def test_what_other_libraries_call_an_argument_is_translated(given: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"no argument '{given}'\. Here it is called '{ours}'"):
        Trainer(**{given: 4})


def test_what_a_launcher_is_told_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no argument 'max_restarts'.*drivetrain launch --max-restarts"):
        Trainer(max_restarts=3)  # type: ignore[call-arg]


def test_what_other_libraries_call_a_hook_is_translated() -> None:
    class Ported:
        def on_train_batch_end(self, run: Any) -> None:
            """Nothing."""

        def on_log(self, run: Any) -> None:
            """Nothing."""

    with pytest.raises(ConfigError, match=r"on_train_batch_end is no hook\. Here it is called 'on_step_end'"):
        quiet(callbacks=[Ported()])


def test_what_a_launcher_may_start_again_goes_on_without_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    quiet(max_epochs=1, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    seen: list[int] = []
    look = LambdaCallback(on_step_start=lambda run: seen.append(run.progress.updates))
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True, callbacks=[look]).fit(Regression(), pairs())
    assert seen == [5, 6, 7, 8, 9]
