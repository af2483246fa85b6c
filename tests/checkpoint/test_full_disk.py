"""Real disks that are full, limited or read-only, under a real training run."""

import os
import shutil
import subprocess
import threading

import pytest
import torch
from tests.campaigns.life import content, differences
from tests.support.outcome import weights
from tests.support.saving import file_size_limit
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, TaskModule, Trainer
from drivetrain.checkpoint import CheckpointManager, verify
from drivetrain.core.errors import CheckpointError

SIZE = 4 << 20


def mounted(directory, *options):
    """Mount, and skip where that is not allowed."""
    try:
        subprocess.run(["mount", *options, str(directory)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted(directory, "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


class Regression(TaskModule):
    """Of 65,536 weights: with AdamW's two moments a checkpoint takes 0.8 MB."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 1024)

    def forward(self, features):
        return self.net(features)

    def training_step(self, batch):
        features, target = batch
        return F.mse_loss(self(features), target)

    def configure_optimizers(self):
        return OptimizerConfig("adamw", lr=1e-3)


class Filler(Callback):
    """Fills the disk after the fifth update, but for a little, once nothing is being written there."""

    def __init__(self, file):
        self.file = file

    def on_step_end(self, run):
        if run.progress.updates == 5:
            for thread in threading.enumerate():
                if thread.name == "drivetrain-checkpoint":
                    thread.join(20)
            self.file.write_bytes(bytes(shutil.disk_usage(self.file.parent).free - 300_000))


def train(directory, *callbacks, asynchronous=False):
    torch.manual_seed(0)
    task = Regression()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 64, generator=generator), torch.randn(40, 1024, generator=generator))
    trainer = Trainer(
        max_steps=10,
        strategy="cpu",
        checkpoint=CheckpointConfig(every="2 steps", by=None, asynchronous=asynchronous),
        callbacks=callbacks,
        loggers=(),
        progress_bar=False,
        run_dir=directory,
    )
    trainer.fit(task, torch.utils.data.DataLoader(data, batch_size=4), resume="auto")
    return weights(task)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_a_full_disk_says_what_to_do_and_goes_on_once_there_is_room(
    small_disk, tmp_path, asynchronous
):
    run, filler = small_disk / "run", small_disk / "filler"
    with pytest.raises(CheckpointError, match=r"cannot write .*update-00000006.*\(ENOSPC\); free some space"):
        train(run, Filler(filler), asynchronous=asynchronous)
    checkpoints = run / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["index.json", "update-00000002", "update-00000004"]
    for name in ("update-00000002", "update-00000004"):
        verify(str(checkpoints / name))
    filler.unlink()
    resumed = train(run, asynchronous=asynchronous)
    assert resumed == train(tmp_path / "undisturbed")


def test_a_file_that_may_not_grow_leaves_what_was_there(tmp_path):
    manager = CheckpointManager(str(tmp_path / "c"), CheckpointConfig(by=None))
    manager.save(1, 0, {}, lambda: content(1))
    # The file of weights has more than this; the part that fits is written, and must go.
    with (
        file_size_limit(1000),
        pytest.raises(CheckpointError, match=r"cannot write .*update-00000002/model.safetensors.*\(EFBIG\)"),
    ):
        manager.save(2, 0, {}, lambda: content(2))
    assert sorted(os.listdir(tmp_path / "c")) == ["index.json", "update-00000001"]
    manager.save(2, 0, {}, lambda: content(2))
    path, snapshot = manager.load_latest()
    assert path.endswith("update-00000002")
    assert differences(snapshot) is None


def test_a_read_only_disk_can_be_resumed_from_and_says_that_it_cannot_be_saved_to(tmp_path):
    source, place = tmp_path / "source", tmp_path / "place"
    CheckpointManager(str(source), CheckpointConfig(by=None)).save(1, 0, {}, lambda: content(1))
    place.mkdir()
    mounted(place, "--bind", str(source))
    try:
        mounted(place, "-o", "remount,ro,bind")
        manager = CheckpointManager(str(place), CheckpointConfig(by=None))
        path, snapshot = manager.load_latest()
        assert path == str(place / "update-00000001")
        assert differences(snapshot) is None
        with pytest.raises(
            CheckpointError, match=r"cannot create .*\(EROFS\); use a directory on a writable"
        ):
            manager.save(2, 0, {}, lambda: content(2))
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert sorted(os.listdir(source)) == ["index.json", "update-00000001"]
