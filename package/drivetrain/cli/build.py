"""From settings to a trainer, a task and data."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.cli.config import Settings
from drivetrain.cli.references import load
from drivetrain.cli.values import arguments
from drivetrain.errors import ConfigError
from drivetrain.precision import as_precision
from drivetrain.strategies.table import config_type
from drivetrain.trainer import Trainer


def build_trainer(settings: Settings) -> Trainer:
    """The trainer.

    Raises:
        ConfigError: An unknown name or a value that is not allowed; says which are.
        StrategyError: A strategy that cannot run here.
    """
    given = dict(settings.arguments["trainer"])
    callbacks = given.pop("callbacks", ())
    for key, make in _NAMED.items():
        if isinstance(given.get(key), Mapping):
            given[key] = make(given[key])
    return Trainer(**arguments("trainer", Trainer, given), callbacks=_callbacks(callbacks))


def build_task(settings: Settings) -> Any:
    """The task: an instance of the class, or what the function returns; or the object itself.

    Raises:
        ConfigError: None was named, it cannot be found, or its arguments do not fit.
    """
    if "task" not in settings.objects:
        raise ConfigError("which task? Give --task module.Class or --task path/to/file.py:Class")
    return _made("task", settings.objects["task"], settings.arguments["task"])


def build_data(settings: Settings, option: str) -> Any:
    """The data of one option, or None when it was not given.

    Args:
        settings: What was asked for.
        option: "data", "train_data" or "validation_data".

    Raises:
        ConfigError: It cannot be found, or its arguments do not fit.
    """
    given = settings.arguments["data"] if option == "data" else {}
    if option not in settings.objects:
        if given:
            raise ConfigError(f"--data.{next(iter(given))} is given without --data")
        return None
    return _made(option, settings.objects[option], given)


def fit_arguments(settings: Settings) -> tuple[Any, Any]:
    """Training and validation data for a fit.

    Raises:
        ConfigError: No training data, or two.
    """
    data, train = build_data(settings, "data"), build_data(settings, "train_data")
    if data is not None and train is not None:
        raise ConfigError("--data and --train-data both give training data; give one of them")
    if data is None and train is None:
        raise ConfigError(
            "no data to train on: give --data module.object (with train_data() and so on) or --train-data"
        )
    return (data if train is None else train), build_data(settings, "validation_data")


def evaluation_data(settings: Settings, stage: str) -> Any:
    """Data to validate, test or predict with.

    Raises:
        ConfigError: None, or two.
    """
    data = build_data(settings, "data")
    other = build_data(settings, "validation_data") if stage == "validation" else None
    if data is not None and other is not None:
        raise ConfigError("--data and --validation-data both give validation data; give one of them")
    if data is None and other is None:
        raise ConfigError(
            f"no {stage} data: give --data module.object, with {stage}_data() or batches of its own"
        )
    return data if other is None else other


def plain_config(settings: Settings) -> dict[str, Any]:
    """The settings as a configuration file has them: every text converted by its parameter's annotation.

    Raises:
        ConfigError: As in `build_trainer` and `build_task`, but for values that only the trainer can judge.
    """
    config: dict[str, Any] = {}
    for section in ("task", "data"):
        if section in settings.objects:
            reference, given = settings.objects[section], settings.arguments[section]
            config[section] = {"object": reference}
            if given:
                target = _callable(load(reference, f"--{section}"))
                config[section]["arguments"] = (
                    arguments(section, target, given, build=False) if target is not None else given
                )
    config.update({name: each for name, each in settings.objects.items() if name not in config})
    trainer = dict(settings.arguments["trainer"])
    listed: dict[str, Any] = {}
    if "callbacks" in trainer:
        listed["callbacks"] = _listed(trainer.pop("callbacks"))
    for key, make in _NAMED.items():
        if isinstance(trainer.get(key), Mapping):
            listed[key] = make(trainer.pop(key), build=False)
    config["trainer"] = {**arguments("trainer", Trainer, trainer, build=False), **listed}
    return {**config, **settings.texts}


def _callable(found: Any) -> Any:
    """What is to be called to get the object: a class or a function, or None for a finished object."""
    return found if isinstance(found, type) or inspect.isroutine(found) else None


def _made(option: str, reference: str, given: Mapping[str, Any]) -> Any:
    flag = f"--{option.replace('_', '-')}"
    found = load(reference, flag)
    target = _callable(found)
    if target is not None:
        return target(**arguments(option, target, given))
    if given:
        raise ConfigError(
            f"{flag} {reference} is a finished {type(found).__name__}, which takes no "
            f"--{option}.{next(iter(given))}; name its class"
        )
    return found


def _strategy(parts: Mapping[str, Any], *, build: bool = True) -> Any:
    """The name alone, or, with options beside it, the strategy's configuration.

    Args:
        parts: The "name", and options as texts or as values of a JSON file.
        build: Make the configuration; False gives the converted parts, as a file would have them.
    """
    name, given = _name_and_options("strategy", parts)
    if not given:
        return name
    config = config_type(name)
    options = arguments("trainer.strategy", config, given, build=build)
    return config(**options) if build else {"name": name, **options}


def _precision(parts: Mapping[str, Any], *, build: bool = True) -> Any:
    """As `_strategy`: the name alone, or the precision of that name with other options."""
    name, given = _name_and_options("precision", parts)
    if not given:
        return name
    named = as_precision(name)
    options = arguments("trainer.precision", type(named), {"name": name, **given}, build=build)
    return dataclasses.replace(named, **options) if build else options


_NAMED: dict[str, Callable[..., Any]] = {"strategy": _strategy, "precision": _precision}


def _name_and_options(what: str, parts: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    # Configurations are never changed, so that their sequences are tuples, which JSON has not.
    given = {key: tuple(each) if isinstance(each, list) else each for key, each in parts.items()}
    name: Any = given.pop("name", None)
    if name is None:
        raise ConfigError(
            f"which {what}? trainer.{what}.{next(iter(given), 'name')} is an option of one: give"
            f" --trainer.{what} NAME too"
        )
    return name, given


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, str):
        return [each.strip() for each in callbacks.split(",") if each.strip()]
    if isinstance(callbacks, Mapping):
        return [callbacks]
    return list(callbacks)


def _callbacks(given: Any) -> list[Any]:
    """Callbacks from references ("drivetrain.EarlyStopping"), or objects with "object" and "arguments"."""
    made = []
    for each in _listed(given):
        entry: Any = {"object": each} if isinstance(each, str) else each
        if not isinstance(entry, Mapping) or not isinstance(entry.get("object"), str):
            raise ConfigError(
                f"trainer.callbacks has {each!r}; write module.Class, or in a file "
                '{"object": "module.Class", "arguments": {...}}'
            )
        made.append(_made("trainer.callbacks", entry["object"], entry.get("arguments", {})))
    return made
