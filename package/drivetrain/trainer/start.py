"""Where a fit begins: anew or from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Json, RunLogger
from drivetrain.data.resumption import Resumption
from drivetrain.run.record import record_of, with_resumes
from drivetrain.run.run import Run
from drivetrain.run.settings import RunSettings
from drivetrain.run.state import Start
from drivetrain.task.attribute_state import AttributeState
from drivetrain.task.task import TaskModule

if TYPE_CHECKING:
    from drivetrain.callbacks.checkpoint import CheckpointSaver


def start_from(
    settings: RunSettings,
    run: Run,
    saver: CheckpointSaver | None,
    start: Start,
    settings_of: str | None,
    how: Resumption,
) -> None:
    """Restore the checkpoint that the fit begins from, then set rates and intervals to the run's progress."""
    for each in run.loggers if run.is_main else ():
        if isinstance(each, RunLogger):
            each.begin(run)
    if start.kind != "new" or (saver is not None and saver.policies[0].resumable):
        declared = run.train_metrics, *run.evaluation_metrics.values()
        run.attributes = AttributeState(run.task, declared, run.engine.data_ranks)
    found = None
    if start.kind != "new":
        from drivetrain.run.checkpoint import restore
        from drivetrain.trainer.checkpoints import load_start, report_start

        with run.timed("restore"):
            found = load_start(start, run, saver)
            if found is not None:
                restore(run, found[1], found[0], settings_of, how._replace(once=start.kind == "auto"))
            elif how.asked:
                raise ConfigError(
                    f"{how.asked} goes on from a checkpoint, and resume='auto' found none in {start.path}."
                    " Give the path of one"
                )
            report_start(settings, run, start)
    snapshot = None
    if saver is not None:  # values that cannot be stored are found now, not at a save
        from drivetrain.run.checkpoint import snapshot_run

        snapshot = snapshot_run(run, saver.policies[0].resumable)
    run.nonfinite.note_weights(snapshot if run.frozen is None else None)
    run.engine.set_rates()
    run.triggers.log.start(run.progress)
    run.triggers.validate.start(run.progress)
    if found is None:
        _begin_anew(settings, run, saver)
    if run.loggers:  # on rank 0
        _log_config(settings, run, settings_of, how, resumed=found is not None)


def _begin_anew(settings: RunSettings, run: Run, saver: CheckpointSaver | None) -> None:
    """Set what a fit that is no resume does before its first step: lists of steps may have a 0."""
    if run.triggers.validate.every is not None:
        run.sanity_batches = sanity_batches(settings, run)
    saves = [] if saver is None else [each.interval for each in saver.policies if each.interval is not None]
    of = {
        "log": run.triggers.log.at_start,
        "validate": run.triggers.validate.at_start,
        "save": any(0 in each.steps for each in saves),
    }
    run.agreed |= {name for name, is_due in of.items() if is_due}


def _log_config(
    settings: RunSettings, run: Run, settings_of: str | None, how: Resumption, resumed: bool
) -> None:
    updaters = run.engine.updaters
    config: dict[str, Json] = {"trainer": settings.to_json(), "task": describe_task(run.task)}
    config |= {"optimizers": {name: dict(each.given) for name, each in updaters.items()}}
    config["run"] = {**record_of(run)}
    kept: dict[str, Json] = {name: dict(each.kept) for name, each in updaters.items() if each.kept}
    if kept:  # the arguments of the task say otherwise
        config["kept_of_checkpoint"] = kept
    if resumed:
        config = with_resumes(config, run, settings_of, how)
    for each in run.loggers:
        with run.logging_to(each, f"the configuration that {type(each).__name__} writes at step"):
            each.log_config(config)


_SANITY_BATCHES = 2
"""The batches of each loader that the short validation before training takes by default, as in Lightning."""


def sanity_batches(settings: RunSettings, run: Run) -> int | None:
    """Return the batches of each loader that a fit validates on before it trains, or None.

    By default it validates where that is under a hundredth of the batches that it trains on in an epoch, and
    where what it reads can be read again.
    """
    feeds = [feed for _, feed in run.evaluation_feeds]
    asked = settings.sanity_validation
    if not isinstance(asked, str) or run.train_feed is None:
        assert not isinstance(asked, str)
        once = next((feed.source.name for feed in feeds if feed.source.one_shot), None)
        if asked is not None and once is not None:
            raise ConfigError(
                f"sanity_validation={asked} would use up batches of the {once} data, an iterator that can be"
                " read once. Give data that can be read again, or sanity_validation=None"
            )
        return asked
    trained = run.train_feed.batches_per_epoch
    if run.length.steps is not None and trained is not None:
        trained = min(trained, run.length.steps * run.train_feed.accumulation)
    is_cheap = trained is not None and _SANITY_BATCHES * len(feeds) * 100 < trained
    return _SANITY_BATCHES if is_cheap and all(feed.source.exact for feed in feeds) else None


def describe_task(task: TaskModule) -> dict[str, Any]:
    """Return a description of a task for a log: its class and constructor arguments."""
    plain = (bool, int, float, str, type(None))
    hparams = {
        name: value if isinstance(value, plain) else repr(value) for name, value in task.hparams.items()
    }
    return {"class": type(task).__name__, "hparams": hparams}
