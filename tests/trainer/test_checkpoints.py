"""What a Trainer's `checkpoint=` and `resume=` are told when they cannot mean what they say."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, CheckpointError, ConfigError, LambdaCallback, Trainer
from drivetrain.checkpoint import load_weights, resolve
from drivetrain.checkpoint.saving.index import read_index, write_index
from drivetrain.checkpoint.storage import files as checkpoint_files


def test_keepers_that_were_asked_for_need_a_validation(tmp_path: Path) -> None:
    policy = CheckpointConfig(best=1)
    with pytest.raises(ConfigError, match=r"by 'validation/loss' at each.*never validates.*by=None"):
        quiet(max_epochs=1, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs())
    quiet(max_epochs=1, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs(), pairs())


@pytest.mark.parametrize(
    "policy", [CheckpointConfig(every="1 epoch"), CheckpointConfig(best=2, by="train/loss"), True]
)
def test_a_policy_that_can_be_followed_needs_none(policy: Any, tmp_path: Path) -> None:
    quiet(max_epochs=1, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs())


@pytest.mark.parametrize(("word", "named"), [("last", "last_checkpoint"), ("best", "best_checkpoint")])
def test_a_word_that_names_no_checkpoint_is_told_from_auto(word: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"resume='{word}' is neither 'auto'.*{named}"):
        quiet(max_epochs=1, run_dir=tmp_path).fit(Regression(), pairs(), resume=word)


def test_a_file_of_weights_is_no_checkpoint(tmp_path: Path) -> None:
    result = quiet(max_epochs=1, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    assert result.model_path is not None
    with pytest.raises(ConfigError, match=r"model\.safetensors' is a file.*task\.load_weights\(path\)"):
        quiet(max_epochs=2, run_dir=tmp_path / "other").fit(Regression(), pairs(), resume=result.model_path)


def test_the_weights_of_a_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    opened: list[str] = []
    init = checkpoint_files.HashedReader.__init__

    def noted(self: Any, path: str, *arguments: Any) -> None:
        opened.append(Path(path).name)
        init(self, path, *arguments)

    monkeypatch.setattr(checkpoint_files.HashedReader, "__init__", noted)
    load_weights(tmp_path / "checkpoints" / "update-00000010")
    once = opened.count("model.safetensors")
    for read in (load_weights, Regression.from_checkpoint):
        opened.clear()
        read(tmp_path)
        assert opened.count("model.safetensors") == once


def test_a_task_that_changes_the_working_directory_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    leave = LambdaCallback(on_epoch_end=lambda run: monkeypatch.chdir(tmp_path / "other"))
    quiet(max_epochs=2, run_dir="run", checkpoint=True, callbacks=[leave]).fit(Regression(), pairs())
    assert not list((tmp_path / "other").iterdir())
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / "checkpoints" / "update-00000010").exists()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_run_directory_that_is_a_file_is_told_before_training(below: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be made: '.*/run' is a file"):
        quiet(max_epochs=1, run_dir=tmp_path / "run" / below).fit(Regression(), pairs())


def test_another_runs_checkpoint_is_not_mixed_into_a_run_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        quiet(max_epochs=1, run_dir=tmp_path / name, checkpoint=True).fit(Regression(), pairs())
    trainer = quiet(max_epochs=2, run_dir=tmp_path / "b", checkpoint=True)
    for other in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "update-00000005"):
        with pytest.raises(ConfigError, match="holds the checkpoints of an earlier run"):
            trainer.fit(Regression(), pairs(), resume=str(other))
    (tmp_path / "link").symlink_to(tmp_path / "b")
    own = tmp_path / "link" / "checkpoints" / "update-00000005"
    assert trainer.fit(Regression(), pairs(), resume=str(own)).progress.updates == 10


def test_a_run_that_is_resumed_by_its_path_sets_the_damaged_aside_too(tmp_path: Path) -> None:
    policy = CheckpointConfig(every="1 epoch", keep_last=2, best=0)
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs())
    (tmp_path / "checkpoints" / "update-00000010" / "model.safetensors").unlink()
    with warned(r"update-00000010\.bad"):
        quiet(max_epochs=2, run_dir=tmp_path, checkpoint=policy).fit(
            Regression(), pairs(), resume=str(tmp_path)
        )
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["index.json", "update-00000005", "update-00000010", "update-00000010.bad"]


def test_a_checkpoint_that_is_lost_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    (tmp_path / "checkpoints" / "update-00000010" / "manifest.json").unlink()
    with warned("lacks update-00000010, newer than update-00000005"):
        load_weights(tmp_path)


def test_an_empty_path_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is empty"):
        resolve("")


@pytest.fixture
def may_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which torch's agent may start this program again."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(name, value)


def test_a_program_that_may_start_again_needs_resumable_checkpoints(
    may_start_again: None, tmp_path: Path
) -> None:
    policy = CheckpointConfig(resumable=False)
    with pytest.raises(ConfigError, match=r"--max-restarts.*resumable=False"):
        quiet(max_epochs=1, run_dir=tmp_path, checkpoint=policy).fit(Regression(), pairs())


@pytest.mark.parametrize("again", [("TORCHELASTIC_RESTART_COUNT", "1"), ("DRIVETRAIN_AGAIN", "1")])
@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_a_program_that_is_started_again_goes_on_whatever_it_was_told(
    may_start_again: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    resume: str | None,
    again: tuple[str, str],
) -> None:
    quiet(max_epochs=1, run_dir="elsewhere", checkpoint=True).fit(Regression(), pairs())
    quiet(max_epochs=2, run_dir=tmp_path / "run", checkpoint=True).fit(Regression(), pairs(), resume=resume)
    monkeypatch.setenv(*again)
    seen: list[int] = []
    noting = LambdaCallback(on_fit_start=lambda run: seen.append(run.progress.updates))
    quiet(max_epochs=3, run_dir=tmp_path / "run", checkpoint=True, callbacks=[noting]).fit(
        Regression(), pairs(), resume=resume
    )
    assert seen == [10], "its own checkpoint, and not a fresh start, an error, or the other run's"


@pytest.mark.parametrize("resume", [None, "elsewhere"])
def test_a_new_run_in_a_used_directory_is_refused_whatever_the_launcher_may_do(
    may_start_again: None, tmp_path: Path, resume: str | None
) -> None:
    for run_dir in ("elsewhere", tmp_path / "run"):
        quiet(max_epochs=1, run_dir=run_dir, checkpoint=True).fit(Regression(), pairs())
    trainer = quiet(max_epochs=2, run_dir=tmp_path / "run", checkpoint=True)
    with pytest.raises(ConfigError, match="holds the checkpoints of an earlier run"):
        trainer.fit(Regression(), pairs(), resume=resume)
    assert trainer.fit(Regression(), pairs(), resume="auto").progress.updates == 10


def test_where_a_run_begins_that_was_to_go_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(resume: str | None, **options: Any) -> list[str]:
        trainer = Trainer(max_epochs=4, strategy="cpu", loggers=(), run_dir="run", **options)
        with heard("^(begins anew|goes on)", logging.INFO) as texts:
            trainer.fit(Regression(), pairs(), resume=resume)
        return texts

    monkeypatch.chdir(tmp_path)
    assert told(None, checkpoint=False) == []
    assert told("auto", max_steps=7) == ["begins anew: no checkpoint in run"]
    newest = "run/checkpoints/update-00000007"
    assert told("auto", max_steps=8) == [f"goes on from {newest} (update 7, epoch 1)"]
    assert told("auto", progress_bar=False) == []


def test_a_program_that_is_started_again_needs_a_place_to_go_on_from(may_start_again: None) -> None:
    with pytest.raises(ConfigError, match="would begin from the start each time: give the Trainer a run_dir"):
        quiet(max_epochs=1, checkpoint=True).fit(Regression(), pairs())
    quiet(max_epochs=1).fit(Regression(), pairs())


def test_the_best_is_found_again_whose_loss_on_a_named_loader_ranked(tmp_path: Path) -> None:
    losses = [1.0, 9.0, 2.0, 8.0, 3.0, 7.0]  # on two loaders, epoch after epoch

    class Planted(Regression):
        def validation_step(self, batch: Any) -> Any:
            return torch.tensor(losses.pop(0))

    loaders = {"near": pairs(2), "far": pairs(2, seed=1)}
    trainer = quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True)
    result = trainer.fit(Planted(), pairs(), loaders)
    best, other = Regression(), Regression()
    best.load_weights(str(result.best_checkpoint))
    trainer.validate(other, loaders, checkpoint="best")
    assert result.best_checkpoint == str(tmp_path / "checkpoints" / "update-00000005")
    assert weights(other) == weights(best)
    # Kept by a policy whose direction nobody has to repeat.
    losses[:] = [1.0, 1.0, 3.0, 2.0, 5.0, 3.0]
    policy = CheckpointConfig(every=None, by="validation/near/loss", mode="max", best=2)
    given = quiet(max_epochs=3, run_dir=tmp_path / "max", checkpoint=policy).fit(Planted(), pairs(), loaders)
    best.load_weights(str(given.best_checkpoint))
    quiet(run_dir=tmp_path / "max", checkpoint=True).validate(other, loaders, checkpoint="best")
    assert str(given.best_checkpoint).endswith("update-00000015")
    assert weights(other) == weights(best)


def test_the_best_of_several_whose_direction_an_older_version_did_not_record_needs_the_policy(
    tmp_path: Path,
) -> None:
    keepers = CheckpointConfig(every=None, best=2, by="train/loss")
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=keepers).fit(Regression(), pairs())
    directory = str(tmp_path / "checkpoints")
    entries = read_index(directory) or []
    write_index(directory, [dataclasses.replace(each, keeper={"train/loss": ""}) for each in entries])
    with pytest.raises(CheckpointError, match=r"CheckpointConfig\(by='train/loss', mode=\.\.\.\)"):
        quiet(run_dir=tmp_path).validate(Regression(), pairs(), checkpoint="best")
    quiet(run_dir=tmp_path, checkpoint=keepers).validate(Regression(), pairs(), checkpoint="best")
    write_index(directory, [dataclasses.replace(entries[-1], keeper={"train/loss": ""})])
    quiet(run_dir=tmp_path).validate(Regression(), pairs(), checkpoint="best")
