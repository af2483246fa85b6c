"""A run that is resumed on another number of ranks still has each sample of its epoch once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.promises.example import QUIET, Line, batches
from tests.support.ranks import on_two_ranks
from torch import Tensor

from drivetrain import LambdaCallback, Run, Trainer


class Noting(Line):  # notes the numbers of the samples that it is trained on
    def __init__(self, note: Callable[[list[int]], None]) -> None:
        super().__init__()
        self.note = note

    def training_step(self, batch: Mapping[str, Tensor]) -> Any:
        self.note(batch["number"].tolist())
        return super().training_step(batch)


def train(devices: int, run_dir: Path, until: int) -> list[int]:
    """Train an epoch of 24 samples, four a step, or stop before its end; return what was seen."""

    def stop(run: Run) -> None:
        if run.progress.steps == until:
            run.stop("half way")

    seen: list[int] = []
    task, strategy = Noting(seen.extend), "ddp" if devices > 1 else "cpu"
    options = {"strategy": strategy, "devices": devices, "run_dir": run_dir, **QUIET}
    trainer = Trainer(max_epochs=1, callbacks=[LambdaCallback(on_step_end=stop)], **options)
    trainer.fit(task, batches(24, 4 // devices, shuffle=True), resume="auto")
    return seen


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_an_epoch_has_each_sample_once_over_a_resume(first: int, second: int, tmp_path: Path) -> None:
    def seen(devices: int, until: int) -> list[int]:
        ranks = on_two_ranks(train, 2, tmp_path, until) if devices == 2 else [train(1, tmp_path, until)]
        return [number for each in ranks for number in each]

    before, after = seen(first, 3), seen(second, -1)
    assert (len(before), len(after)) == (12, 12)
    assert sorted(before + after) == list(range(24))
