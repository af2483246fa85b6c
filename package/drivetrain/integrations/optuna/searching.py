"""`drivetrain.search`: many fits over a space of parameters, which Optuna chooses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.direction import direction_of
from drivetrain.core.errors import EXIT_REQUEUE, ConfigError, MissingDependencyError, Preempted
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import count
from drivetrain.distributed.failure.last_words import write_now
from drivetrain.distributed.launch.calls import Call
from drivetrain.distributed.launch.children import end_all
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.forks import fork_ranks
from drivetrain.distributed.processes import one_at_a_time
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.signals import Signals
from drivetrain.engine.engine import Engine
from drivetrain.integrations.optuna.result import (
    SearchMistake,
    SearchResult,
    best_numbers,
    check_complete,
    restorer,
    trials_of,
)
from drivetrain.run.messages import part_of
from drivetrain.run.preemption import as_preemption
from drivetrain.trainer.result import FitResult
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    import optuna

    from drivetrain.integrations.optuna.trials import SearchSettings

_LOG = logger(__name__)

_DIRECTIONS = {"minimize": "minimize", "min": "minimize", "maximize": "maximize", "max": "maximize"}

_LOOKING = 0.05
"""Seconds between two checks of the processes of trials."""

_SAVING = 60.0
"""Seconds that trials have to save when the search is interrupted."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from reporting each study and trial, which the search reports itself."""
    if not is_installed("optuna"):  # which the search says
        yield
        return
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


@_quiet()
def search(
    make_task: Callable[[dict[str, Any]], Any],
    data: Any,
    space: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]],
    *,
    trainer: Trainer,
    trials: int,
    objective: str | Sequence[str] = "validation/loss",
    direction: str | Sequence[str] | None = None,
    storage: Any = None,
    sampler: Any = "tpe",
    pruner: Any = None,
    parallel: int = 1,
) -> SearchResult:
    """Fit a task with many hyper-parameters that Optuna chooses, and return the best.

    The search is kept in the Trainer's `run_dir`: each trial's fit in a directory of its own, and the trials
    in a storage. If a search was killed, the same call continues it there: the trial that was running resumes
    from its checkpoint, and the trials are those of an uninterrupted search. Sampler and tasks are seeded by
    the Trainer's `seed`.

    A trial that raises an error or has no finite objective is recorded as failed, and the search goes on.
    Without a launcher, a trial on several devices runs in forks of this process.

    Args:
        make_task: Takes a mapping of the names of the space to values, and returns a new task; or a pair of a
            task and a mapping of the Trainer's arguments that differ in this trial, such as
            `{"batch_size": 64}`.
        data: As for `Trainer.fit`: an object with `train_data()` and `validation_data()`, or a pair of both;
            or a function of the parameters that returns either.
        space: A mapping of names to a range `(1e-5, 1e-2)`, `(1e-5, 1e-2, "log")` or with a step
            `(0, 100, 10)`, of whole numbers if all are; to a list of choices `[64, 128]`; or to a
            distribution of Optuna. Or a function of Optuna's trial that returns a mapping of names to values.
        trainer: The Trainer of each trial. Its `run_dir` is the directory of the search, a new one if it is
            None, and its `run_name` names the study.
        trials: The number of trials, those of earlier calls included.
        objective: The logged name whose latest value at the end of a fit counts, or several.
        direction: "minimize" or "maximize", one for each objective. None takes it from a well-known name,
            such as a loss or an accuracy.
        storage: An address such as "sqlite:///search.db", the path of a journal, which several machines may
            share, or a storage of Optuna. None takes a journal in `run_dir`.
        sampler: "tpe", "random", "grid", "gp", "nsga2", or a function of a seed that returns a sampler of
            Optuna. If you give a sampler object instead, its random state is not stored.
        pruner: "median", "halving", "hyperband", or a pruner of Optuna; None prunes nothing. It judges each
            value of the objective that a fit logs.
        parallel: The number of trials that run at a time, in processes of this machine.

    Returns:
        The trials, and the best one with its task, its weights and its Trainer.

    Raises:
        ConfigError: An argument that no trial can work with.
        MissingDependencyError: Optuna is not installed.
        DrivetrainError: No trial is complete.
    """
    if not is_installed("optuna"):
        raise MissingDependencyError("optuna", "search", "drivetrain.search")
    import optuna

    from drivetrain.integrations.optuna.sampling import (
        EXHAUSTED,
        SeededSampler,
        check_grid,
        make_pruner,
        make_sampler,
    )
    from drivetrain.integrations.optuna.space import Space
    from drivetrain.integrations.optuna.study import identify, is_shared, open_storage, record
    from drivetrain.integrations.optuna.trials import SearchSettings, run_trial

    if not callable(make_task):
        raise ConfigError(
            f"make_task must be a function of the parameters that returns a task, not {make_task!r}"
        )
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"trainer must be a Trainer, not {trainer!r}")
    _check_trainer(trainer)
    count("search(trials=)", trials, at_least=1)
    count("search(parallel=)", parallel, at_least=1)
    objectives = _objectives(objective)
    directions = _directions(direction, objectives)
    if pruner is not None and len(objectives) > 1:
        raise ConfigError(
            f"pruner={pruner!r} with {len(objectives)} objectives: Optuna prunes by one. Leave it out"
        )
    chosen_pruner, chosen_sampler = make_pruner(pruner), make_sampler(sampler, trainer.seed)
    made_space = Space(space)
    for each in made_space.distributions.items():
        check_grid(chosen_sampler, *each)
    spread = _is_spread(trainer, parallel)
    if spread and not is_shared(storage):
        raise ConfigError(
            "trials in processes of their own need a storage that each of them can open: give its address or"
            f" its path, or None for a journal in run_dir, not {storage!r}"
        )
    ranks = _ranks(trainer)
    directory = ranks.first(lambda: _directory(trainer))
    name = trainer.run_name or "search"
    identity = {"objective": objectives, "direction": directions, "seed": trainer.seed}
    identity["space"] = made_space.to_json()

    def open_study() -> tuple[optuna.Study, Any]:
        opened = open_storage(storage, directory)
        study = optuna.load_study(
            study_name=name, storage=opened, sampler=chosen_sampler, pruner=chosen_pruner
        )
        return study, opened

    def begin() -> tuple[bool, frozenset[int]]:
        with one_at_a_time(directory / "search"):  # two that make one database's tables get an error
            opened = open_storage(storage, directory)
            study = optuna.create_study(
                storage=opened, study_name=name, directions=directions, load_if_exists=True
            )
            identify(study, identity, directory)
            if is_shared(storage):
                record(directory, None if storage is None else _absolute(storage), name)
            earlier = study.get_trials(deepcopy=False)
        return not earlier, frozenset(each.number for each in earlier if each.state.is_finished())

    is_new, finished = ranks.first(begin)
    if not is_new and not isinstance(chosen_sampler, SeededSampler):
        _LOG.warning(
            "the random state of a sampler object is not stored, so the trials from here on are not those of"
            " an uninterrupted search. Give a function: sampler=lambda seed: TPESampler(seed=seed)"
        )

    settings = SearchSettings(
        make_task, data, made_space, trainer, objectives, trials, directory, pruner is not None, finished
    )

    def one_trial() -> bool:
        study, opened = open_study()
        return run_trial(settings, study, opened, ranks, _on_forks(trainer))

    with _interruptible(directory):
        if spread:
            _Spread(settings, open_study, one_trial, parallel).run()
        else:
            study, opened = open_study() if ranks.is_first else (None, None)
            while run_trial(settings, study, opened, ranks):
                pass

    def collect() -> tuple[Any, list[int], bool]:
        study, _ = open_study()
        found = trials_of(study, objectives, directory, settings.space)
        return found, best_numbers(study), bool(study.user_attrs.get(EXHAUSTED))

    found, best, exhausted = ranks.first(collect)
    check_complete(found, best, finished, exhausted)
    pareto = tuple(found[each] for each in best)
    restore = restorer(settings.task_and_trainer)
    return SearchResult(found, objectives, tuple(directions), directory, pareto, restore)


def _how_it_goes_on(directory: Path) -> str:
    return f"start the same search again, which goes on in {directory}"


@contextmanager
def _interruptible(directory: Path) -> Iterator[None]:
    """Have the last words of an interrupted search say how it goes on."""
    again = _how_it_goes_on(directory)
    try:
        with part_of(again):
            yield
    except KeyboardInterrupt as error:
        if not any(again in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"drivetrain: {again}")
        raise


def _check_trainer(trainer: Trainer) -> None:
    if trainer.dry_run is not None:
        raise ConfigError("the Trainer of a search has dry_run, which writes nothing. Leave it out")
    shared = next((each.directory for each in chosen_policies(trainer.checkpoint) if each.directory), None)
    if shared is not None:
        raise ConfigError(
            f"CheckpointConfig(directory={str(shared)!r}) would hold the checkpoints of all trials. Leave it"
            " out: each trial has a directory in run_dir"
        )


def _objectives(given: str | Sequence[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if not found or not all(isinstance(each, str) and each for each in found) or len({*found}) < len(found):
        raise ConfigError(
            f"objective must be a logged name such as 'validation/loss', or a list of several, not {given!r}"
        )
    return found


def _directions(given: str | Sequence[str] | None, objectives: tuple[str, ...]) -> list[str]:
    if given is None:
        known = {each: direction_of(each) for each in objectives}
        for name, each in known.items():
            if each is None:
                raise ConfigError(
                    f"it is unknown whether more or less of {name!r} is better: give direction='maximize' or"
                    " 'minimize', or a list with one for each objective"
                )
        return [_DIRECTIONS[str(each)] for each in known.values()]
    named = [given] if isinstance(given, str) else [*given] if isinstance(given, (list, tuple)) else [None]
    if not all(each in _DIRECTIONS for each in named):
        raise ConfigError(f"direction must be 'minimize', 'maximize', or a list of them, not {given!r}")
    if len(named) != len(objectives):
        raise ConfigError(f"{len(objectives)} objectives have {len(named)} directions: give one for each")
    return [_DIRECTIONS[str(each)] for each in named]


def _is_spread(trainer: Trainer, parallel: int) -> bool:
    """Return whether trials run in processes of their own: several at a time, or on several devices."""
    if detect(os.environ) is None and not torch.distributed.is_initialized():
        return parallel > 1 or (trainer.num_nodes == 1 and trainer.select_strategy().world_size > 1)
    if parallel > 1:
        raise ConfigError(
            f"parallel={parallel} in a program that a launcher has started: start the same search several"
            " times with one run_dir instead. They share its trials"
        )
    return False


def _ranks(trainer: Trainer) -> Ranks:
    """Return the ranks that a launcher has started, or this process alone."""
    if detect(os.environ) is None and not torch.distributed.is_initialized():
        return ALONE
    if trainer.select_strategy().world_size == 1:
        return ALONE
    return Engine(trainer.strategy, devices=trainer.devices, num_nodes=trainer.num_nodes).ranks


def _directory(trainer: Trainer) -> Path:
    """Return the directory of the search; a new one if the Trainer has none."""
    if trainer.run_dir is not None:
        directory = Path(trainer.run_dir).absolute()
    else:
        stem = Path("runs").absolute() / f"{trainer.run_name or 'search'}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = stem
        while directory.exists():
            directory = directory.with_name(f"{stem.name}-{os.urandom(2).hex()}")
        _LOG.info(f"the search is in {directory}; Trainer(run_dir={str(directory)!r}) goes on there")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _absolute(storage: str | os.PathLike[str]) -> str:
    given = os.fspath(storage)
    if "://" not in given:
        return os.path.abspath(given)
    kind, _, path = given.partition(":///")
    is_relative = kind == "sqlite" and path and not os.path.isabs(path)
    return f"{kind}:///{os.path.abspath(path)}" if is_relative else given


def _on_forks(trainer: Trainer) -> Callable[[Callable[[], FitResult]], FitResult]:
    """Return the function that makes a fit on all ranks: this process and forks of it."""
    world_size = trainer.select_strategy().world_size

    if world_size > 1 and detect(os.environ) is None:
        return partial(fork_ranks, world_size=world_size)
    return lambda act: act()


class _Spread:
    """Trials in forks of this process, one trial a fork.

    A fork begins without a trace of earlier trials, so it may use CUDA and have ranks of its own. If one
    dies, its trial has failed.

    Args:
        settings: The search.
        open_study: Returns the study and its storage, opened anew.
        one_trial: Runs one trial, and returns whether there was one.
        parallel: The number of forks at a time.
    """

    def __init__(
        self,
        settings: SearchSettings,
        open_study: Callable[[], tuple[optuna.Study, Any]],
        one_trial: Callable[[], bool],
        parallel: int,
    ) -> None:
        self._settings = settings
        self._open_study = open_study
        self._one_trial = one_trial
        self._parallel = parallel
        self._running: dict[int, tuple[Call, int]] = {}
        """By slot, the call of a trial, and the number of trials that were finished when it began."""
        self._nothing_left = False

    def run(self) -> None:
        """Run all trials.

        Raises:
            ConfigError: CUDA is in use here, which a fork could not use.
            SearchMistake: No trial can work.
            Preempted: A signal has ended a trial; the search goes on when it is started again.
        """
        if not hasattr(os, "fork") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError(
                "trials in processes of their own are forks of this process, and it cannot be forked: CUDA is"
                " in use here, or the system has no fork. Use parallel=1 and devices=1, or search before that"
            )
        config = as_preemption(self._settings.trainer.preemption)
        asked: list[signal.Signals] = []
        requeues = [each for each in signal.Signals if config is not None and each.name in config.requeues]
        signals = Signals(requeues, (), lambda number: None, lambda text: write_now(f"drivetrain: {text}\n"))
        signals.open()
        signals.attach(asked.append, lambda: "the trials are ended")
        try:
            self._fill()
            while self._running:
                time.sleep(_LOOKING)
                if asked:
                    raise Preempted(f"ended by {asked[0].name}")
                if self._take_ended():
                    self._fill()
        except BaseException:
            end_all([call.child for call, _ in self._running.values()], grace=_SAVING)
            if asked:
                again = _how_it_goes_on(self._settings.directory)
                write_now(f"drivetrain: ended by {asked[0].name}: {again}; exit code {EXIT_REQUEUE}\n")
            raise
        finally:
            signals.close()
            for call, _ in self._running.values():
                call.close()
            self._running.clear()

    def _fill(self) -> None:
        """Begin as many trials as may run."""
        finished = self._finished()
        for slot in range(self._parallel):
            enough = finished + len(self._running) >= self._settings.trials
            if slot not in self._running and not enough and not self._nothing_left:
                call = Call(partial(self._in_fork, self._gpus(slot)), slot, method="fork")
                self._running[slot] = call, finished

    def _in_fork(self, gpus: Mapping[str, str]) -> None:
        os.setpgid(0, 0)  # Ctrl-C reaches the search alone, which asks the trials to save and end
        os.environ.update(gpus)
        torch.set_num_threads(1)
        self._one_trial()

    def _finished(self) -> int:
        study, _ = self._open_study()
        return sum(each.state.is_finished() for each in study.get_trials(deepcopy=False))

    def _gpus(self, slot: int) -> dict[str, str]:
        """Return the variable by which the trials of a slot see GPUs of their own."""
        there = torch.cuda.device_count()
        if self._parallel == 1 or not there:
            return {}
        given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(there)))
        names, each = given.split(","), self._settings.trainer.select_strategy().world_size
        chosen = [names[(slot * each + index) % len(names)] for index in range(min(each, len(names)))]
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}

    def _take_ended(self) -> bool:
        """Take the forks that have ended from those that run; return whether there were any."""
        ended = {slot: each for slot, each in self._running.items() if each[0].has_ended()}
        for slot, (call, finished) in ended.items():
            del self._running[slot]
            call.close()
            if call.cause is None:
                # The other trials may run elsewhere.
                self._nothing_left = self._nothing_left or self._finished() == finished
                continue
            kind, text = call.error
            known = {each.__name__: each for each in (Preempted, KeyboardInterrupt, SearchMistake)}
            if kind in known:
                raise known[kind](text)
            if call.cause.kind == "error":
                raise call.cause.failure()
            self._fail_trial_of(call.child.pid, f"its process {call.cause.what.removeprefix('it ')}")
        return bool(ended)

    def _fail_trial_of(self, pid: int, reason: str) -> None:
        """Record that the trial of a killed process has failed: another start might end the same way."""
        from drivetrain.integrations.optuna.study import fail, running_trials_of

        study, storage = self._open_study()
        for number in running_trials_of(study, self._settings.directory, pid):
            fail(study, storage, number, reason)
