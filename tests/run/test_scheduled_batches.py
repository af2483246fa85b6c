"""Fits whose accumulation and batch size change during the run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
    Run,
    already_split,
)
from drivetrain.testing import run_distributed

SAMPLES = 23


class Numbered(Dataset[Any]):
    """Features and targets, with the sample's number."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.features, self.targets = pairs(count).dataset.tensors  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.features[index], self.targets[index], index


class Seen(Callback):
    """The numbers in each window, by epoch; and whether it was the last."""

    def __init__(self) -> None:
        self.windows: list[tuple[int, list[list[int]], bool]] = []
        self.totals: Any = None

    def on_fit_start(self, run: Run) -> None:
        self.totals = run.totals

    def on_step_start(self, run: Run) -> None:
        numbers = [[] if each.is_placeholder else each.batch[2].tolist() for each in run.window.micro_batches]
        self.windows.append((run.progress.epoch, numbers, run.window.last))

    def sizes(self, epoch: int | None = None) -> list[list[int]]:
        return [[len(each) for each in window] for at, window, _ in self.windows if epoch in (None, at)]

    def order(self, epoch: int) -> list[int]:
        return [n for at, window, _ in self.windows if at == epoch for batch in window for n in batch]


def task() -> Regression:
    return Regression(OptimizerConfig("adamw", lr=0.05, schedule="cosine"), dropout=0.2)


def fitted(*, resume: str | None = None, **options: Any) -> tuple[Seen, Regression, Any]:
    seen, trained = Seen(), task()
    options = {"batch_size": 2, **options}
    callbacks = [seen, *options.pop("callbacks", ())]
    result = quiet(callbacks=callbacks, **options).fit(trained, Numbered(), resume=resume)
    return seen, trained, result


SCHEDULES: dict[str, dict[str, Any]] = {
    "accumulation by epochs": {"gradient_accumulation_steps": {0: 4, "1 epoch": 2, "2 epochs": 1}},
    "accumulation by steps": {"gradient_accumulation_steps": {0: 1, 4: 3, 9: 2}},
    "accumulation by samples": {"gradient_accumulation_steps": {0: 1, "7 samples": 2, "30 samples": 3}},
    "batch size by epochs": {"batch_size": {0: 2, "1 epoch": 5, "2 epochs": 3}},
    "batch size by steps": {"batch_size": {0: 1, 3: 4, 8: 6}},
    "batch size by samples": {"batch_size": {0: 2, "9 samples": 3, "40 samples": 7}},
    "both": {"batch_size": {0: 1, 3: 2, 12: 3}, "gradient_accumulation_steps": {0: 4, "1 epoch": 2}},
    "a limit": {"batch_size": {0: 1, 3: 2, 12: 3}, "limit_train_batches": 7},
}


QUICK = [(0, "accumulation by epochs"), (0, "batch size by samples"), (2, "batch size by steps")]


def test_accumulation_by_epochs_makes_the_windows_of_each_epoch() -> None:
    seen, _, result = fitted(max_epochs=3, **SCHEDULES["accumulation by epochs"])
    assert [len(each) for each in seen.sizes(0)] == [4, 4, 4]
    assert [len(each) for each in seen.sizes(1)] == [2] * 6
    assert [len(each) for each in seen.sizes(2)] == [1] * 12
    assert [last for *_, last in seen.windows] == [number in (2, 8, 20) for number in range(21)]
    assert seen.totals.updates == result.progress.updates == 21
    assert (seen.totals.updates_per_epoch, seen.totals.gradient_accumulation_steps) == (None, 4)


def test_a_batch_size_by_steps_grows_in_the_middle_of_an_epoch() -> None:
    seen, _, result = fitted(max_epochs=2, **SCHEDULES["batch size by steps"])
    assert seen.sizes(0) == [[1], [1], [1], [4], [4], [4], [4], [4]]
    assert seen.sizes(1) == [[6], [6], [6], [5]]
    assert seen.totals.updates == result.progress.updates == 12


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_every_schedule_reads_the_same_order_and_the_totals_are_those_made(options: dict[str, Any]) -> None:
    plain, _, _ = fitted(max_epochs=3)
    seen, _, result = fitted(max_epochs=3, **options)
    for epoch in range(3):
        order = seen.order(epoch)
        assert order == plain.order(epoch)[: len(order)]
        if "limit_train_batches" not in options:
            assert sorted(order) == list(range(SAMPLES))
    assert seen.totals.updates == result.progress.updates == len(seen.windows)


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        *QUICK,
        *(
            pytest.param(workers, name, marks=pytest.mark.full)
            for workers, name in itertools.product((0, 2), SCHEDULES)
            if (workers, name) not in QUICK
        ),
    ],
)
def test_a_run_resumed_after_any_update_is_bitwise_the_uninterrupted_one(
    workers: int, name: str, tmp_path: Path
) -> None:
    options = {**SCHEDULES[name], "max_epochs": 3, "num_workers": workers}
    policy = CheckpointConfig(every="1 step", keep_last=None, best=0, by=None)
    whole, expected, _ = fitted(run_dir=tmp_path, checkpoint=policy, **options)
    found = sorted((tmp_path / "checkpoints").glob("update-*"))
    assert len(found) == len(whole.windows)
    chosen = found[:-1] if not workers else found[2:9:3]  # each starts workers anew
    for path in chosen:
        done = int(path.name.rpartition("-")[2])
        seen, trained, _ = fitted(resume=str(path), **options)
        assert seen.windows == whole.windows[done:]
        assert weights(trained) == weights(expected)


def test_the_gradient_of_each_window_is_that_of_its_samples() -> None:
    def by_hand(seen: Seen) -> Regression:
        plain = Regression(OptimizerConfig("sgd", lr=0.05))
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        data = Numbered()
        for _, window, _ in seen.windows:
            numbers = [number for batch in window for number in batch]
            optimizer.zero_grad()
            plain.loss(plain(data.features[numbers]), (None, data.targets[numbers])).backward()
            optimizer.step()
        return plain

    seen, trained = Seen(), Regression(OptimizerConfig("sgd", lr=0.05))
    quiet(max_epochs=2, callbacks=[seen], **SCHEDULES["both"]).fit(trained, Numbered())
    torch.testing.assert_close(trained.state_dict(), by_hand(seen).state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("max_epochs", "updates", "last"), [(1.5, 6, [2, 2, 2]), (2.5, 15, [1] * 6), (0.5, 2, [4, 4])]
)
def test_a_fraction_of_an_epoch_is_one_of_its_own_updates(
    max_epochs: float, updates: int, last: list[int]
) -> None:
    seen, _, result = fitted(max_epochs=max_epochs, **SCHEDULES["accumulation by epochs"])
    assert (seen.totals.updates, result.progress.updates) == (updates, updates)
    assert [len(each) for each in seen.sizes(result.progress.epoch)] == last


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({0: 4, "1 epoch": 2, "2 epochs": 1}, [2, 3, 6, 9, 15, 21]),  # of 3, 6 and 12 updates
        ({0: 1, "1 epoch": 6}, [6, 12, 13, 14, 15, 16]),  # of 12, 2 and 2
    ],
)
def test_intervals_in_parts_of_an_epoch_follow_the_updates_of_each_epoch(
    steps: dict[Any, int], expected: list[int]
) -> None:
    validated: list[int] = []
    watch = LambdaCallback(on_evaluation_end=lambda run: validated.append(run.progress.updates))
    quiet(
        max_epochs=3, batch_size=2, validate_every="0.5 epochs", callbacks=[watch],
        gradient_accumulation_steps=steps,
    ).fit(task(), Numbered(), Numbered(4))  # fmt: skip
    assert validated == expected


def test_max_steps_ends_at_its_update_and_validate_from_counts_from_the_schedule() -> None:
    validated: list[int] = []
    watch = LambdaCallback(on_evaluation_end=lambda run: validated.append(run.progress.updates))
    result = quiet(
        max_steps=15, batch_size=2, validate_every="1 step", validate_from="1.5 epochs", callbacks=[watch],
        **SCHEDULES["accumulation by epochs"],
    ).fit(task(), Numbered(), Numbered(4))  # fmt: skip
    assert result.progress.updates == 15
    assert validated == list(range(6, 16))


@pytest.mark.parametrize("kind", ["list", "stream", "already split"])
def test_accumulation_changes_for_data_of_every_kind(kind: str) -> None:
    batches = [[*each] for each in pairs(14)]

    class Stream:
        def __iter__(self) -> Any:
            return iter(batches)

    data = {"list": batches, "stream": Stream(), "already split": already_split(batches)}[kind]
    sizes: list[int] = []
    watch = LambdaCallback(on_step_start=lambda run: sizes.append(len(run.window.micro_batches)))
    steps = {0: 1, 2: 3, 5: 4}
    quiet(max_epochs=2, gradient_accumulation_steps=steps, callbacks=[watch]).fit(Regression(), data)
    assert sizes == [1, 1, 3, 2, 3, 4]


def test_a_skipped_update_moves_no_point() -> None:
    class Broken(Numbered):
        def __getitem__(self, index: int) -> Any:
            features, target, number = super().__getitem__(index)
            return features * float("nan") if number in (3, 8) else features, target, number

    sizes: list[int] = []
    watch = LambdaCallback(on_step_start=lambda run: sizes.append(len(run.window.micro_batches[0].batch[2])))
    settings: dict[str, Any] = {"batch_size": {0: 1, 24: 3}, "on_nonfinite": "skip", "max_epochs": 2}
    result = quiet(callbacks=[watch], **settings).fit(task(), Broken())
    assert result.progress.skipped == 4
    assert sizes == [1] * 23 + [1] + [3] * 7 + [1]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_a_callback_ends_moves_no_point(workers: int) -> None:
    ends = LambdaCallback(on_step_end=lambda run: run.end_epoch() if run.progress.updates == 2 else None)
    options = {"batch_size": {0: 2, 4: 4, 7: 3}, "max_epochs": 2, "num_workers": workers}
    seen, _, _ = fitted(callbacks=[ends], **options)
    assert [window[0] for window in seen.sizes()] == [2, 2, 2, 2, 4, 4, 4, 3, 3, 1]
    assert sorted(seen.order(1)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("options", "data", "told"),
    [
        ({"batch_size": {0: 2, 4: 3}}, pairs(), "given as a dataset with a length, but it is a DataLoader"),
        ({"batch_size": {0: 2, 4: 3}}, [*pairs()], "given as a dataset with a length, but it is a list"),
        (
            {"batch_size": {0: 2, 4: 3}, "limit_train_batches": 0.5},
            Numbered(),
            "is a fraction of an epoch's batches",
        ),
        ({"gradient_accumulation_steps": {0: 2, "4 samples": 3}}, [*pairs()], "changes after samples"),
    ],
)
def test_data_that_does_not_fit_is_refused(options: dict[str, Any], data: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        quiet(max_epochs=1, **options).fit(task(), data)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": {0: 2, 4: 3}, "group_by_length": "x"}, "changes how many an update has"),
        (
            {"batch_size": {0: 2, "4 samples": 3}, "on_bad_batch": "skip"},
            "on_bad_batch='skip' leaves some out",
        ),
        (
            {"gradient_accumulation_steps": {0: 1, 4: 3}, "memory": {"release_gradients": True}},
            "gradients have to be kept",
        ),
        ({"gradient_accumulation_steps": {"4 epochs": 3}}, "no number for the start"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        quiet(max_epochs=1, **options)


def test_a_dataset_with_a_batch_size_of_its_own_is_refused() -> None:
    data = Numbered()
    data.batch_size = 4  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="an attribute batch_size=4, which would be used instead"):
        quiet(max_epochs=1, batch_size={0: 2, 4: 3}).fit(task(), data)


def test_the_plan_has_the_exact_length_and_the_points() -> None:
    trainer = quiet(
        max_epochs=3, validate_every="1 epoch", batch_size=2, **SCHEDULES["accumulation by epochs"]
    )
    plan = trainer.plan(task(), Numbered(), Numbered(4))
    assert (plan.updates, plan.updates_per_epoch, plan.samples_per_update) == (21, None, 8)
    assert (plan.validation.times, plan.validation.first, plan.validation.last) == (3, 3, 21)
    assert plan.stages == {"gradient_accumulation_steps": "4, 2 from 1 epoch on, 1 from 2 epochs on"}
    assert "epochs differ in their updates" in str(plan)
    assert '"gradient_accumulation_steps": {' in json.dumps(trainer.to_json())


def _on_a_rank(folder: str, strategy: str, options: dict[str, Any]) -> Any:
    devices = {"strategy": strategy, "devices": 2}
    straight = _sharded(f"{folder}/straight", devices, options, 3, None)
    _sharded(f"{folder}/parts", devices, options, 1.5, None)
    resumed = _sharded(f"{folder}/parts", devices, options, 3, "auto")
    return straight, resumed


def _sharded(folder: str, devices: Any, options: Any, epochs: float, resume: str | None) -> Any:
    seen, trained = Seen(), Regression(OptimizerConfig("adamw", lr=0.05))
    trainer = quiet(
        max_epochs=epochs, run_dir=folder, checkpoint=True, callbacks=[seen], **devices, **options
    )  # fmt: skip
    result = trainer.fit(trained, Numbered(), resume=resume)
    flat = torch.cat([each.detach().flatten() for each in trained.parameters()]).tolist()
    return flat, seen.windows, result.progress.updates, seen.totals.updates


@pytest.mark.parametrize(
    "name", [pytest.param("accumulation by steps", marks=pytest.mark.full), "batch size by steps"]
)
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("fsdp", "zero3", "accelerate")),
    ],
)
def test_two_ranks_read_each_sample_once_and_resume_bitwise_also_on_one(
    strategy: str, name: str, tmp_path: Path
) -> None:
    options = {"batch_size": 2, **SCHEDULES[name]}
    results = run_distributed(_on_a_rank, str(tmp_path), strategy, options, timeout=180)
    (straight, resumed), (other, other_resumed) = results
    assert straight[0] == resumed[0] == other[0] == other_resumed[0]
    assert straight[2] == straight[3] == resumed[2]
    for epoch in range(3):
        seen = [
            n
            for part in (straight, other)
            for at, window, _ in part[1]
            if at == epoch
            for b in window
            for n in b
        ]
        assert sorted(seen) == list(range(SAMPLES))
    # As one process with batches of both, for such a schedule is one of updates.
    alone = {key: value for key, value in options.items() if key != "batch_size"}
    size = options["batch_size"]
    alone["batch_size"] = {at: 2 * each for at, each in size.items()} if isinstance(size, dict) else 2 * size
    flat = _sharded(str(tmp_path / "alone"), {"strategy": "cpu"}, alone, 3, None)[0]
    assert straight[0] == pytest.approx(flat, abs=1e-6)
    # On one process the rest of the epoch is read once.
    run_distributed(_part, str(tmp_path), strategy, options, timeout=180)
    with warned("samples per update, the checkpoint's had"):
        rest = _sharded(f"{tmp_path}/fewer", {"strategy": "cpu"}, options, 2, "auto")
    first = [n for part in (straight, other) for at, window, _ in part[1][:3] for b in window for n in b]
    assert sorted([*first, *(n for at, window, _ in rest[1] if at == 0 for b in window for n in b)]) == list(
        range(SAMPLES)
    )


def _part(folder: str, strategy: str, options: dict[str, Any]) -> None:
    seen, trained = Seen(), Regression(OptimizerConfig("adamw", lr=0.05))
    quiet(
        max_steps=3, run_dir=f"{folder}/fewer", checkpoint=True, callbacks=[seen], strategy=strategy,
        devices=2, **options,
    ).fit(trained, Numbered())  # fmt: skip
