"""The programs of docs/how-to/kinds have, step by step, the losses of the loops in examples/plain_loops."""

import copy
import functools
import inspect
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.test_docs import ROOT, WORK, environment_is_set, run_page

import drivetrain

__all__ = ["environment_is_set"]  # a fixture


class Step(NamedTuple):
    batch: Any
    random: torch.Tensor  # the state of torch's generator before the step
    losses: list[float]  # in the order of the yields


def loss_of(returned: Any) -> torch.Tensor:
    loss = getattr(returned, "loss", returned)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    assert isinstance(loss, torch.Tensor)
    return loss


def recorded(step: Callable[..., Any], steps: list[Step]) -> Callable[..., Any]:
    def begun(batch: Any) -> list[float]:
        steps.append(Step(copy.deepcopy(batch), torch.get_rng_state(), []))
        return steps[-1].losses

    @functools.wraps(step)
    def alternating(task: Any, batch: Any) -> Iterator[Any]:
        losses = begun(batch)
        body = step(task, batch)
        for name, returned in body:
            losses.append(loss_of(returned).item())
            yield name, returned

    @functools.wraps(step)
    def single(task: Any, batch: Any) -> Any:
        losses = begun(batch)
        returned = step(task, batch)
        losses.append(loss_of(returned).item())
        return returned

    return alternating if inspect.isgeneratorfunction(step) else single


def replayed(steps: list[Step]) -> Iterator[Any]:
    for step in steps:
        torch.set_rng_state(step.random)
        yield copy.deepcopy(step.batch)


PAGES = [*sorted(WORK.glob("*.md")), WORK.parent / "distill.md", WORK.parent / "language-model.md"]


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_kind_of_work_has_the_losses_of_a_plain_loop(
    page: Path, environment_is_set: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = list[tuple[Any, list[Step]]]()
    fit = drivetrain.Trainer.fit

    def recording(self: Any, task: Any, *data: Any, **named: Any) -> Any:
        fits.append((copy.deepcopy(task), []))
        kinds = [each for each in type(task).__mro__ if "training_step" in vars(each)]
        with monkeypatch.context() as patch:
            patch.setattr(kinds[0], "training_step", recorded(vars(kinds[0])["training_step"], fits[-1][1]))
            return fit(self, task, *data, **named)

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(drivetrain.Trainer, "fit", recording)
        run_page(page, tmp_path / "page")
    task, steps = fits[-1]
    loop = runpy.run_path(str(ROOT / "examples" / "plain_loops" / "loops.py"))[page.stem.replace("-", "_")]
    losses = [each for step in steps for each in step.losses]
    assert len(losses) > 20
    assert list(loop(task, replayed(steps))) == pytest.approx(losses, rel=1e-6, abs=1e-7)
