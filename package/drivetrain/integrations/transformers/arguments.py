"""From transformers' `TrainingArguments` to the options of a Trainer, a task and its data."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.utils.data import DataLoader

from drivetrain.callbacks import Callback, MemoryReport, NonFiniteDetector, Throughput, XLAReport
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.core.direction import direction_of
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.intervals import Every
from drivetrain.core.messages import NAME, logger
from drivetrain.core.validation import count
from drivetrain.data.orders.length_grouped import LengthGroupedSampler, lengths_of
from drivetrain.distributed.launch.environment import detect
from drivetrain.integrations.transformers.arguments_strategy import strategy_options
from drivetrain.integrations.transformers.arguments_table import ROWS, SECRETS
from drivetrain.integrations.transformers.arguments_values import Values, accumulation, read_values
from drivetrain.integrations.transformers.last_step import LastStep
from drivetrain.integrations.transformers.optimizers import TransformersOptimizer
from drivetrain.loggers import LOGGERS, TensorBoardLogger
from drivetrain.strategies.base import refusal
from drivetrain.strategies.registry import DEVICES, STRATEGIES, named
from drivetrain.trainer.trainer import Trainer

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_INPUTS = ("input_ids", "input_values", "input_features", "pixel_values")
_PUSHES = {"end": "end", "every_save": "save", "checkpoint": "checkpoint", "all_checkpoints": "all"}


@dataclass(frozen=True)
class ReportLine:
    """The translation of one option.

    Attributes:
        name: The option's name.
        value: Its value; a token is hidden.
        status: "mapped" or "ignored".
        text: What it became, or the reason.
    """

    name: str
    value: Any
    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} ({self.status}): {self.text}"


@dataclass(frozen=True)
class ArgumentsReport:
    """A line for each option that is not at its default, and for what differs at the defaults."""

    lines: tuple[ReportLine, ...]

    def __iter__(self) -> Iterator[ReportLine]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


@dataclass(frozen=True)
class MappedArguments:
    """The result of `from_training_arguments`.

    Attributes:
        trainer_options: Arguments of `drivetrain.Trainer`.
        task_options: Arguments of `TransformersTask`, without the model and the functions.
        data_options: The options for reading the data. The Trainer takes some of them, and the DataLoader
            that `train_data` makes takes the others.
        report: What became of each option that is not at its default.
        publish: The callback that uploads to the Hub, which `trainer_options` has too; None without one.
        eval_on_start: Whether to validate before the fit.
        loss_only: Whether evaluations and predictions give the loss alone.
        resume: The checkpoint to resume from; None for a fresh start.
    """

    trainer_options: dict[str, Any]
    task_options: dict[str, Any]
    data_options: dict[str, Any]
    report: ArgumentsReport
    publish: Callback | None = None
    eval_on_start: bool = False
    loss_only: bool = False
    resume: str | None = None

    @cached_property
    def trainer(self) -> Trainer:
        """The Trainer with these options."""
        return Trainer(**self.trainer_options)

    def train_data(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """Return the training data to give to `fit`.

        It is the dataset itself if the Trainer has all of the options for reading data, else a DataLoader
        with them.

        Args:
            dataset: The dataset.
            collate: Makes a batch of samples. A dataset uses `task.collate_function()` by default; a
                DataLoader needs a function here.
        """
        if not self._needs_loader:
            return dataset
        return self._loader(dataset, collate)

    @property
    def _needs_loader(self) -> bool:
        return "group_by_length" not in self.trainer_options and needs_loader(self.data_options)

    def _loader(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> DataLoader[Any]:
        options = self.data_options
        sampler = None
        if options["group_by_length"] is not None:
            size = options["batch_size"] * self.trainer.gradient_accumulation_steps
            lengths = lengths_of(dataset, options["group_by_length"], "training")
            sampler = LengthGroupedSampler(lengths, size * self.trainer.select_strategy().data_size)
        return DataLoader(
            dataset,
            batch_size=options["batch_size"],
            shuffle=options["shuffle"] and sampler is None,
            sampler=sampler,
            num_workers=options["num_workers"],
            collate_fn=collate,
            drop_last=options["drop_last"],
            multiprocessing_context=options["multiprocessing_context"],
            prefetch_factor=options["prefetch_factor"],
            persistent_workers=options["persistent_workers"],
        )


def from_training_arguments(
    args: Any, *, total_steps: int | None = None, **trainer_options: Any
) -> MappedArguments:
    """Map transformers' arguments to the options of a Trainer, a task and its data.

    ::

        mapped = from_training_arguments(args)
        task = TransformersTask(model, processing_class=tokenizer, **mapped.task_options)
        mapped.trainer.fit(task, mapped.train_data(train), validation, resume=mapped.resume)

    The level of the logger "drivetrain" is set at once.

    Args:
        args: A `TrainingArguments` or `Seq2SeqTrainingArguments`, or a mapping of options, also of the older
            names of versions 4.2x to 4.5x.
        total_steps: The number of steps of the run, for intervals that are shares of it, such as
            `logging_steps=0.1`; needed for these if there is no `max_steps`.
        **trainer_options: Arguments of the Trainer that replace those of `args`. Callbacks are added.

    Raises:
        ConfigError: An option or a value that is refused or unknown; says what to use instead.
    """
    values = read_values(args)
    max_steps = trainer_options.get("max_steps") or values["max_steps"]
    values = replace(values, total_steps=max_steps if max_steps > 0 else total_steps)
    _set_log_level(values)
    checkpoint = _checkpoint(values)
    publish = _publish(values)
    if publish is not None and checkpoint is False:
        checkpoint = CheckpointConfig(every=None, keep_last=1, best=0, by=None)
    data = _data(values)
    resume = values["resume_from_checkpoint"]
    options = {
        **_length(values),
        **_step(values),
        **_precision(values),
        **strategy_options(values),
        **_evaluation(values),
        "sanity_validation": None,  # transformers makes no such check
        **_logs(values, loggers=trainer_options.get("loggers")),
        "checkpoint": checkpoint,
        **{name: data[name] for name in ("batch_size", "evaluation_batch_size", "num_workers")},
    }
    if data["group_by_length"] is not None and not needs_loader(data):
        options["group_by_length"] = data["group_by_length"]
    options |= trainer_options
    options["callbacks"] = [
        *_callbacks(values),
        *([] if publish is None else [publish]),
        *_last_step(values, options, trainer_options),
        *trainer_options.get("callbacks", ()),
    ]
    _settle(values, options)
    return MappedArguments(
        options,
        _task(values),
        data,
        _report(values),
        publish,
        eval_on_start=values["eval_on_start"],
        loss_only=values["prediction_loss_only"],
        resume={True: "auto", False: None}.get(resume, resume),
    )


def _length(values: Values) -> dict[str, Any]:
    if values["max_steps"] > 0:
        return {"max_steps": values["max_steps"]}
    return {"max_epochs": values["num_train_epochs"]}


def _every(values: Values, what: str) -> Every | None:
    """Return the interval of an action; None if no interval decides.

    Args:
        values: The arguments.
        what: The action: "logging", "eval" or "save".

    Raises:
        ConfigError: It is no number of steps, or a share of a run of unknown length.
    """
    strategy, name = values[f"{what}_strategy"], f"{what}_steps"
    if strategy == "epoch":
        return Every("1 epoch")
    if strategy != "steps":
        return None
    amount, total = values[name], values.total_steps
    if amount is None:
        amount = values["logging_steps"]
    if not 0 < amount < 1:
        return Every(amount, "steps")
    if total is None:
        raise ConfigError(
            f"{name}={amount} is a share of the run's steps, whose number is not known. Give max_steps, or"
            " from_training_arguments(args, total_steps=...)"
        )
    return Every(math.ceil(total * amount), "steps")


def _step(values: Values) -> dict[str, Any]:
    made: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation(values),
        "max_grad_norm": values["max_grad_norm"] or None,
        "seed": values["seed"],
        "data_seed": values["data_seed"],
        "deterministic": values["full_determinism"],
        "on_nonfinite": "skip" if values["logging_nan_inf_filter"] else "raise",
    }
    if values["auto_find_batch_size"]:
        made["micro_batch"] = "auto"
    return made


def _precision(values: Values) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if values["bf16"] or values["fp16"]:
        made["precision"] = "bf16-mixed" if values["bf16"] else "16-mixed"
    elif values["tf32"]:
        made["precision"] = "tf32"
    if values["torch_compile"] or values["torch_compile_backend"] or values["torch_compile_mode"]:
        chosen = {"backend": values["torch_compile_backend"], "mode": values["torch_compile_mode"]}
        made["compile"] = {name: each for name, each in chosen.items() if each} or True
    if values["activation_checkpointing"]:
        made["memory"] = _memory(values["activation_checkpointing_kwargs"] or {})
    return made


def _memory(options: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"activation_checkpointing": True}
    for name, value in options.items():
        if name == "offload" and value:
            raise ConfigError(
                "activation_checkpointing_kwargs={'offload': True} has no counterpart here. Run the task's"
                " training_step under torch.autograd.graph.save_on_cpu"
            )
        if name == "every_n_layers" and value != 1:
            raise ConfigError(
                f"activation_checkpointing_kwargs={{'every_n_layers': {value}}}: give the modules to"
                ' recompute, Trainer(memory={"activation_checkpointing": ("*.layer.[02468]",)})'
            )
        if name not in ("use_reentrant", "every_n_layers", "offload"):
            raise ConfigError(
                f"activation_checkpointing_kwargs has {name!r}."
                f" {nearest(name, ('use_reentrant', 'every_n_layers'))}"
            )
    return made


def _evaluation(values: Values) -> dict[str, Any]:
    every = _every(values, "eval")
    made: dict[str, Any] = {"validate_every": every}
    if every is not None and values["eval_delay"] > 0:
        unit = "steps" if values["eval_strategy"] == "steps" else "epochs"
        made["validate_from"] = Every(values["eval_delay"], unit)
    return made


def _logs(values: Values, loggers: Any) -> dict[str, Any]:
    made = {
        "log_every": _every(values, "logging"),
        "log_first_step": values["logging_first_step"],
        "progress_bar": not values["disable_tqdm"],
        "run_dir": values["output_dir"],
        "run_name": values["run_name"],
    }
    own = () if loggers is not None else _loggers(values)
    if not any(isinstance(each, TensorBoardLogger) for each in own):
        values.notes["logging_dir"] = "not used: report_to has no 'tensorboard'"
    return made if loggers is not None else {**made, "loggers": own}


_CARBON, _COUNTRY = "codecarbon", "CODECARBON_COUNTRY_ISO_CODE"
_OUR_LOGGERS = {"azure_ml": "azureml", "comet_ml": "comet", "dagshub": "mlflow"}
"""Names in `report_to` that are others here."""


def _loggers(values: Values) -> tuple[Any, ...]:
    names = [_OUR_LOGGERS.get(each, each) for each in values["report_to"]]
    if "all" in names:
        found = transformers.integrations.get_available_reporting_integrations()
        names = [name for each in found if (name := _OUR_LOGGERS.get(each, each)) in LOGGERS]
    names = [each for each in names if each != _CARBON]  # a callback
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(
                f"report_to has {name!r}, and there is no such logger here. Write one with"
                " log_metrics(metrics, step), log_config(config) and close(), and pass it:"
                " from_training_arguments(args, loggers=[...]). Or leave it out:"
                f" report_to={[each for each in names if each in LOGGERS]}"
            )
    return tuple(_logger(values, name) for name in dict.fromkeys(names))


def _logger(values: Values, name: str) -> Any:
    if name == "tensorboard" and (directory := values["logging_dir"]):
        return TensorBoardLogger(directory)
    if name == "trackio":
        made: Any = LOGGERS[name]
        options = {"bucket_id": values["trackio_bucket_id"], "private": values["hub_private_repo"]}
        return made(
            project=values["project"],
            space_id=values["trackio_space_id"],
            options={key: value for key, value in options.items() if value is not None},
        )
    return name


def _checkpoint(values: Values) -> bool | CheckpointConfig:
    strategy, limit = values["save_strategy"], values["save_total_limit"] or None
    if strategy == "no":
        if values["load_best_model_at_end"]:
            raise ConfigError(
                'load_best_model_at_end needs checkpoints: give save_strategy="best" or another'
            )
        return False
    metric, validates = values["metric_for_best_model"], values["eval_strategy"] != "no"
    if strategy == "best" and metric is None:
        raise ConfigError(
            'save_strategy="best" needs a metric: `args.metric_for_best_model` must be provided, such as'
            ' "loss"'
        )
    needed = values["load_best_model_at_end"] or strategy == "best"
    if needed and not validates:
        raise ConfigError(
            f"load_best_model_at_end={values['load_best_model_at_end']}, save_strategy={strategy!r}: the best"
            " is known by validations. Give eval_strategy='steps' or 'epoch'"
        )
    ranks = needed or (metric is not None and validates)
    if metric is not None and not ranks:
        values.notes["metric_for_best_model"] = "not used: there are no validations"
    best = limit or 1 if strategy == "best" else 1
    return CheckpointConfig(
        every=None if strategy == "best" else _every(values, "save"),
        keep_last=1 if strategy == "best" else limit,
        best=best if ranks else 0,
        by=validation_name(metric or "loss") if ranks else None,
        mode=_mode(values),
        restore_best=values["load_best_model_at_end"],
        resumable=not values["save_only_model"],
    )


def validation_name(metric: str) -> str:
    """Return our name of a metric of transformers' Trainer: "eval_f1" or "f1" is "validation/f1"."""
    return f"validation/{metric.removeprefix('eval_')}"


def _mode(values: Values) -> str:
    metric, greater = values["metric_for_best_model"] or "loss", values["greater_is_better"]
    if greater is None:  # a name that says nothing is taken as transformers does
        theirs = "min" if metric.endswith("loss") else "max"
        known = direction_of(metric) or theirs
        if known != theirs:
            values.notes["greater_is_better"] = f"not given, and less of {metric!r} is better, by its name"
        return known
    return "max" if greater else "min"


def _publish(values: Values) -> Callback | None:
    if not values["push_to_hub"]:
        return None
    hub = importlib.import_module("drivetrain.integrations.hub")  # only if it is asked for
    folder = Path(values["output_dir"] or "").absolute().name
    name = values["hub_model_id"] or folder
    owner = values["push_to_hub_organization"]
    publish: Callback = hub.Publish(
        f"{owner}/{name}" if owner and "/" not in name else name,
        _PUSHES[values["hub_strategy"]],
        private=values["hub_private_repo"],
        revision=values["hub_revision"],
        token=values["hub_token"],
    )
    return publish


def _code_carbon() -> Callback:
    """Return the callback for "codecarbon" in `report_to`, with the country of CodeCarbon's own variable."""
    country = os.environ.get(_COUNTRY)
    if not country:
        raise ConfigError(
            "report_to has 'codecarbon', which measures without a network and so must know the country: set"
            f" {_COUNTRY}=DEU in the environment, or leave it out and give callbacks=[CodeCarbon('DEU')] of"
            " drivetrain.integrations.trackers"
        )
    trackers = importlib.import_module("drivetrain.integrations.trackers")  # only if it is asked for
    made: Callback = trackers.CodeCarbon(country)
    return made


class _EmptyCache(Callback):
    """Empties the cache of the device's allocator after every n-th step."""

    def __init__(self, every: int) -> None:
        self._every = count("torch_empty_cache_steps", every, at_least=1)

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        if strategy.device.type not in ("cuda", "mps", "xpu"):
            raise ConfigError(
                f"torch_empty_cache_steps on {strategy.device.type!r}, whose allocator has no cache to empty."
                " Leave it out"
            )

    def on_step_end(self, run: Run) -> None:
        if run.progress.steps % self._every == 0:
            torch.get_device_module(run.engine.device).empty_cache()


def _callbacks(values: Values) -> list[Any]:
    made: list[Any] = [_code_carbon()] if _CARBON in values["report_to"] else []
    if values["torch_empty_cache_steps"] is not None:
        made.append(_EmptyCache(values["torch_empty_cache_steps"]))
    for name in values["debug"]:
        if name not in ("underflow_overflow", "tpu_metrics_debug"):
            raise ConfigError(f"debug={name!r}. {nearest(name, ('underflow_overflow', 'tpu_metrics_debug'))}")
        made.append(NonFiniteDetector() if name == "underflow_overflow" else XLAReport())
    if not values["skip_memory_metrics"]:
        made.append(MemoryReport())
    if values["include_tokens_per_second"]:
        made.append(Throughput(measure_flops=False))
    return made


def _last_step(values: Values, options: Mapping[str, Any], replaced: Mapping[str, Any]) -> list[LastStep]:
    """Return the callback for the last step, if one is needed.

    Args:
        values: The arguments.
        options: The Trainer's options.
        replaced: The Trainer's arguments that replace these; an interval among them is used alone.
    """
    logs = values["logging_strategy"] == "epoch" and "log_every" not in replaced
    validates = values["eval_strategy"] != "no" and "validate_every" not in replaced
    begins = options.get("validate_from")
    made = LastStep(logs, validates, None if begins is None else Every(begins))
    return [made] if logs or validates else []


def _data(values: Values) -> dict[str, Any]:
    sampling = values["train_sampling_strategy"]
    if sampling not in ("random", "sequential", "group_by_length"):
        raise ConfigError(
            f"train_sampling_strategy={sampling!r} is not allowed."
            f" {nearest(sampling, ('random', 'sequential', 'group_by_length'))}"
        )
    grouped = sampling == "group_by_length" or values["sortish_sampler"]
    parts = 1
    if values.accelerator("split_batches"):
        found = detect(os.environ)
        parts = 1 if found is None else found.world_size
    made = {
        "group_by_length": SampleLength(values["length_column_name"]) if grouped else None,
        "shuffle": sampling != "sequential",
        "drop_last": values["dataloader_drop_last"],
        "num_workers": values["dataloader_num_workers"],
        "pin_memory": values["dataloader_pin_memory"],
        "persistent_workers": values["dataloader_persistent_workers"],
        "prefetch_factor": values["dataloader_prefetch_factor"],
        "multiprocessing_context": values["dataloader_multiprocessing_context"],
    }
    for name, option in (
        ("batch_size", "per_device_train_batch_size"),
        ("evaluation_batch_size", "per_device_eval_batch_size"),
    ):
        if values[option] % parts:
            raise ConfigError(
                f"split_batches: {option}={values[option]} does not divide by {parts} processes"
            )
        made[name] = values[option] // parts
    return made


def needs_loader(options: Mapping[str, Any]) -> bool:
    """Return whether options of the data need a DataLoader."""
    return (
        options["drop_last"]
        or options["prefetch_factor"] is not None
        or options["multiprocessing_context"] is not None
        or not options["shuffle"]
    )


@dataclass(frozen=True)
class SampleLength:
    """The length of a sample: a column, or that of the model's input.

    Args:
        column: The name of a column with the length, which samples need not have.
    """

    column: str

    def __call__(self, sample: Mapping[str, Any]) -> int:
        """Return the length.

        Raises:
            ConfigError: The sample has neither.
        """
        if self.column in sample:
            value = sample[self.column]
            return int(value) if not hasattr(value, "__len__") else len(value)
        for name in _INPUTS:
            if name in sample:
                return len(sample[name])
        raise ConfigError(
            f"group_by_length needs samples with {self.column!r} or one of {', '.join(_INPUTS)}; these have"
            f" {', '.join(map(str, sample))}. Give length_column_name"
        )


def _task(values: Values) -> dict[str, Any]:
    made: dict[str, Any] = {
        "optimizer": TransformersOptimizer(
            values["optim"],
            values["learning_rate"],
            values["weight_decay"],
            values["adam_beta1"],
            values["adam_beta2"],
            values["adam_epsilon"],
            values["optim_args"],
            values["lr_scheduler_type"],
            values["lr_scheduler_kwargs"] or {},
            values["warmup_steps"],
            validation_name(values["metric_for_best_model"] or "loss"),
            _mode(values),
        ),
        "label_smoothing": values["label_smoothing_factor"],
        "neftune_alpha": values["neftune_noise_alpha"],
        "include_for_metrics": tuple(values["include_for_metrics"]),
        "batch_eval_metrics": values["batch_eval_metrics"],
        "label_names": values["label_names"],
        "remove_unused_columns": values["remove_unused_columns"],
        "count_tokens": values["include_num_input_tokens_seen"],
        "generate": _generation(values),
    }
    if made["count_tokens"] == "no" and values["include_tokens_per_second"]:
        made["count_tokens"] = "all"
    return made


def _generation(values: Values) -> Any:
    if not values["predict_with_generate"]:
        return None
    given = {"max_length": values["generation_max_length"], "num_beams": values["generation_num_beams"]}
    options = {name: each for name, each in given.items() if each is not None}
    config = values["generation_config"]
    if config is None:
        return options or True
    if not isinstance(config, transformers.GenerationConfig):
        config = transformers.GenerationConfig.from_pretrained(config)
    if "max_length" in options:
        options["max_new_tokens"] = None  # it would take precedence
    return transformers.GenerationConfig.from_dict({**config.to_dict(), **options})


def _set_log_level(values: Values) -> None:
    found = detect(os.environ)
    first = found is None or (found.local_rank if values["log_on_each_node"] else found.rank) == 0
    level = values["log_level"] if first else values["log_level_replica"]
    if level == "passive" or (not first and level == "warning"):  # as our logger does by itself
        return
    number = logging.getLevelNamesMapping().get(str(level).upper())
    if number is None:
        allowed = ("debug", "info", "warning", "error", "critical", "passive")
        raise ConfigError(f"log_level={level!r}. {nearest(str(level), allowed)}")
    logger(NAME).setLevel(number)


def _settle(values: Values, options: dict[str, Any]) -> None:
    """Raise instead of skipping steps if the strategy cannot skip one, and report so."""
    name, _ = named(options["strategy"])
    cannot = "" if name in ("auto", *DEVICES) else refusal(STRATEGIES[name], "skipping")
    if options["on_nonfinite"] == "skip" and cannot:
        options["on_nonfinite"] = "raise"
        values.notes["logging_nan_inf_filter"] = f'with this strategy "raise", because {cannot}'


def _report(values: Values) -> ArgumentsReport:
    lines = []
    shown_always = {name: values[name] for name in ("logging_nan_inf_filter",)}
    for name, value in {**values.given, **shown_always}.items():
        row = ROWS[name]
        shown = "***" if name in SECRETS else value
        note = values.notes.get(name)
        lines.append(ReportLine(name, shown, row.status, f"{row.text}{f' ({note})' if note else ''}"))
    return ArgumentsReport(tuple(lines))
