"""The methods of transformers' Trainer that a subclass may override here, and what to use for the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import transformers

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.integrations.transformers.script.accelerator import SERVED, ScriptAccelerator
from drivetrain.integrations.transformers.script.reads import Names, names_in

_LOG = logger(__name__)

THEIRS, _THEIR_SEQ2SEQ = transformers.Trainer, transformers.Seq2SeqTrainer
"""transformers' own classes, whatever `replace_trainer` has done since."""

REPLACED: set[bool] = set()
"""Not empty once it has."""

OVERRIDABLE = frozenset(
    {
        "__init__",
        "call_model_init",
        "compute_loss",
        "create_model_card",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "create_scheduler",
        "evaluate",
        "evaluation_loop",
        "get_decay_parameter_names",
        "get_eval_dataloader",
        "get_learning_rates",
        "get_num_trainable_parameters",
        "get_optimizer_cls_and_kwargs",
        "get_optimizer_group",
        "get_test_dataloader",
        "get_train_dataloader",
        "is_local_process_zero",
        "is_world_process_zero",
        "log",
        "log_metrics",
        "loss_is_scaled_for_ga",
        "metrics_format",
        "num_examples",
        "predict",
        "prediction_step",
        "push_to_hub",
        "save_model",
        "save_metrics",
        "save_state",
        "train",
        "training_step",
        "_evaluate",
        "_get_eval_sampler",
        "_get_train_sampler",
        "_save",
        "_save_checkpoint",
        "_set_signature_columns_if_needed",
    }
)
"""The names of transformers' Trainer that a subclass may define: those that are called here too."""

_CHECKPOINT = (
    "checkpoints are saved by drivetrain's CheckpointSaver. Override save_model, which fills checkpoint-N, or"
    " write other files there in `on_save` of a TrainerCallback"
)
_RESUME = "a checkpoint is loaded by drivetrain's Trainer.fit(..., resume=...)"
_LOOP = "the loop is that of drivetrain.Trainer. Override training_step, or use a TrainerCallback"
_SEARCH = "hyperparameter_search sets the arguments and reports to the backend itself: give it hp_space and"
_SEARCH += " compute_objective"
_PRECISION = "the strategy runs each step under Trainer(precision=...)"
_PLACE = "the strategy places and wraps the model: see drivetrain.strategies"
_COUNT = "items are counted by the task: override TransformersTask.loss_weight, and use drivetrain.Trainer"
_COLUMNS = "set remove_unused_columns=False, and give a data_collator"
_HUB = "drivetrain.integrations.hub.Publish uploads in the background"

COUNTERPARTS: Mapping[str, str] = {
    "_hp_search_setup": _SEARCH,
    "_report_to_hp_search": _SEARCH,
    "_tune_save_checkpoint": _SEARCH,
    "hp_name": _SEARCH,
    "hp_space": _SEARCH,
    "objective": _SEARCH,
    "compute_objective": _SEARCH,
    "_save_optimizer_and_scheduler": _CHECKPOINT,
    "_save_rng_state": _CHECKPOINT,
    "_save_scaler": _CHECKPOINT,
    "_get_output_dir": _CHECKPOINT,
    "_determine_best_metric": "CheckpointConfig(by=..., mode=...) says which checkpoint is the best",
    "_load_best_model": "the best checkpoint is loaded by TransformersTask.load_weights",
    "_load_from_checkpoint": _RESUME,
    "_load_optimizer_and_scheduler": _RESUME,
    "_load_rng_state": _RESUME,
    "_load_scaler": _RESUME,
    "_load_callback_state": _RESUME,
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "_prepare_for_training": _LOOP,
    "_finalize_training": _LOOP,
    "_init_training_state": _LOOP,
    "_maybe_log_save_evaluate": "use a TrainerCallback, whose control asks for logs, saves or evaluations",
    "prediction_loop": "override evaluation_loop or prediction_step",
    "_prepare_inputs": "batches are on the device when a step gets them. Override compute_loss or"
    " training_step to change them",
    "_prepare_input": "batches are on the device when a step gets them",
    "_remove_unused_columns": _COLUMNS,
    "_signature_columns": _COLUMNS,
    "_get_collator_with_removed_columns": _COLUMNS,
    "_get_dataloader": "override get_train_dataloader, get_eval_dataloader or get_test_dataloader",
    "get_batch_samples": _COUNT,
    "_get_num_items_in_batch": _COUNT,
    "floating_point_ops": "`total_flos` is 6 x parameters x input tokens; callbacks.Throughput measures",
    "store_flos": "`state.total_flos` is counted by CallbackAdapter",
    "current_flos": "`state.total_flos` is counted by CallbackAdapter",
    "autocast_smart_context_manager": _PRECISION,
    "create_accelerator_and_postprocess": _PLACE,
    "_wrap_model": _PLACE,
    "place_model_on_device": _PLACE,
    "is_model_parallel": _PLACE,
    "is_deepspeed_enabled": _PLACE,
    "is_fsdp_enabled": _PLACE,
    "_clip_grad_norm": "gradients are clipped by Trainer(max_grad_norm=...)",
    "_get_grad_norm": "gradients are clipped by Trainer(max_grad_norm=...)",
    "_get_learning_rate": "rates come from create_scheduler or get_learning_rates",
    "init_hf_repo": _HUB,
    "_push_from_checkpoint": _HUB,
    "_finish_current_push": _HUB,
    "push_in_progress": _HUB,
    "gather_function": "evaluations join the outputs of all processes, each sample once",
    "neftune_noise_alpha": "`args.neftune_noise_alpha` has it",
    "label_smoother": "TransformersTask(label_smoothing=...) smooths labels",
    "end": "train, evaluate and predict leave their process group themselves: no call is needed",
}
"""Sentences that say what to use instead of a name of transformers' Trainer that is not served here."""


_DONE_HERE = frozenset({"_load_best_model", "_load_from_checkpoint", "_push_from_checkpoint"})
"""Methods of a package's trainer that need not be called: what they do is done here in another way."""


def check_overrides(cls: type, ours: type) -> None:
    """Check that a subclass overrides only methods that are called.

    Args:
        cls: The script's class.
        ours: The class here that it derives from.

    Raises:
        ConfigError: It overrides a method of transformers' Trainer that would never be called; says what to
            use instead.
    """
    for kind in _classes_of_script(cls, ours):
        for name in vars(kind):
            if name in OVERRIDABLE or (name.startswith("__") and name.endswith("__")):
                continue
            if REPLACED and name in _DONE_HERE:
                _LOG.info(f"{kind.__name__}.{name} is not called: {counterpart(name)}")
            elif hasattr(THEIRS, name) or hasattr(_THEIR_SEQ2SEQ, name):
                raise ConfigError(
                    f"{kind.__name__}.{name} would never be called as in transformers: {counterpart(name)}"
                )


def check_reads(script: object, ours: type) -> None:
    """Check that the methods of a script's class read no name of transformers' Trainer that is not served.

    They may read a name that one of them sets, or that the same method also has as a text, as for `hasattr`.
    A method that catches an AttributeError may read any. With `setattr` in one, nothing is known.

    Args:
        script: The script's Trainer, with all attributes that this package sets.
        ours: The class here that it derives from.

    Raises:
        ConfigError: A method reads such a name; says what to use instead.
    """
    methods = _methods_of(type(script), ours)
    assigned = {name for names in methods.values() for name in names.assigned}
    served = {*assigned, *vars(script), *dir(type(script))}
    if any("setattr" in names.calls for names in methods.values()):
        return
    for method, names in methods.items():
        if names.catches:
            continue
        for name in sorted(names.read - served - names.texts):
            if is_theirs(name):
                raise ConfigError(f"{method} reads self.{name}, which is not served: {counterpart(name)}")
        for name in sorted(names.of_accelerator - names.texts):
            if "accelerator" not in assigned and not hasattr(ScriptAccelerator, name):
                raise ConfigError(f"{method} reads self.accelerator.{name}, which is not served: {SERVED}")


def readers(cls: type, ours: type, name: str) -> list[str]:
    """Return the methods of a script's class that read an attribute of any object."""
    return [method for method, names in _methods_of(cls, ours).items() if name in names.of_anything]


def dividers(cls: type, ours: type, name: str) -> list[str]:
    """Return the methods of a script's class that divide by an attribute of any object."""
    return [method for method, names in _methods_of(cls, ours).items() if name in names.divisors]


def _methods_of(cls: type, ours: type) -> dict[str, Names]:
    return {
        f"{kind.__name__}.{method}": names
        for kind in _classes_of_script(cls, ours)
        for method, names in names_in(kind)
        if not (REPLACED and method.rpartition(".")[2] in _DONE_HERE)
    }


def _classes_of_script(cls: type, ours: type) -> list[type]:
    before = cls.__mro__[: cls.__mro__.index(ours)]
    return [kind for kind in before if not kind.__module__.startswith("drivetrain.")]


def is_theirs(name: str) -> bool:
    """Return whether transformers' Trainer has an attribute of this name, in its class or its objects."""
    return name in _their_names() and not name.startswith("__")


@cache
def _their_names() -> frozenset[str]:
    theirs = _THEIR_SEQ2SEQ
    found = set(dir(theirs))
    for kind in theirs.__mro__:
        for _, names in names_in(kind):
            found |= names.assigned
    return frozenset(found)


def is_overridden(script: object, *names: str) -> bool:
    """Return whether a script's class, or the object, has its own version of one of these methods."""
    for name in names:
        kind = next((each for each in type(script).__mro__ if name in vars(each)), object)
        if name in vars(script) or not kind.__module__.startswith("drivetrain."):
            return True
    return False


def items_for(method: Callable[..., Any], count: Any) -> dict[str, Any]:
    """Return the argument `num_items_in_batch` of a method; empty if a script's version lacks it."""
    return {"num_items_in_batch": count} if _takes_items(getattr(method, "__func__", method)) else {}


def items_by_position(method: Callable[..., Any], count: Any) -> tuple[Any, ...]:
    """Return the third argument of a `training_step`, of any name; empty if the script's has none."""
    return (count,) if _takes_third(getattr(method, "__func__", method)) else ()


@cache
def _takes_third(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None, None)
    except TypeError:
        return False
    return True


@cache
def _takes_items(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "num_items_in_batch" in parameters or any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    )


def counterpart(name: str) -> str:
    """Return what serves the purpose of a name of transformers' Trainer."""
    return COUNTERPARTS.get(
        name,
        "it is a part of transformers' own loop. Override compute_loss, training_step, prediction_step,"
        " evaluate or log, or use drivetrain.Trainer with a TransformersTask",
    )
