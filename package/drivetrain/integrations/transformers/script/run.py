"""The run behind a script's Trainer: its fit in progress, and the pass over data that is wanted from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from drivetrain.callbacks.base import Callback
from drivetrain.core.random_streams import shielded
from drivetrain.data import Feed
from drivetrain.integrations.transformers.callbacks import CallbackAdapter
from drivetrain.integrations.transformers.log_names import from_metric_for_best_model
from drivetrain.integrations.transformers.script.pass_outputs import Pass
from drivetrain.integrations.transformers.script.script_task import ScriptTask
from drivetrain.run.loop import evaluate, validate
from drivetrain.run.run import Run
from drivetrain.trainer.feeds import evaluation_feeds
from drivetrain.trainer.trainer import Trainer


class ScriptRun(Callback):
    """Has a fit evaluate by a script's `evaluate`, and evaluates in the middle of a fit.

    Args:
        evaluate: The script's `evaluate`.
        first: Whether to evaluate before the first step.
        adapter: Calls transformers' callbacks.
        begins: Is given the run as the script's fit begins.
        saved: Is given the run after each checkpoint.

    Attributes:
        run: The fit in progress, or None.
        current: The pass in progress, or None.
        first: Whether to evaluate before the first step of the next fit.
    """

    def __init__(
        self,
        evaluate: Callable[[], Mapping[str, Any]],
        first: bool,
        adapter: CallbackAdapter,
        begins: Callable[[Run], None],
        saved: Callable[[Run], None],
    ) -> None:
        self.run: Run | None = None
        self.current: Pass | None = None
        self._evaluate = evaluate
        self.first = first
        self._adapter = adapter
        self._begins = begins
        self._saved = saved
        self._save: Callable[[Run], None] | None = None
        self._loaders: Any = None
        self._feeds: dict[int, tuple[Any, str | None, Feed]] = {}

    @contextmanager
    def fitting(self, loaders: Any) -> Iterator[None]:
        """Run the block, a fit.

        Args:
            loaders: The loaders of its evaluation sets by name, or the only one, or None.
        """
        self._loaders = loaders if isinstance(loaders, Mapping) else {None: loaders}
        try:
            yield
        finally:
            self.run, self._loaders = None, None
            self._feeds.clear()

    @contextmanager
    def passing(self, task: ScriptTask, wanted: Pass) -> Iterator[None]:
        """Run the block, a pass over data, which the script reports itself."""
        self.current = task.current = wanted
        self._adapter.reports_evaluations = False
        try:
            yield
        finally:
            self._adapter.reports_evaluations = True
            self.current = task.current = None

    def values(self, settings: Trainer, task: ScriptTask, loader: Any) -> dict[str, float]:
        """Return the values of a pass over a loader by their last names, in the fit if there is one."""
        if self.run is None:
            return _last_names(settings.validate(task, loader), None)
        known, name, feed = self._feeds.get(id(loader), (None, None, None))
        if feed is None or known is not loader:
            ((name, feed),) = evaluation_feeds(
                settings, self.run.engine, task, loader, "validation", self.run.callbacks
            )
            self._feeds[id(loader)] = loader, name, feed
        with shielded():
            return _last_names(evaluate(self.run, "validation", [(name, feed)]), name)

    def on_fit_start(self, run: Run) -> None:
        """Take over the evaluations of the fit."""
        self.run = run
        if self._loaders is None:  # an evaluation, or a fit that the script did not begin
            return
        self._feeds = {
            id(self._loaders[name]): (self._loaders[name], name, feed) for name, feed in run.evaluation_feeds
        }
        run.evaluator = self._evaluate_fit
        self._begins(run)

    def on_epoch_start(self, run: Run) -> None:
        """Evaluate before the first step, if that is asked for."""
        if self.first:
            self.first = False
            validate(run)

    def save_by(self, save: Callable[[Run], None] | None) -> None:
        """Set what saves a checkpoint that a callback asks for; None if the fit has a saver."""
        self._save = save
        vars(self).pop("on_save", None)
        if save is None:
            vars(self)["on_save"] = Callback.on_save  # which is marked unused

    def on_save(self, run: Run) -> None:
        """Save if a callback has asked for it, and the fit has no saver."""
        if run.saves_now and self._save is not None:
            self._save(run)

    def on_checkpoint_saved(self, run: Run) -> None:
        """Tell the script."""
        self._saved(run)

    def on_evaluation_end(self, run: Run) -> None:
        """Give all ranks what the pass has read."""
        if self.current is not None:
            self.current.samples = sum(each.samples for each in run.evaluation.passes)
            self.current.share(run.engine.data_ranks)

    def _evaluate_fit(self) -> dict[str, float]:
        metrics = self._evaluate()
        if self.run is not None:
            self._adapter.heed(self.run)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        numbers.pop("epoch", None)
        self._adapter.note_evaluation(numbers)
        names = [name for name in self._loaders if name is not None]
        return {from_metric_for_best_model(name, names): value for name, value in numbers.items()}


def _last_names(values: Mapping[str, float], loader: str | None) -> dict[str, float]:
    prefix = "validation/" if loader is None else f"validation/{loader}/"
    return {name.removeprefix(prefix): value for name, value in values.items()}
