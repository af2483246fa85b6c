"""kill -9 at any moment of saving: the newest complete checkpoint is always found, with the right content."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.support.outcome import outcome
from tests.support.trials import trials

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, verify

# For each delay that it reads: forks a child that saves as fast as it can, and kills it after that delay.
# Forked, because importing torch anew for each kill would take a hundred times as long.
PROGRAM = """
import os, signal, sys, time
import torch
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot

def snapshot(update):
    weights = {str(part): torch.full((40_000,), float(update + part)) for part in range(4)}
    return Snapshot({"model": weights}, {"state": [update]}, {"updates": update, "epoch": 0})

POLICIES = [
    CheckpointConfig(keep_last=2, best=1), CheckpointConfig(every="7 steps", keep_last=5, best=0)
]

def work(directory, acknowledged):
    manager = CheckpointManager(directory, POLICIES)
    found = manager.load_latest()
    update = found[1].progress["updates"] if found else 0
    while True:
        update += 1
        resume = ["", "7 steps"] if update % 7 == 0 else True
        metrics = {"validation/loss": update * 37 % 101}
        manager.save(update, 0, metrics, lambda: snapshot(update), resume=resume, keeper=True)
        os.write(acknowledged, b"%d\\n" % update)

acknowledged = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        work(sys.argv[1], acknowledged)
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    print(os.WTERMSIG(status), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_after_any_kill_the_newest_complete_checkpoint_is_found(tmp_path):
    directory, acknowledged = tmp_path / "checkpoints", tmp_path / "acknowledged"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    chance = random.Random(0)
    kills = halves = 0
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), str(acknowledged)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 7
        while kills < 60 and (time.monotonic() < end or kills < 10 or not halves):
            process.stdin.write(f"{chance.uniform(0.005, 0.06)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "9\n"
            kills += 1
            halves += directory.exists() and any(name.startswith(".") for name in os.listdir(directory))
            check(directory, acknowledged)
        process.stdin.close()
    assert process.returncode == 0
    assert kills >= 10
    assert halves > 0  # at least one kill hit the middle of a save


def check(directory, acknowledged):
    lines = acknowledged.read_text(encoding="ascii").split() if acknowledged.exists() else []
    policies = [
        CheckpointConfig(keep_last=2, best=1),
        CheckpointConfig(every="7 steps", keep_last=5, best=0),
    ]
    manager = CheckpointManager(str(directory), policies)
    found = manager.load_latest()  # a checkpoint set aside would warn, and warnings are errors
    if found is None:
        assert not lines
        return
    snapshot = found[1]
    update = snapshot.progress["updates"]
    assert update >= int(lines[-1] if lines else 0)
    assert snapshot.objects["state"] == [update]
    for part, tensor in snapshot.tensors["model"].items():
        assert tensor.shape == (40_000,)
        assert bool((tensor == update + int(part)).all())
    best = min(range(1, update + 1), key=lambda each: each * 37 % 101)
    assert manager.best() == str(directory / f"update-{best:08d}")
    sevenths = {entry.update for entry in manager.entries() if "7 steps" in entry.resume}
    assert sevenths >= {*range(7, update + 1, 7)[-5:]}
    for entry in manager.entries():
        verify(str(directory / entry.name))
    assert not [name for name in os.listdir(directory) if name.startswith(".")]


# What a training process does to files, and about how often; each time is a moment to be killed at.
MOMENTS = {"open": 30, "os.rename": 6, "os.mkdir": 3}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
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
    assert kills >= 4
