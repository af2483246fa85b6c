"""What other libraries call our arguments and hooks: used in error messages only, never accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drivetrain.errors import nearest

ARGUMENTS = {
    "accelerator": "strategy",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "check_val_every_n_epoch": "validate_every",
    "default_root_dir": "run_dir",
    "enable_checkpointing": "checkpoint",
    "enable_progress_bar": "progress_bar",
    "eval_interval": "validate_every",
    "eval_steps": "validate_every",
    "gradient_checkpointing": "memory",
    "gradient_clip_val": "max_grad_norm",
    "limit_val_batches": "limit_validation_batches",
    "log_every_n_steps": "log_every",
    "logger": "loggers",
    "logging_steps": "log_every",
    "max_duration": "max_time",
    "num_train_epochs": "max_epochs",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "batch_size",
    "save_steps": "checkpoint",
    "val_check_interval": "validate_every",
}
"""Arguments of Lightning's Trainer, Hugging Face's TrainingArguments and Composer's Trainer."""

CHECKPOINT_ARGUMENTS = {
    "async_save": "asynchronous",
    "dirpath": "directory",
    "every_n_epochs": "every",
    "every_n_train_steps": "every",
    "metric_for_best_model": "by",
    "monitor": "by",
    "save_folder": "directory",
    "save_interval": "every",
    "save_num_checkpoints_to_keep": "keep_last",
    "save_steps": "every",
    "save_top_k": "best",
    "save_total_limit": "keep_last",
    "train_time_interval": "every",
}
"""Arguments of Lightning's ModelCheckpoint, and those about checkpoints of Hugging Face and Composer."""

STRATEGIES = {
    "ddp_find_unused_parameters_true": "DDPConfig(find_unused_parameters=True)",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_spawn": "ddp",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_2_offload": "zero2_offload",
    "deepspeed_stage_3": "zero3",
    "deepspeed_stage_3_offload": "zero3_offload",
    "dp": "ddp",
    "fsdp_native": "fsdp",
    "full_shard": "fsdp",
    "gpu": "cuda",
    "hybrid_shard": "FSDPConfig(sharding='hybrid')",
    "shard_grad_op": "FSDPConfig(sharding='shard_grad_op')",
    "tpu": "xla",
    "xla_spmd": "xla_fsdp_v2",
}
"""Strategies and accelerators of Lightning, and sharding strategies of Hugging Face's Trainer."""

HOOKS = {
    "on_after_backward": "on_before_optimizer_step",
    "on_epoch_begin": "on_epoch_start",
    "on_evaluate": "on_evaluation_end",
    "on_save_checkpoint": "on_checkpoint_saved",
    "on_step_begin": "on_step_start",
    "on_train_batch_end": "on_step_end",
    "on_train_batch_start": "on_step_start",
    "on_train_begin": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_epoch_start": "on_epoch_start",
    "on_train_start": "on_fit_start",
    "on_validation_batch_end": "on_evaluation_step_end",
    "on_validation_end": "on_evaluation_end",
    "on_validation_epoch_end": "on_evaluation_end",
    "on_validation_start": "on_evaluation_start",
}
"""Hooks of Lightning's and Hugging Face's callbacks."""


def help_with(name: str, allowed: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """As `errors.nearest`, but what another library calls by this name goes before what is spelt alike."""
    if name in elsewhere:
        return f"Here it is called {elsewhere[name]!r}. Allowed: {', '.join(map(repr, sorted(allowed)))}."
    return nearest(name, allowed)
