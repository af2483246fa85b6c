"""What only watches a run moves none of its random numbers, and neither does how its data is fetched."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Callback, CheckpointConfig, LambdaCallback, OptimizerConfig


def drawn() -> Tensor:
    return torch.randn(4) + random.random() + np.random.rand()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return drawn() + index, torch.tensor([float(index)])


class Drawing(Callback):  # draws from every generator in every hook that exists
    def __init__(self) -> None:
        for hook in vars(Callback):
            if hook.startswith("on_"):
                setattr(self, hook, lambda run: drawn())


def noisy_weights(workers: int = 0, validation: Any = None, **options: Any) -> Any:
    task = Regression(OptimizerConfig("adamw", lr=0.05), dropout=0.4)
    data = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    quiet(max_epochs=2, gradient_accumulation_steps=2, **options).fit(task, data, validation)
    return weights(task)


@pytest.mark.parametrize(
    "more",
    [
        {"validation": DataLoader(Noisy(), batch_size=4), "validate_every": "1 step"},
        {"callbacks": (Drawing(),), "validation": pairs(3), "log_every": "1 step"},
        {"loggers": ("csv", "jsonl", "tensorboard"), "log_every": "1 step", "progress_bar": True},
        {"checkpoint": CheckpointConfig(every="1 step", by=None)},
        {"workers": 1},
        {"workers": 2, "validation": pairs(6, num_workers=1)},
    ],
    ids=lambda more: ", ".join(more),
)
def test_what_only_watches_leaves_the_weights_as_they_are(more: dict[str, Any], tmp_path: Path) -> None:
    assert noisy_weights(**more, run_dir=tmp_path / "run") == noisy_weights()


class Drawn(Regression):  # a step that draws from all three of the host's generators
    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self(batch[0]) + drawn()[0], batch)


def drawn_weights(validation: Any = None, stops: Sequence[int] = (8,), **options: Any) -> Any:
    """Over batches in memory, before which nothing is seeded but the step itself."""
    data = list(pairs(8))
    for stop in stops:
        task = Drawn(OptimizerConfig("adamw", lr=0.05), dropout=0.4)
        resume = "auto" if len(stops) > 1 else None
        quiet(max_steps=stop, **options).fit(task, data, validation, resume=resume)
        torch.randn(stop), random.random(), np.random.rand()
    return weights(task)


def test_a_step_that_draws_from_every_generator_is_not_moved_by_what_watches(tmp_path: Path) -> None:
    hooks = ("on_epoch_start", "on_log", "on_epoch_end", "on_evaluation_step_end")
    between = LambdaCallback(**dict.fromkeys(hooks, lambda run: drawn()))
    right = drawn_weights()
    assert drawn_weights(DataLoader(Noisy(), batch_size=2), validate_every="1 step") == right
    assert drawn_weights(pairs(4), log_every="1 step", callbacks=[between]) == right
    assert drawn_weights(loggers=("csv", "tensorboard"), log_every="1 step", run_dir=tmp_path) == right


def test_a_step_that_draws_from_every_generator_does_not_depend_on_workers() -> None:
    found = []
    for workers in (0, 2):
        task = Drawn(OptimizerConfig("adamw", lr=0.05), dropout=0.4)
        quiet(max_epochs=1).fit(task, DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers))
        found.append(weights(task))
    assert found[0] == found[1]


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_step_that_draws_from_every_generator_resumes_bitwise(stop: int, tmp_path: Path) -> None:
    assert drawn_weights(stops=(stop, 8), checkpoint=True, run_dir=tmp_path) == drawn_weights()


def test_the_seed_decides_and_the_process_before_does_not() -> None:
    torch.manual_seed(5)
    first = noisy_weights(seed=1)
    torch.manual_seed(6)
    random.seed(6)
    assert noisy_weights(seed=1) == first
    assert noisy_weights(seed=2) != first


@pytest.mark.parametrize(("first", "second"), [((2, 1), (3, 1)), ((2, 2), (1, 3)), ((3, 1), (4, 2))])
def test_a_run_resumed_with_another_batch_size_sees_each_sample_once(
    first: tuple[int, int], second: tuple[int, int], tmp_path: Path
) -> None:
    features = torch.randn(17, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, torch.arange(17.0)[:, None])
    seen: list[int] = []

    def note(run: Any) -> None:
        seen.extend(int(i) for micro in run.window.micro_batches for i in micro.batch[1].flatten())

    for (batch_size, accumulation), limit in ((first, {"max_steps": 2}), (second, {"max_epochs": 1})):
        options = {**limit, "gradient_accumulation_steps": accumulation, "checkpoint": True}
        trainer = quiet(**options, callbacks=[LambdaCallback(on_step_end=note)], run_dir=tmp_path / "run")
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        size, before = batch_size * accumulation, first[0] * first[1]
        told = warned(f"goes on with {size} samples per step, the checkpoint's had {before}:")
        with told if size != before else nullcontext():
            result = trainer.fit(Regression(), loader, resume="auto")
    assert sorted(seen) == list(range(17))
    assert result.progress.samples == 17
