"""`drivetrain search` and `drivetrain search show`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.cli.commands import check_task_given, fit_data
from drivetrain.cli.parser import Parser
from drivetrain.cli.printing import line, print_json, shortened, table
from drivetrain.cli.settings import Settings
from drivetrain.core.errors import ConfigError, MissingDependencyError
from drivetrain.core.registry import is_installed
from drivetrain.integrations.optuna.result import SearchResult, TrialResult
from drivetrain.integrations.optuna.searching import search

_PARTS = ("task", "trainer", "data", "train_data", "validation_data")
_LISTED = ("objective", "direction")
_FORMS = "a range LOW:HIGH, LOW:HIGH:log or LOW:HIGH:STEP, or choices A,B,C"


def search_command(settings: Settings, as_json: bool) -> None:
    """Run `drivetrain search`, and print the best trials.

    Raises:
        ConfigError: An argument is missing or wrong.
        MissingDependencyError: Optuna is not installed.
    """
    if not is_installed("optuna"):
        raise MissingDependencyError("optuna", "search", "drivetrain search")
    check_task_given(settings)
    space = _space(settings)
    trainer = settings.trainer()

    def changed(parameters: Mapping[str, Any]) -> Settings:
        return settings.changed({name: _text(each) for name, each in parameters.items()})

    def make_task(parameters: dict[str, Any]) -> Any:
        own = changed(parameters)
        names = {name.split(".")[1] for name in parameters if name.startswith("trainer.")}
        other = own.trainer() if names else trainer
        return own.make("task"), {name: getattr(other, name) for name in names}

    first = {name: each[0] for name, each in space.items()}
    changed(first)  # a wrong name, or a choice that is not possible, ends the search before it begins
    for name, each in space.items():
        for other in each[1:] if isinstance(each, list) else ():
            changed({**first, name: other})
    given = {name: found for name in _LISTED if (found := settings.option(name)) is not None}
    lists = {name: each.split(",") if isinstance(each, str) else each for name, each in given.items()}
    texts = {name: found for name in ("storage", "sampler", "pruner") if (found := settings.option(name))}
    result = search(
        make_task,
        lambda parameters: fit_data(changed(parameters)),
        space,
        trainer=trainer,
        trials=_number(settings, "trials"),
        parallel=1 if settings.option("parallel") is None else _number(settings, "parallel"),
        **lists,
        **texts,
    )
    if as_json:
        print_json(_json(result.trials, [each.number for each in result.pareto], str(result.run_dir)))
        return
    print_trials(result.pareto, result.objectives)
    line(f"run dir: {result.run_dir}")
    line(f"all trials: drivetrain search show {result.run_dir}")


def _space(settings: Settings) -> dict[str, Any]:
    from drivetrain.integrations.optuna.space import Space, read_range, read_value

    given = settings.option("space")
    if not isinstance(given, Mapping) or not given:
        raise ConfigError("which space? Give a range or choices, such as --space.task.lr 1e-5:1e-2:log")
    space: dict[str, Any] = {}
    for name, each in _flat(given).items():
        if name.split(".")[0] not in _PARTS or "." not in name:
            raise ConfigError(
                f"--space.{name} names no argument: write --space.task.NAME for one of the task, or"
                f" {', '.join(f'--space.{part}.NAME' for part in _PARTS[1:])}"
            )
        if name == "trainer.run_dir":
            raise ConfigError(
                "--space.trainer.run_dir is not possible: each trial has a directory of its own in the"
                " run_dir of the search"
            )
        found = read_range(each) if isinstance(each, str) else each
        if isinstance(found, list):  # YAML reads 1e-4 as a text
            found = [read_value(item) if isinstance(item, str) else item for item in found]
        if not isinstance(found, (list, tuple)) or not found:
            raise ConfigError(f"--space.{name} must be {_FORMS}, in quotes in YAML; not {each!r}")
        try:
            Space({name: found})
        except ConfigError as error:
            if isinstance(found, list):
                raise
            raise ConfigError(f"--space.{name} must be {_FORMS}, not {each!r}: {error.__cause__}") from None
        space[name] = found
    return space


def _flat(given: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in given.items():
        inner = _flat(each) if isinstance(each, Mapping) else {"": each}
        found |= {f"{name}.{key}".rstrip("."): value for key, value in inner.items()}
    return found


def _text(value: Any) -> str:
    """Return a value as a command line gives it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _number(settings: Settings, name: str) -> int:
    given = settings.option(name)
    if given is None:
        raise ConfigError(f"how many {name}? Give --{name} NUMBER")
    if not str(given).isdecimal():
        raise ConfigError(f"--{name} must be a whole number, not {given!r}")
    return int(given)


def show(words: Sequence[str]) -> int:
    """Run `drivetrain search show` with the words after it, and return the exit code.

    Raises:
        ConfigError: The directory is not one of a search.
        MissingDependencyError: Optuna is not installed.
    """
    parser = Parser(
        prog="drivetrain search show",
        description="Print the trials of a search and which parameters matter. With --html, write the report"
        " of its runs, as `drivetrain runs report` does.",
    )
    parser.add_argument("directory", metavar="DIR", help="the run_dir of a search")
    parser.add_argument("--html", metavar="FILE", help="the report, a page for a browser")
    parser.add_argument("--storage", help="the storage, where its address has a password")
    parser.add_common()
    parsed = parser.parse_args(words)
    if not is_installed("optuna"):
        raise MissingDependencyError("optuna", "search", "drivetrain search show")
    from drivetrain.integrations.optuna.report import importances, objectives_of
    from drivetrain.integrations.optuna.result import best_numbers, trials_of
    from drivetrain.integrations.optuna.study import recorded_study

    directory = Path(parsed.directory)
    study = recorded_study(directory, parsed.storage)
    objectives = objectives_of(study)
    trials, best = trials_of(study, objectives, directory), best_numbers(study)
    important = importances(study, objectives)
    if parsed.json:
        print_json({**_json(trials, best, str(directory)), "importances": important})
        return 0
    report = ""
    if parsed.html is not None:
        page = importlib.import_module("drivetrain.integrations.report.command").ReportPage
        report = page([parsed.directory], parsed.storage).write(Path(parsed.html))
    print_trials(trials, objectives, best)
    for name, found in important.items():
        line()
        line(f"importance for {name}")
        rows = [(each, f"{value:.1%}") for each, value in found.items()]
        table((), rows or [("unknown: too few trials are complete", "")], numbers=(1,))
    if report:
        line(report)
    return 0


def print_trials(trials: Sequence[TrialResult], objectives: Sequence[str], best: Sequence[int] = ()) -> None:
    """Print a table of trials; the best ones have a star."""
    names = list(dict.fromkeys(name for each in trials for name in each.parameters))
    rows = [
        (
            f"{'* ' if each.number in best else ''}{each.number}",
            each.state,
            *(f"{each.values[name]:.6g}" if name in each.values else "" for name in objectives),
            *(_shown(each.parameters.get(name, "")) for name in names),
            "" if each.seconds is None else f"{each.seconds:.1f}",
            shortened(each.failure or ""),
        )
        for each in trials
    ]
    head = ("trial", "state", *objectives, *names, "seconds", "failure")
    table(head, rows, numbers=(0, *range(2, 2 + len(objectives)), len(head) - 2))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _json(trials: Sequence[TrialResult], best: Sequence[int], directory: str) -> dict[str, Any]:
    rows = []
    for each in trials:
        row = {name: getattr(each, name) for name in each.__dataclass_fields__}
        rows.append({name: str(value) if isinstance(value, Path) else value for name, value in row.items()})
    return {"run_dir": directory, "best": list(best), "trials": rows}


__all__ = ["SearchResult", "print_trials", "search_command", "show"]
