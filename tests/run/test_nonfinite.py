"""What a run with numbers that are not finite leaves: an error or an ordinary end, and no bad checkpoint."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.fragile import GOOD, GRADIENT, INFINITE, NAN, Fragile, marked
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import CheckpointConfig, FitResult, LambdaCallback, NonFiniteError, OptimizerConfig, Trainer

POLICY = CheckpointConfig(every="2 steps", keep_last=9, best=0, by=None)
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def data(bad: int, at: int, count: int = 12) -> Any:
    marks = [GOOD] * (count * 2)
    marks[at * 2] = bad
    return marked(marks, 2)


def trainer(run_dir: Path | None, **options: Any) -> Trainer:
    checkpoint = POLICY if run_dir is not None else False
    defaults = {"max_epochs": 1, "checkpoint": checkpoint, "log_every": "4 steps", "run_dir": run_dir}
    return quiet(**{**defaults, **options})


def saved(run_dir: Path) -> list[str]:
    return sorted(each.name for each in (run_dir / "checkpoints").glob("step-*"))


def finite(checkpoint: str) -> bool:
    return all(bool(each.isfinite().all()) for each in load_file(f"{checkpoint}/model.safetensors").values())


@pytest.mark.parametrize("bad", [NAN, INFINITE])
def test_on_nonfinite_stop_ends_in_order_and_names_what_and_where(bad: int, tmp_path: Path) -> None:
    result = trainer(tmp_path, on_nonfinite="stop").fit(Fragile(), data(bad, at=5))
    last = str(tmp_path / "checkpoints" / "step-00000004")
    assert result.stop_reason == (
        f"NaN or infinite at step 5 on rank 0: 'loss' (from step 5); the last good checkpoint is {last}"
    )
    assert result.last_checkpoint == last
    assert saved(tmp_path) == ["step-00000002", "step-00000004"]
    assert result.model_path is None
    assert not list(tmp_path.glob("*.safetensors"))
    assert result.progress.steps == 6, "at the next save, which comes before the log point"
    # A run that was stopped goes on from its last good checkpoint.
    result = trainer(tmp_path).fit(Fragile(), data(GOOD, at=5), resume="auto")
    straight = trainer(tmp_path / "straight").fit(Fragile(), data(GOOD, at=5))
    assert result.progress.steps == 12
    one, other = (load_file(str(each.model_path))["net.0.weight"] for each in (result, straight))
    assert torch.equal(one, other)


def test_on_nonfinite_stop_is_found_at_a_log_point_too_and_nothing_is_evaluated_any_more() -> None:
    run = trainer(None, on_nonfinite="stop", validate_every="4 steps")
    result = run.fit(Fragile(), data(NAN, at=5), data(GOOD, at=0, count=2))
    found = "NaN or infinite at step 5 on rank 0: 'loss' (from step 5); no checkpoint was saved"
    assert (result.stop_reason, result.progress.steps) == (found, 8)
    assert result.metrics["validation/loss"] > 0, "that of the validation before"


@pytest.mark.parametrize("choice", ["raise", "stop"])
@pytest.mark.parametrize("at", [5, 11], ids=["before a save", "in the last step"])
def test_weights_that_a_gradient_has_spoiled_are_not_saved(choice: str, at: int, tmp_path: Path) -> None:
    """The loss of the step before the save is finite, and so are all before."""

    def fit() -> FitResult:
        return trainer(tmp_path, on_nonfinite=choice, log_every=None).fit(Fragile(), data(GRADIENT, at))

    if choice == "stop":
        reason = fit().stop_reason
        assert f"; the last good checkpoint is {tmp_path}" in reason
    else:
        with pytest.raises(NonFiniteError) as caught:
            fit()
        reason = str(caught.value)
    assert reason.startswith(f"NaN or infinite after step {at} on rank 0: the weights 'net.0.weight', ")
    assert saved(tmp_path) == [f"step-{each:08}" for each in range(2, at, 2)]
    assert not list(tmp_path.glob("*.safetensors"))
    assert finite(str(tmp_path / "checkpoints" / "step-00000004"))


def test_weights_that_are_infinite_from_the_start_or_not_trained_are_no_error(tmp_path: Path) -> None:
    task = Fragile(OptimizerConfig("sgd", lr=0.01))
    task.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]))
    task.fixed = nn.Parameter(torch.zeros(1), requires_grad=False)
    spoil = LambdaCallback(on_step_end=lambda run: task.fixed.fill_(torch.nan))
    assert trainer(tmp_path, callbacks=[spoil]).fit(task, data(GOOD, at=0)).model_path is not None


class Misjudged(Regression):  # its second validation gives a loss that is not finite, though its weights are
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.validations = value, 0

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        self.validations += 1
        loss = torch.tensor(self.value if self.validations == 2 else 1.0)
        return {"loss": loss, "f1": torch.tensor(math.nan)}


def judged(run_dir: Path, value: float, choice: str, **options: Any) -> FitResult:
    run = quiet(max_epochs=3, run_dir=run_dir, checkpoint=POLICY, on_nonfinite=choice, **options)
    return run.fit(Misjudged(value), pairs(10), pairs(4 if options else 2))


def test_a_validation_loss_that_is_not_finite_raises_stops_or_warns_after_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (math.nan, math.inf):
        directory = tmp_path / str(value)
        with pytest.raises(
            NonFiniteError, match=f"^'validation/loss' is {value} after step 10. .*loss_weight"
        ):
            judged(directory, value, "raise")
        assert saved(directory)[-1] == "step-00000010"
    result = judged(tmp_path / "stop", math.nan, "stop")
    assert (result.stop_reason, result.progress.steps) == ("'validation/loss' is nan after step 10", 10)
    assert result.model_path is not None
    assert judged(tmp_path / "skip", math.nan, "skip").progress.steps == 15
    assert "'validation/loss' is nan after step 10; with on_nonfinite='skip' the run goes on" in caplog.text


def stopped_on_a_rank(run_dir: Path) -> list[Any]:
    found: list[Any] = []
    for strategy in ("ddp", "fsdp"):
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "on_nonfinite": "stop"}
        result = trainer(run_dir / strategy, **options).fit(Fragile(), data(NAN, at=7))
        found.append((result.stop_reason, result.last_checkpoint, result.model_path, result.progress.steps))
    found.append(judged(run_dir / "judged", math.nan, "stop", strategy="ddp", devices=2).stop_reason)
    return found


@needs_gloo
def test_on_nonfinite_stops_all_ranks_together_and_names_the_one(tmp_path: Path) -> None:
    first, second = on_two_ranks(stopped_on_a_rank, tmp_path)
    assert first == second
    *strategies, judgement = first
    for strategy, (reason, last, model, steps) in zip(("ddp", "fsdp"), strategies, strict=True):
        what = "NaN or infinite at step 3 on rank 1: 'loss' (from step 3)"
        assert reason == f"{what}; the last good checkpoint is {last}"
        assert (saved(tmp_path / strategy), model, steps) == (["step-00000002"], None, 4)
        assert not list((tmp_path / strategy).glob("*.safetensors"))
    assert judgement == "'validation/loss' is nan after step 6"


@needs_gloo
@pytest.mark.landing
def test_weights_that_the_last_step_of_two_ranks_spoils_are_named() -> None:
    def stopped() -> tuple[str, int, list[bool]]:
        task, options = Fragile(), {"strategy": "ddp", "devices": 2, "on_nonfinite": "stop"}
        result = trainer(None, **options).fit(task, data(GRADIENT, at=23, count=24))
        return (
            result.stop_reason,
            result.progress.steps,
            [bool(each.isfinite().all()) for each in task.parameters()],
        )

    for reason, steps, finite in on_two_ranks(stopped):
        assert steps == 12
        assert not any(finite), reason
        assert re.match("NaN or infinite after step 11 on rank 0: the weights", reason)
