"""The folders `checkpoint-N` of a script, where programs around transformers look for its checkpoints.

::

    output_dir/
        checkpoints/step-00000500/      a checkpoint of drivetrain
        checkpoint-500/                 what `from_pretrained` loads, and transformers' own Trainer
            checkpoints/step-00000500/  the same checkpoint, by hard links

So such a folder is complete by itself: it can be moved or copied, and still be resumed from. Only the
weights and the optimizer are on the disk a second time, because transformers needs them in other files.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.checkpoint.saving.io import verify
from drivetrain.checkpoint.saving.lock import DirectoryLock
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS, newest_first, resolve
from drivetrain.checkpoint.storage.files import write_atomically
from drivetrain.checkpoint.storage.filesystem import (
    LOCAL,
    REMOVING,
    SAVING,
    DamagedCheckpointError,
    os_errors,
)
from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import read_json
from drivetrain.core.messages import logger
from drivetrain.run.checkpoint import has_weights_only

_LOG = logger(__name__)

_KNOWN = "folders.json"
"""The file in `checkpoints` with the names of the checkpoints there that may have a folder."""

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_STEP = re.compile(r"step-(\d+)")
_EARLIER = "earlier"


class MissingCheckpointError(CheckpointError, ValueError):
    """There is no checkpoint to resume from: a ValueError too, as in transformers, which scripts catch."""


class CheckpointFolders:
    """The folders `checkpoint-N` of one fit; rank 0 has them, and the disk is this process's.

    Args:
        output_dir: The `output_dir` of the fit.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = output_dir
        self._directory = os.path.join(output_dir, CHECKPOINTS)
        self._known: set[str] = set()

    def begin(self) -> None:
        """Delete what a killed save or pruning has left, and note which checkpoints there are."""
        with os_errors("tidy", self.output_dir):
            for name in LOCAL.entries(self.output_dir):
                if name.startswith(
                    (f"{SAVING}{PREFIX_CHECKPOINT_DIR}-", f"{REMOVING}{PREFIX_CHECKPOINT_DIR}-")
                ):
                    LOCAL.delete(os.path.join(self.output_dir, name))
        with suppress(OSError, ValueError, TypeError):  # a first start, or a file that was damaged
            self._known = set(read_json(os.path.join(self._directory, _KNOWN)))
        self._prune()

    def path(self, checkpoint: str) -> str:
        """Return the path of the folder for a checkpoint."""
        step = _step_of(os.path.basename(checkpoint))
        assert step is not None, checkpoint
        return os.path.join(self.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def lacks(self, checkpoint: str) -> bool:
        """Return whether a checkpoint of this `output_dir` has no folder, because its save was killed."""
        own = os.path.realpath(os.path.dirname(checkpoint)) == os.path.realpath(self._directory)
        return own and not os.path.isdir(self.path(checkpoint))

    def unfinished(self, checkpoint: str) -> str:
        """Make an empty folder, which `commit` gives its name, and return its path."""
        parent, name = os.path.split(self.path(checkpoint))
        made = os.path.join(parent, f"{SAVING}{name}-{secrets.token_hex(4)}")
        with os_errors("create", made):
            os.mkdir(made)
        return made

    def commit(self, unfinished: str, checkpoint: str, state: str) -> None:
        """Add the state and the checkpoint to a folder that has the model, and give it its name.

        A folder of that name is replaced. Folders are deleted whose checkpoint is gone.

        Args:
            unfinished: The folder.
            checkpoint: The checkpoint.
            state: The content of trainer_state.json.

        Raises:
            StorageError: A file cannot be written or deleted.
        """
        final = self.path(checkpoint)
        write_atomically(os.path.join(unfinished, TRAINER_STATE_NAME), [state.encode()], LOCAL)
        with os_errors("write", final):
            _link_folder(checkpoint, os.path.join(unfinished, CHECKPOINTS, os.path.basename(checkpoint)))
            replaced = self._remove(os.path.basename(final)) if os.path.isdir(final) else None
            LOCAL.rename(unfinished, final)
            LOCAL.sync(self.output_dir)
            if replaced is not None:
                LOCAL.delete(replaced)
        self._prune()

    def _prune(self) -> None:
        """Delete the folders whose checkpoint was deleted since it was noted, and note those that there are.

        The note is on the disk, because a kill can come between a checkpoint's end and its folder's.
        """
        with os_errors("remove folders in", self.output_dir):
            there = {each for each in LOCAL.entries(self._directory) if _STEP.match(each)}
            for name, checkpoint in folders_in(self.output_dir).items():
                if checkpoint in self._known - there:
                    LOCAL.delete(self._remove(name))
        if there != self._known:
            self._known = there
            write_atomically(os.path.join(self._directory, _KNOWN), [json.dumps(sorted(there)).encode()])

    def _remove(self, name: str) -> str:
        """Rename a folder, so that a half-deleted one has no name that counts; returns its new path."""
        doomed = os.path.join(self.output_dir, f"{REMOVING}{name}-{secrets.token_hex(4)}")
        LOCAL.rename(os.path.join(self.output_dir, name), doomed)
        return doomed


def folders_in(output_dir: str | os.PathLike[str]) -> dict[str, str]:
    """Return the names of the folders of this kind, by rising numbers, each with its checkpoint's name."""
    found = {}
    for name, kind in LOCAL.entries(os.fspath(output_dir)).items():
        checkpoint = _checkpoint_of(os.path.join(output_dir, name)) if kind == "directory" else None
        if checkpoint is not None:
            found[name] = checkpoint
    return dict(sorted(found.items(), key=lambda each: int(each[0].rpartition("-")[2])))


def _checkpoint_of(folder: str) -> str | None:
    """Return the name of the checkpoint in a folder; None if it is no folder of this kind.

    Of a folder that has lost its own, it is the one of its step in `checkpoints` beside it.
    """
    found = _NAME.fullmatch(os.path.basename(folder))
    if found is None:
        return None
    names = [each for each in LOCAL.entries(os.path.join(folder, CHECKPOINTS)) if _STEP.match(each)]
    if not names and os.path.exists(os.path.join(folder, TRAINER_STATE_NAME)):
        beside = os.path.join(os.path.dirname(folder), CHECKPOINTS)
        names = [each for each in LOCAL.entries(beside) if _step_of(each) == int(found[1])]
    return names[0] if len(names) == 1 else None


def _step_of(checkpoint: str) -> int | None:
    found = _STEP.match(checkpoint)
    return None if found is None else int(found[1])


def checkpoint_in(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint that a folder `checkpoint-N` stands for; None for another folder.

    It is the one in `checkpoints` beside it, or, of a folder that was moved, its own.
    """
    path = os.path.normpath(folder)
    name = _checkpoint_of(path)
    if name is None:
        return None
    beside = os.path.join(os.path.dirname(path), CHECKPOINTS, name)
    return beside if DirectoryCheckpointIO().exists(beside) else os.path.join(path, CHECKPOINTS, name)


def newest(output_dir: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the newest good checkpoint of a script, as the path to show and the path to load.

    Where there are no folders `checkpoint-N`, because drivetrain's own Trainer has trained there, both are
    that of the checkpoint itself. Where there are some, a checkpoint without one counts only if its folder is
    unfinished, because the save was killed. Otherwise somebody has deleted the folder.

    Raises:
        DamagedCheckpointError: All are damaged.
        CheckpointError: There is none.
    """
    by_checkpoint = {checkpoint: name for name, checkpoint in folders_in(output_dir).items()}
    if not by_checkpoint:
        found = resolve(output_dir)
        return found, found
    directory, killed = os.path.join(output_dir, CHECKPOINTS), _unfinished_in(output_dir)
    known = [each for each in newest_first(directory) if each in by_checkpoint or _step_of(each) in killed]
    others = [each for each in reversed(by_checkpoint) if each not in known]  # only their folders have them
    latest = _step_of(known[0]) if known else None
    newer = [each for each in others if latest is not None and (_step_of(each) or 0) > latest]
    damaged = []
    for each in dict.fromkeys([*newer, *known, *others]):
        name = by_checkpoint.get(each)
        folder = os.path.join(directory, each) if name is None else os.path.join(output_dir, name)
        path = folder if name is None else checkpoint_in(folder)
        assert path is not None
        try:
            verify(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            _LOG.warning(f"{folder!r} is damaged and skipped: {error}")
        else:
            return folder, path
    raise DamagedCheckpointError(
        f"{os.fspath(output_dir)!r} has no good checkpoint, only damaged ones: {'; '.join(damaged)}"
    )


def _unfinished_in(output_dir: str | os.PathLike[str]) -> set[int]:
    """Return the steps of the folders that killed saves have left unfinished."""
    begun = re.compile(rf"{re.escape(SAVING)}{PREFIX_CHECKPOINT_DIR}-(\d+)-")
    found = map(begun.match, LOCAL.entries(os.fspath(output_dir)))
    return {int(each[1]) for each in found if each is not None}


def is_of_transformers(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a checkpoint of transformers' own Trainer, or has one."""
    own = Path(path)
    return any(
        _NAME.fullmatch(each.name)
        and (each / TRAINER_STATE_NAME).exists()
        and _checkpoint_of(str(each)) is None
        for each in (own, *own.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    )


def not_there(given: object, output_dir: str) -> str:
    """Return the message for a checkpoint that is not there, with those that are."""
    names = list(folders_in(output_dir))
    with suppress(CheckpointError):
        names = names or newest_first(os.path.join(output_dir, CHECKPOINTS))
    there = f"has {', '.join(names)}; True takes the newest" if names else "has none"
    path = output_dir if given is True else os.fspath(given)  # type: ignore[call-overload]
    found = f"Can't find a valid checkpoint at {path}"  # transformers' words, which scripts look for
    what = f"{found}: there is no {Path(path).name or 'folder of this name'}"
    if given is True:
        what = f"No valid checkpoint found in output directory ({output_dir})"
    elif os.path.isfile(path):
        what = f"{found}: it is a file, and a checkpoint is a folder"
    elif path and os.path.isdir(path):
        what = f"{found}: the folder has no checkpoint in it"
    return f"resume_from_checkpoint={given!r}: {what}. output_dir={output_dir!r} {there}"


def check_resumable(given: object, checkpoint: str) -> None:
    """Check that a checkpoint has more than weights.

    Raises:
        CheckpointError: It was saved with `save_only_model`.
        DamagedCheckpointError: It is damaged.
    """
    objects = DirectoryCheckpointIO().load(checkpoint, ("state",)).objects
    if has_weights_only(objects.get("state")):
        raise CheckpointError(
            f"resume_from_checkpoint={given!r}: {checkpoint!r} has the weights alone, as save_only_model=True"
            " saves them, and no optimizer, schedule or position in the data. Load the weights of its folder"
            f" {PREFIX_CHECKPOINT_DIR}-N with from_pretrained and train anew; save_only_model=False saves"
            " checkpoints to resume from"
        )


def taken_into(output_dir: str, checkpoint: str, acts: bool) -> str:
    """Return the path of a checkpoint for a fit in `output_dir` that resumes from it and saves.

    A checkpoint that is left in a folder of `output_dir` alone is put back into `checkpoints`. If it is from
    elsewhere, the checkpoints in `output_dir` are of another training, and are moved away.

    Args:
        output_dir: The `output_dir` of the fit.
        checkpoint: The checkpoint.
        acts: Whether this process changes the disk; the others only get the path.

    Raises:
        ConfigError: Another job trains in this directory.
        StorageError: A file cannot be moved or linked.
    """
    root, real = os.path.realpath(output_dir), os.path.realpath(checkpoint)
    own = os.path.join(root, CHECKPOINTS)
    parent, name = os.path.split(real)
    if parent == own:
        return checkpoint
    back = os.path.join(own, name)
    folder = os.path.dirname(parent)
    if os.path.dirname(folder) == root and _NAME.fullmatch(os.path.basename(folder)):
        if acts and not os.path.exists(back):
            made = os.path.join(own, f"{SAVING}{name}-{secrets.token_hex(4)}")
            with os_errors("write", back):
                _link_folder(real, made)
                LOCAL.rename(made, back)
        return back
    if acts:
        set_aside(output_dir, f"train() goes on from {checkpoint!r}")
    return checkpoint


def set_aside(output_dir: str, why: str = "train() begins anew") -> None:
    """Move the checkpoints of an earlier training to a folder of their own, so that a new one begins empty.

    Raises:
        ConfigError: Another job trains in this directory.
        StorageError: They cannot be moved.
    """
    with os_errors("read", output_dir):
        kinds = LOCAL.entries(output_dir)
    names = [each for each, kind in kinds.items() if kind == "directory" and _NAME.fullmatch(each)]
    directory = os.path.join(output_dir, CHECKPOINTS)
    if kinds.get(CHECKPOINTS) == "directory":
        DirectoryLock(directory, LOCAL).refuse_others()
        if newest_first(directory):
            names.insert(0, CHECKPOINTS)
    if not names:
        return
    number = 1
    while f"{_EARLIER}-{number}" in kinds:
        number += 1
    folder = os.path.join(output_dir, f"{_EARLIER}-{number}")
    with os_errors("move checkpoints to", folder):
        os.mkdir(folder)
        for each in names:
            LOCAL.rename(os.path.join(output_dir, each), os.path.join(folder, each))
    _LOG.warning(f"{why}: the checkpoints of the training before are now in {folder!r}")


def _link_folder(source: str, target: str) -> None:
    """Make a folder of hard links to the files of another one; where the disk has none, of copies."""
    for parent, _, names in os.walk(source):
        folder = os.path.join(target, os.path.relpath(parent, source))
        os.makedirs(folder)
        for each in names:
            _link(os.path.join(parent, each), os.path.join(folder, each))
    for parent, _, _ in os.walk(os.path.dirname(os.path.dirname(target))):
        LOCAL.sync(parent)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
