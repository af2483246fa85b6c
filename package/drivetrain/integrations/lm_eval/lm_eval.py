"""Scores of EleutherAI's evaluation harness during a fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.at_points import AtPoints
from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.registry import is_installed

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.task.task import TaskModule

_OURS = ("every", "model", "batch_size", "include_path")
_GIVEN = {*_OURS, "model_args", "tasks", "task_manager", "device"}
"""The arguments of `simple_evaluate` that `LMEval` gives by itself."""


class LMEval(AtPoints):
    """Logs the scores of EleutherAI's harness (`lm_eval`), at each validation or at an interval.

    The harness runs on rank 0, inside `run.gathered()`, so that it works under every strategy. The score
    "acc" of the task "arc_easy" is logged as "lm_eval/arc_easy/acc"; a score with a filter of the harness has
    the filter at its end, as "lm_eval/gsm8k/exact_match/strict-match". The training goes on as without it.

    Args:
        tasks: The names of the harness's tasks.
        every: The interval, such as "1_000 steps" or "1 epoch"; None is each validation.
        model: Takes the task, and returns an `lm_eval.api.model.LM` for the harness. None is for a task with
            a `model` of transformers and its tokenizer in `processing_class`, such as a `TransformersTask`.
        batch_size: The requests in a batch, for `model=None`.
        include_path: A folder with tasks of your own, as YAML files.
        options: More arguments of `lm_eval.simple_evaluate`, such as `limit=100` and `num_fewshot=5`.

    Raises:
        MissingDependencyError: lm_eval is not installed.
        ConfigError: An option is unknown; or, at the start of a fit, a task is unknown, or the task has no
            model of transformers with a tokenizer.
    """

    def __init__(
        self,
        tasks: str | Sequence[str],
        *,
        every: Interval | None = None,
        model: Callable[[TaskModule], Any] | None = None,
        batch_size: int = 8,
        include_path: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every)
        if not is_installed("lm_eval"):
            raise MissingDependencyError("lm_eval", "lm-eval", "LMEval")
        from lm_eval import simple_evaluate

        theirs = inspect.signature(simple_evaluate).parameters.keys() - _GIVEN
        for name in options.keys() - theirs:
            raise ConfigError(f"LMEval has no option {name!r}. {nearest(name, {*theirs, *_OURS})}")
        self.tasks = [tasks] if isinstance(tasks, str) else list(tasks)
        if not self.tasks:
            raise ConfigError(
                "LMEval(tasks) is empty; give names of the harness's tasks, such as ['arc_easy']"
            )
        self.model, self.batch_size, self.include_path, self.options = (
            model,
            batch_size,
            include_path,
            options,
        )
        self._manager: Any = None

    def on_fit_start(self, run: Run) -> None:
        """Look up the tasks.

        Raises:
            ConfigError: One is unknown, or there is nothing to make a model of the harness from.
        """
        task = run.task
        if self.model is None and None in (
            getattr(task, "model", None),
            getattr(task, "processing_class", None),
        ):
            raise ConfigError(
                "LMEval without model= needs a task with a model of transformers and a tokenizer, such as"
                f" TransformersTask(model, processing_class=tokenizer), not a {type(task).__name__}. Give"
                " LMEval(model=function), whose function takes the task and returns an"
                " lm_eval.api.model.LM"
            )
        run.engine.ranks.first(self._find_tasks)
        super().on_fit_start(run)

    def _find_tasks(self) -> None:
        from lm_eval.tasks import TaskManager

        self._manager = TaskManager(include_path=self.include_path)
        for name in self.tasks:
            if not self._manager.match_tasks([name]):
                raise ConfigError(
                    f"LMEval(tasks=...) has {name!r}, which the harness does not know."
                    f" {nearest(name, self._manager.all_tasks)}"
                )

    def evaluate(self, run: Run) -> None:
        """Run the harness and log its scores; see `AtPoints`."""
        for name, value in run.engine.ranks.first(lambda: self._scores(run)).items():
            run.log(name, value)

    def _scores(self, run: Run) -> dict[str, float]:
        from lm_eval import simple_evaluate

        given = _language_model(run.task, self.batch_size) if self.model is None else self.model(run.task)
        found = simple_evaluate(given, tasks=self.tasks, task_manager=self._manager, **self.options)
        scores = {}
        for task, values in found["results"].items():
            for name, value in values.items():
                measure, _, chosen = name.partition(",")
                is_score = isinstance(value, (int, float)) and name not in ("alias", "sample_len")
                if is_score and not measure.endswith("_stderr"):
                    parts = ("lm_eval", task, measure, *([chosen] if chosen not in ("", "none") else []))
                    scores["/".join(parts)] = float(value)
        return scores


def _language_model(task: Any, batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=task.model, tokenizer=task.processing_class, batch_size=batch_size)
