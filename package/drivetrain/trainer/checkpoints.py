"""A Trainer's checkpoints: the saver of a fit, the checkpoint to resume from, and that of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    Snapshot,
    resolve,
)
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.checkpoint.saving.config import chosen_policies, rankings
from drivetrain.checkpoint.saving.index import Entry, rank, read_index
from drivetrain.checkpoint.storage.filesystem import FileSystem, StorageError, os_errors, plain_path
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.files import MODEL
from drivetrain.checkpoint.weights.load import is_weight_file
from drivetrain.core.errors import CheckpointError, ConfigError, nearest
from drivetrain.core.files import check_path
from drivetrain.core.messages import logger
from drivetrain.distributed.launch.environment import is_started_again, may_start_again
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine.own_loop_checkpoint import like_module
from drivetrain.run.messages import as_given
from drivetrain.run.run import Run
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

_DEFAULT = CheckpointConfig()


def checkpoint_root(settings: RunSettings, run_dir: str | os.PathLike[str] | None) -> str | None:
    """Return the root of checkpoints and weights: the policies' directory, or the run directory."""
    own = _directory(settings)
    root = own if own is not None else run_dir
    return None if root is None else file_system(os.fspath(root)).absolute(os.fspath(root))


def make_saver(
    settings: RunSettings,
    task: TaskModule,
    run_dir: Path | None,
    loaders: Sequence[str | None],
    resume: str | None,
    ranks: Ranks,
    closing: ExitStack,
) -> CheckpointSaver | None:
    """Build the saver that the Trainer's policies ask for.

    Args:
        closing: The fit's exit stack; the directory stays locked until it closes.
    """
    root = checkpoint_root(settings, run_dir)
    if settings.checkpoint is False or root is None:
        return None
    chosen = chosen_policies(settings.checkpoint)
    policies = chosen or (_default_policy(settings, task, loaders[0] if loaders else None),)
    manager = _manager(root, policies, ranks)
    if may_start_again() and settings.run_dir is None and _directory(settings) is None:
        raise ConfigError(
            "the launcher may start this program again (--max-restarts), and without a run_dir it would begin"
            " from the start each time: give the Trainer a run_dir, or checkpoint=False"
        )
    if may_start_again() and not policies[0].resumable:
        raise ConfigError(
            "the launcher may start this program again (--max-restarts), and a run cannot resume from"
            " checkpoints of CheckpointConfig(resumable=False). Leave one of them out"
        )
    _lock(settings, manager, closing)
    source = fetching_callback(settings, resume)
    if source is not None and not (_goes_on(ranks) and manager.entries()):
        ranks.first(lambda: source.fetch_checkpoint(manager.directory))
    own = source is not None or _is_own(resume, root, manager.directory)
    if manager.entries() and not own and not _goes_on(ranks):
        raise ConfigError(
            f"{as_given(settings, root)} holds the checkpoints of an earlier run (the newest after step"
            f" {manager.entries()[-1].step}). To go on from there, fit(..., resume='auto'); for a new run"
            " choose another run_dir"
        )
    if not manager.entries() and ranks.first(lambda: _has_model(root)):
        raise ConfigError(
            f"{as_given(settings, root)} has a {MODEL}, and no checkpoints of a run that has left it. The end"
            " of the fit would replace it: choose another run_dir, or move the file"
        )
    validates = bool(loaders) and settings.validate_every is not None
    # The default may go without its metric: without a validation, and for a task that names its loss itself.
    validates = validates and task.metric_name("validation", None, "loss") is not None
    required = any(
        validates or each.best is not None or each.by != _DEFAULT.by or each.restore_best for each in chosen
    )
    return CheckpointSaver(policies, manager, root, metric_required=required, assets=settings.assets)


def _has_model(root: str) -> bool:
    files = file_system(root)
    with os_errors("read", root):
        return files.kind(files.join(root, MODEL)) is not None


def fetching_callback(settings: RunSettings, resume: object) -> Any:
    """Return the callback that fetches a checkpoint for this `resume`, or None."""
    if not isinstance(resume, str):
        return None
    return next((each for each in settings.callbacks if each.resume_name == resume), None)


def _lock(settings: RunSettings, manager: CheckpointManager, closing: ExitStack) -> None:
    """Lock the directory until the fit ends; a refusal of the storage is treated as a failed save."""
    closing.callback(manager.release)
    try:
        manager.lock()
    except StorageError as error:
        if settings.on_save_error != "warn":
            raise
        if manager.ranks.rank == 0:
            _LOG.warning(
                f"the checkpoints of this run are not protected against another job: {error}. The run goes on"
                " (on_save_error='warn'), and each save tries again"
            )


def _goes_on(ranks: Ranks) -> bool:
    """Return whether a launcher has restarted this program. The run then resumes from its own checkpoints,
    whatever `resume` says. All ranks call this together.
    """
    return may_start_again() and any(ranks.all_gather(is_started_again()))


def _directory(settings: RunSettings) -> str | os.PathLike[str] | None:
    return next((each.directory for each in chosen_policies(settings.checkpoint)), None)


def _default_policy(settings: RunSettings, task: TaskModule, first_loader: str | None) -> CheckpointConfig:
    """Return the default policy, which ranks by the loss on the first loader."""
    loss = task.metric_name("validation", first_loader, "loss")
    return CheckpointConfig(asynchronous=settings.checkpoint == "async", by=loss, mode="min")


def _manager(root: str, policies: Sequence[CheckpointConfig], ranks: Ranks = ALONE) -> CheckpointManager:
    return CheckpointManager(file_system(root).join(root, CHECKPOINTS), policies, ranks=ranks)


def find_checkpoint(
    settings: RunSettings, run: Run, saver: CheckpointSaver | None, resume: str | None
) -> tuple[str, Snapshot] | None:
    """Return the checkpoint that `resume` names, or None for a fresh start."""
    if saver is not None and saver.manager.entries() and _goes_on(run.engine.ranks):
        resume = "auto"
    if resume is None:
        return None
    if fetching_callback(settings, resume) is not None:
        if saver is None:
            raise ConfigError(
                f"resume={resume!r} brings a checkpoint to run_dir, and checkpoint=False uses none"
            )
        resume = "auto"
    if not isinstance(resume, (str, os.PathLike)):
        raise ConfigError(f"resume must be 'auto', a path or None, not {resume!r}")
    with run.engine.checkpoint_layout():
        like = like_module(run.task)
    if resume != "auto" and saver is not None and _is_whole_run(resume, saver.manager.directory):
        # As for "auto": damaged checkpoints are set aside, and do not count as kept ones.
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
    root = checkpoint_root(settings, None if settings.run_dir is None else run.run_dir)  # rank 0's
    if root is None:
        raise ConfigError("resume='auto' takes the newest checkpoint of run_dir: give the Trainer a run_dir")
    manager = saver.manager if saver else _manager(root, (_DEFAULT,), run.engine.ranks)
    return manager.load_latest(like)


def report_start(settings: RunSettings, run: Run, resume: object) -> None:
    """Report where a resumed run begins, on the main rank, if progress is shown."""
    if not (run.is_main and settings.progress_bar):
        return
    at, progress = as_given(settings, run.last_checkpoint), run.progress
    if at is not None:
        text = f"goes on from {at} (step {progress.steps}, epoch {progress.epoch})"
    elif resume == "auto" or fetching_callback(settings, resume) is not None:
        text = f"begins anew: no checkpoint in {as_given(settings, checkpoint_root(settings, run.run_dir))}"
    else:
        return
    _LOG.info(text)


def _is_own(resume: object, root: str, directory: str) -> bool:
    """Return whether a run resumes from its own directory."""
    if not isinstance(resume, (str, os.PathLike)):
        return False
    if resume == "auto" or _is_whole_run(resume, directory):
        return True
    files = file_system(root)
    return files.split(_real(resume, files))[0] == _real(directory, files)


def _is_whole_run(resume: str | os.PathLike[str], directory: str) -> bool:
    """Return whether a path is a run directory or its directory of checkpoints."""
    files = file_system(directory)
    own = _real(directory, files)
    return _real(resume, files) in (own, files.split(own)[0])


def _real(path: str | os.PathLike[str], files: FileSystem) -> str:
    """Return a path with symbolic links resolved; only local paths have them."""
    given = os.fspath(path)
    if not files.renames:
        return files.absolute(given)
    check_path(given)
    return os.path.realpath(given)


def _check_resume(resume: str | os.PathLike[str]) -> None:
    """Raise for a word or a file of weights that names no checkpoint, with the likely meaning."""
    given = os.fspath(resume)
    files = file_system(given)
    if files.renames:
        check_path(plain_path(given))
    with os_errors("read", given):
        kind = files.kind(files.absolute(given))
    word = given.partition(":")[0]
    if word in ("last", "best", "newest", "latest") and kind is None:
        what = "best_checkpoint" if word == "best" else "last_checkpoint"
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


def named_checkpoint(settings: RunSettings, checkpoint: str) -> str:
    """Return the path of a checkpoint or of a file of weights, given as a path, "last", "best", or
    "best:<metric>".
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise ConfigError(f"checkpoint={checkpoint!r}. Give 'best' or 'last' of run_dir, or a path")
    word, _, by = os.fspath(checkpoint).partition(":")
    if word != "best" and checkpoint != "last":
        path = os.fspath(checkpoint)
        if path in ("latest", "newest", "final") and not os.path.exists(path):
            raise ConfigError(f"checkpoint={path!r} is no path. Give 'last' or 'best' of run_dir, or a path")
        return path if is_weight_file(path) else resolve(path)
    root = checkpoint_root(settings, settings.run_dir)
    if root is None:
        raise ConfigError(
            f"checkpoint={checkpoint!r} is looked for in run_dir: give the Trainer a run_dir, or give a path"
        )
    if checkpoint == "last":
        return resolve(root)
    # Only read: a manager would tidy the directory, and another process may be training in it.
    files = file_system(root)
    directory = files.join(root, CHECKPOINTS)
    return files.join(directory, _best(read_index(directory, files) or [], settings, by, root).name)


def _best(entries: Sequence[Entry], settings: RunSettings, by: str, root: str) -> Entry:
    """Return the best checkpoint by a metric, or by the only one that ranks if none is named.

    The metrics that rank are those of the Trainer's policies. With the default policy they come from the
    index, because the run may have had named loaders, or other policies.
    """
    policies = rankings(chosen_policies(settings.checkpoint))
    recorded = {name: mode for each in entries for name, mode in each.best.items()}
    asked = {name: recorded.get(name) or "" if p.mode == "auto" else p.mode for name, p in policies.items()}
    modes = recorded | asked
    choices = [f"best:{name}" for name in (asked or recorded)]
    if not by and len(choices) > 1:
        raise ConfigError(
            f"checkpoint='best' could mean several: this run ranks by {len(choices)} metrics. Give one of"
            f" {', '.join(map(repr, choices))}"
        )
    if by and by not in modes and modes:
        raise ConfigError(
            f"checkpoint='best:{by}': no checkpoint is ranked by {by!r}."
            f" {nearest(f'best:{by}', [f'best:{name}' for name in modes])}"
        )
    by = by or next(iter(asked or recorded), "")
    ranked = rank(entries, by, modes.get(by, ""))
    if not ranked:
        what = f"a value of {by!r}" if by else "a value that ranks"
        raise CheckpointError(
            f"{root} has no best checkpoint: no evaluation gave {what}. Use checkpoint='last', or a path"
        )
    return ranked[0]
