"""The model card of a script: transformers' names of its parts, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.core.errors import ConfigError, nearest

_NAMES = {
    "language": "language",
    "license": "license",
    "tags": "tags",
    "model_name": "model_name",
    "finetuned_from": "base_model",
    "tasks": "pipeline_tag",
    "dataset_tags": "datasets",
    "dataset": "dataset_names",
    "dataset_args": "dataset_args",
}


def card_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `CardData` for those of transformers' `create_model_card`.

    The first task is the one that the Hub shows; others become tags.

    Args:
        given: Texts, lists of them, and None.

    Raises:
        ConfigError: A name is none of a card's; says which is the nearest.
    """
    unknown = sorted(given.keys() - _NAMES.keys())
    if unknown:
        raise ConfigError(
            f"push_to_hub({unknown[0]}=...): a model card has no such part. {nearest(unknown[0], _NAMES)}"
        )
    options = {_NAMES[name]: value for name, value in given.items() if value is not None}
    for name in ("tags", "datasets", "dataset_names", "dataset_args"):
        options[name] = _listed(options.get(name))
    tasks = _listed(options.pop("pipeline_tag", None))
    return {**options, "pipeline_tag": next(iter(tasks), None), "tags": [*options["tags"], *tasks[1:]]}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)
