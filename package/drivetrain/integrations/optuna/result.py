"""The result of a search: its trials, and the best one with its weights and its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import ConfigError, DrivetrainError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.notebook.output import new_figure, new_frame
from drivetrain.core.validation import count

if TYPE_CHECKING:
    import optuna
    from matplotlib.figure import Figure

    from drivetrain.integrations.optuna.space import Space
    from drivetrain.task.task import TaskModule
    from drivetrain.trainer.trainer import Trainer

_LOG = logger(__name__)

_ENDS = ("steps", "seconds", "stop_reason", "failure", "run_dir")
"""The columns of a trial's end."""

_LONG = ("stop_reason", "failure", "run_dir")  # which a notebook's table leaves out
_SHOWN = 10  # the trials of a notebook's table
_COLUMNS, _WIDTH, _HEIGHT = 3, 4.0, 2.8  # of the plots in a figure, and the inches of one


class SearchMistake(ConfigError):  # noqa: N818 - as `Preempted`, it says what has happened
    """An argument of the search that no trial can work with; it ends the search."""


@dataclass(frozen=True)
class TrialResult:
    """One trial of a search.

    Attributes:
        number: Its number, from 0.
        state: "complete", "pruned", "failed" or "running".
        parameters: Its values by the names of the space.
        values: The objectives by name, once it is complete; of a pruned trial the last that it reported.
        run_dir: The directory of its fit.
        steps: The steps of its fit; None if it failed.
        stop_reason: Why its fit ended; None if it failed.
        failure: Why it failed; None if it did not.
        seconds: From its first start to its end; None while it runs.
        model_path: Its finished weights, or None.
        last_checkpoint: Its newest checkpoint, or None.
        best_checkpoint: Its best checkpoint, or None.
    """

    number: int
    state: str
    parameters: dict[str, Any]
    values: dict[str, float]
    run_dir: Path
    steps: int | None = None
    stop_reason: str | None = None
    failure: str | None = None
    seconds: float | None = None
    model_path: Path | None = None
    last_checkpoint: Path | None = None
    best_checkpoint: Path | None = None


@dataclass(frozen=True)
class RestoredTrial:
    """A trial with what it trained.

    Attributes:
        trial: Its parameters, values and files.
        task: The task with the trained weights.
        trainer: The configuration that it was trained with.
    """

    trial: TrialResult
    task: TaskModule
    trainer: Trainer


@dataclass(frozen=True)
class SearchResult:
    """The result of `drivetrain.search`.

    Attributes:
        trials: All trials, by number.
        objectives: The optimised names.
        directions: "minimize" or "maximize", for each of them.
        run_dir: The directory of the search.
        pareto: The trials that no other one beats in all objectives, by number; with one objective the best.
    """

    trials: tuple[TrialResult, ...]
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    run_dir: Path
    pareto: tuple[TrialResult, ...]
    _restore: Callable[[TrialResult], RestoredTrial] = field(repr=False, compare=False)

    @property
    def best(self) -> RestoredTrial:
        """The best trial: its task with the trained weights, its Trainer, its parameters and its values.

        Raises:
            ConfigError: There are several objectives, or the weights were not kept.
        """
        if len(self.objectives) > 1:
            raise ConfigError(
                f"a search of {len(self.objectives)} objectives has no single best trial: choose one of"
                " result.pareto, and give its number to result.restore(number)"
            )
        return self._restore(self.pareto[0])

    def restore(self, number: int) -> RestoredTrial:
        """Return a trial's task with its trained weights, and its Trainer.

        Raises:
            ConfigError: There is no such trial, or its weights were not kept.
        """
        if count("restore(number)", number) >= len(self.trials):
            raise ConfigError(f"there is no trial {number}: this search has {len(self.trials)}, from 0")
        return self._restore(self.trials[number])

    def to_pandas(self) -> Any:
        """Return the trials as a DataFrame of pandas, with a row for each.

        Its columns are "number" and "state", the objectives, the parameters, "steps", "seconds",
        "stop_reason", "failure" and "run_dir". An objective or parameter that is called like another column
        becomes "objective.<name>" or "parameter.<name>".

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        return new_frame("SearchResult.to_pandas", [self._row(each) for each in self.trials])

    def plot(self, *parameters: str) -> Figure:
        """Return the values of the complete trials as a figure of matplotlib, which a notebook shows.

        For each objective it has the value by trial, with the best so far, and the value by each parameter.

        Args:
            *parameters: The parameters to show; without any, all of them.

        Raises:
            ConfigError: No trial has a parameter of that name.
            MissingDependencyError: matplotlib is not installed.
        """
        known = dict.fromkeys(name for each in self.trials for name in each.parameters)
        for name in parameters:
            if name not in known:
                raise ConfigError(f"no trial has a parameter {name!r}. {nearest(str(name), known)}")
        chosen = parameters or tuple(known)
        columns = min(_COLUMNS, 1 + len(chosen))
        lines = -(-(1 + len(chosen)) // columns)
        size = _WIDTH * columns, _HEIGHT * lines * len(self.objectives)
        figure = new_figure("SearchResult.plot", figsize=size)
        for index, objective in enumerate(self.objectives):
            numbers, values = self._complete(objective)
            first = 1 + index * lines * columns
            grid = lines * len(self.objectives), columns
            axes = figure.add_subplot(*grid, first, xlabel="trial", ylabel=objective)
            axes.plot(numbers, values, "o", alpha=0.5)
            axes.plot(numbers, self._best_so_far(objective), label="best so far")
            axes.legend()
            for index, name in enumerate(chosen, first + 1):
                axes = figure.add_subplot(*grid, index, xlabel=name, ylabel=objective)
                _scatter(axes, [self.trials[number].parameters.get(name) for number in numbers], values)
        return figure

    def _repr_html_(self) -> str:
        """Return the best trials as a table with the curve of the best value, which a notebook shows."""
        curves = [(f"best {name} by trial", sparkline(self._best_so_far(name))) for name in self.objectives]
        rows = [self._row(each) for each in self._ranked()[:_SHOWN]]
        names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _LONG]
        cells = [[_short(row.get(name)) for name in names] for row in rows]
        states = Counter(each.state for each in self.trials)
        about = ", ".join(f"{count} {state}" for state, count in states.items())
        facts = [("trials", about), ("directory", self.run_dir), *curves]
        return html_table(names, cells) + html_table((), facts)

    def _row(self, trial: TrialResult) -> dict[str, Any]:
        """Return a trial by the names of the columns."""
        ends = {name: getattr(trial, name) for name in _ENDS}
        row = {"number": trial.number, "state": trial.state}
        values = {name: trial.values.get(name) for name in self.objectives}
        for kind, given in (("objective", values), ("parameter", trial.parameters)):
            row |= {
                f"{kind}.{name}" if name in row or name in ends else name: each
                for name, each in given.items()
            }
        return row | ends

    def _complete(self, objective: str) -> tuple[list[int], list[float]]:
        """Return the numbers of the complete trials, and their values."""
        found = [each for each in self.trials if each.state == "complete"]
        return [each.number for each in found], [each.values[objective] for each in found]

    def _best_so_far(self, objective: str) -> list[float]:
        is_less_better = self.directions[self.objectives.index(objective)] == "minimize"
        return list(accumulate(self._complete(objective)[1], min if is_less_better else max))

    def _ranked(self) -> list[TrialResult]:
        """Return the trials: the best, the other complete ones by their first objective, and the rest."""
        sign = 1 if self.directions[0] == "minimize" else -1

        def key(trial: TrialResult) -> tuple[Any, ...]:
            if trial.state != "complete":
                return 2, 0.0
            return trial not in self.pareto, sign * trial.values[self.objectives[0]]

        return sorted(self.trials, key=key)


def _short(value: Any) -> Any:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else value


def _scatter(axes: Any, positions: Sequence[Any], values: Sequence[float]) -> None:
    """Draw values by a parameter, on a logarithmic axis if the largest is over twenty times the smallest."""
    numbers = [each for each in positions if isinstance(each, (int, float)) and not isinstance(each, bool)]
    if len(numbers) == len(positions):
        axes.plot(numbers, values, "o", alpha=0.5)
        if numbers and min(numbers) > 0 and max(numbers) / min(numbers) > 20:
            axes.set_xscale("log")
    else:
        axes.plot([str(each) for each in positions], values, "o", alpha=0.5)


def trials_of(
    study: optuna.Study, objectives: tuple[str, ...], directory: Path, space: Space | None = None
) -> tuple[TrialResult, ...]:
    """Return the trials of a study.

    Args:
        study: The study.
        objectives: The optimised names.
        directory: The directory of the search.
        space: The space, whose function may return more than the study has.
    """
    from optuna.trial import TrialState

    from drivetrain.integrations.optuna.study import trial_directory

    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    found = []
    for each in study.get_trials():
        own, has_ended = each.user_attrs, each.state in (TrialState.COMPLETE, TrialState.PRUNED)
        path = {
            name: None if own.get(name) is None else directory / own[name]
            for name in ("model_path", "last_checkpoint", "best_checkpoint")
        }
        found.append(
            TrialResult(
                each.number,
                states.get(each.state, "running"),
                each.params if space is None or not has_ended else space.suggest(each),
                dict(zip(objectives, each.values or (), strict=False)),
                trial_directory(directory, each.number),
                own.get("steps"),
                own.get("stop_reason"),
                own.get("failure"),
                None if each.duration is None else each.duration.total_seconds(),
                **path,
            )
        )
    return tuple(found)


def best_numbers(study: optuna.Study) -> list[int]:
    """Return the numbers of the trials that no other one beats; of one objective the first best."""
    if len(study.directions) > 1:
        return sorted(each.number for each in study.best_trials)
    try:
        return [study.best_trial.number]
    except ValueError:  # none is complete
        return []


def check_complete(
    trials: tuple[TrialResult, ...], best: list[int], finished: frozenset[int], exhausted: bool
) -> None:
    """Check that a search has found something, and say if there was nothing left to run.

    Args:
        trials: All trials.
        best: The best ones.
        finished: The numbers of those that had ended when the program started.
        exhausted: Whether a sampler of finite spaces has tried all.

    Raises:
        DrivetrainError: No trial is complete; says why the first failed.
    """
    failed, left = [each for each in trials if each.failure is not None], ""
    if len(finished) == len(trials):
        more = "A" if exhausted else "A larger number of trials goes on, and a"
        left = (
            f"all {len(trials)} trials of this search ended before this start, {len(failed)} of them with a"
            f" failure, so none was run. {more}nother run_dir begins a new search"
        )
    if not best:
        what = f"{left}. None is complete" if left else f"none of the {len(trials)} trials is complete"
        first = f" Trial {failed[0].number} failed: {failed[0].failure}" if failed else ""
        raise DrivetrainError(f"{what}.{first}")
    if left:
        _LOG.info(left)


def restorer(
    make: Callable[[dict[str, Any], int], tuple[TaskModule, Trainer]],
) -> Callable[[TrialResult], RestoredTrial]:
    """Return the function that makes a trial's task and Trainer again.

    Args:
        make: Returns both for the parameters and the number of a trial.
    """

    def restore(trial: TrialResult) -> RestoredTrial:
        if trial.model_path is None or not trial.model_path.exists():
            why = (
                trial.failure or "checkpoint=False keeps no weights"
                if trial.state != "running"
                else "it runs"
            )
            raise ConfigError(f"trial {trial.number} has no trained weights: {why}")
        task, trainer = make(trial.parameters, trial.number)
        task.load_weights(str(trial.model_path))
        return RestoredTrial(trial, task, trainer)

    return restore
