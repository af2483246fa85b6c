"""A model as a checkpoint describes it: its class and configurations, without its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.quantizers.auto import AutoQuantizationConfig

from drivetrain.checkpoint.format.tree import unpack
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.saving.run_directory import resolve
from drivetrain.checkpoint.weights.frozen import FROZEN
from drivetrain.checkpoint.weights.load import is_weight_file
from drivetrain.core.errors import CheckpointError, MissingDependencyError
from drivetrain.core.registry import is_installed

_QUANTISED = "quantization_config"

_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")

_REMOTE = "auto_map"
"""The entry of a configuration that names code in the model's own repository."""


def base_of(model: Any) -> Any:
    """Return the model of transformers in a `PeftModel`; any other model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "base_model") else model


def is_pretrained(model: Any) -> bool:
    """Return whether a model has a configuration of transformers, as a `PreTrainedModel` has."""
    return hasattr(getattr(model, "config", None), "model_type") and hasattr(model, "can_generate")


def quantised_by(model: Any) -> str:
    """Return the name of the library that has quantised a model's base; "" for none."""
    config = getattr(getattr(base_of(model), "config", None), _QUANTISED, None)
    method = (
        config.get("quant_method", "") if isinstance(config, Mapping) else getattr(config, "quant_method", "")
    )
    return str(getattr(method, "value", method))


def has_prompts(model: Any) -> bool:
    """Return whether an adapter puts tokens of its own before those of a sample."""
    if base_of(model) is model:
        return False
    kind = getattr(model.active_peft_config, "peft_type", "")
    return getattr(kind, "value", kind) in ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING")


def registered_classes(model_type: str) -> frozenset[str]:
    """Return the names of the classes that transformers lists for a type of model."""
    found: set[str] = set()
    for name, table in vars(modeling_auto).items():
        if name.endswith("_MAPPING_NAMES") and model_type in table:
            named = table[model_type]
            found.update([named] if isinstance(named, str) else named)
    return frozenset(found)


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Return what `build_model` makes the model from again, in JSON's types.

    Returns:
        None for a class that is not transformers' own: one written elsewhere, or loaded from a repository.
    """
    base = base_of(model)
    if not is_pretrained(base):
        return None
    kind, config = type(base), base.config
    registered = kind.__name__ in registered_classes(config.model_type)
    if not registered or getattr(transformers, kind.__name__, None) is not kind:
        return None
    described = {
        "class": kind.__name__,
        "config": describe_config(config),
        "attention": config._attn_implementation,
    }
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        described["generation"] = generation.to_diff_dict()
    origin = origin_of(model)
    if origin:
        described["origin"] = dict(origin)
    if base is not model:
        configs: Any = model.peft_config
        adapters = {name: _plain(each.to_dict()) for name, each in configs.items()}
        described["adapters"] = adapters
        described["active"] = model.active_adapter
    return described


def describe_config(config: Any) -> dict[str, Any]:
    """Return a configuration in JSON's types, without the name of code in a repository."""
    values: dict[str, Any] = config.to_dict()
    values.pop(_REMOTE, None)
    if _QUANTISED in values:
        values[_QUANTISED] = _plain(values[_QUANTISED])  # which has enumerations
    return values


def origin_of(model: nn.Module) -> dict[str, str]:
    """Return the name and the revision of the pretrained model that a model was made from; empty for none."""
    base: Any = base_of(model)
    config = getattr(base, "config", None)
    adapters: Any = getattr(model, "peft_config", None) if base is not model else None
    adapter = next(iter(adapters.values())) if adapters else None
    name = getattr(adapter, "base_model_name_or_path", None) or getattr(config, "_name_or_path", None)
    revision = getattr(config, "_commit_hash", None) or getattr(adapter, "revision", None)
    found = {"name": name, "revision": revision if name else None}
    return {key: str(each) for key, each in found.items() if each}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.value if hasattr(value, "value") else value  # peft's enumerations


def base_of_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Return the model of a checkpoint that leaves out frozen weights, with these loaded by their name.

    Returns:
        None if the path is no checkpoint, or one that has all weights.

    Raises:
        CheckpointError: The weights have no name, or cannot be loaded.
    """
    if is_weight_file(os.fspath(path)):
        return None
    reader = open_checkpoint(resolve(path))
    if FROZEN not in reader.manifest.objects():
        return None
    described = described_in(reader)
    if not (described.get("origin") or {}).get("name"):
        raise CheckpointError(
            f"{reader.path!r} leaves out the frozen weights of a {described['class']} that has no name: it"
            " was not made by from_pretrained. Make it with the same weights, and pass model=..."
        )
    return build_model(described, pretrained=True)


def described_in(reader: Reader) -> Mapping[str, Any]:
    """Return the description of the model in a checkpoint.

    Raises:
        CheckpointError: It has none; says why.
    """
    stored = reader.object("hparams") if "hparams" in reader.manifest.objects() else None
    values = stored.get("values") if isinstance(stored, dict) else None
    described = unpack(values.get("model"), {}) if isinstance(values, dict) else None
    if isinstance(described, Mapping) and {"class", "config"} <= described.keys():
        return described
    task = reader.manifest.saved_by.get("task") or "another program"
    unstored = stored.get("unstored") if isinstance(stored, dict) else None
    if isinstance(unstored, list) and "model" in unstored:
        raise CheckpointError(
            f"{reader.path!r} has a model of a class that is not transformers' own. Make the model in your"
            f" program: {task}.from_checkpoint(path, model=...)"
        )
    raise CheckpointError(
        f"{reader.path!r} was saved by {task}, and has no model of transformers: only checkpoints of a"
        " TransformersTask can be exported for from_pretrained. For the weights alone, use"
        " drivetrain checkpoint export --format safetensors"
    )


def build_model(described: Mapping[str, Any], pretrained: bool = False) -> Any:
    """Return a model of the class and configurations of a description.

    Its weights are new, or with `pretrained` those of the description's origin.

    The class is looked up in transformers' own tables. Nothing is imported by a name that is not there, and
    code of a model's repository is never run.

    Raises:
        CheckpointError: The description is damaged, or names a class that this version of transformers lacks.
        MissingDependencyError: It has adapters, and peft is not installed.
    """
    from huggingface_hub.errors import StrictDataclassError

    name, values = described.get("class"), described.get("config")
    if not isinstance(name, str) or not isinstance(values, Mapping):
        raise CheckpointError("a stored model has a class and a config; this one has not")
    model_type = values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING or name not in registered_classes(str(model_type)):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no model of the class {name!r} and the type"
            f" {model_type!r}. Install the version that the task was saved with"
            f" ({values.get('transformers_version', 'unknown')}), or pass model=..."
        )
    plain = {key: value for key, value in values.items() if key != _REMOTE}
    attention = described.get("attention")
    _refuse_kernels({**plain, "attn_implementation": attention})
    try:
        return _built(name, plain, attention, described, pretrained)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot make a {name} of the stored configuration:"
            f" {error}. Install the version that the task was saved with"
            f" ({values.get('transformers_version', 'unknown')}), or pass model=..."
        ) from error


def _refuse_kernels(values: Mapping[str, Any]) -> None:
    """Check that no part of a configuration names attention code in a repository, which would be run."""
    for key, value in values.items():
        if key in _ATTENTION and "/" in str(value):
            raise CheckpointError(
                f"the stored model takes its attention from the repository {value!r}, and code that a file"
                " names is never run. If you trust it, make the model yourself, and pass model=..."
            )
        if isinstance(value, Mapping):
            _refuse_kernels(value)


def _built(
    name: str, plain: Mapping[str, Any], attention: Any, described: Mapping[str, Any], pretrained: bool
) -> Any:
    config: Any = transformers.CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
    origin = described.get("origin") or {}
    kind = getattr(transformers, name)
    if pretrained:
        options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        quantised = vars(config).pop(
            _QUANTISED, None
        )  # in a configuration, it says that the files are quantised
        if quantised is not None:
            options[_QUANTISED] = AutoQuantizationConfig.from_dict(quantised)
        where = origin["name"]
        try:
            model = kind.from_pretrained(
                where, config=config, revision=origin.get("revision", "main"), **options
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint leaves out the frozen weights of {where!r}, which cannot be loaded: {error}."
                " Load them, and pass model=..."
            ) from error
    else:
        if isinstance(attention, str):
            config._attn_implementation = attention
        model = kind(config)
    if origin:
        vars(model.config).update(_name_or_path=origin.get("name"), _commit_hash=origin.get("revision"))
    if "generation" in described:
        model.generation_config = transformers.GenerationConfig.from_dict(dict(described["generation"]))
    adapters = described.get("adapters")
    return model if not adapters else _adapted(model, adapters, described.get("active"))


def _adapted(model: Any, adapters: Mapping[str, Any], active: Any) -> Any:
    if not is_installed("peft"):
        raise MissingDependencyError("peft", "transformers", "a stored model with adapters")
    import peft

    configs = {name: peft.PeftConfig.from_peft_type(**values) for name, values in adapters.items()}
    (first, config), *others = configs.items()
    adapted = peft.get_peft_model(model, config, adapter_name=first)
    for name, config in others:
        adapted.add_adapter(name, config)
    if isinstance(active, str) and active != first:
        adapted.set_adapter(active)
    return adapted
