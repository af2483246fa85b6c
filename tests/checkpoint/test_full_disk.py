"""Real disks that are full, limited or read-only, under a real training run."""

import os
import shutil
import subprocess
import threading

import pytest
from tests.campaigns.life import content, differences
from tests.support.outcome import weights
from tests.support.saving import Wide, at, data, file_size_limit
from tests.support.tasks import quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, verify
from drivetrain.core.errors import CheckpointError


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
    mounted(directory, "-t", "tmpfs", "-o", f"size={4 << 20}", "tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def train(directory, *callbacks, asynchronous=False):
    task = Wide()
    config = CheckpointConfig(every="2 steps", by=None, asynchronous=asynchronous)
    quiet(max_steps=10, checkpoint=config, callbacks=callbacks, run_dir=directory).fit(
        task, data(), resume="auto"
    )
    return weights(task)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_on_a_full_disk_says_what_to_do_and_goes_on_once_there_is_room(
    small_disk, tmp_path, asynchronous
):
    run, filler = small_disk / "run", small_disk / "filler"

    def fill():
        """Fill the disk, but for a little, once nothing is being written there."""
        for thread in threading.enumerate():
            if thread.name == "drivetrain-checkpoint":
                thread.join()
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 300_000))

    with pytest.raises(CheckpointError, match=r"cannot write .*update-00000006.*\(ENOSPC\); free some space"):
        train(run, at(5, fill), asynchronous=asynchronous)
    checkpoints = run / "checkpoints"
    assert sorted(os.listdir(checkpoints)) == ["index.json", "update-00000002", "update-00000004"]
    for name in ("update-00000002", "update-00000004"):
        verify(str(checkpoints / name))
    filler.unlink()
    assert train(run, asynchronous=asynchronous) == train(tmp_path / "undisturbed")


def test_a_file_that_may_not_grow_leaves_what_was_there(tmp_path):
    manager = CheckpointManager(str(tmp_path / "c"), CheckpointConfig(by=None))
    manager.save(1, 0, {}, lambda: content(1))
    # The file of weights has more than this; the part that fits is written, and must go.
    limited = r"cannot write .*update-00000002/model.safetensors.*\(EFBIG\)"
    with file_size_limit(1000), pytest.raises(CheckpointError, match=limited):
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
