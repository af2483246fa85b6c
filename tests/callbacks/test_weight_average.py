"""Averages of the weights: their numbers, what evaluates and saves with them, and resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, Run
from drivetrain.callbacks import Callback, WeightAverage
from drivetrain.checkpoint.weights.load import load_weights
from drivetrain.core.errors import CheckpointError, ConfigError

OF_KIND: dict[str, Any] = {"ema": {"decay": 0.9}, "swa": {}}


class Trajectory(Callback):  # the trained weights after each step, and what each validation had
    def __init__(self) -> None:
        self.after: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_step_end(self, run: Run) -> None:
        self.after.append(flat(run.task))

    def on_evaluation_step_end(self, run: Run) -> None:
        self.validated.append(flat(run.task))


def flat(task: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().clone() for each in task.parameters()])


def expected(kind: str, seen: list[Tensor]) -> Tensor:  # the average of weights by hand
    if kind != "ema":
        return torch.stack(seen).double().mean(0).float()
    average = seen[0].double()
    for each in seen[1:]:
        average = 0.9 * average + 0.1 * each.double()
    return average.float()


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_average_is_the_papers_and_training_goes_on_as_without_it(kind: str) -> None:
    quiet(max_epochs=3, callbacks=[without := Trajectory()]).fit(Regression(), pairs(), pairs(4))
    points: list[tuple[dict[str, Any], Any]] = [
        ({"every": 1}, lambda number: True),
        ({"every": "2 steps", "start": "3 steps"}, lambda number: number > 3 and number % 2 == 0),
        ({"every": "1 epoch"}, lambda number: number % 5 == 0),
        ({"every": "1 epoch", "start": "1 epoch"}, lambda number: number % 5 == 0 and number > 5),
    ]
    for when, kept in points:
        task, seen = Regression(), Trajectory()
        average = WeightAverage(kind, **OF_KIND[kind], **when)
        quiet(max_epochs=3, callbacks=[average, seen]).fit(task, pairs(), pairs(4))
        assert torch.equal(torch.stack(seen.after), torch.stack(without.after))
        taken = [each for number, each in enumerate(seen.after, 1) if kept(number)]
        assert average.averaged == len(taken)
        torch.testing.assert_close(flat(task), expected(kind, taken), rtol=1e-6, atol=1e-7)
        # The validation after the second epoch.
        by_then = [each for number, each in enumerate(seen.after[:10], 1) if kept(number)]
        torch.testing.assert_close(seen.validated[2], expected(kind, by_then), rtol=1e-6, atol=1e-7)


def with_decays(folder: Path, strategy: str, epochs: int, resume: str | None = None) -> list[Any]:
    """Average the weight alone, by two decays; return the trajectory, and each average at each validation."""
    task, seen, found = Regression(), Trajectory(), list[Tensor]()
    average = WeightAverage(decay=(0.9, 0.5), parameters="*.weight", start="2 steps")

    def note(run: Run) -> None:
        for decay in (0.9, 0.5):
            with average.used(decay), run.gathered():
                found.append(flat(run.task))
        with run.gathered():  # the validation's, which is the first decay's
            assert torch.equal(flat(run.task), found[-2])
        assert average.averaged == run.progress.steps - 2

    notes = [average, LambdaCallback(on_evaluation_end=note), *([seen] if strategy == "cpu" else [])]
    devices = 1 if strategy == "cpu" else 2
    options: Any = {
        "strategy": strategy,
        "devices": devices,
        "run_dir": folder / strategy,
        "checkpoint": True,
    }
    trainer = quiet(max_epochs=epochs, callbacks=notes, sanity_validation=None, **options)
    trainer.fit(task, pairs(batch_size=2 // devices), pairs(4, 2), resume=resume)
    return [seen.after, found, flat(task)]


def resumed_with_decays(folder: Path, strategy: str) -> tuple[list[Tensor], Tensor]:
    with_decays(folder, strategy, 1)
    _, found, end = with_decays(folder, strategy, 2, "auto")
    return found, end


def test_averages_by_several_decays_and_of_some_parameters_are_those_by_hand(tmp_path: Path) -> None:
    after, found, end = with_decays(tmp_path / "whole", "cpu", 2)
    wanted = []
    for steps in (5, 10):
        for decay in (0.9, 0.5):
            average = after[2]
            for each in after[3:steps]:
                average = decay * average + (1 - decay) * each
            wanted.append(torch.cat([average[:-1], after[steps - 1][-1:]]))  # the bias as it was trained
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=0, atol=1e-6)
    assert torch.equal(end, found[-2])  # the first decay's
    again = resumed_with_decays(tmp_path, "cpu")
    assert torch.equal(torch.stack(again[0]), torch.stack(found[2:]))
    for strategy in ("ddp", "fsdp"):
        for parts, last in on_two_ranks(resumed_with_decays, tmp_path, strategy):
            torch.testing.assert_close(torch.stack(parts), torch.stack(wanted[2:]), rtol=0, atol=1e-6)
            torch.testing.assert_close(last, wanted[-2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_every_hook_of_an_evaluation_and_of_the_fits_end_sees_the_average_in_any_order(place: int) -> None:
    found: dict[str, Tensor] = {}

    class Measure(Callback):
        def on_step_end(self, run: Run) -> None:
            with torch.no_grad():
                run.task.line.bias.fill_(3.0)  # what a hook changes is averaged

        def on_evaluation_start(self, run: Run) -> None:
            found["start"] = flat(run.task)

        def on_evaluation_end(self, run: Run) -> None:
            found["end"] = flat(run.task)

        def on_fit_end(self, run: Run) -> None:
            found["fit"] = flat(run.task)

    callbacks: list[Callback] = [Measure()]
    callbacks.insert(place, WeightAverage(decay=0.9))
    quiet(max_epochs=2, callbacks=callbacks).fit(task := Regression(), pairs(), pairs(4))
    assert all(torch.equal(each, flat(task)) for each in found.values())
    torch.testing.assert_close(task.line.bias, torch.tensor([3.0]))


def test_evaluate_false_and_save_false_leave_the_trained_weights() -> None:
    plain, task, seen = Regression(), Regression(), Trajectory()
    quiet(max_epochs=2).fit(plain, pairs(), pairs(4))
    average = WeightAverage(evaluate=False, save=False)
    quiet(max_epochs=2, callbacks=[average, seen]).fit(task, pairs(), pairs(4))
    assert weights(task) == weights(plain)
    assert torch.equal(seen.validated[-1], seen.after[-1])


def test_checkpoints_and_finished_weights_hold_the_average(tmp_path: Path) -> None:
    seen = Trajectory()
    config = CheckpointConfig(every="1 epoch", best=1, by="validation/loss")
    callbacks = [WeightAverage(decay=0.9), seen]
    trainer = quiet(max_epochs=3, run_dir=tmp_path, checkpoint=config, callbacks=callbacks)
    result = trainer.fit(task := Regression(), pairs(), pairs(4))
    average = expected("ema", seen.after)
    for path in (result.model_path, result.last_checkpoint):
        stored = load_weights(path)
        found = torch.cat([stored["line.weight"].flatten(), stored["line.bias"]])
        torch.testing.assert_close(found, average, rtol=1e-6, atol=1e-7)
    assert result.best_checkpoint is not None
    again = quiet().validate(Regression.from_checkpoint(result.best_checkpoint), pairs(4))
    assert again["validation/loss"] == pytest.approx(result.metrics["validation/loss"], rel=1e-6)
    for verb in ("validate", "test", "predict"):  # evaluations after the fit leave the task its average
        getattr(trainer, verb)(task, pairs(4))
        torch.testing.assert_close(flat(task), average, rtol=1e-6, atol=1e-7)


def fitted(folder: Path, kind: str, steps: int, resume: str | None = None, **more: Any) -> Any:
    average = WeightAverage(kind, **{**OF_KIND[kind], "every": 2, **more})
    policy = CheckpointConfig(every="4 steps", keep_last=9, best=0, by=None, asynchronous=kind == "swa")
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.2)
    options: Any = {"max_steps": steps, "checkpoint": policy, "validate_every": "3 steps"}
    quiet(**options, run_dir=folder, callbacks=[average]).fit(task, pairs(), pairs(4), resume=resume)
    return weights(task), average.averaged


@pytest.mark.parametrize(("kind", "save"), [("ema", True), ("ema", False), ("swa", True)])
def test_resume_is_bitwise(kind: str, save: bool, tmp_path: Path) -> None:  # SWA in the background
    straight = fitted(tmp_path / "straight", kind, 13, save=save)
    for steps in (1, 7):
        with heard("nothing was averaged"):
            fitted(tmp_path / str(steps), kind, steps, save=save)
        assert fitted(tmp_path / str(steps), kind, 13, "auto", save=save) == straight
    path = str(tmp_path / "straight" / "checkpoints" / "step-00000008")
    assert fitted(tmp_path / "from", kind, 13, path, save=save) == straight


def test_resume_with_other_averages_or_without_the_callback_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path / "swa", "swa", 7)
    with pytest.raises(ConfigError, match=r"WeightAverage\('swa'\), and this run has"):
        fitted(tmp_path / "swa", "ema", 13, "auto")
    options: dict[str, Any] = {"max_steps": 13, "checkpoint": True}
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.2)
    with (
        warned("lacks: WeightAverage"),
        pytest.raises(CheckpointError, match=r"are averages, .* Resume with the callback"),
    ):
        quiet(run_dir=tmp_path / "swa", **options).fit(task, pairs(), resume="auto")
    fitted(tmp_path / "beside", "ema", 7, save=False)
    for other in ({"decay": (0.9, 0.5)}, {"parameters": "*.bias"}):
        with pytest.raises(ConfigError, match="averages of other parameters, or by another number of decays"):
            fitted(tmp_path / "beside", "ema", 13, "auto", save=False, **other)
    with warned("lacks: WeightAverage"):
        quiet(run_dir=tmp_path / "beside", **options).fit(task, pairs(), resume="auto")
    plain = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.2)
    quiet(max_steps=13).fit(plain, pairs())
    assert weights(task) == weights(plain)


def on_ranks(folder: Path, kind: str, steps: int, resume: bool = False, **more: Any) -> Any:
    task = Regression(OptimizerConfig("adamw", lr=0.05))
    callbacks = [WeightAverage(kind, **OF_KIND[kind], every=2)]
    options: Any = {"max_steps": steps, "checkpoint": True, "validate_every": "3 steps"}
    trainer = quiet(**options, run_dir=folder, callbacks=callbacks, **more)
    data = pairs(24, 4 // more.get("devices", 1))
    result = trainer.fit(task, data, pairs(4), resume="auto" if resume else None)
    return weights(task), result.metrics["validation/loss"], flat(task).tolist()


def straight_and_resumed(folder: Path, strategy: str, kind: str) -> Any:
    more = {"strategy": strategy, "devices": 2}
    straight = on_ranks(folder / "straight", kind, 12, **more)
    on_ranks(folder / "parts", kind, 7, **more)
    trained = []
    for every in ("2 steps", None):  # shards go on from their own weights after a validation of the average
        average, task = WeightAverage("ema", decay=0.9, save=False), Regression()
        trainer = quiet(max_steps=8, validate_every=every, callbacks=[average], **more)
        trainer.fit(task, pairs(16), pairs(4))
        trained.append(weights(task))
    assert trained[0] == trained[1]
    return straight, on_ranks(folder / "parts", kind, 12, True, **more)


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "ema"), ("fsdp", "swa")])
def test_two_ranks_average_and_resume_as_one_process(strategy: str, kind: str, tmp_path: Path) -> None:
    first, second = on_two_ranks(straight_and_resumed, tmp_path, strategy, kind)
    assert first == second
    straight, resumed = first
    assert straight == resumed
    _, loss, alone = on_ranks(tmp_path / "alone", kind, 12)
    assert straight[1] == pytest.approx(loss, rel=1e-5)
    assert straight[2] == pytest.approx(alone, abs=1e-6)


def normed() -> Regression:
    task = variant(forward=lambda self, features: self.line(self.norm(features)))()
    task.norm = nn.BatchNorm1d(4)
    return task


def test_batch_norms_are_renewed_at_the_end_and_only_then(tmp_path: Path) -> None:
    seen, task, by_hand = Trajectory(), normed(), normed()
    trainer = quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True, callbacks=[WeightAverage("swa"), seen])
    result = trainer.fit(task, pairs(), pairs(4))
    assert torch.equal(seen.validated[-1], seen.after[-1])
    by_hand.load_state_dict(task.state_dict())
    update_bn(DataLoader(pairs().dataset.tensors[0], batch_size=2), by_hand)
    torch.testing.assert_close(task.norm.running_mean, by_hand.norm.running_mean)
    torch.testing.assert_close(task.norm.running_var, by_hand.norm.running_var)
    assert task.norm.momentum == 0.1
    assert torch.equal(load_weights(result.model_path)["norm.running_mean"], task.norm.running_mean)


def test_an_error_in_a_validation_leaves_the_trained_weights() -> None:
    def fails(self: Any, batch: Any) -> Any:
        raise ValueError("broken")

    task, seen = variant(validation_step=fails)(), Trajectory()
    with pytest.raises(ValueError, match="broken"):
        quiet(max_epochs=1, callbacks=[WeightAverage(decay=0.5), seen]).fit(task, pairs(), pairs(4))
    assert torch.equal(flat(task), seen.after[-1])


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
