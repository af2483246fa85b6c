"""A folder that `from_pretrained` loads, written from a model's weights."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.assets import write_assets
from drivetrain.checkpoint.format.records import TENSORS
from drivetrain.checkpoint.saving.assets import Asset, make_assets
from drivetrain.checkpoint.storage.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import floating_dtype
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import INDEX, MODEL
from drivetrain.checkpoint.weights.frozen import fingerprints
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors, TensorSource
from drivetrain.checkpoint.weights.load import Found, find_weights
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.types import Json
from drivetrain.integrations.transformers.saved_tensors import AdapterTensors, SavedTensors
from drivetrain.integrations.transformers.stored_model import base_of, is_pretrained

_LOG = logger(__name__)

PRETRAINED = "pretrained"
"""The folder in a run directory that a finished fit leaves."""

SHARD = "5 GB"
"""The most that a file of weights holds."""

IN_TASK = "model."
"""The prefix of the model's names in a task."""

CONFIG = "config.json"
ADAPTER = f"adapter_model{TENSORS}"

_OF_BASE = (CONFIG, "generation_config.json")
"""Files that PEFT's folders lack."""

_WHOLE = "1000 TB"
"""PEFT reads one file."""


def model_assets(model: Any, processing_class: Any) -> list[Asset]:
    """Return what belongs beside a model's weights: processor, configurations, adapters' configurations."""
    base = base_of(model)
    assets: list[Asset] = [partial(_write_config, base)] if is_pretrained(base) else []
    if base_of(model) is not model:
        assets.append(partial(_write_adapter_configs, model))
    if hasattr(processing_class, "save_pretrained"):
        assets.append(processing_class)
    return assets


def _write_config(base: Any, folder: str) -> None:
    """Write the configuration with the model's class, as transformers does, and that of generation."""
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]  # the name that FSDP gives a class
    config.dtype = str(base.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if base.can_generate() and base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def _write_adapter_configs(model: Any, folder: str) -> None:
    """Write the configuration of each adapter where PEFT's own `save_pretrained` does."""
    base = model.get_base_model()
    for name, given in model.peft_config.items():
        config = copy.copy(given)
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
        mapping = None
        if config.task_type is None:
            kind = type(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        config.save_pretrained(_adapter_folder(folder, name, os.path.join), auto_mapping_dict=mapping)


def of_model(weights: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the weights of a task's model by the model's own names; others are left out, with a warning.

    Args:
        weights: The weights by their names in the task.
        where: Their source, for the warning.
    """
    others = [name for name in weights if not name.startswith(IN_TASK)]
    if others:
        _LOG.warning(
            f"{where} has {len(others)} weights outside its model, such as {others[0]!r}, which"
            " from_pretrained would not take: they are not exported"
        )
    return {name.removeprefix(IN_TASK): each for name, each in weights.items() if name.startswith(IN_TASK)}


def write_pretrained(
    model: Any,
    tensors: TensorSource,
    folder: str,
    *,
    files: Mapping[str, bytes] | None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = SHARD,
    write: bool = True,
    owned: bool = False,
    frozen: Json = None,
) -> list[str]:
    """Write a model's weights, its configuration and its processor; of a `PeftModel`, its adapters alone.

    Args:
        model: The model, which may be on the meta device.
        tensors: The values of its state dict, by clean name. A `PeftModel` may have its adapter's alone.
        folder: The folder; also an address. Files of the same names are replaced where drivetrain has written
            the weights there.
        files: The files beside the weights, by name; None makes those of the model.
        dtype: The dtype for floating-point tensors; None keeps each.
        max_shard_size: The most bytes of tensors in a file; an adapter is always one file.
        write: Whether this process writes.
        owned: Whether files of the same names are replaced in any case.
        frozen: The fingerprints of an adapter's base, by name in the task.

    Returns:
        The paths of the files with weights.

    Raises:
        CheckpointError: The weights do not fit the model, a file cannot be written, or one that drivetrain
            has not written is in the way.
        ConfigError: The dtype or the size is not allowed, or the folder is a file.
    """
    target = os.fspath(folder)
    disk = file_system(target)
    if disk.kind(disk.absolute(target)) == "file":
        raise ConfigError(f"{target!r} is a file; give a folder")
    final = floating_dtype(dtype)
    base = base_of(model)
    written: list[str] = []
    begun = [disk.kind(disk.absolute(disk.join(target, each))) for each in (MODEL, MODEL + INDEX, ADAPTER)]
    if base is model:
        saved = SavedTensors(model, tensors, final)
        path = disk.join(target, MODEL)
        written += export_weights(saved, path, max_shard_size=max_shard_size, write=write, overwrite=owned)
    else:
        stored: set[str] = set()
        for name in model.peft_config:
            adapter = AdapterTensors(model, tensors, name, _has_embeddings(model, name), final)
            stored |= {*adapter.origins.values()}
            path = disk.join(_adapter_folder(target, name, disk.join), ADAPTER)
            how: dict[str, Any] = {"write": write, "overwrite": owned, "frozen": frozen}
            written += export_weights(adapter, path, max_shard_size=_WHOLE, **how)
        _warn_of_others(model, stored)
    if write:
        if files is None:
            files = make_assets(("the model", model_assets(model, None)))
        wanted = {name: each for name, each in files.items() if base is model or name not in _OF_BASE}
        if CONFIG in wanted:
            trained = _dtype_of(model, tensors) if final is None else final
            wanted[CONFIG] = _as_trained(wanted[CONFIG], trained, base.config)
        if not owned and not any(begun):  # else the weights there have been drivetrain's
            for name, content in wanted.items():
                _check_free(disk, disk.join(target, name), content)
        write_assets(target, wanted)
    return written


def is_adapter(source: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a source of weights is a folder of PEFT with an adapter."""
    return isinstance(source, (str, os.PathLike)) and os.path.isfile(os.path.join(source, ADAPTER))


def adapter_weights(task: nn.Module, model: Any, folder: str | os.PathLike[str]) -> Found:
    """Return the weights in a folder of PEFT for the active adapter of a task's `PeftModel`.

    All other tensors of the task are those that the folder leaves out. The fingerprints of the base are those
    of the export, if drivetrain has written the folder.
    """
    found = find_weights(os.path.join(folder, ADAPTER))
    own = LazyTensors(module_state(model)[0], None, "the adapter's weights")
    name = model.active_adapter
    origins = AdapterTensors(model, own, name, _has_embeddings(model, name), None).origins
    tensors = {
        f"{IN_TASK}{origins[each]}" if each in origins else each: t for each, t in found.tensors.items()
    }
    left_out = fingerprints(
        task, {*module_state(task)[0]} - {f"{IN_TASK}{each}" for each in origins.values()}
    )
    stored = found.frozen if isinstance(found.frozen, dict) else {}
    return Found(tensors, frozen={**left_out, **stored}, path=os.fspath(folder))


def _check_free(disk: FileSystem, path: str, content: bytes) -> None:
    with os_errors("read", path):
        if disk.kind(disk.absolute(path)) is None:
            return
        with closing(disk.open(disk.absolute(path))) as file:
            if file.read() == content:
                return
    raise CheckpointError(
        f"{path!r} is a file that drivetrain has not written, and stays as it is. The weights are written"
        " beside it. Remove it, or give another folder"
    )


def _adapter_folder(folder: str, adapter: str, join: Callable[[str, str], str]) -> str:
    """Return the folder of an adapter, as PEFT names it."""
    return folder if adapter == "default" else join(folder, adapter)


def _dtype_of(model: Any, tensors: TensorSource) -> torch.dtype | None:
    """Return the dtype that transformers calls the model's: that of its first floating-point parameter."""
    for name, _ in model.named_parameters():
        spec = tensors.specs.get(name)
        if spec is not None and spec.is_floating_point():
            return spec.dtype
    return None


def _as_trained(config: bytes, dtype: torch.dtype | None, present: Any) -> bytes:
    """Return a configuration with what the training has set.

    That is the dtype of the weights, because `from_pretrained` converts to the configuration's, and the
    `problem_type` that a classifier infers from its first labels.
    """
    values = json.loads(config)
    trained = {"problem_type": getattr(present, "problem_type", None)}
    if dtype is not None:
        trained["dtype"] = str(dtype).removeprefix("torch.")
    if not isinstance(values, dict) or all(values.get(name) == each for name, each in trained.items()):
        return config
    changed = {name: each for name, each in trained.items() if each is not None}
    return (json.dumps({**values, **changed}, indent=2, sort_keys=True) + "\n").encode()


def _has_embeddings(model: Any, adapter: str) -> bool:
    """Return whether PEFT would store the embeddings with an adapter: they are adapted, or were resized.

    PEFT asks the Hub for the base's configuration to find out. Here it is the one on this machine.
    """
    import transformers

    config = model.peft_config[adapter]
    if getattr(config, "trainable_token_indices", None) is not None:
        return False
    base = model.get_base_model()
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    if any(
        hasattr(each, "base_layer") and isinstance(each.base_layer, torch.nn.Embedding) for each in embeddings
    ):
        return True
    name = config.base_model_name_or_path or getattr(base, "name_or_path", None)
    if not name:
        return False
    try:
        there = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return getattr(there, "vocab_size", None) != getattr(base.config, "vocab_size", None)


def _warn_of_others(model: Any, stored: set[str]) -> None:
    """Warn of trained parameters that are no part of an adapter, and that PEFT's files cannot hold."""
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    others = [name for name in trained if name not in stored and not name.startswith("prompt_encoder.")]
    if others:
        _LOG.warning(
            f"{len(others)} trained parameters are no part of an adapter, and are not in its files: such as"
            f" {others[0]!r}. Name their modules in the adapter's modules_to_save"
        )
