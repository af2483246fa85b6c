"""The checks of the arguments of a script's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, trainer_callback

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.core.errors import ConfigError
from drivetrain.integrations.transformers.arguments import MappedArguments
from drivetrain.integrations.transformers.arguments_values import accumulation, read_values
from drivetrain.integrations.transformers.log_names import from_metric_for_best_model
from drivetrain.integrations.transformers.optimizers import TransformersOptimizer
from drivetrain.integrations.transformers.stored_model import base_of
from drivetrain.task.blocks import repeated_blocks
from drivetrain.trainer.trainer import Trainer

_RECOMPUTATION = ("activation_checkpointing", "gradient_checkpointing")
"""The name in transformers now, and the name before."""


def ranked_by(mapped: MappedArguments, args: TrainingArguments, sets: Any) -> MappedArguments:
    """Return the options with the name of `metric_for_best_model` among the metrics of named sets."""
    metric = args.metric_for_best_model
    if metric is None or not isinstance(sets, Mapping):
        return mapped
    name = from_metric_for_best_model(metric, sets)
    trainer, task = dict(mapped.trainer_options), dict(mapped.task_options)
    if isinstance(trainer["checkpoint"], CheckpointConfig) and trainer["checkpoint"].by is not None:
        trainer["checkpoint"] = replace(trainer["checkpoint"], by=name)
    if isinstance(task.get("optimizer"), TransformersOptimizer):
        task["optimizer"] = replace(task["optimizer"], metric=name)
    return replace(mapped, trainer_options=trainer, task_options=task)


def made_callback(callback: Any) -> Any:
    """Return a callback; of a class, a new object."""
    return callback() if isinstance(callback, type) else callback


def made_callbacks(given: Any) -> list[Any]:
    """Return the callbacks of a script; of classes, new objects.

    Raises:
        ConfigError: One callback is given without a list.
    """
    if isinstance(given, (TrainerCallback, Callback, type)):
        raise ConfigError(f"callbacks must be a sequence of callbacks, not {given!r}: give [it]")
    made = [made_callback(each) for each in given or ()]
    for number, each in enumerate(made):
        if type(each) in map(type, made[:number]):
            trainer_callback.logger.warning(f"there are two callbacks of the class {type(each).__name__}")
    return made


def is_served(callback: Any) -> bool:
    """Return whether any fit does what this callback of transformers does, so that it is not called."""
    kind, served = type(callback), ("DefaultFlowCallback", "JITCheckpointCallback", "ProgressCallback")
    return kind.__module__.startswith("transformers.") and kind.__name__ in served


def jit_checkpoint(script: Any) -> Any:
    """Return transformers' callback for `enable_jit_checkpoint`. A fit heeds signals itself, without it."""
    from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

    made = JITCheckpointCallback()
    made.trainer, made.jit_manager = script, CheckpointManager(script)
    return made


def checked_arguments(args: Any) -> TrainingArguments:
    """Return the arguments, with transformers' defaults for None and one number of micro-batches.

    Raises:
        ConfigError: They are of another type, or two of them contradict each other.
    """
    if args is None:
        return TrainingArguments(output_dir="tmp_trainer")
    if not isinstance(args, TrainingArguments):
        raise ConfigError(f"args must be TrainingArguments, not {type(args).__name__}")
    args.gradient_accumulation_steps = accumulation(read_values(args))
    return args


def processor_of(processing_class: Any, tokenizer: Any, collator: Any) -> Any:
    """Return the processor, under its present or its former name, or that of the collator.

    Raises:
        ConfigError: It is given under both names.
    """
    if processing_class is not None and tokenizer is not None:
        raise ConfigError("tokenizer is the former name of processing_class: give one of them")
    given = processing_class if tokenizer is None else tokenizer
    return getattr(collator, "tokenizer", None) if given is None else given


def checked_optimizers(
    given: tuple[Optimizer | None, Any],
    kind: tuple[type[Optimizer], dict[str, Any]] | None,
    model_init: Any,
    settings: Trainer,
) -> tuple[Optimizer | None, Any]:
    """Return the optimizer and scheduler that a script gives.

    Raises:
        ConfigError: They cannot be used with the other arguments.
    """
    optimizer, scheduler = given
    if scheduler is not None and optimizer is None:
        raise ConfigError("optimizers=(None, scheduler): a scheduler belongs to an optimizer; give both")
    if optimizer is None:
        return given
    instead = "give optimizer_cls_and_kwargs=(class, arguments), or override create_optimizer"
    if kind is not None:
        raise ConfigError("optimizers and optimizer_cls_and_kwargs are two ways to say the same: give one")
    if model_init is not None:
        raise ConfigError(f"optimizers were built for one model, and model_init makes others; {instead}")
    if settings.select_strategy().sharded:
        raise ConfigError(
            f"optimizers were built before the strategy {settings.select_strategy().name!r} shards the"
            f" parameters; {instead}"
        )
    return given


def has_own_recomputation(model: Any) -> bool:
    """Return whether a model recomputes activations itself: a module of others, or a model without blocks."""
    base = base_of(model)
    if isinstance(base, PreTrainedModel) and repeated_blocks(base, tied=True):
        return False
    return any(hasattr(model, f"{kind}_enable") for kind in _RECOMPUTATION)


def enable_own_recomputation(model: Any, args: TrainingArguments) -> None:
    """Have such a model recompute its activations in backward.

    Raises:
        ConfigError: Options for a method that takes none.
    """
    kind = next(each for each in _RECOMPUTATION if hasattr(model, f"{each}_enable"))
    enable, name = getattr(model, f"{kind}_enable"), f"{kind}_kwargs"
    given = (getattr(args, f"{each}_kwargs", None) for each in _RECOMPUTATION)
    options = next((each for each in given if each), None)
    parameters = inspect.signature(enable).parameters.values()
    if any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters):
        enable(**{name: options})
    elif options:
        raise ConfigError(
            f"{name}={options!r}, which {type(model).__name__}.{kind}_enable does not take. Leave them out"
        )
    else:
        enable()
