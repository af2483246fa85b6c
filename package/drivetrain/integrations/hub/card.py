"""The model card, `README.md` of a repository on the Hub, made from a checkpoint and the run's record."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint.inspection.description import Description
from drivetrain.core.errors import ConfigError

CARD = "README.md"

MARK = "<!-- drivetrain writes this card at each upload. Delete this line to keep your own text. -->"
"""A card on the Hub without this line is never replaced."""

_FENCE = "`" * 3

_ADAPTER = "adapter_config.json"

_LONGEST = 300
"""Characters of a hyper-parameter; a model's whole configuration is in its own file."""

_SETTINGS = (
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "max_epochs",
    "max_steps",
    "max_time",
    "seed",
)
"""The Trainer's arguments that a card lists, unless they are None."""


@dataclass(frozen=True, kw_only=True)
class CardData:
    """The parts of a model card that no run knows.

    Attributes:
        license: The licence's name on the Hub, such as "apache-2.0".
        tags: Tags, besides "drivetrain".
        base_model: The repository or repositories of the weights that training started from. None takes the
            name that the checkpoint or an adapter's `adapter_config.json` records, if the Hub has that name.
        datasets: The names of the data sets on the Hub. If there are none, `Publish` takes the name of the
            training set, provided that the library `datasets` has loaded it from the Hub.
        language: The language or languages, such as "en".
        pipeline_tag: The task's name on the Hub, such as "text-classification". If a data set is given too,
            the Hub shows the values of validation as results.
        model_name: The title of the card; None takes the repository's name.
        dataset_names: Names of the data sets for readers, in the order of `datasets`. A missing name is taken
            from there.
        dataset_args: The configurations of the data sets, such as "mrpc" of "glue", in the same order.
    """

    license: str | None = None
    tags: Sequence[str] = ()
    base_model: str | Sequence[str] | None = None
    datasets: Sequence[str] = ()
    language: str | Sequence[str] | None = None
    pipeline_tag: str | None = None
    model_name: str | None = None
    dataset_names: Sequence[str] = ()
    dataset_args: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("tags", "datasets", "dataset_names", "dataset_args"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(each, str) for each in given):
                raise ConfigError(f"{name} takes a list of names, such as ['a'], not {given!r}")
            object.__setattr__(self, name, tuple(given))


def model_card(
    repository: str,
    found: Description,
    settings: Mapping[str, Any],
    files: Collection[str],
    data: CardData,
    kind: str = "",
) -> str:
    """Return the text of a card.

    Args:
        repository: The repository's name.
        found: The checkpoint that the weights are from.
        settings: The Trainer's arguments, or an empty mapping.
        files: The names of the files beside the card.
        data: The parts that the user gives.
        kind: The class of transformers that loads the files; "" if none does.
    """
    parts = [
        f"---\n{_front_matter(repository, found, data, files)}---\n",
        MARK,
        f"# {_title(repository, data)}",
        _summary(found, data),
    ]
    results = [(_code(name), f"{value:.6g}") for name, value in sorted(found.metrics.items())]
    parts += _table("Results", ("metric", "value"), results)
    parts += _table("Training", ("", ""), _progress(found))
    parts += _table("Hyper-parameters", ("name", "value"), _hyper_parameters(found, settings))
    versions = [(name, _code(each)) for name, each in found.saved_by.items() if name != "task"]
    parts += _table("Versions", ("package", "version"), versions)
    return "\n".join([*parts, _usage(repository, found, data, files, kind)])


def _front_matter(repository: str, found: Description, data: CardData, files: Collection[str]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    library = "peft" if _ADAPTER in files else "transformers" if "config.json" in files else "drivetrain"
    metrics = sorted({name.rpartition("/")[2] for name in found.metrics if name.startswith("validation/")})
    args: Any = next(iter(data.dataset_args), None)  # a text, as transformers writes it
    results = [
        EvalResult(
            task_type=data.pipeline_tag,
            dataset_type=data.datasets[0],
            dataset_name=(*data.dataset_names, data.datasets[0])[0],
            dataset_args=args,
            dataset_split="validation",
            metric_type=name.rpartition("/")[2],
            metric_value=value,
        )
        for name, value in sorted(found.metrics.items())
        if data.pipeline_tag and data.datasets and name.startswith("validation/")
    ]
    card = ModelCardData(
        model_name=_title(repository, data) if results else None,
        eval_results=results or None,
        license=data.license,
        language=_listed(data.language),
        library_name=library,
        pipeline_tag=data.pipeline_tag,
        tags=list(dict.fromkeys(["drivetrain", *data.tags])),
        base_model=_listed(data.base_model),
        datasets=list(data.datasets) or None,
        metrics=metrics or None,
        ignore_metadata_errors=False,
    )
    return f"{card.to_yaml().strip()}\n"


def _title(repository: str, data: CardData) -> str:
    return data.model_name or repository.rpartition("/")[2]


def _listed(value: str | Sequence[str] | None) -> str | list[str] | None:
    return value if value is None or isinstance(value, str) else list(value)


def _summary(found: Description, data: CardData) -> str:
    weights = found.groups.get("model")
    size = "" if weights is None else f" It has {weights.elements:,} parameters and buffers."
    base = data.base_model
    names = [base] if isinstance(base, str) else list(base or ())
    started = f" It started from {', '.join(map(_code, names))}." if names else ""
    sets = (*data.dataset_names, *data.datasets[len(data.dataset_names) :])
    trained = f" It was trained on {', '.join(map(_code, sets))}." if sets else ""
    task = found.saved_by.get("task", "")
    what = f"A model of the task {_code(task)}" if task else "A model"
    return f"\n{what}, trained with drivetrain.{started}{trained}{size}\n"


def _progress(found: Description) -> list[tuple[str, str]]:
    rows = []
    for name in ("steps", "epoch", "samples", "tokens"):
        value = found.progress.get(name)
        if isinstance(value, int) and value:
            rows.append(("epochs" if name == "epoch" else name, f"{value:,}"))
    seconds = found.progress.get("seconds")
    if isinstance(seconds, (int, float)):
        rows.append(("wall time", f"{seconds:,.0f} seconds"))
    return rows


def _hyper_parameters(found: Description, trainer: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {f"task.{name}": value for name, value in found.hparams.items()}
    for optimizer, settings in found.optimizers.items():
        prefix = "optimizer" if len(found.optimizers) == 1 else f"optimizer.{optimizer}"
        rows[prefix] = settings.optimizer
        for number, group in enumerate(settings.groups):
            inside = prefix if len(settings.groups) == 1 else f"{prefix}.{number}"
            rows.update({f"{inside}.{name}": each for name, each in group.items() if name != "parameters"})
    rows.update({f"trainer.{name}": trainer[name] for name in _SETTINGS if trainer.get(name) is not None})
    return [
        (_code(name), _code(_shortened(value if isinstance(value, str) else json.dumps(value))))
        for name, value in rows.items()
    ]


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _usage(repository: str, found: Description, data: CardData, files: Collection[str], kind: str) -> str:
    code = []
    if _ADAPTER in files and isinstance(data.base_model, str):
        code = [
            "from peft import PeftModel",
            "from transformers import AutoModel\n",
            f'base = AutoModel.from_pretrained("{data.base_model}")  # or the class for the task',
            f'model = PeftModel.from_pretrained(base, "{repository}")',
        ]
    elif kind and _ADAPTER not in files:
        code = [f"from transformers import {kind}\n", f'model = {kind}.from_pretrained("{repository}")']
    if code:
        return "\n".join(["\n## Use\n", f"{_FENCE}python", *code, f"{_FENCE}\n"])
    task = found.saved_by.get("task") or "Task"
    lines = [
        "\n## Use\n",
        f"{_FENCE}python",
        "from huggingface_hub import snapshot_download\n",
        f"task = {task}(...)  # with the arguments above",
        f'task.load_weights(snapshot_download("{repository}"))',
        f"{_FENCE}\n",
    ]
    return "\n".join(lines)


def _table(title: str, head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = [f"| {name} | {value} |" for name, value in rows]
    return ["\n".join([f"\n## {title}\n", f"| {head[0]} | {head[1]} |", "| --- | --- |", *listed])] * bool(
        listed
    )


def _code(value: object) -> str:
    """Return a value as code in a table: on one line, without the characters that would end it."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "``"
