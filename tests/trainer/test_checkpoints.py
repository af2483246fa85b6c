"""A Trainer's `checkpoint=` and `resume=`: what a run begins from, and which checkpoint is the best."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, Trainer


def test_a_changed_working_directory_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    leave = LambdaCallback(on_epoch_end=lambda run: monkeypatch.chdir(tmp_path / "other"))
    quiet(max_epochs=2, run_dir="run", checkpoint=True, callbacks=[leave]).fit(Regression(), pairs())
    assert not list((tmp_path / "other").iterdir())
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000010").exists()


def test_resume_from_another_run_is_not_mixed_into_a_used_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        quiet(max_epochs=1, run_dir=tmp_path / name, checkpoint=True).fit(Regression(), pairs())
    trainer = quiet(max_epochs=2, run_dir=tmp_path / "b", checkpoint=True)
    for other in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "step-00000005"):
        with pytest.raises(ConfigError, match="holds the checkpoints of an earlier run"):
            trainer.fit(Regression(), pairs(), resume=str(other))
    (tmp_path / "link").symlink_to(tmp_path / "b")
    own = tmp_path / "link" / "checkpoints" / "step-00000005"
    assert trainer.fit(Regression(), pairs(), resume=str(own)).progress.steps == 10


def test_resume_by_the_runs_path_sets_a_damaged_checkpoint_aside(tmp_path: Path) -> None:
    policy = CheckpointConfig(every="1 epoch", keep_last=2, best=0)
    trainer = quiet(max_epochs=2, run_dir=tmp_path, checkpoint=policy)
    trainer.fit(Regression(), pairs())
    (tmp_path / "checkpoints" / "step-00000010" / "model.safetensors").unlink()
    with warned(r"step-00000010\.bad"):
        trainer.fit(Regression(), pairs(), resume=str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["index.json", "step-00000005", "step-00000010", "step-00000010.bad"]


@pytest.fixture
def may_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which torch's agent may start this program again."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("may_start_again")
def test_a_program_that_may_start_again_needs_resumable_checkpoints_in_a_run_dir(tmp_path: Path) -> None:
    policy = CheckpointConfig(resumable=False)
    with pytest.raises(ConfigError, match=r"--max-restarts.*resumable=False"):
        quiet(max_epochs=1, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs())
    with pytest.raises(ConfigError, match="would begin from the start each time: give the Trainer a run_dir"):
        quiet(max_epochs=1, checkpoint=True).fit(Regression(), pairs())
    quiet(max_epochs=1).fit(Regression(), pairs())


@pytest.mark.usefixtures("may_start_again")
@pytest.mark.parametrize("again", ["TORCHELASTIC_RESTART_COUNT", "DRIVETRAIN_AGAIN"])
@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_a_program_that_is_started_again_resumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: str | None, again: str
) -> None:
    run_dir, seen = tmp_path / "run", []
    quiet(max_epochs=1, run_dir="elsewhere", checkpoint=True).fit(Regression(), pairs())
    quiet(max_epochs=2, run_dir=run_dir, checkpoint=True).fit(Regression(), pairs(), resume=resume)
    noting = LambdaCallback(on_fit_start=lambda run: seen.append(run.progress.steps))
    trainer = quiet(max_epochs=3, run_dir=run_dir, checkpoint=True, callbacks=[noting])
    with pytest.raises(ConfigError, match="holds the checkpoints of an earlier run"):  # a new run
        trainer.fit(Regression(), pairs(), resume=resume)
    monkeypatch.setenv(again, "1")
    trainer.fit(Regression(), pairs(), resume=resume)
    assert seen == [10], "its own checkpoint, and not a fresh start, an error, or the other run's"


def test_log_tells_where_a_resumed_fit_continues() -> None:
    def told(resume: str | None, **options: Any) -> list[str]:
        trainer = Trainer(max_epochs=4, strategy="cpu", loggers=(), run_dir="run", **options)
        with heard("^(begins anew|goes on)", logging.INFO) as texts:
            trainer.fit(Regression(), pairs(), resume=resume)
        return texts

    assert told(None, checkpoint=False) == []
    assert told("auto", max_steps=7) == ["begins anew: no checkpoint in run"]
    newest = "run/checkpoints/step-00000007"
    assert told("auto", max_steps=8) == [f"goes on from {newest} (step 7, epoch 1)"]
    assert told("auto", progress_bar=False) == []


def test_best_is_found_again_by_the_loader_and_the_mode_that_ranked(tmp_path: Path) -> None:
    losses: list[float] = []
    task = variant(validation_step=lambda self, batch: torch.tensor(losses.pop(0)))()
    loaders = {"near": pairs(2), "far": pairs(2, seed=1)}
    by_far = CheckpointConfig(by="validation/far/loss")
    maximum = CheckpointConfig(every=None, by="validation/near/loss", mode="max", best=2)
    for name, policy, values, best in (  # the values are of near and far, epoch after epoch
        ("default", True, [1.0, 9.0, 2.0, 8.0, 3.0, 7.0], "05"),
        ("far", by_far, [1.0, 9.0, 2.0, 8.0, 3.0, 7.0], "15"),
        ("max", maximum, [1.0, 1.0, 3.0, 2.0, 5.0, 3.0], "15"),
    ):
        losses[:] = values
        trainer = quiet(max_epochs=3, run_dir=tmp_path / name, checkpoint=policy)
        result = trainer.fit(task, pairs(), loaders)
        assert str(result.best_checkpoint).endswith(f"step-000000{best}"), name
        expected, found = Regression(), Regression()
        expected.load_weights(str(result.best_checkpoint))
        being_written = tmp_path / name / "checkpoints" / ".saving-step-00000016-ab12"
        being_written.mkdir()
        # By a policy that need not repeat the mode, and without touching the directory of a run in progress.
        again = True if name == "max" else policy
        quiet(run_dir=tmp_path / name, checkpoint=again).validate(found, loaders, checkpoint="best")
        assert weights(found) == weights(expected), name
        assert being_written.exists()
