"""DeepSpeed's own configuration, as a user has it: read, and checked for what the engine itself uses of it.

DeepSpeed checks the rest when the Trainer is made; see `errors.py`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.files import read_json

_NAMES = """
activation_checkpointing aio allgather_size amp autotuning bf16 bfloat16 checkpoint comet comms_logger
communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency
data_types dataloader_drop_last datastates disable_allgather disable_python_gc dump_state eigenvalue
elasticity expert_parallel flops_profiler fp16 fp32_allreduce gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting hybrid_engine log_level
managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type
sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers
torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
vocabulary_size wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer zero_optimization
"""

NAMES = frozenset(_NAMES.split())
"""All names that DeepSpeed reads, or once read; it ignores others."""

REFUSED = {
    "bfloat16": "is called 'bf16' today",
    "tensor_parallel": "splits layers over processes, which must then get the same data; use strategy 'fsdp'"
    " with FSDPConfig(tensor_parallel=...)",
    "sequence_parallel_size": "splits sequences over processes; use strategy 'fsdp' with context_parallel",
    "expert_parallel": "replaces modules, so that checkpoints would fit no other strategy",
    "curriculum_learning": "passes a length to the model's forward; give the Trainer the callback"
    " SequenceLength(ramp(...)), which cuts the batches",
    "data_efficiency": "changes the data behind the engine's back; do it in the data set, or give the Trainer"
    " SequenceLength(...) or batch_size={...}",
    "hybrid_engine": "replaces modules to generate text, so that checkpoints would fit no other strategy",
    "torch_autocast": "is the Trainer's: give precision='bf16-mixed'",
    "autotuning": "runs the program many times over to try batch sizes; give the one that you want",
    "optimizer": "is the task's: remove it, and let configure_optimizers return"
    " OptimizerConfig('adamw', lr=...)",
    "scheduler": "is the task's: remove it, and let configure_optimizers return"
    " OptimizerConfig(..., schedule='linear', warmup_steps=...)",
    "gradient_allreduce_op": "would sum the gradients of all processes, but the engine's weights need their"
    " mean; remove it",
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"),
        "is not for ZeRO; remove it: gradients are reduced in float32",
    ),
    "compile.deepcompile": "replaces the engine's step; remove it, and give Trainer(compile=True)",
    "zero_optimization.round_robin_gradients": "makes DeepSpeed 0.19 lose track of where its flat pieces hold"
    " a parameter, so that weights would be mixed up in checkpoints, its own included",
    "zero_optimization.zero_hpz_partition_size": "keeps a second copy of the weights, which would not be"
    " updated when a checkpoint is read",
    "zero_optimization.elastic_checkpoint": "is for DeepSpeed's own checkpoints, which are not written",
    "zero_optimization.zenflow": "makes steps at other times than the engine",
    "zero_optimization.super_offload": "makes steps at other times than the engine",
    "zero_optimization.cpu_offload": 'is called "offload_optimizer": {"device": "cpu"} today',
    "zero_optimization.cpu_offload_param": 'is called "offload_param": {"device": "cpu"} today',
    **dict.fromkeys(
        (
            "bf16.bf16_master_weights_and_grads",
            "bf16.bf16_optimizer_states",
            "fp16.fp16_master_weights_and_grads",
        ),
        "keeps no float32 weights, which steps and checkpoints need; remove it",
    ),
}
"""Settings of DeepSpeed that the engine cannot honour, each with the reason and what to do instead."""

_OF_TRAINER = {
    "train_batch_size": "follows from the data",
    "train_micro_batch_size_per_gpu": "is that of the data",
    "gradient_accumulation_steps": "is given to the Trainer",
    "gradient_clipping": "is Trainer(max_grad_norm=...)",
}
"""Settings that a program gives elsewhere, and where."""

AUTO = "auto"
"""The value in DeepSpeed's configuration that means the Trainer's value, or DeepSpeed's default."""

_SECTIONS = ("zero_optimization", "bf16", "fp16", "compile")
"""The sections that this file reads."""


def read(config: Any) -> dict[str, Any]:
    """Read and check a configuration; empty for None.

    Args:
        config: The path of a JSON file, or a mapping.

    Raises:
        ConfigError: It is neither, or it has a wrong name or a setting that the engine cannot honour.
    """
    if config is None:
        return {}
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        try:
            config = read_json(path, object_pairs_hook=_each_once)
        except (OSError, ValueError) as error:
            raise ConfigError(f"DeepSpeed's configuration {str(path)!r} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(
            "DeepSpeedConfig(config=...) must be the path of a JSON file or a mapping, not a"
            f" {type(config).__name__}"
        )
    given = copy.deepcopy({key: value for key, value in config.items() if value is not None})
    for key, value in given.items():
        _check_name(key, value)
    for key in _SECTIONS:
        if not isinstance(given.get(key, {}), Mapping):
            raise ConfigError(f"DeepSpeed's configuration has {key}={given[key]!r}; it must be a mapping")
    _check_honoured(given)
    return given


def is_off(value: Any) -> bool:
    """Return whether a section or a setting is off."""
    if isinstance(value, Mapping):
        if "autotp_size" in value:
            return value["autotp_size"] in (0, 1)
        return not value or value.get("enabled") is False
    return value is None or value in (False, AUTO, "mean") or (value == 1 and value is not True)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"it has {twice!r} twice")
    return dict(pairs)


def _check_name(key: Any, value: Any) -> None:
    """Check that DeepSpeed reads this name, unless it is a user's note, which begins with no letter."""
    if key in NAMES:
        if isinstance(value, str) and value.lower() in ("true", "false"):  # DeepSpeed takes both as true
            raise ConfigError(f"DeepSpeed's configuration has {key}={value!r}; write {value.lower()}")
        return
    if str(key)[:1].isalpha():
        raise ConfigError(
            f"DeepSpeed's configuration has {key!r}, which DeepSpeed does not know and would ignore. To keep"
            f" it as a note, let its name begin with '_'. {nearest(str(key), NAMES)}"
        )


def _check_honoured(given: Mapping[str, Any]) -> None:
    """Check that the engine can honour all settings."""
    for key, where in _OF_TRAINER.items():
        if given.get(key, AUTO) != AUTO:
            raise ConfigError(
                f"DeepSpeed's configuration has {key}={given[key]!r}, which {where}. Write"
                f' "{key}": "auto" there, or leave it out'
            )
    for path, why in REFUSED.items():
        section, _, key = path.rpartition(".")
        if not is_off((given.get(section, {}) if section else given).get(key)):
            raise ConfigError(f"DeepSpeed's configuration has {path!r}, which {why}")
    for key, there in (
        ("managed_gradient_accumulation", given),
        ("compute_grad_norm", given.get("zero_optimization", {})),
    ):
        if there.get(key) is False:
            raise ConfigError(f"DeepSpeed's configuration has {key}=false, which the engine needs. Remove it")
