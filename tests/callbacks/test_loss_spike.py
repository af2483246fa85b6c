"""Spikes are left out, or taken back: what comes after is as if their data had never been there."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fragile import GOOD, GRADIENT, LARGE, NAN, Fragile, LeftBehind, marked
from tests.support.messages import warned
from tests.support.outcome import outcome, weights
from tests.support.tasks import Duel, duels, quiet
from torch.utils.data import DataLoader, IterableDataset, Subset

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    DivergenceError,
    LossSpike,
    OptimizerConfig,
    Run,
    StrategyError,
)
from drivetrain.checkpoint import read_manifest
from drivetrain.strategies import STRATEGIES, Strategy
from drivetrain.testing.distributed import run_distributed

POLICY = CheckpointConfig(every="4 steps", keep_last=99, best=0, by=None)
SIZE = 4
COUNT = 30


def data(*bad: int, mark: int = LARGE, count: int = COUNT, **options: Any) -> DataLoader[Any]:
    """Batches, of which some are bad."""
    marks = [mark if index in bad and not each else GOOD for index in range(count) for each in range(SIZE)]
    return marked(marks, SIZE, **options)


def without(passed_over: range, whole: DataLoader[Any]) -> DataLoader[Any]:
    """The same batches, but for some."""
    kept = [i * SIZE + each for i in range(COUNT) if i not in passed_over for each in range(SIZE)]
    return DataLoader(Subset(whole.dataset, kept), batch_size=SIZE)


def spike(action: str, **options: Any) -> LossSpike:
    """With batches of four samples the losses scatter wide."""
    return LossSpike(action, **{"window": 10, "threshold": 20, **options})


def rolling(run_dir: Path, *callbacks: Any, **options: Any) -> Any:
    """A Trainer of runs that are taken back."""
    callbacks += (spike("rollback", **options.pop("spike", {})),)
    given = {"max_epochs": 1, "log_every": "7 steps", "checkpoint": POLICY, "loggers": ("csv", "jsonl")}
    return quiet(**{**given, **options}, run_dir=run_dir, callbacks=callbacks)


def task() -> Fragile:
    return Fragile(OptimizerConfig("adamw", lr=0.003, schedule="inverse_sqrt", warmup_steps=3))


# Left out.


def test_a_spike_is_left_out_whole(caplog: pytest.LogCaptureFixture) -> None:
    watch = LeftBehind()
    trainer = quiet(max_epochs=1, log_every="4 steps", callbacks=[spike("skip"), watch])
    with caplog.at_level(logging.WARNING):
        result = trainer.fit(task(), data(15, 22))
    assert watch.changed == {15: [], 22: []}
    assert result.progress.skipped == 2
    assert result.metrics["spikes"] == 2
    assert caplog.messages[0].startswith("update 15 was not made: loss is ")
    assert "deviations above the median" in caplog.messages[0]


def test_nothing_is_judged_before_the_window_is_full() -> None:
    watch = LeftBehind()
    quiet(max_epochs=1, callbacks=[spike("skip", window=20), watch]).fit(task(), data(15, 25))
    assert watch.changed == {25: []}


def test_a_level_that_does_not_come_back_ends_the_run() -> None:
    trainer = quiet(max_epochs=1, callbacks=[spike("skip", max_in_a_row=3)])
    with pytest.raises(DivergenceError, match="4 updates in a row, number 12 each time"):
        trainer.fit(task(), data(*range(12, 30)))


def test_noise_has_no_spikes() -> None:
    trainer = quiet(max_epochs=20, log_every="1 epoch", callbacks=[LossSpike("skip", window=50)])
    result = trainer.fit(task(), marked([GOOD] * 640, 64, shuffle=True))
    assert (result.progress.updates, result.progress.skipped) == (200, 0)


# Taken back.


@pytest.mark.parametrize(("bad", "back", "seen"), [(16, 16, 20), (18, 16, 20), (29, 28, 30)])
def test_the_run_goes_on_from_the_checkpoint_with_the_data_after_the_spike(
    bad: int, back: int, seen: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is found at the log point or save that comes next, and equals a run without the data in between."""
    found = [task(), task()]
    with caplog.at_level(logging.WARNING):
        result = rolling(tmp_path / "spike").fit(found[0], data(bad))
    rolling(tmp_path / "without").fit(found[1], without(range(back, seen), data(bad)))
    assert weights(found[0]) == weights(found[1])
    assert result.progress.updates == COUNT - (seen - back)
    assert result.progress.skipped == seen - back
    assert result.progress.samples == COUNT * SIZE
    assert result.metrics["spikes"] == 1
    assert f"a spike at update {bad}: loss is " in caplog.messages[0]
    assert f"update-{back:08d}. The data of {seen - back} update(s) are passed over" in caplog.messages[0]


def test_a_run_by_steps_makes_up_for_what_was_taken_back(tmp_path: Path) -> None:
    result = rolling(tmp_path, max_epochs=None, max_steps=20).fit(task(), data(19))
    assert result.progress.updates == 20
    assert result.progress.samples == 24 * SIZE, "the spike came in the last update, which was not the last"


class Unreadable(Subset[Any]):
    """Has samples that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index in range(17 * SIZE, 18 * SIZE):
            raise OSError(f"sample {index}")
        return super().__getitem__(index)

    __getitems__ = None  # type: ignore[assignment]


def test_a_bad_batch_that_was_read_stays_counted(tmp_path: Path) -> None:
    whole = data(18)
    bad = DataLoader(Unreadable(whole.dataset, range(COUNT * SIZE)), batch_size=SIZE)
    with warned("sample 68; the batch is left out"):
        progress = rolling(tmp_path, on_bad_batch="skip").fit(task(), bad).progress
    assert (progress.skipped > 0, progress.bad_batches, progress.samples) == (True, 1, (COUNT - 1) * SIZE)


def test_a_loss_that_is_nan_is_taken_back_too(tmp_path: Path) -> None:
    found = [task(), task()]
    assert rolling(tmp_path / "nan").fit(found[0], data(5, mark=NAN)).progress.skipped == 3
    rolling(tmp_path / "without").fit(found[1], without(range(4, 7), data(5, mark=NAN)))
    assert weights(found[0]) == weights(found[1])


def test_so_are_weights_that_a_gradient_has_made_nan(tmp_path: Path) -> None:
    """Of update 7, after which the run is saved; its loss is finite."""
    found = [task(), task()]
    result = rolling(tmp_path / "nan", log_every=None).fit(found[0], data(7, mark=GRADIENT))
    assert result.progress.skipped == 4
    rolling(tmp_path / "without").fit(found[1], without(range(4, 8), data(7)))
    assert weights(found[0]) == weights(found[1])


class Dies(Callback):
    """Is killed once the data of so many updates are used."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, run: Run) -> None:
        if run.progress.micro_batches == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def two_epochs(run_dir: Path, *callbacks: Any) -> None:
    trainer = rolling(run_dir, *callbacks, max_epochs=2, spike={"max_rollbacks": 4})
    trainer.fit(task(), data(13, 24), resume="auto")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("at", [14, 15, 27])
def test_a_run_that_is_killed_around_a_rollback_is_resumed_exactly(at: int, tmp_path: Path) -> None:
    two_epochs(tmp_path / "straight")
    killed = multiprocessing.get_context("fork").Process(
        target=two_epochs, args=(tmp_path / "killed", Dies(at))
    )
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    two_epochs(tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "straight")


@pytest.mark.parametrize(("bad", "found", "name"), [(13, 14, "update-00000012"), (17, 20, "update-00000016")])
def test_what_a_run_was_taken_back_to_is_saved_at_once(
    bad: int, found: int, name: str, tmp_path: Path
) -> None:
    """Found at a log point, and before a save."""

    class Fails(Callback):
        def on_step_start(self, run: Run) -> None:
            if run.progress.micro_batches == found:
                raise ConnectionError

    with pytest.raises(ConnectionError) as caught:
        rolling(tmp_path, Fails()).fit(task(), data(bad))
    newest = f"{tmp_path / 'checkpoints' / name}-2"
    assert f"the newest checkpoint is {newest}" in "".join(caught.value.__notes__)
    assert read_manifest(newest).progress["position"] == found * SIZE


def test_data_that_cannot_be_read_again_just_go_on(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(data(18)))

    found = [task(), task()]
    rolling(tmp_path / "stream").fit(found[0], DataLoader(Stream(), batch_size=None))
    rolling(tmp_path / "indexed").fit(found[1], data(18))
    assert weights(found[0]) == weights(found[1])


def test_too_many_rollbacks_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"rolled back 2 time\(s\) before, as often as max_rollbacks=2"):
        rolling(tmp_path, spike={"max_rollbacks": 2}).fit(task(), data(14, 19, 23, 27))


def test_without_a_checkpoint_from_before_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = CheckpointConfig(every="25 steps", best=0, by=None)
    with caplog.at_level(logging.WARNING):
        result = rolling(tmp_path, checkpoint=late).fit(task(), data(15))
    assert result.progress.updates == COUNT
    assert caplog.messages[0].endswith("there is no checkpoint from before it")


def _on_ranks(strategy: str, run_dir: str, spiking: bool) -> Any:
    trainer = rolling(Path(run_dir), strategy=strategy, devices=2)
    model = task()
    whole = data(31, count=60)  # the second rank's in the sixteenth update
    kept = [*range(12 * 2 * SIZE), *range(16 * 2 * SIZE, 60 * SIZE)]
    result = trainer.fit(
        model, whole if spiking else DataLoader(Subset(whole.dataset, kept), batch_size=SIZE)
    )
    return weights(model), result.progress.updates, result.progress.skipped


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_are_taken_back_together(strategy: str, tmp_path: Path) -> None:
    first, second = run_distributed(_on_ranks, strategy, str(tmp_path / "spike"), True)
    other, _ = run_distributed(_on_ranks, strategy, str(tmp_path / "without"), False)
    assert first == second
    assert first[0] == other[0]
    assert (first[1:], other[1:]) == ((26, 4), (26, 0))


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "rolback"}, "Did you mean 'rollback'"),
        ({"threshold": 0}, "threshold"),
        ({"window": 5}, "window"),
        ({"max_rollbacks": 0}, "max_rollbacks"),
        ({"max_in_a_row": 3}, "LossSpike\\('rollback', max_in_a_row=3\\): that is a limit of 'skip'"),
        ({"action": "skip", "max_rollbacks": 3}, "that is a limit of 'rollback'"),
        ({"sync": 1}, "sync"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSpike(**arguments)


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_a_metric_that_is_not_returned_is_named(action: str, tmp_path: Path) -> None:
    callbacks = [spike(action, metric="los")]
    trainer = quiet(
        max_epochs=1, log_every="7 steps", checkpoint=POLICY, run_dir=tmp_path, callbacks=callbacks
    )
    with pytest.raises(ConfigError, match=r"LossSpike\(metric='los'\)\. Did you mean 'loss'"):
        trainer.fit(task(), data())


def test_skipping_by_the_loss_of_one_of_several_optimizers_needs_its_name() -> None:
    with pytest.raises(ConfigError, match=r"metric='loss'.*'discriminator_loss'"):
        quiet(max_epochs=1, log_every="2 steps", callbacks=[spike("skip")]).fit(Duel(), duels())
    by_name = spike("skip", metric="generator_loss")
    quiet(max_epochs=1, log_every="2 steps", callbacks=[by_name]).fit(Duel(), duels())


def test_what_cannot_be_done_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="checkpoint=False"):
        quiet(callbacks=[LossSpike("rollback")])
    kind: Any = STRATEGIES["xla"]
    with pytest.raises(StrategyError, match=r"LossSpike\(action='skip'\) with strategy 'xla'"):
        LossSpike("skip").check_trainer(quiet(), kind)


def test_on_an_accelerator_skipping_has_to_be_allowed_to_wait() -> None:
    class Accelerator(Strategy):
        name = "accelerator"
        device = torch.device("cuda")
        no_skipping = ""

    kind: Any = Accelerator
    with pytest.raises(ConfigError, match=r"LossSpike\(action='skip'\) on 'cuda' waits .* sync=True"):
        LossSpike("skip").check_trainer(quiet(), kind)
    LossSpike("skip", sync=True).check_trainer(quiet(), kind)
