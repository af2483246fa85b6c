"""The values of transformers' arguments: from its dataclasses, or from a mapping, also of older names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args, get_type_hints

from transformers import Seq2SeqTrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.synonyms import help_with
from drivetrain.integrations.transformers.arguments_table import REFUSED, ROWS

_FIELDS = "__dataclass_fields__"
_APEX = "apex has ended; torch's own mixed precision has replaced it: leave {} out"

_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Former names that version 5 still has."""

NEWER = {
    "activation_checkpointing": False,
    "activation_checkpointing_kwargs": None,
    "dataloader_in_order": True,
    "dataloader_multiprocessing_context": None,
    "ddp_static_graph": None,
    "trackio_bucket_id": None,
    "trackio_static_space_id": None,
    "train_sampling_strategy": "random",
}
"""The defaults of options that version 5.0 does not have."""

_JSON = (
    "accelerator_config",
    "fsdp_config",
    "deepspeed",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
)
"""Options that may be JSON as a text; "{" is its first character."""


@dataclass(frozen=True)
class Values:
    """The value of each option, in its plain form.

    Attributes:
        all: The values by the names of the installed release, and of older options that have a meaning here.
        given: Those that are not at their defaults, under the names that the user gave.
        notes: What the report says beside the row of an option.
        total_steps: The number of steps of the run; None if it is not known.
    """

    all: Mapping[str, Any]
    given: Mapping[str, Any]
    notes: dict[str, str] = field(default_factory=dict)
    total_steps: int | None = None

    def __getitem__(self, name: str) -> Any:
        return self.all[name]

    def accelerator(self, name: str) -> Any:
        """Return an option of `accelerator_config`; None if it is not given."""
        return (self.all["accelerator_config"] or {}).get(name)


def accumulation(values: Values) -> int:
    """Return the number of micro-batches of a step, by either of its names.

    Raises:
        ConfigError: The two names have different numbers.
    """
    steps: int = values["gradient_accumulation_steps"]
    by_plugin: int = (values.accelerator("gradient_accumulation_kwargs") or {}).get("num_steps", steps)
    if steps not in (1, by_plugin):
        raise ConfigError(
            f"The `AcceleratorConfig`'s `num_steps` is set but is {by_plugin}, and"
            f" gradient_accumulation_steps={steps}. Give gradient_accumulation_steps alone"
        )
    return by_plugin


def read_values(args: Any) -> Values:
    """Return the values of `TrainingArguments`, or of a mapping.

    Raises:
        ConfigError: It is neither, or has an option that is unknown, or refused and not at its default.
    """
    defaults = default_values()
    if isinstance(args, Mapping):
        entered = {str(name): _plain(str(name), value) for name, value in args.items()}
    elif dataclasses.is_dataclass(args) and not isinstance(args, type) and hasattr(args, "output_dir"):
        entered = _of_dataclass(args)
    else:
        raise ConfigError(
            "from_training_arguments takes a TrainingArguments, a Seq2SeqTrainingArguments or a mapping of"
            f" options, not {type(args).__name__}"
        )
    entered = {name: value for name, value in entered.items() if not _is_hidden(name, value)}
    given = {name: value for name, value in entered.items() if _is_given(name, value, defaults, args)}
    _check(given)
    _check_types(entered, defaults)
    _check_choices(entered)
    values = {**defaults, **{name: value for name, value in entered.items() if name in defaults}}
    for name, value in given.items():
        if name in _RENAMED:
            _take_over(values, name, _RENAMED[name](value, values), given)
    for name, now in _ALIASES.items():
        if values[now] in (None, False) and values[name] is not None:
            values[now] = values[name]
    return Values(values, given)


def default_values() -> dict[str, Any]:
    """Return the defaults of the installed release, and of older and newer options with a meaning here."""
    found = {
        each.name: _plain(each.name, _default(each)) for each in dataclasses.fields(Seq2SeqTrainingArguments)
    }
    old = {each.name: each.default for each in ROWS.values() if each.is_old}
    return {**NEWER, **old, **found}


def _default(each: dataclasses.Field[Any]) -> Any:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def _is_hidden(name: str, value: Any) -> bool:
    """Return whether a value is what `TrainingArguments.to_dict` puts in the place of a token."""
    return name.endswith("_token") and bool(value == f"<{name.upper()}>")


def _of_dataclass(args: Any) -> dict[str, Any]:
    found = {
        each.name: _plain(each.name, getattr(args, each.name))
        for each in dataclasses.fields(args)
        if each.init and (each.name in ROWS or _is_theirs(each.name, type(args)))
    }
    for name, now in _ALIASES.items():  # version 5 copies the new value to the old name
        if found.get(name) == found.get(now):
            found.pop(name, None)
    derived = {
        "do_eval": found["do_eval"] and found["eval_strategy"] != "no",
        "eval_steps": found["eval_steps"] == found["logging_steps"],
        "greater_is_better": found["greater_is_better"]
        == (not str(found["metric_for_best_model"]).endswith("loss")),
    }
    return {name: value for name, value in found.items() if not derived.get(name)}


def _is_theirs(name: str, kind: type) -> bool:
    """Return whether transformers, not a script's subclass, has declared a field."""
    first = next(each for each in reversed(kind.__mro__) if name in getattr(each, _FIELDS, ()))
    return first.__module__.partition(".")[0] == "transformers"


def _plain(name: str, value: Any) -> Any:
    """Return a value without transformers' enumerations, and empty where that means nothing."""
    if isinstance(value, Enum):
        return value.value
    if name in _JSON and isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if name == "report_to":
        names = [value] if isinstance(value, str) else list(value or ())
        return [each for each in names if each != "none"]
    if name == "debug":
        return [_plain("", each) for each in (value.split() if isinstance(value, str) else value or ())]
    if name == "include_num_input_tokens_seen" and isinstance(value, bool):
        return "all" if value else "no"
    if name == "accelerator_config":
        return _accelerator(value)
    if name in ("disable_tqdm", "activation_checkpointing", "gradient_checkpointing", "tf32", "fsdp"):
        return value or (None if name == "gradient_checkpointing" and value is None else False)
    if name in ("fsdp_config", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        return value or None
    return value


def _accelerator(value: Any) -> dict[str, Any] | None:
    """Return the options of `accelerator_config` that differ from the defaults; None if none does."""
    if isinstance(value, str):
        value = AcceleratorConfig.from_json_file(value)
    if value is None:
        return None
    given = dict(value) if isinstance(value, Mapping) else value.to_dict()
    defaults = AcceleratorConfig().to_dict()
    wrong = next((name for name in given if name not in defaults and name != "use_configured_state"), None)
    if wrong is not None:
        raise ConfigError(f"accelerator_config has {wrong!r}. {nearest(wrong, defaults)}")
    return {name: each for name, each in given.items() if each != defaults.get(name, False)} or None


def _is_given(name: str, value: Any, defaults: Mapping[str, Any], args: Any) -> bool:
    row = ROWS.get(name)
    if row is not None and (row.is_old or row.status == REFUSED) and not (value or defaults.get(name)):
        return False  # None, False and [] mean the same: versions store different ones
    if name in defaults:
        return bool(value != defaults[name])
    if isinstance(args, Mapping):
        return True
    own = next(each for each in dataclasses.fields(args) if each.name == name)
    return bool(value != _default(own))


def _check(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in ROWS:
            raise ConfigError(
                f"from_training_arguments knows no option {name!r}, which is {value!r}."
                f" {help_with(name, ROWS, 'option')}"
            )
        if ROWS[name].status == REFUSED:
            raise ConfigError(f"{name}={value!r}: {ROWS[name].text}")
        if name in ("half_precision_backend", "fp16_backend") and value == "apex":
            raise ConfigError(f"{name}='apex': {_APEX.format(name)}")
        if name == "ddp_backend" and value not in ("nccl", "gloo", "xccl"):
            raise ConfigError(
                f"ddp_backend={value!r} is not supported. NCCL is used on NVIDIA GPUs, gloo on CPUs, XCCL on"
                " Intel GPUs: leave it out"
            )


def _check_types(entered: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check that numbers and flags are no texts: YAML reads 5e-5 as a text, and "false" would be true."""
    for name, value in entered.items():
        default = defaults.get(name)
        if isinstance(value, str) and isinstance(default, (bool, int, float)) and name != "fsdp":
            wanted = "True or False" if isinstance(default, bool) else f"a number, such as {default}"
            raise ConfigError(f"{name}={value!r} is a text: give {wanted}")


def _choices() -> dict[str, list[str]]:
    """Return the allowed values of each option that is one of transformers' enumerations."""
    found = {
        name: [each.value for each in kind]
        for name, hint in get_type_hints(Seq2SeqTrainingArguments).items()
        for kind in get_args(hint)
        if isinstance(kind, type) and issubclass(kind, Enum)
    }
    del found["optim"]  # whose own table has names of older releases
    return {**found, "evaluation_strategy": found["eval_strategy"]}


def _check_choices(entered: Mapping[str, Any]) -> None:
    for name, allowed in _choices().items():
        if name in entered and entered[name] not in allowed:
            raise ConfigError(
                f"{name}={entered[name]!r} is not allowed. {nearest(str(entered[name]), allowed)}"
            )


def _take_over(values: dict[str, Any], old: str, new: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Set the new names' values to those that an old name stands for.

    Raises:
        ConfigError: The new name is given too, with another value.
    """
    for name, value in new.items():
        if name in given and given[name] != value and not isinstance(value, (dict, list)):
            raise ConfigError(f"{old} is the former name of {name}, and both are given. Give {name} alone")
        if isinstance(value, dict):
            value = {**(values[name] or {}), **value}
        elif isinstance(value, list):
            value = [*values[name], *value]
        values[name] = value


_RENAMED: Mapping[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "evaluation_strategy": lambda value, _: {"eval_strategy": value},
    "per_gpu_train_batch_size": lambda value, _: {"per_device_train_batch_size": value},
    "per_gpu_eval_batch_size": lambda value, _: {"per_device_eval_batch_size": value},
    # There, warmup_steps had precedence.
    "warmup_ratio": lambda value, values: {"warmup_steps": values["warmup_steps"] or value},
    "no_cuda": lambda value, _: {"use_cpu": value},
    "adafactor": lambda value, _: {"optim": "adafactor"} if value else {},
    "group_by_length": lambda value, _: {"train_sampling_strategy": "group_by_length"} if value else {},
    "include_inputs_for_metrics": lambda value, _: {"include_for_metrics": ["inputs"]} if value else {},
    "torchdynamo": lambda value, _: {"torch_compile_backend": value},
    "tpu_metrics_debug": lambda value, _: {"debug": ["tpu_metrics_debug"]} if value else {},
    "fsdp_min_num_params": lambda value, _: {
        "fsdp_config": {"min_num_params": value, "auto_wrap_policy": "SIZE_BASED_WRAP"}
    },
    "fsdp_transformer_layer_cls_to_wrap": lambda value, _: {
        "fsdp_config": {"transformer_layer_cls_to_wrap": value}
    },
    "split_batches": lambda value, _: {"accelerator_config": {"split_batches": True}} if value else {},
    "push_to_hub_model_id": lambda value, _: {"hub_model_id": value},
    "push_to_hub_token": lambda value, _: {"hub_token": value},
}
"""The meaning of each older name, in the names of version 5."""
