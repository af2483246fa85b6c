"""Other libraries' names answered with ours, in error messages. No foreign name is ever accepted.

The names are in `other_names.toml` beside this file, which says what a row means. It is read once: for an
error, or for the check of the first task.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import resources
from typing import Any, NoReturn

from drivetrain.core.errors import ConfigError, nearest

OWNERS = {
    "Trainer": "Trainer({})",
    "fit": "trainer.fit({})",
    "test": "trainer.test({})",
    "predict": "trainer.predict({})",
    "CheckpointConfig": "Trainer(checkpoint=CheckpointConfig({}))",
    "CompileConfig": "Trainer(compile=CompileConfig({}))",
    "MemoryConfig": "Trainer(memory=MemoryConfig({}))",
    "PreemptionConfig": "Trainer(preemption=PreemptionConfig({}))",
    "DDPConfig": "Trainer(strategy=DDPConfig({}))",
    "FSDPConfig": "Trainer(strategy=FSDPConfig({}))",
    "DeepSpeedConfig": "Trainer(strategy=DeepSpeedConfig({}))",
    "Float8": "Trainer(precision=Float8({}))",
    "EarlyStopping": "Trainer(callbacks=[EarlyStopping({})])",
    "OptimizerConfig": "OptimizerConfig({}), returned by the task's configure_optimizers",
    "DataLoader": "DataLoader({}), the loader that you give to fit",
}
"""How to write an argument of each owner, seen from another owner."""

_CLASS_OF_OURS = "drivetrain's class of that name, whose arguments differ"
_PAGE = "docs/how-to/from-other-libraries.md"

STEPS = {"training_step", "validation_step", "test_step", "predict_step"}

_OF_TASKS = ("attribute", "hook")


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the rows of `other_names.toml`: the answers by name, for each kind of name."""
    import tomllib

    text = resources.files(__package__).joinpath("other_names.toml").read_text(encoding="utf-8")
    return {
        kind: {name: ours for names, ours in section.items() for name in names.split()}
        for kind, section in tomllib.loads(text).items()
    }


def row(name: str, kind: str, owner: str = "") -> str | None:
    """Return the table's answer to a name.

    Args:
        name: The name that the user wrote; lower case is tried too.
        owner: The call that it was given to: "Trainer", "Trainer.fit". A row for the owner comes first.
    """
    rows: Mapping[str, str] = table().get(kind, {})
    return rows.get(f"{owner}.{name}") or rows.get(name) or rows.get(name.lower())


def help_with(name: str, allowed: Iterable[str], kind: str = "argument", owner: str = "") -> str:
    """Return a hint for a wrong name: our counterpart if the table has one, else the nearest name."""
    names = sorted(allowed)
    ours = None if name.lower() in names else row(name, kind, owner)
    if ours is None or ours.startswith("same"):
        return nearest(name, names)
    return f"{_sentence(ours, names, owner)} Allowed: {', '.join(map(repr, names)) or 'none'}."


def _sentence(ours: str, allowed: Iterable[str] = (), owner: str = "") -> str:
    """Put an answer of the table into words; `owner` is the call that takes the allowed names."""
    if ours.startswith("none: "):
        return f"It has no counterpart here: {ours.removeprefix('none: ')}."
    shown: list[str] = []
    for part in ours.split(" | "):
        theirs, _, rest = part.partition(".")
        if theirs not in OWNERS:
            shown.append(f"called {part!r}" if part in allowed else part)
            continue
        argument, _, note = rest.partition("; ")
        name, _, value = argument.partition("=")
        note = f", {note}" if note else ""
        is_verb = theirs in ("fit", "test", "predict")
        if name in allowed and (is_verb == ("." in owner) or not owner.startswith("Trainer")):
            called = argument if value not in ("", "True") else f"called {name!r}"
            return f"Here it is {called}{note}."
        shown.append(OWNERS[theirs].format(argument if value else f"{name}=...") + note)
    return f"Here it is {' or '.join(shown)}."


def missing(owner: type, name: str) -> str:
    """Return the message for a missing attribute: Python's, and a hint if the table has a row.

    Args:
        owner: The class. "Trainer" and "Run" have rows of their own; all other rows are a task's.
    """
    told = f"'{owner.__name__}' object has no attribute '{name}'"
    ours = table()["attribute"].get(f"{owner.__name__}.{name}")
    of_task = () if owner.__name__ in ("Run", "Trainer") else _OF_TASKS
    rows = [table()[kind].get(name) for kind in of_task] if of_task else [ours]
    for ours in rows:
        if ours is not None:
            return f"{told}. {_sentence(ours).removesuffix('.')}"  # Python may add a sentence
    return told


class Elsewhere:
    """An attribute of other libraries' classes. Reading or setting it raises an error that names ours."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(missing(owner, self._name))

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(missing(type(instance), self._name))


def foreign(thing: object) -> str | None:
    """Return our counterpart of another library's object, in words; None for any other object.

    The object's base classes are recognised by name, so no other library is imported.
    """
    for kind in type(thing).__mro__:
        library = table()["library"].get(kind.__module__.partition(".")[0])
        ours = row(kind.__name__, "name") if library else None
        if ours is not None:
            given = type(thing).__name__
            known = (
                f"{given} of {library}"
                if given == kind.__name__
                else f"{given} ({kind.__name__} of {library})"
            )
            return f"{known}. {_sentence(_CLASS_OF_OURS if ours.startswith('same') else ours)}"
    return None


def defined_by_user(thing: object) -> dict[str, Any]:
    """Return the attributes that an object has itself, and those that its user-written classes define."""
    found: dict[str, Any] = {}
    for kind in reversed(type(thing).__mro__):
        if kind.__module__.partition(".")[0] not in ("builtins", "drivetrain", "torch", *table()["library"]):
            found.update(vars(kind))
    return {**found, **vars(thing)}


def check_task_names(task: object, hooks: Collection[str]) -> None:
    """Raise if a task defines methods of another library that we never call; all in one error."""
    owner = type(task).__name__
    defined = defined_by_user(task)
    lines: list[str] = []
    for name in defined:
        ours = name if name in hooks else row(name, "hook", _first_parameter(defined[name]))
        if ours is None or (name in table()["only false"] and getattr(task, name) is not False):
            continue
        ours = f"a callback's {ours}" if ours.startswith("on_") else ours
        lines.append(f"\n- {owner}.{name} is never called. {_sentence(ours)}")
    for name in STEPS & defined.keys():
        given = _more_than_the_batch(getattr(task, name))
        if given:
            lines.append(
                f"\n- {owner}.{name} takes {', '.join(map(repr, given))}, but is given the batch alone. Write"
                f" it as `def {name}(self, batch)`. Where a run is, callbacks see:"
                " run.progress.epoch_batches, run.evaluation.batch and run.evaluation.loader"
            )
    if lines:
        raise ConfigError(
            f"{owner} is written for another library; change this first (see {_PAGE}):"
            + "".join(sorted(lines))
        )


def _first_parameter(method: object) -> str:
    names = [*inspect.signature(method).parameters] if inspect.isfunction(method) else []
    return names[1] if len(names) > 1 else ""


def _more_than_the_batch(step: Callable[..., Any]) -> list[str]:
    """Return a step's required parameters beyond the batch, and those that only another library passes."""
    parameters = inspect.signature(step, follow_wrapped=False).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return [each.name for each in named[1:] if each.default is each.empty or each.name in table()["step"]]
