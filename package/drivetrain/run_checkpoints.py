"""Where a Trainer's checkpoints are: the saver of a fit, what it resumes from, what an evaluation loads."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    Snapshot,
    resolve,
)
from drivetrain.checkpoint.filesystem import FileSystem, StorageError, os_errors
from drivetrain.checkpoint.index import rank, read_index
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.weights import is_weight_file
from drivetrain.distributed.environment import is_started_again, may_start_again
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine_state import like_module
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.paths import as_given
from drivetrain.run import Run

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


_DEFAULT = CheckpointConfig()


def checkpoint_root(trainer: Trainer, run_dir: str | os.PathLike[str] | None) -> str | None:
    """Where checkpoints and weights go: the policy's own directory or address, or else the run directory."""
    policy = trainer.checkpoint
    own = policy.directory if isinstance(policy, CheckpointConfig) else None
    root = own if own is not None else run_dir
    return None if root is None else file_system(os.fspath(root)).absolute(os.fspath(root))


def make_saver(
    trainer: Trainer,
    run_dir: Path | None,
    loaders: Sequence[str | None],
    resume: str | None,
    ranks: Ranks,
    closing: ExitStack,
) -> CheckpointSaver | None:
    """The saver that the Trainer's policy asks for.

    Args:
        trainer: The settings.
        run_dir: The run directory.
        loaders: The names of the validation loaders.
        resume: As given to `fit`.
        ranks: The processes of the job.
        closing: What ends with the fit: the directory is locked until then.

    Raises:
        ConfigError: A fresh start in a directory that has another run's checkpoints, or another job is
            writing there.
        CheckpointError: The directory cannot be locked, and the run is not to go on without it.
    """
    root = checkpoint_root(trainer, run_dir)
    if trainer.checkpoint is False or root is None:
        return None
    config = _policy(trainer, loaders[0] if loaders else None)
    manager = _manager(root, config, ranks)
    if may_start_again() and trainer.run_dir is None and not _has_directory(trainer):
        raise ConfigError(
            "the launcher may start this program again (--max-restarts), and without a run_dir it would begin"
            " from the start each time: give the Trainer a run_dir, or checkpoint=False"
        )
    _lock(trainer, manager, closing)
    own = _is_own(resume, root, manager.directory)
    if manager.entries() and not own and not _goes_on(ranks):
        raise ConfigError(
            f"{as_given(trainer, root)} holds the checkpoints of an earlier run (the newest after update"
            f" {manager.entries()[-1].update}). To go on from there, fit(..., resume='auto'); for a new run"
            " choose another run_dir"
        )
    asked = isinstance(trainer.checkpoint, CheckpointConfig)
    validates = bool(loaders) and trainer.validate_every is not None
    chosen = (config.best, config.by) != (_DEFAULT.best, _DEFAULT.by)  # nobody asked for the default's
    return CheckpointSaver(config, manager, root, metric_required=asked and (validates or chosen))


def _lock(trainer: Trainer, manager: CheckpointManager, closing: ExitStack) -> None:
    """Lock the directory until the fit ends; a storage that refuses it is met as one that refuses a save."""
    closing.callback(manager.release)
    try:
        manager.lock()
    except StorageError as error:
        if trainer.on_save_error != "warn":
            raise
        if manager.ranks.rank == 0:
            warnings.warn(
                f"the checkpoints of this run are not protected against another job: {error}. The run goes on"
                " (on_save_error='warn'), and each save tries again",
                stacklevel=2,
            )


def _goes_on(ranks: Ranks) -> bool:
    """Whether a launcher has started this program before: the run then goes on from its own checkpoints,
    whatever it was told. To be asked by all ranks.
    """
    return may_start_again() and any(ranks.all_gather(is_started_again()))


def _has_directory(trainer: Trainer) -> bool:
    return isinstance(trainer.checkpoint, CheckpointConfig) and trainer.checkpoint.directory is not None


def _policy(trainer: Trainer, first_loader: str | None = None) -> CheckpointConfig:
    """The policy; without one of the user's, the first loader ranks."""
    if isinstance(trainer.checkpoint, CheckpointConfig):
        return trainer.checkpoint
    config = CheckpointConfig(asynchronous=trainer.checkpoint == "async")
    return config if first_loader is None else replace(config, by=f"validation/{first_loader}/loss")


def _manager(root: str, config: CheckpointConfig, ranks: Ranks = ALONE) -> CheckpointManager:
    return CheckpointManager(file_system(root).join(root, CHECKPOINTS), config, ranks=ranks)


def find_checkpoint(
    trainer: Trainer, run: Run, saver: CheckpointSaver | None, resume: str | None
) -> tuple[str, Snapshot] | None:
    """The checkpoint that `resume` names, or None for a fresh start.

    Raises:
        ConfigError: "auto" without a run directory.
        CheckpointError: Nothing readable at a path.
    """
    if saver is not None and saver.manager.entries() and _goes_on(run.engine.ranks):
        resume = "auto"
    if resume is None:
        return None
    if not isinstance(resume, (str, os.PathLike)):
        raise ConfigError(f"resume must be 'auto', a path or None, not {resume!r}")
    with run.engine.exchanged():
        like = like_module(run.task)
    if resume != "auto" and saver is not None and _is_whole_run(resume, saver.manager.directory):
        # As "auto": what is damaged is set aside, and does not count as one of those that are kept.
        found = saver.manager.load_latest(like)
        if found is not None:
            return found
    if resume != "auto":
        _check_resume(resume)
        ranks = run.engine.ranks
        path = ranks.first(lambda: resolve(resume))
        loaded: list[Snapshot] = []
        ranks.together(lambda: loaded.append(DirectoryCheckpointIO().load(path, like=like)))
        return path, loaded[0]
    root = checkpoint_root(trainer, None if trainer.run_dir is None else run.run_dir)  # rank 0's
    if root is None:
        raise ConfigError("resume='auto' takes the newest checkpoint of run_dir: give the Trainer a run_dir")
    manager = saver.manager if saver else _manager(root, CheckpointConfig(), run.engine.ranks)
    return manager.load_latest(like)


def tell_start(trainer: Trainer, run: Run, resume: object) -> None:
    """Say where a run that was to go on begins, on the main rank, where the progress is shown.

    Args:
        trainer: Its settings.
        run: The run, in the state that it begins in.
        resume: What `fit` was given.
    """
    if not (run.is_main and trainer.progress_bar):
        return
    at, progress = as_given(trainer, run.last_checkpoint), run.progress
    if at is not None:
        text = f"goes on from {at} (update {progress.updates}, epoch {progress.epoch})"
    elif resume == "auto":
        text = f"begins anew: no checkpoint in {as_given(trainer, checkpoint_root(trainer, run.run_dir))}"
    else:
        return
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()


def _is_own(resume: object, root: str, directory: str) -> bool:
    """Whether a run goes on from what is in its own directory."""
    if not isinstance(resume, (str, os.PathLike)):
        return False
    if resume == "auto" or _is_whole_run(resume, directory):
        return True
    files = file_system(root)
    return files.split(_real(resume, files))[0] == _real(directory, files)


def _is_whole_run(resume: str | os.PathLike[str], directory: str) -> bool:
    """Whether a path is that of a run's directory of checkpoints, or of the run."""
    files = file_system(directory)
    own = _real(directory, files)
    return _real(resume, files) in (own, files.split(own)[0])


def _real(path: str | os.PathLike[str], files: FileSystem) -> str:
    """A path without symbolic links, which only a disk has."""
    given = os.fspath(path)
    return os.path.realpath(given) if files.renames else files.absolute(given)


def _check_resume(resume: str | os.PathLike[str]) -> None:
    """Say what is meant by a word, or a file of weights, that names no checkpoint."""
    given = os.fspath(resume)
    files = file_system(given)
    with os_errors("read", given):
        kind = files.kind(files.absolute(given))
    if given in ("last", "best", "newest", "latest") and kind is None:
        what = "best_checkpoint" if given == "best" else "last_checkpoint"
        raise ConfigError(
            f"resume={given!r} is neither 'auto', which takes the newest checkpoint of run_dir, nor the path"
            f" of a checkpoint. For another one give its path, such as the {what} of fit's result"
        )
    if kind == "file":
        hint = (
            "Only its weights can be read: to start from them, call task.load_weights(path) before fit"
            if is_weight_file(given)
            else "Give the directory of a checkpoint, or a run directory"
        )
        raise ConfigError(
            f"resume={given!r} is a file: a run is resumed from a checkpoint, which is a directory. {hint}"
        )


def named_checkpoint(trainer: Trainer, checkpoint: str) -> str:
    """The path of a checkpoint, or of a file of weights, given as such or as "best" or "last" of `run_dir`.

    Raises:
        ConfigError: "best" or "last" without a run directory.
        CheckpointError: There is none.
    """
    if checkpoint not in ("best", "last"):
        path = os.fspath(checkpoint)
        return path if is_weight_file(path) else resolve(path)
    root = checkpoint_root(trainer, trainer.run_dir)
    if root is None:
        raise ConfigError(
            f"checkpoint={checkpoint!r} is looked for in run_dir: give the Trainer a run_dir, or give a path"
        )
    if checkpoint == "last":
        return resolve(root)
    policy = _policy(trainer)
    # Only read: a manager would tidy the directory, in which another process may be training.
    files = file_system(root)
    directory = files.join(root, CHECKPOINTS)
    keepers = rank(read_index(directory, files) or [], policy)
    if not keepers:
        raise CheckpointError(
            f"{root} has no best checkpoint: no evaluation gave a value of {policy.by!r}. Use"
            " checkpoint='last', or a path"
        )
    return files.join(directory, keepers[0].name)
