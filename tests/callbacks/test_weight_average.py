"""Averages of the weights: their numbers, what evaluates and saves with them, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    LossSpike,
    OptimizerConfig,
    Run,
    StrategyError,
    WeightAverage,
)
from drivetrain.checkpoint.weights.load import load_weights
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.testing import run_distributed

OF_KIND: dict[str, Any] = {"ema": {"decay": 0.9}, "swa": {}, "lawa": {"window": 2}}
"""The arguments of each kind, for the averages of `expected`."""


class Trajectory(Callback):
    """The trained weights after each update, and what each validation had."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_step_end(self, run: Run) -> None:
        self.after.append(flat(run.task))

    def on_evaluation_step_end(self, run: Run) -> None:
        self.validated.append(flat(run.task))


def flat(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().clone() for each in task.parameters()])


def expected(kind: str, seen: list[Tensor]) -> Tensor:
    """The average of weights by hand."""
    if kind == "swa":
        return torch.stack(seen).double().mean(0).float()
    if kind == "lawa":
        return torch.stack(seen[-2:]).double().mean(0).float()
    average = seen[0].double()
    for each in seen[1:]:
        average = 0.9 * average + 0.1 * each.double()
    return average.float()


@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ({"every": 1}, lambda number: True),
        ({"every": "2 steps", "start": "3 steps"}, lambda number: number > 3 and number % 2 == 0),
        ({"every": "1 epoch"}, lambda number: number % 5 == 0),
        ({"every": "1 epoch", "start": "1 epoch"}, lambda number: number % 5 == 0 and number > 5),
    ],
)
def test_the_average_is_the_papers_and_training_goes_on_as_without(kind: str, points: Any, kept: Any) -> None:
    plain, seen = Regression(), Trajectory()
    quiet(max_epochs=3, callbacks=[without := Trajectory()]).fit(plain, pairs(), pairs(4))
    task = Regression()
    average = WeightAverage(kind, **OF_KIND[kind], **points)
    quiet(max_epochs=3, callbacks=[average, seen]).fit(task, pairs(), pairs(4))
    assert torch.equal(torch.stack(seen.after), torch.stack(without.after))
    taken = [each for number, each in enumerate(seen.after, 1) if kept(number)]
    assert average.averaged == len(taken)
    torch.testing.assert_close(flat(task), expected(kind, taken), rtol=1e-6, atol=1e-7)
    # The validation after the second epoch.
    by_then = [each for number, each in enumerate(seen.after[:10], 1) if kept(number)]
    torch.testing.assert_close(seen.validated[2], expected(kind, by_then), rtol=1e-6, atol=1e-7)


def test_by_choice_neither_evaluates_nor_saves_with_it() -> None:
    plain, seen = Regression(), Trajectory()
    quiet(max_epochs=2).fit(plain, pairs(), pairs(4))
    task = Regression()
    quiet(max_epochs=2, callbacks=[WeightAverage(evaluate=False, save=False), seen]).fit(
        task, pairs(), pairs(4)
    )
    assert weights(task) == weights(plain)
    assert torch.equal(seen.validated[-1], seen.after[-1])


def test_checkpoints_and_finished_weights_hold_the_average(tmp_path: Path) -> None:
    seen = Trajectory()
    config = CheckpointConfig(every="1 epoch", best=1, by="validation/loss")
    trainer = quiet(
        max_epochs=3, run_dir=tmp_path, checkpoint=config, callbacks=[WeightAverage(decay=0.9), seen]
    )
    result = trainer.fit(Regression(), pairs(), pairs(4))
    average = expected("ema", seen.after)
    for path in (result.model_path, result.last_checkpoint):
        stored = load_weights(path)
        found = torch.cat([stored["line.weight"].flatten(), stored["line.bias"]])
        torch.testing.assert_close(found, average, rtol=1e-6, atol=1e-7)
    assert result.best_checkpoint is not None
    again = quiet().validate(Regression.from_checkpoint(result.best_checkpoint), pairs(4))
    assert again["validation/loss"] == pytest.approx(result.metrics["validation/loss"], rel=1e-6)


def fitted(
    folder: Path,
    name: str,
    kind: str,
    updates: int,
    resume: str | None = None,
    checkpoint: Any = True,
    **more: Any,
) -> Any:
    average = WeightAverage(kind, **{**OF_KIND[kind], "every": 2, **more})
    task = Regression(OptimizerConfig(name, lr=0.05), dropout=0.2)
    options = {"max_steps": updates, "run_dir": folder, "checkpoint": checkpoint, "validate_every": "3 steps"}
    quiet(**options, callbacks=[average]).fit(task, pairs(), pairs(4), resume=resume)
    return weights(task), average.averaged


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("kind", "save"), [("ema", True), ("ema", False), ("swa", True), ("lawa", True)])
def test_a_resume_is_bitwise(name: str, kind: str, save: bool, tmp_path: Path) -> None:
    straight = fitted(tmp_path / "straight", name, kind, 13, save=save)
    for updates in (1, 7):
        with heard("nothing was averaged"):
            fitted(tmp_path / str(updates), name, kind, updates, save=save)
        assert fitted(tmp_path / str(updates), name, kind, 13, "auto", save=save) == straight


def test_a_checkpoint_that_is_written_while_training_goes_on_is_whole(tmp_path: Path) -> None:
    policy = CheckpointConfig(every="4 steps", keep_last=9, asynchronous=True)
    straight = fitted(tmp_path / "one", "adamw", "ema", 13, checkpoint=policy)
    for updates in (4, 8, 12):
        path = str(tmp_path / "one" / "checkpoints" / f"update-{updates:08}")
        assert fitted(tmp_path / str(updates), "adamw", "ema", 13, path) == straight


@pytest.mark.parametrize(("kind", "other"), [("swa", {}), ("lawa", {"window": 3})], ids=["kind", "window"])
def test_other_averages_are_refused_at_a_resume(kind: str, other: dict[str, Any], tmp_path: Path) -> None:
    fitted(tmp_path, "sgd", "lawa", 7)
    with pytest.raises(ConfigError, match=r"averages of WeightAverage\('lawa', window=2\), and this run has"):
        fitted(tmp_path, "sgd", kind, 13, "auto", **other)


def test_a_resume_without_the_callback_does_not_train_on_from_the_average(tmp_path: Path) -> None:
    fitted(tmp_path / "saved", "adamw", "ema", 7)
    options: dict[str, Any] = {"max_steps": 13, "checkpoint": True}
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.2)
    with (
        warned("does not have: WeightAverage"),
        pytest.raises(CheckpointError, match=r"are averages, .* Resume with the callback"),
    ):
        quiet(run_dir=tmp_path / "saved", **options).fit(task, pairs(), resume="auto")
    fitted(tmp_path / "beside", "adamw", "ema", 7, save=False)
    with warned("does not have: WeightAverage"):
        quiet(run_dir=tmp_path / "beside", **options).fit(task, pairs(), resume="auto")
    plain = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.2)
    quiet(max_steps=13).fit(plain, pairs())
    assert weights(task) == weights(plain)


def _on_a_rank(rank_dir: str, strategy: str, kind: str) -> Any:
    folder = Path(rank_dir)
    more = {"strategy": strategy, "devices": 2}
    straight = _sharded(folder / "straight", kind, 12, False, more)
    _sharded(folder / "parts", kind, 7, False, more)
    return straight, _sharded(folder / "parts", kind, 12, True, more)


def _sharded(folder: Path, kind: str, updates: int, resume: bool, more: Any, batch_size: int = 2) -> Any:
    task = Regression(OptimizerConfig("adamw", lr=0.05))
    average = WeightAverage(kind, **OF_KIND[kind], every=2)
    trainer = quiet(
        max_steps=updates,
        run_dir=folder,
        checkpoint=True,
        validate_every="3 steps",
        callbacks=[average],
        **more,
    )
    result = trainer.fit(task, pairs(24, batch_size), pairs(4), resume="auto" if resume else None)
    return weights(task), result.metrics["validation/loss"], flat(task).tolist()


@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_average_of_one_process_and_resume_bitwise(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    first, second = run_distributed(_on_a_rank, str(tmp_path), strategy, kind, timeout=180)
    assert first == second
    straight, resumed = first
    assert straight == resumed
    _, loss, alone_flat = _sharded(tmp_path / "alone", kind, 12, False, {}, batch_size=4)
    assert straight[1] == pytest.approx(loss, rel=1e-5)
    assert straight[2] == pytest.approx(alone_flat, abs=1e-6)


def _with_and_without_validations() -> Any:
    found = []
    for every in ("2 steps", None):
        task = Regression(OptimizerConfig("sgd", lr=0.05))
        average = WeightAverage("ema", decay=0.9, save=False)
        trainer = quiet(max_steps=8, strategy="fsdp", devices=2, validate_every=every, callbacks=[average])
        trainer.fit(task, pairs(16), pairs(4))
        found.append(weights(task))
    return found


def test_shards_are_trained_on_from_their_own_weights_after_a_validation_of_the_average() -> None:
    for validated, not_validated in run_distributed(_with_and_without_validations, timeout=180):
        assert validated == not_validated


class Normed(Regression):
    """Has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.norm(features))


def test_batch_norms_are_renewed_at_the_end_and_only_then(tmp_path: Path) -> None:
    seen, task = Trajectory(), Normed()
    trainer = quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True, callbacks=[WeightAverage("swa"), seen])
    result = trainer.fit(task, pairs(), pairs(4))
    assert torch.equal(seen.validated[-1], seen.after[-1])
    by_hand = Normed()
    by_hand.load_state_dict(task.state_dict())
    features = DataLoader(pairs().dataset.tensors[0], batch_size=2)
    update_bn(features, by_hand)
    torch.testing.assert_close(task.norm.running_mean, by_hand.norm.running_mean)
    torch.testing.assert_close(task.norm.running_var, by_hand.norm.running_var)
    assert task.norm.momentum == 0.1
    stored = load_weights(result.model_path)
    assert torch.equal(stored["norm.running_mean"], task.norm.running_mean)


def test_an_error_leaves_the_trained_weights() -> None:
    seen, task = Trajectory(), Regression()

    class Fails(Regression):
        def validation_step(self, batch: Any) -> Any:
            raise ValueError("broken")

    task = Fails()
    with pytest.raises(ValueError, match="broken"):
        quiet(max_epochs=1, callbacks=[WeightAverage(decay=0.5), seen]).fit(task, pairs(), pairs(4))
    assert torch.equal(flat(task), seen.after[-1])


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_after_the_fit_leaves_the_task_its_average(verb: str) -> None:
    task = Regression()
    trainer = quiet(max_epochs=2, callbacks=[WeightAverage(decay=0.9)])
    trainer.fit(task, pairs(), pairs(4))
    average = weights(task)
    getattr(trainer, verb)(task, pairs(4))
    assert weights(task) == average


def test_a_fit_after_one_that_was_rolled_back_begins_a_new_average(tmp_path: Path) -> None:
    class Spiking(Regression):
        """The loss of its fifteenth step is a spike, if asked for."""

        spikes = False

        def training_step(self, batch: Any) -> Tensor:
            return self.loss(self(batch[0]), batch) * self.factor()

        def factor(self) -> float:
            self.steps = getattr(self, "steps", 0) + 1
            return 1e4 if self.steps == 15 and self.spikes else 1.0

    average = WeightAverage(decay=0.9)
    spike = LossSpike("rollback", window=10, threshold=1000)
    checkpoint = CheckpointConfig(every="4 steps", best=0, by=None)
    options: dict[str, Any] = {"max_steps": 20, "max_epochs": None, "log_every": 1, "checkpoint": checkpoint}
    trainers = [
        quiet(callbacks=[average, spike], run_dir=tmp_path / name, **options) for name in ("first", "second")
    ]
    task = Spiking()
    task.spikes = True
    trainers[0].fit(task, pairs(60))
    assert spike.rollbacks == 1
    found, fresh = Spiking(), Spiking()
    trainers[1].fit(found, pairs(60))
    quiet(callbacks=[WeightAverage(decay=0.9)], max_steps=20, max_epochs=None).fit(fresh, pairs(60))
    assert weights(found) == weights(fresh)


def test_weights_of_16_bits_are_averaged_in_float32() -> None:
    task, seen = Regression(), Trajectory()
    average = WeightAverage(decay=0.999)
    quiet(max_steps=40, precision="bf16-true-nearest", callbacks=[average, seen]).fit(task, pairs(80))
    by_hand = seen.after[0].double()
    for each in seen.after[1:]:
        by_hand = 0.999 * by_hand + 0.001 * each.double()
    # In 16 bits each of these steps would be lost in rounding.
    assert torch.equal(flat(task), by_hand.to(torch.bfloat16))
    assert not torch.equal(flat(task), seen.after[0])


def test_complex_weights_are_averaged_whole() -> None:
    class Turned(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4) * (1 + 2j))

        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features * (self.phase * features).abs())

    task, seen = Turned(), Trajectory()
    quiet(max_steps=6, callbacks=[WeightAverage(decay=0.9), seen]).fit(task, pairs(12))
    assert flat(task).is_complex()
    average = seen.after[0]
    for each in seen.after[1:]:
        average = 0.9 * average + 0.1 * each
    torch.testing.assert_close(flat(task), average, rtol=1e-5, atol=1e-6)


def test_batch_norms_are_not_renewed_from_data_that_may_not_end() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield from pairs()

    with pytest.raises(ConfigError, match="no known length"):
        quiet(max_steps=1, callbacks=[WeightAverage("swa")]).fit(Normed(), Endless())
    quiet(max_steps=1, callbacks=[WeightAverage("swa", every=1, save=False)]).fit(Normed(), Endless())


@pytest.mark.parametrize("points", [{"every": "5 epochs"}, {"start": "3 epochs"}], ids=str)
def test_a_fit_that_averages_nothing_says_so(points: dict[str, str]) -> None:
    with warned("WeightAverage: no point of every=.* came in the 10 updates of this fit"):
        quiet(max_epochs=2, callbacks=[WeightAverage("swa", **points)]).fit(Regression(), pairs())
    quiet(max_epochs=2, callbacks=[WeightAverage("swa", start="1 epoch")]).fit(Regression(), pairs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "mean"}, "kind"),
        ({"decay": 1.0}, "below 1"),
        ({"decay": 0}, "decay"),
        ({"every": "10 minutes"}, r"WeightAverage\(every=\) takes steps or whole epochs"),
        ({"every": "0.5 epochs"}, "whole epochs"),
        ({"kind": "lawa", "window": 0}, "window"),
        ({"kind": "swa", "decay": 0.9}, "decay is for 'ema' alone"),
        ({"window": 3}, "window is for 'lawa' alone"),
        ({"save": 1}, "save"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightAverage(**arguments)


def test_what_keeps_weights_of_its_own_is_refused() -> None:
    for name in ("deepspeed", "xla_fsdp", "xla_fsdp_v2"):
        kind: Any = STRATEGIES[name]
        words = rf"WeightAverage with strategy '{name}': .* of (its|their) own"
        with pytest.raises(StrategyError, match=words):
            WeightAverage().check_trainer(quiet(), kind)
    with pytest.raises(ConfigError, match="callbacks has 2 WeightAverage, which would replace each other's"):
        quiet(max_steps=1, callbacks=[WeightAverage(), WeightAverage("swa")])
    with pytest.raises(ConfigError, match="evaluation_precision"):
        quiet(max_steps=1, evaluation_precision="bf16-true", callbacks=[WeightAverage()])
