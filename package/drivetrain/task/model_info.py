"""A task's description of its model, for parts that know no model: its blocks, files and collation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.saving.assets import Assets
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch, Json

SaveFinished = Callable[[str, Mapping[str, Tensor], Mapping[str, bytes], bool, Json], str | None]


@dataclass(frozen=True)
class ModelInfo:
    """A task's description of its model; `TaskModule.model_info` returns it.

    Attributes:
        block_classes: The names of the classes that FSDP's `wrap="auto"` shards one at a time. Activation
            checkpointing recomputes them if the model has no repeated blocks. Empty shards the largest blocks
            that occur more than once.
        parallel_plan: How `FSDPConfig(tensor_parallel=2)` splits modules over ranks: styles of
            `torch.distributed.tensor.parallel`, such as `ColwiseParallel()`, by the names of modules in the
            task. `FSDPConfig(expert_parallel=True)` uses each `drivetrain.strategies.ExpertParallel()`. In a
            name, `*` matches any part between two dots: `"blocks.*.out"`. Or a function that returns the
            mapping; it is called when modules are split.
        sequence_columns: For `FSDPConfig(context_parallel=2)`: the columns of a batch that have the sequence
            in dimension 1, such as the tokens, their positions and the label of each position. A rank gets
            its part of these, and the whole of all others.
        attention_modules: For the same: the modules, named as in `parallel_plan`, whose forward is given
            query, key and value, [batch, heads, positions, size], and returns such a tensor. In them a rank
            has the whole sequence and a part of the heads.
        collate: Makes a batch from a list of samples, for data given as a dataset; None is torch's own
            collation. `Trainer(collate=...)` takes precedence. Worker processes get a copy of it, so it
            should not hold the task.
        assets: Files to store beside the weights, such as a processor and a configuration, in the form that
            `Trainer(assets=...)` takes. The Trainer's files replace those of the same names. They are made on
            rank 0 when a fit begins.
        left_out: The names of the frozen parameters, and of buffers that training does not change, such as
            the codes of a quantised base, that checkpoints leave out by default. Another name is refused.
            `CheckpointConfig(parameters=...)` takes precedence.
        origin: The origin of the weights that training starts with, such as "name" and "revision".
            Checkpoints record it, and the error of a resume with other frozen weights names both origins.
        export_format: The format in which other programs load the model, one of
            `drivetrain.checkpoint.formats.FORMATS`; empty for plain safetensors. Checkpoints name it, so that
            a command can export them without the task.
        export_names: The names of the weights in `export_format`, for a model that is not of that library: a
            mapping of regular expressions to replacements, as for `load_weights(rename=...)`; None leaves a
            weight out. `assets` then has the files that the format needs, such as a `config.json`.
        save_finished: Writes the weights of a finished fit in the format of another program, in place of
            `model.safetensors`. All ranks call it together. Its arguments are the run directory or the
            address of the checkpoints; all weights by their names in a checkpoint, sharded ones as
            `DTensor`s; the files beside the weights by name, empty on ranks that do not write; whether this
            rank writes; and the fingerprints of the frozen parameters that checkpoints leave out, by name, or
            None. It returns the path of the file or folder, or None if it has written nothing.
        reset_of: For a task on the meta device with modules of another library. It takes a module, and
            returns a function that initialises the parameters and buffers of the module itself, without those
            of its children. If it returns None, the module's `reset_parameters` is called.
    """

    block_classes: Collection[str] = ()
    parallel_plan: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    sequence_columns: Collection[str] = ()
    attention_modules: Collection[str] = ()
    collate: Callable[[list[Any]], Batch] | None = None
    assets: Assets = ()
    left_out: Collection[str] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    export_format: str = ""
    export_names: Mapping[str, str | None] = field(default_factory=dict)
    save_finished: SaveFinished | None = None
    reset_of: Callable[[nn.Module], Callable[[], None] | None] | None = None


def info_of(model: nn.Module) -> ModelInfo:
    """Return what a task says of its model; of any other module, nothing is known."""
    describe = getattr(model, "model_info", None)  # a user's own loop may train any module
    info = ModelInfo() if describe is None else describe()
    if not isinstance(info, ModelInfo):
        raise ConfigError(
            f"{type(model).__name__}.model_info() returned a {type(info).__name__}; it returns a"
            " drivetrain.task.ModelInfo, such as ModelInfo(assets=[tokenizer])"
        )
    return info
