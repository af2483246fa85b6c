"""What a run with numbers that are not finite leaves: an error or an ordinary end, and no bad checkpoint."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.fragile import GOOD, GRADIENT, INFINITE, NAN, Fragile, marked
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import CheckpointConfig, FitResult, LambdaCallback, NonFiniteError, OptimizerConfig, Trainer
from drivetrain.testing.distributed import run_distributed

POLICY = CheckpointConfig(every="2 steps", keep_last=9, best=0, by=None)


def data(bad: int, at: int, count: int = 12, size: int = 2, **options: Any) -> Any:
    marks = [GOOD] * (count * size)
    marks[at * size] = bad
    return marked(marks, size, **options)


def trainer(run_dir: Path | None, **options: Any) -> Trainer:
    checkpoint = POLICY if run_dir is not None else False
    return quiet(
        **{"max_epochs": 1, "checkpoint": checkpoint, "log_every": "4 steps", "run_dir": run_dir, **options}
    )


def saved(run_dir: Path) -> list[str]:
    return sorted(each.name for each in (run_dir / "checkpoints").glob("update-*"))


def finite(checkpoint: str) -> bool:
    return all(bool(each.isfinite().all()) for each in load_file(f"{checkpoint}/model.safetensors").values())


def weights_of(run_dir: Path) -> list[str]:
    return [each.name for each in run_dir.glob("*.safetensors")]


@pytest.mark.parametrize("bad", [NAN, INFINITE])
def test_stop_ends_a_run_in_order_and_names_what_and_where(bad: int, tmp_path: Path) -> None:
    result = trainer(tmp_path, on_nonfinite="stop").fit(Fragile(), data(bad, at=5))
    last = str(tmp_path / "checkpoints" / "update-00000004")
    assert result.stop_reason == (
        f"NaN or infinite at update 5 on rank 0: 'loss' (from update 5); the last good checkpoint is {last}"
    )
    assert result.last_checkpoint == last
    assert saved(tmp_path) == ["update-00000002", "update-00000004"]
    assert result.model_path is None
    assert weights_of(tmp_path) == []
    assert result.progress.updates == 6, "at the next save, which comes before the log point"


def test_stop_is_found_at_a_log_point_too_and_nothing_is_evaluated_any_more(tmp_path: Path) -> None:
    options: dict[str, Any] = {"validate_every": "4 steps"}
    validation = data(GOOD, at=0, count=2)
    result = trainer(None, on_nonfinite="stop", **options).fit(Fragile(), data(NAN, at=5), validation)
    assert result.stop_reason == (
        "NaN or infinite at update 5 on rank 0: 'loss' (from update 5); no checkpoint was saved"
    )
    assert result.progress.updates == 8
    assert result.metrics["validation/loss"] > 0, "that of the validation before"


def test_a_run_that_was_stopped_goes_on_from_its_last_good_checkpoint(tmp_path: Path) -> None:
    for directory in ("straight", "stopped"):
        (tmp_path / directory).mkdir()
    trainer(tmp_path / "stopped", on_nonfinite="stop").fit(Fragile(), data(NAN, at=5))
    result = trainer(tmp_path / "stopped").fit(Fragile(), data(GOOD, at=5), resume="auto")
    trainer(tmp_path / "straight").fit(Fragile(), data(GOOD, at=5))
    assert result.progress.updates == 12
    assert load_file(str(result.model_path))["net.0.weight"].equal(
        load_file(str(tmp_path / "straight" / "model.safetensors"))["net.0.weight"]
    )


@pytest.mark.parametrize("choice", ["raise", "stop"])
def test_weights_that_a_gradient_has_spoiled_are_not_saved(choice: str, tmp_path: Path) -> None:
    """The loss of the update before the save is finite, and so are all before."""

    def fit() -> FitResult:
        return trainer(tmp_path, on_nonfinite=choice, log_every=None).fit(Fragile(), data(GRADIENT, at=5))

    if choice == "stop":
        reason = fit().stop_reason
    else:
        with pytest.raises(NonFiniteError) as caught:
            fit()
        reason = str(caught.value)
    assert reason.startswith("NaN or infinite after update 5 on rank 0: the weights 'net.0.weight', ")
    assert saved(tmp_path) == ["update-00000002", "update-00000004"]
    assert weights_of(tmp_path) == []
    assert finite(str(tmp_path / "checkpoints" / "update-00000004"))


def test_weights_that_are_infinite_from_the_beginning_are_meant_to_be(tmp_path: Path) -> None:
    class Masked(Fragile):
        def __init__(self) -> None:
            super().__init__(OptimizerConfig("sgd", lr=0.01))
            self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]))

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return super().loss(outputs, batch) + self.mask.softmax(0).square().sum()

    assert trainer(tmp_path, strategy="cpu").fit(Masked(), data(GOOD, at=0)).model_path is not None


def test_a_loss_that_a_loss_scale_has_skipped_stops_the_run_with_good_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "16-mixed", "on_nonfinite": "stop"}
    result = trainer(tmp_path, **options).fit(Fragile(), data(NAN, at=9))
    assert result.stop_reason.startswith("NaN or infinite at update")
    assert result.last_checkpoint is not None
    assert result.model_path is not None
    assert finite(result.last_checkpoint)


def _stopped(strategy: str, run_dir: str) -> Any:
    result = trainer(Path(run_dir), strategy=strategy, devices=2, on_nonfinite="stop").fit(
        Fragile(),
        data(NAN, at=7),  # the second rank's of the update after three
    )
    return result.stop_reason, result.last_checkpoint, result.model_path, result.progress.updates


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_stop_together_and_name_the_one(strategy: str, tmp_path: Path) -> None:
    first, second = run_distributed(_stopped, strategy, str(tmp_path))
    assert first == second
    reason, last, model, updates = first
    what = "NaN or infinite at update 3 on rank 1: 'loss' (from update 3)"
    assert reason == f"{what}; the last good checkpoint is {last}"
    assert (saved(tmp_path), model, updates) == (["update-00000002"], None, 4)
    assert weights_of(tmp_path) == []


# The end of a run.


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("choice", ["raise", "stop"])
def test_what_only_the_last_gradient_has_spoiled_is_found(choice: str, saves: bool, tmp_path: Path) -> None:
    run = trainer(tmp_path if saves else None, on_nonfinite=choice)
    if choice == "raise":
        with pytest.raises(NonFiniteError, match="after update 11 on rank 0: the weights"):
            run.fit(Fragile(), data(GRADIENT, at=11))
        return
    result = run.fit(Fragile(), data(GRADIENT, at=11))
    kept = "the last good checkpoint is .*update-00000010" if saves else "no checkpoint was saved"
    assert result.stop_reason is not None
    assert re.match(f"NaN or infinite after update 11 on rank 0: the weights .*; {kept}", result.stop_reason)
    assert result.model_path is None


def test_the_end_of_a_loop_of_ones_own_is_looked_at_too() -> None:
    with pytest.raises(NonFiniteError, match="after update 11"):
        for _ in trainer(None).steps(Fragile(), data(GRADIENT, at=11)):
            pass


class Masked(Fragile):
    """Has a parameter that is infinite from the begin, and stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)


def test_what_was_infinite_from_the_begin_is_meant() -> None:
    assert trainer(None).fit(Masked(), data(GOOD, at=0)).stop_reason == "max_epochs=1 reached"


def test_what_is_not_trained_is_not_looked_at() -> None:
    """It may be of a kind, as quantized ones are, of which that cannot be asked."""
    task = Masked()

    def spoil(run: Any) -> None:
        task.mask.fill_(torch.nan)

    options = {"callbacks": [LambdaCallback(on_step_end=spoil)]}
    assert trainer(None, **options).fit(task, data(GOOD, at=0)).stop_reason == "max_epochs=1 reached"


def _spoiled() -> str | None:
    run = trainer(None, strategy="ddp", devices=2, on_nonfinite="stop")
    return run.fit(Fragile(), data(GRADIENT, at=23, count=24)).stop_reason


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_all_ranks_find_it_at_the_end() -> None:
    first, second = run_distributed(_spoiled)
    assert first == second
    assert re.match("NaN or infinite after update 11 on rank 0: the weights", first)


def _sent(run_dir: Path, number: int, rank: int, at: int = 5, log_every: str = "100 steps") -> Any:
    """A signal to one rank after so many updates, of which the fifth had a NaN on the second rank."""
    sent: list[int] = []

    def send(run: Any) -> None:
        if run.progress.updates == at and run.engine.strategy.rank == rank and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    policy = CheckpointConfig(every="3 steps", keep_last=9, best=0, by=None)
    options = {"strategy": "ddp", "devices": 2, "callbacks": [LambdaCallback(on_step_end=send)]}
    run = quiet(
        max_epochs=1,
        checkpoint=policy,
        run_dir=run_dir,
        on_nonfinite="stop",
        log_every=log_every,
        **options,
    )
    try:
        return run.fit(Fragile(), data(NAN, at=9, count=24)).stop_reason
    except BaseException as error:  # of which some are no exceptions, and would end the process
        return type(error).__name__, "\n".join(map(str, (error, *getattr(error, "__notes__", ()))))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process can send itself")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("at", "log_every"), [(5, "100 steps"), (6, "3 steps")])
def test_a_signal_does_not_have_a_program_started_again_that_would_meet_the_same(
    rank: int, at: int, log_every: str, tmp_path: Path
) -> None:
    """Whether it is found in a save, after all have agreed on the signal, or at a log point, before that."""
    first, second = run_distributed(_sent, tmp_path, signal.SIGTERM, rank, at, log_every)
    assert first == second
    assert re.match("NaN or infinite at update 4 on rank 1.*; the last good checkpoint is .*00000003$", first)
    assert saved(tmp_path) == ["update-00000003"]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals that a process can send itself")
def test_an_interrupt_still_ends_the_program_and_says_what_was_found(tmp_path: Path) -> None:
    for kind, told in run_distributed(_sent, tmp_path, signal.SIGINT, 0):
        assert kind == "KeyboardInterrupt"
        assert "NaN or infinite at update 4 on rank 1" in told


class Misjudged(Regression):
    """Its second validation gives a loss that is not finite, though its weights are."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.validations = value, 0

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        self.validations += 1
        return {
            "loss": torch.tensor(self.value if self.validations == 2 else 1.0),
            "f1": torch.tensor(math.nan),
        }


def judged(run_dir: Path, value: float, choice: str) -> FitResult:
    trainer = quiet(max_epochs=3, run_dir=run_dir, checkpoint=POLICY, on_nonfinite=choice)
    return trainer.fit(Misjudged(value), pairs(10), pairs(2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_of_a_validation_that_is_not_finite_raises_after_a_save(value: float, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=f"^'validation/loss' is {value} after update 10. .*loss_weight"):
        judged(tmp_path, value, "raise")
    assert saved(tmp_path)[-1] == "update-00000010"


def test_a_loss_of_a_validation_that_is_not_finite_stops_in_order(tmp_path: Path) -> None:
    result = judged(tmp_path, math.nan, "stop")
    assert result.stop_reason == "'validation/loss' is nan after update 10"
    assert result.progress.updates == 10
    assert result.model_path is not None


def test_a_loss_of_a_validation_that_is_not_finite_is_named_when_it_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert judged(tmp_path, math.nan, "skip").progress.updates == 15
    assert "'validation/loss' is nan after update 10; with on_nonfinite='skip' the run goes on" in caplog.text


def judged_on_two(run_dir: Path) -> str:
    trainer = quiet(
        max_epochs=3, run_dir=run_dir, checkpoint=POLICY, on_nonfinite="stop", strategy="ddp", devices=2
    )
    return trainer.fit(Misjudged(math.nan), pairs(10), pairs(4)).stop_reason


def test_all_ranks_stop_for_a_loss_of_a_validation(tmp_path: Path) -> None:
    first, second = run_distributed(judged_on_two, tmp_path, world_size=2)
    assert first == second == "'validation/loss' is nan after update 6"
