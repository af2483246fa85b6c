"""`checkpoint="async"` in a fit: the same checkpoints, errors at the next step, nothing left unwritten."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.support.saving import let_writing_end
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, CheckpointError, LambdaCallback
from drivetrain.checkpoint import DirectoryCheckpointIO, verify


def writer():  # the thread that is writing, if there is one
    return next((each for each in threading.enumerate() if each.name == "drivetrain-checkpoint"), None)


WAIT = LambdaCallback(on_step_end=lambda run: let_writing_end())  # begun in the step before


def fit(run_dir, checkpoint, *callbacks, **options):
    task = Regression()
    options = {"max_epochs": 3, "run_dir": run_dir, "checkpoint": checkpoint, **options}
    trainer = quiet(**options, callbacks=callbacks)
    return task, trainer.fit(task, pairs(), pairs(6))


def weights_of(run_dir):
    found = {}
    for path in sorted(Path(run_dir, "checkpoints").glob("step-*")):
        groups = DirectoryCheckpointIO().load(str(path)).tensors
        tensors = {**groups["model"], **groups["optimizer"]}
        found[path.name] = {name: tensor.tolist() for name, tensor in tensors.items()}
    return found


def test_checkpoints_of_the_background_are_those_of_the_foreground(tmp_path):
    for name, background in (("sync", False), ("async", True)):
        config = CheckpointConfig(every="2 steps", keep_last=3, asynchronous=background)
        _, result = fit(tmp_path / name, config)
        assert writer() is None
        verify(result.last_checkpoint)
        assert result.best_checkpoint is not None
    assert weights_of(tmp_path / "sync") == weights_of(tmp_path / "async") != {}
    indexes = [(tmp_path / name / "checkpoints" / "index.json").read_bytes() for name in ("sync", "async")]
    assert indexes[0] == indexes[1]


def test_checkpoint_async_is_the_default_policy_in_the_background(tmp_path):
    loaders = {"one": pairs(4), "two": pairs(4, seed=1)}
    task = Regression()
    result = quiet(max_epochs=2, run_dir=tmp_path, checkpoint="async").fit(task, pairs(), loaders)
    assert result.best_checkpoint is not None  # ranked by the first loader's loss
    assert sorted(weights_of(tmp_path)) == ["step-00000005", "step-00000010"]
    again = quiet(max_epochs=3, run_dir=tmp_path, checkpoint="async")
    assert again.fit(Regression(), pairs(), loaders, resume="auto").progress.steps == 15


def test_on_checkpoint_saved_comes_once_for_each_checkpoint_when_it_is_there(tmp_path):
    told = []

    def note(run):
        verify(run.last_checkpoint)
        told.append((os.path.basename(run.last_checkpoint), run.progress.steps))

    config = CheckpointConfig(every="2 steps", best=0, by=None, keep_last=20, asynchronous=True)
    fit(tmp_path, config, LambdaCallback(on_checkpoint_saved=note), WAIT, max_epochs=1)
    # Told after the step that follows; the last by the end of the fit.
    assert told == [("step-00000002", 3), ("step-00000004", 5), ("step-00000005", 5)]


def test_a_failed_write_ends_the_run_at_the_next_step(tmp_path):
    def sabotage(run):
        if run.progress.steps == 4:  # a file in the place of the directory: nobody can write there
            shutil.rmtree(tmp_path / "checkpoints")
            (tmp_path / "checkpoints").write_text("", encoding="ascii")

    config = CheckpointConfig(every="2 steps", best=0, by=None, asynchronous=True)
    callbacks = [LambdaCallback(on_step_end=sabotage), WAIT]
    trainer = quiet(max_epochs=9, run_dir=tmp_path, checkpoint=config, callbacks=callbacks)
    with pytest.raises(CheckpointError, match=r"checkpoints.*step-00000004") as caught:
        trainer.fit(Regression(), pairs())
    assert any("after step 5," in note for note in caught.value.__notes__)
    assert writer() is None


def test_a_run_that_fails_or_is_left_still_commits_what_was_being_written(tmp_path):
    def fail(run):
        if run.progress.steps == 3:
            raise RuntimeError("the user's own")

    config = CheckpointConfig(every="2 steps", best=0, by=None, asynchronous=True)
    with pytest.raises(RuntimeError, match="the user's own") as caught:
        fit(tmp_path, config, LambdaCallback(on_step_end=fail))
    assert any("step-00000002" in note for note in caught.value.__notes__)
    assert list(weights_of(tmp_path)) == ["step-00000002"]
    assert writer() is None
    late = CheckpointConfig(every="50 steps", best=0, by=None, asynchronous=True)
    steps = quiet(max_epochs=3, run_dir=tmp_path / "left", checkpoint=late).steps(Regression(), pairs())
    for _ in range(4):
        next(steps)
    steps.close()
    assert list(weights_of(tmp_path / "left")) == ["step-00000004"]
    assert writer() is None


def test_directory_of_the_policy_holds_checkpoints_and_weights(tmp_path):
    config = CheckpointConfig(directory=tmp_path / "elsewhere")
    _, result = fit(tmp_path / "run", config, loggers="csv")
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["checkpoints", "model.safetensors"]
    assert "checkpoints" not in os.listdir(tmp_path / "run")
    assert result.model_path == str(tmp_path / "elsewhere" / "model.safetensors")
    assert result.last_checkpoint.startswith(str(tmp_path / "elsewhere"))
    trainer = quiet(max_epochs=4, run_dir=tmp_path / "run", checkpoint=config, loggers="csv")
    assert trainer.fit(Regression(), pairs(), pairs(6), resume="auto").progress.epoch == 4
    best = quiet(run_dir=tmp_path / "run", checkpoint=config)
    assert best.validate(Regression(), pairs(6), checkpoint="best")["validation/loss"] > 0
