"""Export a model of transformers from a task, or from a checkpoint of any strategy."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.checkpoint.assets import write_assets
from drivetrain.checkpoint.format.tensors import DTYPES
from drivetrain.checkpoint.formats import NAMES
from drivetrain.checkpoint.inspection.description import mapping
from drivetrain.checkpoint.saving.assets import checked_assets, make_assets
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.saving.run_directory import resolve
from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import cast, floating_dtype
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import MODEL
from drivetrain.checkpoint.weights.frozen import FROZEN, fingerprints, frozen_of
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors, TensorSource, spec_of
from drivetrain.checkpoint.weights.module_state import clean_name, elements, module_state
from drivetrain.checkpoint.weights.rename import renamed
from drivetrain.core.errors import CheckpointError, ConfigError, MissingDependencyError
from drivetrain.core.registry import is_installed
from drivetrain.distributed.processes import rank
from drivetrain.integrations.transformers.pretrained import (
    CONFIG,
    IN_TASK,
    SHARD,
    model_assets,
    of_model,
    write_pretrained,
)
from drivetrain.integrations.transformers.stored_model import base_of, build_model, described_in
from drivetrain.integrations.transformers.task import TransformersTask
from drivetrain.task.model_info import info_of

_MODEL = "model"
"""The group of weights in a checkpoint, and the argument of a task that is the model."""


def export_pretrained(
    source: TransformersTask | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = SHARD,
    merge: bool = False,
) -> list[str]:
    """Write a folder that transformers' `from_pretrained` loads, with the same weights bit for bit.

    The folder has the weights under the names that `save_pretrained` writes: in `model.safetensors` or, above
    `max_shard_size`, in several files with an index. It also has `config.json`, the configuration of
    generation and the processor. For a `PeftModel` it has only the adapter, and
    `PeftModel.from_pretrained(base, folder)` loads it.

    A checkpoint of any strategy is read by one process, tensor by tensor. A task in memory may be sharded:
    then all processes call this, and rank 0 writes.

    Args:
        source: A task; or a checkpoint, or a run directory: its newest good checkpoint.
        folder: The folder; also an address such as "s3://bucket/model". Files of the same names are replaced
            if drivetrain has written the weights in this folder.
        dtype: The dtype for floating-point tensors, such as "bf16"; None keeps each.
        max_shard_size: The most bytes of tensors in a file: a number, or a text such as "5 GB".
        merge: Whether to add the adapters of a `PeftModel` to its base, and write the whole model. It takes
            memory for a second model; a checkpoint's base is loaded by its recorded name.

    Returns:
        The paths of the files with weights, the index last.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, another task made it, or it lacks the frozen
            weights of a model that is no adapter.
        ConfigError: An argument that is not allowed, or a task whose weights are not in this process.
    """
    target = os.fspath(folder)
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
    if isinstance(source, TransformersTask):
        return _export_task(source, target, options, merge)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            "export_pretrained takes a TransformersTask, or the path of a checkpoint or a run directory, not"
            f" {type(source).__name__}"
        )
    path = resolve(source)
    if merge:
        return _export_task(TransformersTask.from_checkpoint(path), target, options, merge)
    return _export_checkpoint(path, target, options)


def merged_weights(task: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a task with the adapters of each `PeftModel` in it added to their base.

    The names are those of the task without PEFT: `export_weights(merged_weights(task), path)` writes a file
    for a task that has no adapters. The task stays as it is; its bases are in memory twice meanwhile.

    Args:
        task: A task with a `PeftModel` anywhere in it, such as from `from_checkpoint`, which checks the base.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: There is no `PeftModel`, its adapters cannot be added to weights, or the weights are
            sharded or quantised.
    """
    if not is_installed("peft"):
        raise MissingDependencyError("peft", "transformers", "merged_weights")
    from peft import PeftModel

    weights = module_state(task)[0]
    found = [(name, each) for name, each in task.named_modules() if isinstance(each, PeftModel)]
    for name, each in found or [("", task)]:
        prefix = f"{clean_name(name)}." if name else ""
        merged = {f"{prefix}{key}": value for key, value in module_state(_merged(each))[0].items()}
        weights = {key: value for key, value in weights.items() if not key.startswith(prefix)} | merged
    return weights


def replace_pretrained(task: TransformersTask, folder: str | os.PathLike[str]) -> list[str]:
    """Write a task's model as `export_pretrained` does, over any files of the same names."""
    return _export_task(task, os.fspath(folder), {"owned": True})


def _export_task(
    task: TransformersTask, folder: str, options: Mapping[str, Any], merge: bool = False
) -> list[str]:
    for name, parameter in task.model.named_parameters():
        if elements(parameter) != parameter.numel() or parameter.is_meta:
            where = "is on the meta device" if parameter.is_meta else "is divided by DeepSpeed"
            raise ConfigError(
                f"{name!r} {where}, and its values are not in this process. Export a checkpoint of the run"
            )
    is_main = rank() == 0
    files, model = {}, task.model
    weights = of_model(module_state(task)[0], type(task).__name__)
    what = f"the assets of {type(task).__name__}.model_info()"
    assets = info_of(task).assets
    if merge:
        model = _merged(model)
        weights = module_state(model)[0]
        assets = model_assets(model, task.processing_class)
    if is_main:
        files = make_assets((what, checked_assets(assets, what)))
    lazy = LazyTensors(weights, None, f"the weights for {folder!r}")
    named = is_main and not merge and not options.get("owned")  # a pass over the base, too long for each save
    frozen = fingerprints(task, info_of(task).left_out) if named else None
    return write_pretrained(model, lazy, folder, files=files, write=is_main, frozen=frozen, **options)


def _merged(model: Any) -> Any:
    """Return a copy of a `PeftModel`'s base with its adapters added."""
    if base_of(model) is model:
        raise ConfigError(
            "a merge adds the adapters of a PeftModel to its base, and this is a"
            f" {type(model).__name__}. Export its weights as they are"
        )
    tensor = next(
        (each for each in model.parameters() if is_traceable_wrapper_subclass(each) or is_sharded(each)), None
    )
    if tensor is not None:
        what = "sharded" if is_sharded(tensor) else f"quantised ({type(tensor.data).__name__})"
        raise ConfigError(
            f"a merge adds adapters to whole weights, and these are {what}. Make the task with the base in"
            " plain weights, such as by from_checkpoint(path, model=...), and export that"
        )
    if not hasattr(model, "merge_and_unload"):
        kind = getattr(model.active_peft_config.peft_type, "value", "")
        raise ConfigError(
            f"adapters of PEFT's type {kind} are not added to weights. Export the adapter alone"
        )
    return copy.deepcopy(model).merge_and_unload()


def _export_checkpoint(path: str, folder: str, options: Mapping[str, Any]) -> list[str]:
    reader = open_checkpoint(path)
    hparams = mapping(reader.object("hparams")) if "hparams" in reader.manifest.objects() else {}
    if names := mapping(hparams.get(NAMES)):
        return _export_renamed(reader, names, folder, options)
    described = described_in(reader)
    with torch.device("meta"):  # shapes and names alone
        model = build_model({key: each for key, each in described.items() if key != "attention"})
    tensors = _Stored(reader)
    if base_of(model) is model:
        _refuse_trained_only(reader, model, tensors)
    else:
        _load_prompts(model, tensors)
    # A checkpoint from before assets has none.
    files = {name: reader.asset(name) for name in reader.assets} or None
    return write_pretrained(model, tensors, folder, files=files, frozen=frozen_of(reader), **options)


def _export_renamed(
    reader: Reader, names: Mapping[str, Any], folder: str, options: Mapping[str, Any]
) -> list[str]:
    """Write the weights of a model that is not of transformers under the names that its task gives them."""
    files = {name: reader.asset(name) for name in reader.assets}
    if CONFIG not in files:
        raise CheckpointError(
            f"{reader.path!r} was saved with ModelInfo(export_names=...), but without the {CONFIG!r} that"
            " from_pretrained needs: give the configuration of transformers in ModelInfo(assets=[config])"
        )
    if FROZEN in reader.manifest.objects():
        raise CheckpointError(
            f"{reader.path!r} leaves out the frozen parameters, and from_pretrained needs all. Train with"
            " CheckpointConfig(parameters='all')"
        )
    disk = file_system(folder)
    written = export_weights(
        _Renamed(reader, names, floating_dtype(options["dtype"])),
        disk.join(folder, MODEL),
        max_shard_size=options["max_shard_size"],
    )
    write_assets(folder, files)
    return written


def _refuse_trained_only(reader: Reader, model: nn.Module, tensors: TensorSource) -> None:
    if FROZEN not in reader.manifest.objects():
        return
    lacking = [name for name in model.state_dict() if name not in tensors.specs]
    if lacking:
        raise CheckpointError(
            f"{reader.path!r} holds the trained parameters only (CheckpointConfig(parameters='trainable')):"
            f" it lacks {len(lacking)} frozen weights of {type(model).__name__}, such as {lacking[0]!r}, and"
            " has no adapter. Make the task with the same frozen weights,"
            " TransformersTask.from_checkpoint(path, model=...), and export that"
        )


def _load_prompts(model: Any, tensors: TensorSource) -> None:
    """Give a skeleton the weights of its prompts, from which PEFT computes what it writes."""
    if not any(each.is_prompt_learning for each in model.peft_config.values()):
        return
    names = [name for name in tensors.specs if name.startswith("prompt_encoder.")]
    model.load_state_dict({name: tensors.materialize(name) for name in names}, strict=False, assign=True)
    for name, each in model.prompt_tokens.items():  # which PEFT counts up from 0
        model.prompt_tokens[name] = torch.arange(len(each))


def _specs(reader: Reader) -> dict[str, Tensor]:
    records = reader.manifest.tensors[_MODEL].items()
    return {name: spec_of(record.shape, DTYPES[record.dtype]) for name, record in records}


class _Renamed(TensorSource):
    """The tensors of a checkpoint under other names, in the dtype `final` unless that is None."""

    def __init__(self, reader: Reader, names: Mapping[str, Any], final: torch.dtype | None) -> None:
        self._reader = reader
        specs = _specs(reader)
        self._stored, _ = renamed({name: name for name in specs}, names, reader.path)
        found = [*specs]
        for pattern, new in names.items():
            if not any(re.search(pattern, each) for each in found):
                raise CheckpointError(
                    f"the pattern {pattern!r} of ModelInfo(export_names=...) matches no weight of"
                    f" {reader.path!r}, such as {found[0]!r}, so from_pretrained would miss some. Give the"
                    " right pattern, and save again"
                )
            found = [re.sub(pattern, new or "", each) for each in found]
        self.specs = {
            name: spec_of(specs[stored].shape, final)
            if final is not None and specs[stored].is_floating_point()
            else specs[stored]
            for name, stored in self._stored.items()
        }

    def materialize(self, name: str) -> Tensor:
        """Read a tensor."""
        return cast(self._reader.tensor(_MODEL, self._stored[name]), self.specs[name].dtype, repr(name))


class _Stored(TensorSource):
    """The tensors of the model in a checkpoint, each read and verified when it is needed."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.specs = of_model(_specs(reader), reader.path)

    def materialize(self, name: str) -> Tensor:
        """Read a tensor."""
        return self._reader.tensor(_MODEL, f"{IN_TASK}{name}")
