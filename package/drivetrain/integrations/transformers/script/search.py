"""The search over hyper-parameters of a script's Trainer: over Optuna, Ray Tune, or a sweep of W&B."""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from transformers.integrations.integration_utils import rewrite_logs
from transformers.trainer_utils import (
    BestRun,
    HPSearchBackend,
    default_compute_objective,
    default_hp_space_optuna,
    default_hp_space_ray,
    default_hp_space_wandb,
)

from drivetrain.core.errors import ConfigError, DrivetrainError, MissingDependencyError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.distributed.ranks import Ranks
from drivetrain.run.run import Run

_LOG = logger(__name__)

_OPTIMIZE = ("timeout", "gc_after_trial", "catch")
"""The keywords for `Study.optimize`; the others are for `optuna.create_study`."""

_NO_TRIAL = ("assignments", "metric", "_wandb")
"""Names in the configuration of a sweep's run that are no parameters of the sweep."""


class HyperparameterSearch(ABC):
    """A search in progress: its trials, and the objective of each.

    Args:
        space: Returns what the backend draws from; None takes transformers'.
        objective: Takes the metrics of an evaluation; None takes transformers'.
        name: Returns the name of a trial; None names it "run-" and its number or identity.

    Attributes:
        objective: The objective of the current trial; None before its first evaluation.
    """

    backend: ClassVar[HPSearchBackend]
    default_space: ClassVar[Callable[[Any], Mapping[str, Any]]]
    in_main_thread: ClassVar[bool] = True
    """Whether trials run in the main thread, which alone takes signals."""

    def __init__(
        self,
        space: Callable[[Any], Mapping[str, Any]] | None,
        objective: Callable[[dict[str, float]], Any] | None,
        name: Callable[[Any], str] | None,
    ) -> None:
        self.space: Callable[[Any], Mapping[str, Any]] = space or type(self).default_space
        self.compute_objective = objective or default_compute_objective
        self.name = name
        self.objective: Any = None
        self._trial: Any = None

    @abstractmethod
    def run(
        self, script: Any, ranks: Ranks, trials: int, direction: str | list[str], options: dict[str, Any]
    ) -> Any:
        """Run all trials, on all ranks.

        Args:
            script: The Trainer of the script.
            ranks: The ranks, which train together.
            trials: The number of trials.
            direction: "minimize" or "maximize", or one for each objective.
            options: Keywords for the backend.

        Returns:
            The best trial, of several objectives the best ones; None on all ranks but the first.

        Raises:
            ConfigError: The backend does not take the options, the direction or the ranks.
        """

    @abstractmethod
    def identity(self, trial: Any) -> str:
        """Return the number or the identity of a trial."""

    def values(self, trial: Any) -> dict[str, Any]:
        """Return the values of a trial by the names of its arguments."""
        return dict(trial)

    def set_arguments(self, args: Any, trial: Any) -> dict[str, Any]:
        """Begin a trial: set the options of the arguments that its values name, and return the values."""
        self._trial = trial
        values = self.values(trial)
        for name, value in values.items():
            if not hasattr(args, name):
                _LOG.warning(
                    f"{name!r} of hp_space is no option of TrainingArguments, so only model_init sees it"
                )
                continue
            before = getattr(args, name)
            setattr(args, name, value if before is None else type(before)(value))
        return values

    def trial_name(self, trial: Any) -> str | None:
        """Return the name that the state has for a trial."""
        return None if self.name is None else self.name(trial)

    def directory(self, base: str, trial: Any) -> str:
        """Return the folder of a trial."""
        return os.path.join(base, self.trial_name(trial) or f"run-{self.identity(trial)}")

    @abstractmethod
    def report(self, run: Run, metrics: Mapping[str, float], saves: bool) -> None:
        """Report an evaluation of the trial's fit, which saves checkpoints or not."""

    def saved(self, folder: str) -> None:
        """Hear of a folder `checkpoint-N` of the trial's fit."""

    def end_trial(self) -> None:
        """End a trial."""

    def _space_without_trial(self) -> dict[str, Any]:
        try:
            return dict(self.space(None))
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"hp_space of backend={self.backend.value!r} gets None, because this backend makes the trials"
                f" itself. It must return a mapping: {error}"
            ) from error

    def _evaluated(self, script: Any) -> dict[str, float] | None:
        """Evaluate after a trial that has not done so itself; return the metrics, else None."""
        if self.objective is not None:
            return None
        metrics: dict[str, float] = script.evaluate()
        self.objective = self.compute_objective(dict(metrics))
        return metrics


@final
class OptunaSearch(HyperparameterSearch):
    """A search over Optuna; `space` takes Optuna's trial and returns options of the arguments by name."""

    backend = HPSearchBackend.OPTUNA
    default_space = staticmethod(default_hp_space_optuna)
    _is_pruned = False

    def run(
        self, script: Any, ranks: Ranks, trials: int, direction: str | list[str], options: dict[str, Any]
    ) -> BestRun | list[BestRun] | None:
        """Run all trials, on all ranks."""
        import optuna

        if options.pop("n_jobs", 1) != 1:
            raise ConfigError(
                "hyperparameter_search(n_jobs=...) would run trials in threads of this process, which share"
                " its devices, random streams and arguments. Start the script several times with one"
                " storage='sqlite:///search.db' and load_if_exists=True, or use drivetrain.search(parallel=)"
            )

        def one(trial: Any) -> Any:
            self.objective = None
            script.train(trial=trial)
            self._evaluated(script)
            return self.objective

        def lead(trial: Any) -> Any:
            self.space(trial)  # draws on this rank alone
            ranks.first(lambda: (trial.params, trial.number))
            return one(trial)

        if not ranks.is_first:
            while (drawn := ranks.first(lambda: None)) is not None:
                try:
                    one(optuna.trial.FixedTrial(*drawn))
                except optuna.TrialPruned:
                    continue
            return None
        named = {name: options.pop(name) for name in _OPTIMIZE if name in options}
        directions = {"directions": direction} if isinstance(direction, list) else {"direction": direction}
        study = optuna.create_study(**directions, **options)
        study.optimize(one if ranks.alone else lead, n_trials=trials, **named)
        ranks.first(lambda: None)
        if isinstance(direction, list):
            return [BestRun(str(each.number), each.values, each.params) for each in study.best_trials]
        best = study.best_trial
        return BestRun(str(best.number), best.value, best.params)

    def identity(self, trial: Any) -> str:
        """Return the number of a trial."""
        return str(trial.number)

    def values(self, trial: Any) -> dict[str, Any]:
        """Draw the values of a trial."""
        self._is_pruned = False
        return dict(self.space(trial))

    def report(self, run: Run, metrics: Mapping[str, float], saves: bool) -> None:
        """Report an evaluation; all ranks stop after this step if the trial must be pruned."""
        self.objective = self.compute_objective(dict(metrics))
        trial, objective, step = self._trial, self.objective, run.progress.steps

        def judge() -> bool:
            study = getattr(trial, "study", None)  # a FixedTrial has none
            if study is None or len(study.directions) > 1:
                return False
            trial.report(objective, step)
            return bool(trial.should_prune())

        if run.engine.ranks.first(judge):
            self._is_pruned = True
            run.stop(f"pruned after step {step}")

    def end_trial(self) -> None:
        """End a trial.

        Raises:
            optuna.TrialPruned: It was pruned.
        """
        import optuna

        if self._is_pruned:
            raise optuna.TrialPruned


@final
class RaySearch(HyperparameterSearch):
    """A search over Ray Tune, whose trials are processes; `space` returns the `config` of `tune.run`.

    A trial reports each evaluation, with a checkpoint of the same step if the script saves any. If Ray
    starts a trial from a checkpoint, it resumes from it, with the arguments of its own configuration.
    """

    backend = HPSearchBackend.RAY
    default_space = staticmethod(default_hp_space_ray)
    in_main_thread = False
    _reported: dict[str, Any] | None = None

    def run(
        self, script: Any, ranks: Ranks, trials: int, direction: str | list[str], options: dict[str, Any]
    ) -> BestRun:
        """Run all trials, in Ray's processes."""
        from ray import tune

        mode = _one_direction("ray", direction)[:3]
        _check_alone("ray", ranks)
        if type(options.get("scheduler")).__name__ in _JUDGES and script.args.eval_strategy == "no":
            raise ConfigError(
                f"{type(options['scheduler']).__name__} judges trials by their evaluations during training:"
                ' give eval_strategy="steps" or "epoch"'
            )
        options.setdefault("resources_per_trial", {"cpu": 1, **_gpu_if_any(script)})
        base, script.args.output_dir = script.args.output_dir, os.path.abspath(script.args.output_dir)
        try:
            found = tune.run(
                tune.with_parameters(_ray_trial, both=(self, script)),
                config=self._space_without_trial(),
                num_samples=trials,
                **options,
            )
        finally:
            script.args.output_dir = base
        scope = getattr(script.args, "ray_scope", None) or os.environ.get("RAY_SCOPE", "last")
        best = found.get_best_trial(metric="objective", mode=mode, scope=scope)
        if best is None:
            raise DrivetrainError("none of the trials of Ray Tune has reported an objective that is a number")
        return BestRun(best.trial_id, best.last_result["objective"], best.config, found)

    def identity(self, trial: Any) -> str:
        """Return Ray's identity of the trial that runs here."""
        from ray import tune

        return str(tune.get_context().get_trial_id())

    def directory(self, base: str, trial: Any) -> str:
        """Return a folder that is not there yet: a trial that goes on may have another trial's checkpoint."""
        first = super().directory(base, trial)
        names = itertools.chain([first], (f"{first}-{each}" for each in itertools.count(2)))
        return next(each for each in names if not os.path.exists(each))

    def trial(self, script: Any, config: dict[str, Any]) -> None:
        """Run one trial, in a process of Ray."""
        from ray import tune

        self.objective, checkpoint = None, tune.get_checkpoint()
        if checkpoint is None:
            script.train(trial=config)
        else:
            with checkpoint.as_directory() as folder:
                script.train(resume_from_checkpoint=folder, trial=config)
        # A trial that goes on may have been at its end.
        metrics = self._evaluated(script) if checkpoint is None else None
        if metrics is not None:
            tune.report({**metrics, "objective": self.objective})

    def report(self, run: Run, metrics: Mapping[str, float], saves: bool) -> None:
        """Report an evaluation, once the checkpoint of this step is saved."""
        self.objective = self.compute_objective(dict(metrics))
        self._reported = {**metrics, "objective": self.objective}
        if saves:
            run.save()
        else:
            self._report(None)

    def saved(self, folder: str) -> None:
        """Report the evaluation of this step with its folder `checkpoint-N`."""
        if self._reported is not None:
            self._report(folder)

    def _report(self, folder: str | None) -> None:
        from ray import tune

        reported, self._reported = self._reported, None
        assert reported is not None
        tune.report(reported, checkpoint=None if folder is None else tune.Checkpoint.from_directory(folder))


def _ray_trial(config: dict[str, Any], both: tuple[RaySearch, Any]) -> None:
    search, script = both  # which Ray copies together, so that the script has this search
    search.trial(script, config)


_JUDGES = frozenset(
    {
        "AsyncHyperBandScheduler",
        "ASHAScheduler",
        "HyperBandForBOHB",
        "MedianStoppingRule",
        "PopulationBasedTraining",
    }
)
"""Schedulers of Ray that need values during training, as in transformers."""


@final
class WandbSearch(HyperparameterSearch):
    """A sweep of Weights & Biases, whose agent runs trials here; `space` returns the sweep's configuration.

    The values of each evaluation go to the trial's run under transformers' names, such as "eval/loss".
    """

    backend = HPSearchBackend.WANDB
    default_space = staticmethod(default_hp_space_wandb)
    in_main_thread = False

    def run(
        self, script: Any, ranks: Ranks, trials: int, direction: str | list[str], options: dict[str, Any]
    ) -> BestRun:
        """Run all trials, which W&B's server chooses."""
        import wandb

        goal = _one_direction("wandb", direction)
        _check_alone("wandb", ranks)
        own = {name: options.pop(name, None) for name in ("sweep_id", "project", "name", "entity", "metric")}
        if options:
            raise ConfigError(
                f"hyperparameter_search(backend='wandb') has no {next(iter(options))!r}."
                f" {nearest(next(iter(options)), own)}"
            )
        self._metric = own["metric"] or "eval/loss"
        sweep = self._space_without_trial()
        if not isinstance(sweep.get("parameters"), Mapping):
            raise ConfigError(
                "hp_space of backend='wandb' must return the configuration of a sweep, such as {'method':"
                f" 'random', 'parameters': {{'learning_rate': {{'min': 1e-5, 'max': 1e-2}}}}}}, not {sweep!r}"
            )
        sweep["metric"] = {**sweep.get("metric", {}), "goal": goal, "name": self._metric}
        if own["name"]:
            sweep["name"] = own["name"]
        script.args.report_to = ["wandb"]
        ended: list[BestRun] = []
        errors: list[BaseException] = []

        def one() -> None:
            try:
                ended.append(self._one(script))
            except BaseException as error:  # which the agent reports, and goes on
                errors.append(error)
                raise

        identity = own["sweep_id"] or wandb.sweep(sweep, project=own["project"], entity=own["entity"])
        wandb.agent(identity, function=one, count=trials, project=own["project"], entity=own["entity"])
        if not ended:
            if errors and isinstance(errors[0], Exception):
                raise errors[0]
            raise DrivetrainError(f"no trial of the sweep {identity} is complete")
        choose = min if goal == "minimize" else max
        return choose(ended, key=lambda each: each.objective)._replace(run_summary=identity)

    def _one(self, script: Any) -> BestRun:
        import wandb

        with wandb.init() if wandb.run is None else wandb.run as opened:
            values = {name: each for name, each in dict(opened.config).items() if name not in _NO_TRIAL}
            self.objective = None
            script.train(trial=values)
            metrics = self._evaluated(script)
            if metrics is not None:
                self._log(metrics, script.state.global_step)
            return BestRun(opened.id, self.objective, values)

    def identity(self, trial: Any) -> str:
        """Return the identity of the run that is open."""
        import wandb

        assert wandb.run is not None
        return str(wandb.run.id)

    def trial_name(self, trial: Any) -> str | None:
        """Return the name of the run that is open, if `hp_name` gives none."""
        import wandb

        return super().trial_name(trial) or (wandb.run and wandb.run.name)

    def directory(self, base: str, trial: Any) -> str:
        """Return the folder of a trial."""
        name = None if self.name is None else self.name(trial)
        return os.path.join(base, name or f"run-{self.identity(trial)}")

    def report(self, run: Run, metrics: Mapping[str, float], saves: bool) -> None:
        """Log an evaluation in the run that is open."""
        self.objective = self.compute_objective(dict(metrics))
        self._log(metrics, run.progress.steps)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        import wandb

        found = {**rewrite_logs(dict(metrics)), "objective": self.objective}
        if self._metric not in found:
            raise ConfigError(
                f"hyperparameter_search(metric={self._metric!r}), which the sweep goes by, is no value of an"
                f" evaluation. {nearest(self._metric, found)}"
            )
        assert wandb.run is not None
        wandb.run.log({**found, "step": step})


_SEARCHES: Mapping[str, type[HyperparameterSearch]] = {
    "optuna": OptunaSearch,
    "ray": RaySearch,
    "wandb": WandbSearch,
}
_EXTRAS = {"optuna": "search"}


def chosen_search(given: object) -> type[HyperparameterSearch]:
    """Return the search over a backend; None takes the first one that is installed.

    Raises:
        ConfigError: There is no such backend.
        MissingDependencyError: It is not installed.
    """
    if given is None:
        given = next((name for name in _SEARCHES if is_installed(name)), "optuna")
    name = str(getattr(given, "value", given))
    if name == "sigopt":
        raise ConfigError("backend='sigopt': SigOpt's service has ended. Use backend='optuna'")
    if name not in _SEARCHES:
        raise ConfigError(f"there is no backend {given!r}. {nearest(name, _SEARCHES)}")
    if not is_installed(name):
        raise MissingDependencyError(
            name, _EXTRAS.get(name, name), f"hyperparameter_search(backend={name!r})"
        )
    return _SEARCHES[name]


def _one_direction(backend: str, given: object) -> str:
    if given not in ("minimize", "maximize"):
        raise ConfigError(
            f"backend={backend!r} has one objective: direction is 'minimize' or 'maximize', not {given!r}."
            " For several, use backend='optuna'"
        )
    return str(given)


def _check_alone(backend: str, ranks: Ranks) -> None:
    if not ranks.alone:
        raise ConfigError(
            f"a trial of backend={backend!r} trains in one process, and there are {ranks.size}. Start the"
            " script without a launcher, or use backend='optuna'"
        )


def _gpu_if_any(script: Any) -> dict[str, int]:
    return {"gpu": 1} if script.args.n_gpu > 0 else {}
