"""A Trainer's checkpoints: the saver of a fit, the checkpoint to resume from, and that of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DirectoryCheckpointIO,
    Snapshot,
    resolve,
)
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS, RunDirectory
from drivetrain.checkpoint.storage.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.files import MODEL
from drivetrain.checkpoint.weights.load import is_weight_file
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import check_path
from drivetrain.core.messages import logger
from drivetrain.distributed.launch.environment import is_started_again, may_start_again
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine.engine import Engine
from drivetrain.engine.own_loop_checkpoint import like_module
from drivetrain.run.messages import as_given, may_resume_by_itself
from drivetrain.run.run import Run
from drivetrain.run.settings import RunSettings
from drivetrain.run.state import Start, StartKind
from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

_DEFAULT = CheckpointConfig()


def checkpoint_root(settings: RunSettings, run_dir: str | os.PathLike[str] | None) -> str | None:
    """Return the root of checkpoints and weights: the policies' directory, or the run directory."""
    own = next((each.directory for each in chosen_policies(settings.checkpoint)), None)
    root = own if own is not None else run_dir
    return None if root is None else file_system(os.fspath(root)).absolute(os.fspath(root))


def open_checkpoints(
    settings: RunSettings,
    task: TaskModule,
    run_dir: Path | None,
    loaders: Sequence[str | None],
    resume: object,
    engine: Engine,
) -> tuple[Start, CheckpointSaver | None]:
    """Return where a fit begins, and the saver that the Trainer's policies ask for.

    The directory stays locked until the engine closes.
    """
    ranks = engine.ranks
    root = checkpoint_root(settings, run_dir)
    if settings.checkpoint is False or root is None:
        return decide_start(settings, resume, root, None, ranks), None
    chosen = chosen_policies(settings.checkpoint)
    policies = chosen or (_default_policy(settings, task, loaders[0] if loaders else None),)
    manager = _manager(root, policies, ranks)
    _check_restarts(settings, policies)
    engine.closing.callback(manager.release)
    manager.lock()
    start = decide_start(settings, resume, root, manager, ranks)
    if manager.entries() and start.kind in ("new", "other"):
        raise ConfigError(
            f"{as_given(settings, root)} holds the checkpoints of an earlier run (the newest after step"
            f" {manager.entries()[-1].step}). To go on from there, fit(..., resume='auto'); for a new run"
            " choose another run_dir"
        )
    if not manager.entries() and ranks.first(lambda: _has_model(root)):
        raise ConfigError(
            f"{as_given(settings, root)} has a {MODEL} that was not left by a run with checkpoints there. The"
            " end of the fit would replace it: choose another run_dir, or move the file"
        )
    validates = bool(loaders) and settings.validate_every is not None
    # The default may go without its metric: without a validation, and for a task that names its loss itself.
    validates = validates and task.metric_name("validation", None, "loss") is not None
    required = any(
        validates or each.best is not None or each.by != _DEFAULT.by or each.restore_best for each in chosen
    )
    saver = CheckpointSaver(policies, manager, root, metric_required=required, assets=settings.assets)
    return start, saver


def _check_restarts(settings: RunSettings, policies: Sequence[CheckpointConfig]) -> None:
    """Check that a program which the launcher may start again can resume."""
    if not may_start_again():
        return
    if not may_resume_by_itself(settings):
        raise ConfigError(
            "the launcher may start this program again (--max-restarts), and without a run_dir it would begin"
            " from the start each time: give the Trainer a run_dir, or checkpoint=False"
        )
    if not policies[0].resumable:
        raise ConfigError(
            "the launcher may start this program again (--max-restarts), and a run cannot resume from"
            " checkpoints of CheckpointConfig(resumable=False). Leave one of them out"
        )


def decide_start(
    settings: RunSettings, resume: object, root: str | None, manager: CheckpointManager | None, ranks: Ranks
) -> Start:
    """Return where a fit begins. All ranks call this together, once.

    Args:
        resume: As given to `fit`. A program that a launcher has restarted resumes from its own checkpoints
            instead.
        root: The directory of the run's checkpoints and weights.
        manager: The manager of its checkpoints, if the fit saves some.
    """
    restarted = may_start_again() and any(ranks.all_gather(is_started_again()))
    if restarted and root is not None and manager is not None and manager.entries():
        return Start("auto", root)
    if resume is None:
        return Start()
    source = next((each for each in settings.callbacks if each.resume_name == resume), None)
    if source is not None:
        if manager is None:
            raise ConfigError(f"resume={resume!r} brings a checkpoint, and checkpoint=False uses none")
        ranks.first(lambda: source.fetch_checkpoint(manager.directory))
    elif resume != "auto":
        return _start_at(ranks.first(lambda: _checked_path(resume)), manager, ranks)
    if root is None or not may_resume_by_itself(settings):
        raise ConfigError("resume='auto' takes the newest checkpoint of run_dir: give the Trainer a run_dir")
    return Start("auto", root)


def _start_at(resume: str, manager: CheckpointManager | None, ranks: Ranks) -> Start:
    """Return the start at a path: that of the run itself, of a checkpoint in it, or of another run."""
    kind: StartKind = "other"
    if manager is not None:
        path, own = _real(resume, manager.files), _real(manager.directory, manager.files)
        if path in (own, manager.files.split(own)[0]):
            return Start("own", resume)
        kind = "checkpoint" if manager.files.split(path)[0] == own else "other"
    return Start(kind, ranks.first(lambda: resolve(resume)))


def _has_model(root: str) -> bool:
    files = file_system(root)
    with os_errors("read", root):
        return files.kind(files.join(root, MODEL)) is not None


def _default_policy(settings: RunSettings, task: TaskModule, first_loader: str | None) -> CheckpointConfig:
    """Return the default policy, which ranks by the loss on the first loader."""
    loss = task.metric_name("validation", first_loader, "loss")
    return CheckpointConfig(asynchronous=settings.checkpoint == "async", by=loss, mode="min")


def _manager(root: str, policies: Sequence[CheckpointConfig], ranks: Ranks = ALONE) -> CheckpointManager:
    return CheckpointManager(file_system(root).join(root, CHECKPOINTS), policies, ranks=ranks)


def load_start(start: Start, run: Run, saver: CheckpointSaver | None) -> tuple[str, Snapshot] | None:
    """Return the checkpoint that a fit begins from, with its content; None if it begins anew."""
    ranks = run.engine.ranks
    with run.engine.checkpoint_layout():
        like = like_module(run.task)
    path = start.path
    if start.kind in ("auto", "own"):
        # Damaged checkpoints are set aside, and do not count as kept ones.
        manager = saver.manager if saver else _manager(path, (_DEFAULT,), ranks)
        found = manager.load_latest(like)
        if found is not None or start.kind == "auto":
            return found
        path = ranks.first(lambda: resolve(path))  # raises
    loaded: list[Snapshot] = []
    ranks.together(lambda: loaded.append(DirectoryCheckpointIO().load(path, like=like)))
    return path, loaded[0]


def report_start(settings: RunSettings, run: Run, start: Start) -> None:
    """Report where a resumed run begins, on the main rank, if progress is shown."""
    if not (run.is_main and settings.progress_bar):
        return
    at, progress = as_given(settings, run.last_checkpoint), run.progress
    if at is not None:
        _LOG.info(f"goes on from {at} (step {progress.steps}, epoch {progress.epoch})")
    elif start.kind == "auto":
        _LOG.info(f"begins anew: no checkpoint in {as_given(settings, start.path)}")


def _real(path: str, files: FileSystem) -> str:
    """Return a path with symbolic links resolved; only local paths have them."""
    if not files.renames:
        return files.absolute(path)
    check_path(path)
    return os.path.realpath(path)


def _checked_path(resume: object) -> str:
    """Return the path to resume from."""
    if not isinstance(resume, (str, os.PathLike)):
        raise ConfigError(f"resume must be 'auto', a path or None, not {resume!r}")
    given = os.fspath(resume)
    files = file_system(given)
    if files.renames:
        check_path(given)
    with os_errors("read", given):
        kind = files.kind(files.absolute(given))
    if kind == "file":
        raise ConfigError(
            f"resume={given!r} is a file: a run is resumed from a checkpoint, which is a directory. To start"
            " from weights in a file, call task.load_weights(path) before fit"
        )
    return given


def named_checkpoint(settings: RunSettings, checkpoint: str) -> str:
    """Return the path of a checkpoint or of a file of weights, given as a path, "last", "best", or
    "best:<metric>".
    """
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise ConfigError(f"checkpoint={checkpoint!r}. Give 'best' or 'last' of run_dir, or a path")
    path = os.fspath(checkpoint)
    if path.partition(":")[0] != "best" and checkpoint != "last":
        return path if is_weight_file(path) else resolve(path)
    root = checkpoint_root(settings, settings.run_dir)
    if root is None:
        raise ConfigError(
            f"checkpoint={checkpoint!r} needs a run_dir to look in: give the Trainer one, or a path"
        )
    return RunDirectory(root, chosen_policies(settings.checkpoint)).named(path)
