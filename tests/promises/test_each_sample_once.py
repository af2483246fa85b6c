"""An evaluation and an epoch have each sample once, also on several ranks, and resumed on another number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.promises.example import QUIET, Line, samples
from tests.support.ranks import on_two_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import LambdaCallback, OverAll, Run, Trainer


class Numbered(Line):
    """Notes the numbers of the samples that it is trained on, and judges those of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Mapping[str, Tensor]) -> Any:
        self.seen += batch["number"].tolist()
        return super().training_step(batch)

    def metrics(self) -> dict[str, Any]:
        return {
            "numbers": OverAll(lambda outputs, numbers: {"count": len(numbers), "sum": float(numbers.sum())})
        }

    def metric_inputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs, batch["number"]


def options(devices: int) -> dict[str, Any]:
    return {"strategy": "ddp" if devices > 1 else "cpu", "devices": devices, **QUIET}


def evaluated(devices: int) -> dict[str, float]:
    trainer = Trainer(checkpoint=False, **options(devices))
    return dict(trainer.validate(Numbered(), DataLoader(samples(11), batch_size=3)))


def test_an_evaluation_counts_each_sample_once() -> None:
    alone = evaluated(1)
    assert alone["validation/numbers/count"] == 11
    assert alone["validation/numbers/sum"] == sum(range(11))
    outputs, targets = (
        Line()(torch.stack([each["x"] for each in samples(11)])),
        [each["y"] for each in samples(11)],
    )
    loss = (outputs - torch.stack(targets)).square().mean().item()
    assert alone["validation/loss"] == pytest.approx(loss)
    for found in on_two_ranks(evaluated, 2):
        assert found == pytest.approx(alone)


def fitted(devices: int, run_dir: Path, until: int) -> list[int]:
    """Train one epoch of 24 samples, four an update, or stop before its end; return what was seen."""

    def stop(run: Run) -> None:
        if run.progress.updates == until:
            run.stop("half way")

    task = Numbered()
    data = DataLoader(samples(24), batch_size=4 // devices, shuffle=True)
    callbacks = [LambdaCallback(on_step_end=stop)]
    trainer = Trainer(max_epochs=1, run_dir=run_dir, callbacks=callbacks, **options(devices))
    trainer.fit(task, data, resume="auto")
    return task.seen


@pytest.mark.parametrize("first", [1, 2])
def test_an_epoch_has_each_sample_once_when_it_is_resumed_on_another_number_of_ranks(
    first: int, tmp_path: Path
) -> None:
    def seen(devices: int, until: int) -> list[int]:
        ranks = on_two_ranks(fitted, 2, tmp_path, until) if devices == 2 else [fitted(1, tmp_path, until)]
        return [number for each in ranks for number in each]

    before, after = seen(first, 3), seen(3 - first, -1)
    assert (len(before), len(after)) == (12, 12)
    assert sorted(before + after) == list(range(24))
