"""A model of transformers on the meta device: its first values, and those of its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.hub import cached_file

from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.files import MODEL, WeightFiles
from drivetrain.core.errors import CheckpointError, StrategyError
from drivetrain.integrations.transformers.pretrained import CONFIG
from drivetrain.integrations.transformers.stored_model import base_of, origin_of

_LOADED = "_is_hf_initialized"
"""The mark that transformers leaves on a parameter that has its value, and does not initialise again."""


def reset_of(model: nn.Module, module: nn.Module) -> Callable[[], None] | None:
    """Return what initialises a module's own tensors as its model does; None for a module of no model."""
    owner = None
    for each in base_of(model).modules():  # the innermost comes last
        if isinstance(each, PreTrainedModel) and any(inner is module for inner in each.modules()):
            owner = each
    return None if owner is None else partial(_reset, owner, module)


def _reset(owner: Any, module: nn.Module) -> None:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for _, tensor in own:
        tensor.__dict__.pop(_LOADED, None)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    owner._init_weights(module)
    left = [name for name, tensor in own if tensor.is_floating_point() and tensor.isnan().any()]
    if left:
        raise StrategyError(
            f"the model was made on the meta device, and {type(owner).__name__}._init_weights gives"
            f" {', '.join(left)} of {type(module).__name__} no values. Load the model whole, without"
            " device_map='meta' or torch.device('meta')"
        )


def is_unloaded(model: nn.Module) -> bool:
    """Return whether `from_pretrained` has made a model on the meta device, and left its weights out."""
    return any(each.is_meta and getattr(each, _LOADED, False) for each in base_of(model).parameters())


def folder_of(model: nn.Module) -> str:
    """Return the folder with the weights that a model was made from, in the Hub's cache if it is a name.

    Raises:
        CheckpointError: The folder is gone, or has no safetensors files.
    """
    origin = origin_of(model)
    name, files = origin.get("name", ""), (MODEL, WeightFiles(MODEL).index)
    if os.path.isdir(name):
        if any(os.path.exists(os.path.join(name, file)) for file in files):
            return name
    else:
        for file in files:
            try:
                found = cached_file(
                    name,
                    file,
                    revision=origin.get("revision", "main"),
                    _raise_exceptions_for_missing_entries=False,
                    _raise_exceptions_for_connection_errors=False,
                )
            except OSError as error:
                raise CheckpointError(
                    f"the weights of a model on the meta device are read from {name!r}, which is no"
                    " folder any more and cannot be loaded from the Hub. Call from_pretrained with a path"
                    f" that stays: {error}"
                ) from error
            if found is not None:
                return os.path.dirname(str(found))
    raise CheckpointError(
        f"{name!r} has no {MODEL} and no index of several: the weights of a model on the meta device are read"
        " from safetensors files. Convert them with save_pretrained"
    )


def is_folder(source: Any) -> bool:
    """Return whether a source of weights is a folder of `from_pretrained`, and no checkpoint."""
    if not isinstance(source, (str, os.PathLike)) or not os.path.isfile(os.path.join(source, CONFIG)):
        return False
    return not DirectoryCheckpointIO().exists(os.fspath(source))


def renamed_to(model: nn.Module, prefix: str) -> Callable[[str], str | None]:
    """Return transformers' rule from the names in a folder of `from_pretrained` to those in a task.

    Weights of a model without a head fit one that has it, and the other way round.

    Args:
        model: The model in the task.
        prefix: The prefix of the model's names in the task.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    base = base_of(model)
    inner = getattr(base, "base_model_prefix", None)
    transforms = get_model_conversion_mapping(base)
    renamings: list[Any] = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters: list[Any] = [each for each in transforms if isinstance(each, WeightConverter)]
    ignored = tuple(getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ())
    own = base.state_dict()

    def rename(name: str) -> str | None:
        found, converted = rename_source_key(name, renamings, converters, inner, own)
        if found not in own and name in own:
            found, converted = rename_source_key(name, [], [], inner, own)
        if found not in own:
            return None if any(re.search(each, name) for each in ignored) else name
        if converted is not None:
            raise CheckpointError(
                f"transformers makes {found!r} of {type(base).__name__} of several stored tensors, such as"
                f" {name!r}, which cannot be read in rows. Load the model whole, without device_map='meta'"
            )
        return f"{prefix}{found}"

    return rename
