"""No wrong byte loads: a checkpoint is verified on every read, and a damaged one is set aside."""

from pathlib import Path

import pytest
from tests.promises.example import QUIET, Line, batches, weights
from tests.support.messages import warned

from drivetrain import CheckpointConfig, CheckpointError, LambdaCallback, Run, Trainer
from drivetrain.checkpoint import DirectoryCheckpointIO


def train(run_dir: Path, until: int = -1) -> Line:
    """Train three epochs of three steps with a checkpoint after each, or stop before."""

    def stop(run: Run) -> None:
        if run.progress.steps == until:
            run.stop("here")

    task, policy = Line(), CheckpointConfig(every="1 epoch", keep_last=3)
    options = {"max_epochs": 3, "strategy": "cpu", "checkpoint": policy, **QUIET}
    trainer = Trainer(run_dir=run_dir, callbacks=[LambdaCallback(on_step_end=stop)], **options)
    trainer.fit(task, batches(12, 4, shuffle=True), resume="auto")
    return task


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    expected = weights(train(tmp_path))
    *_, newest = sorted((tmp_path / "checkpoints").glob("step-*"))
    loaded = 0
    for path in sorted(newest.iterdir()):
        size = path.stat().st_size
        for position in {0, *range(7, size, max(1, size // 12)), size - 1}:
            flip(path, position)
            with pytest.raises(CheckpointError):
                DirectoryCheckpointIO().load(str(newest))
            flip(path, position)
            loaded += 1
    assert loaded > 40
    assert weights(Line.from_checkpoint(newest)).equal(expected)


def test_a_run_resumes_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    expected = weights(train(tmp_path / "whole"))
    train(tmp_path / "damaged", until=6)
    newest = sorted((tmp_path / "damaged" / "checkpoints").glob("step-*"))[-1]
    flip(newest / "model.safetensors", -1)
    with warned("is not what was written"):
        found = weights(train(tmp_path / "damaged"))
    assert found.equal(expected)
    assert newest.with_name(f"{newest.name}.bad").is_dir()
