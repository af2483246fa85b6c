"""The names of logged values: transformers' for ours, and ours for transformers'. No other file maps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

EVALUATION = "eval"
TEST = "test"

_STAGES = {"validation": EVALUATION, "test": TEST, "predict": TEST}
_LR = "lr"
_LEARNING_RATE = "learning_rate"


def metric_name(stage: str, loader: str | None, name: str) -> str:
    """Return the name under which transformers logs a value; it can replace `TaskModule.metric_name`.

    Args:
        stage: "train", "validation", "test" or "predict".
        loader: The name of the evaluation set; None for an only one.
        name: The name that the step or a metric gives the value, such as "loss".

    Returns:
        "loss" in training, "eval_loss" in validation, "eval_news_loss" on the set "news", "test_loss" in a
        test.
    """
    prefix = _STAGES.get(stage)
    if prefix is None:
        return name
    return f"{prefix}_{name}" if loader is None else f"{prefix}_{loader}_{name}"


def to_transformers(name: str, loaders: Iterable[str | None] = ()) -> str:
    """Return transformers' name for one of a run's: "eval_loss" for "validation/loss".

    Args:
        name: The full name. It stays unless it begins with a stage or is a learning rate.
        loaders: The names of the evaluation sets.
    """
    stage, slash, rest = name.partition("/")
    if stage == _LR:
        return _LEARNING_RATE + slash + rest
    if not slash or (stage != "train" and stage not in _STAGES):
        return name
    for loader in loaders:
        if loader is not None and rest.startswith(f"{loader}/"):
            return metric_name(stage, loader, rest[len(loader) + 1 :])
    return metric_name(stage, None, rest)


def all_to_transformers(values: Mapping[str, float], loaders: Iterable[str | None] = ()) -> dict[str, float]:
    """Return values under transformers' names; see `to_transformers`."""
    names = tuple(loaders)
    return {to_transformers(name, names): value for name, value in values.items()}


def with_prefix(name: str) -> str:
    """Return the name that `metric_for_best_model` means: "eval_loss" for "loss"."""
    return name if name.startswith(f"{EVALUATION}_") else f"{EVALUATION}_{name}"


def from_metric_for_best_model(name: str, loaders: Iterable[str | None] = ()) -> str:
    """Return our name for `metric_for_best_model`: "validation/loss" for "loss" and "eval_loss".

    Args:
        name: As given to transformers.
        loaders: The names of the evaluation sets.
    """
    rest = with_prefix(name).removeprefix(f"{EVALUATION}_")
    for loader in loaders:
        if loader is not None and rest.startswith(f"{loader}_"):
            return f"validation/{loader}/{rest[len(loader) + 1 :]}"
    return f"validation/{rest}"
