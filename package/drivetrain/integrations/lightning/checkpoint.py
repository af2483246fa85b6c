"""Weights and plain hyper-parameters from Lightning's checkpoints, for an unchanged module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.checkpoint.weights.load import is_torch_file, torch_weights
from drivetrain.checkpoint.weights.rename import Rename
from drivetrain.checkpoint.weights.warm_start import LoadReport, load_weights_into
from drivetrain.core.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of `load_checkpoint`; its text is a table.

    Attributes:
        hparams: The hyper-parameters that are plain values: numbers, texts, lists and mappings of them.
        left_out: The rest of the file, by name, each part described in words: hyper-parameters that are
            objects, the position, the optimizers, the callbacks and everything else.
        weights: The report on the weights.
        averaged: Whether the loaded weights are averages, from a file that also has the module's own weights.
    """

    hparams: Mapping[str, Any]
    left_out: Mapping[str, str]
    weights: LoadReport
    averaged: bool = False

    def __str__(self) -> str:
        """Return the report on the weights, and a line for each part that was left out."""
        width = max(map(len, self.left_out), default=0)
        lines = [f"left out    {name:<{width}}  {text}" for name, text in self.left_out.items()]
        return "\n".join([str(self.weights), *lines])


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, *, strict: bool = True, rename: Rename | None = None
) -> LoadedCheckpoint:
    """Load the weights of a checkpoint of Lightning into a module, and return its plain hyper-parameters.

    ::

        module = LitModel(**defaults)
        loaded = load_checkpoint("last.ckpt", module)
        trainer.validate(as_task(module), as_data(LitData()))

    Nothing that the file names is imported or run; `on_load_checkpoint` is not called. The prefixes
    "_orig_mod." of torch.compile and "module." of DDP are removed. From a file of `EMAWeightAveraging` the
    averages are loaded, as in Lightning, with a warning. No run can resume from the file: its optimizers and
    its position are left out.

    Args:
        path: The ".ckpt" file; also an address.
        module: The module, unchanged: a `LightningModule` or any other.
        strict: Whether all weights must fit; as for `task.load_weights`.
        rename: As for `task.load_weights`.

    Raises:
        DamagedCheckpointError: The file is not complete.
        CheckpointError: There is no such file, or its weights do not fit. The module is unchanged then.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"load_checkpoint takes the path of a '.ckpt' file, not a {type(path).__name__}")
    given = os.fspath(path)
    if not isinstance(module, nn.Module):
        name = module.__name__ if isinstance(module, type) else type(module).__name__
        raise ConfigError(f"load_checkpoint fills a module, not {name}. Make one first: module = Model(...)")
    if not is_torch_file(given):
        raise CheckpointError(
            f"there is no checkpoint file of Lightning at {given!r}; its name would end with '.ckpt'."
            " The checkpoints of drivetrain are read by task.load_weights(path)"
        )
    found = torch_weights(given)
    report = load_weights_into(module, found, strict=strict, rename=rename)
    left = {f"hyper-parameter {name}": what for name, what in found.objects.items()}
    left |= dict.fromkeys(found.left, "not read")
    return LoadedCheckpoint(found.hparams, left, report, bool(found.warning))
