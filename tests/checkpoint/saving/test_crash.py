"""kill -9 at any moment of saving: the newest complete checkpoint is always found, with the right content."""

import os
import random
import signal
import sys
from functools import partial

import pytest
import torch
from tests.support.outcome import outcome
from tests.support.trials import kill_at_file_event, trials

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot, verify

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and SIGKILL")
POLICIES = [CheckpointConfig(keep_last=2, best=1), CheckpointConfig(every="7 steps", keep_last=5, best=0)]


def snapshot(step):
    weights = {str(part): torch.full((4_000,), float(step + part)) for part in range(4)}
    return Snapshot({"model": weights}, {"state": [step]}, {"steps": step, "epoch": 0})


def work(directory, acknowledged):
    manager = CheckpointManager(directory, POLICIES)
    found = manager.load_latest()
    start = found[1].progress["steps"] if found else 0
    for step in range(start + 1, start + 30):
        resume = ["", "7 steps"] if step % 7 == 0 else True
        metrics = {"validation/loss": step * 37 % 101}
        manager.save(step, 0, metrics, partial(snapshot, step), resume=resume, best=True)
        os.write(acknowledged, b"%d\n" % step)


def check(directory, acknowledged):
    lines = acknowledged.read_text(encoding="ascii").split() if acknowledged.exists() else []
    manager = CheckpointManager(str(directory), POLICIES)
    found = manager.load_latest()  # a checkpoint set aside would warn, and warnings are errors
    if found is None:
        assert not lines
        return
    step = found[1].progress["steps"]
    assert step >= int(lines[-1] if lines else 0)
    assert found[1].objects["state"] == [step]
    for part, tensor in found[1].tensors["model"].items():
        assert tensor.tolist() == [step + int(part)] * 4_000
    best = min(range(1, step + 1), key=lambda each: each * 37 % 101)
    assert manager.best() == str(directory / f"step-{best:08d}")
    sevenths = {entry.step for entry in manager.entries() if "7 steps" in entry.resume}
    assert sevenths >= {*range(7, step + 1, 7)[-5:]}
    for entry in manager.entries():
        verify(str(directory / entry.name))
    assert not [name for name in os.listdir(directory) if name.startswith(".")]


def test_after_a_kill_at_any_operation_the_newest_complete_checkpoint_is_found(tmp_path):
    directory, acknowledged = tmp_path / "checkpoints", tmp_path / "acknowledged"
    chance = random.Random(0)
    halves = 0
    for kill in range(16):
        event = chance.choice(("open", "open", "os.rename", "os.mkdir", "shutil.rmtree"))
        child = os.fork()
        if not child:
            try:
                kill_at_file_event(event, str(directory), chance.randint(1, 30 if event == "open" else 6))
                work(str(directory), os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            finally:
                os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, kill
        halves += directory.exists() and any(name.startswith(".") for name in os.listdir(directory))
        check(directory, acknowledged)
    assert halves > 3  # that many kills have hit the middle of a save


# What a training process does to files, and about how often; each time is a moment to be killed at.
MOMENTS = {"open": 30, "os.rename": 6, "os.mkdir": 3}


@pytest.mark.landing
def test_a_training_run_killed_again_and_again_is_the_run_that_was_not(tmp_path):
    chance = random.Random(0)
    with trials() as server:
        undisturbed = tmp_path / "undisturbed"
        undisturbed.mkdir()
        assert server.run(undisturbed, 0) == 0
        kills = 0
        for trial in range(2):
            directory = tmp_path / str(trial)
            directory.mkdir()
            for attempt in range(3):
                event = chance.choice(list(MOMENTS))
                number = chance.randint(1, MOMENTS[event])
                kill = {"event": event, "part": str(directory / "run"), "number": number}
                status = server.run(directory, attempt, asynchronous=trial % 2 == 1, kill=kill)
                kills += status == -signal.SIGKILL
            assert server.run(directory, 3, asynchronous=trial % 2 == 1) == 0
            assert outcome(directory / "run") == outcome(undisturbed / "run")
    assert kills >= 2
