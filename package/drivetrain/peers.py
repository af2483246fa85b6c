"""What other libraries call our arguments, names and hooks: used in error messages only, never accepted.

A table's value is one of our names, or else a phrase that stands after "Here it is".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drivetrain.errors import nearest

_OPTIMIZER = "for the OptimizerConfig(...) that the task's configure_optimizers returns"
_LOADER = "for the DataLoader that you make"
_RECOMPUTED = 'memory={"activation_checkpointing": True}'

ARGUMENTS = {
    "accelerator": "strategy",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "activation_checkpointing": _RECOMPUTED,
    "activation_offloading": 'memory={"offload_activations": True}',
    "amp": 'precision="16-mixed"',
    "auto_find_batch_size": 'micro_batch="auto"',
    "auto_scale_batch_size": 'micro_batch="auto"',
    "benchmark": "torch.backends.cudnn.benchmark = True",
    "bf16": 'precision="bf16-mixed"',
    "check_val_every_n_epoch": "validate_every",
    "ckpt_path": 'trainer.fit(..., resume="auto"), or trainer.test(..., checkpoint="best")',
    "compile_config": "compile",
    "cpu_offload": "strategy=FSDPConfig(cpu_offload=True)",
    "dataloader_drop_last": _LOADER,
    "dataloader_num_workers": "num_workers",
    "dataloader_persistent_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "ddp_find_unused_parameters": "strategy=DDPConfig(find_unused_parameters=True)",
    "deepspeed": 'strategy="deepspeed", or DeepSpeedConfig(config=...)',
    "default_root_dir": "run_dir",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "device_train_microbatch_size": "micro_batch",
    "dtype": "precision",
    "enable_checkpointing": "checkpoint",
    "enable_progress_bar": "progress_bar",
    "epochs": "max_epochs",
    "eval_interval": "validate_every",
    "eval_steps": "validate_every",
    "eval_strategy": "validate_every",
    "evaluation_strategy": "validate_every",
    "fast_dev_run": "limit_train_batches=2, limit_validation_batches=2, max_epochs=1",
    "fp16": 'precision="16-mixed"',
    "fp8": 'precision="fp8"',
    "fsdp": 'strategy="fsdp", or FSDPConfig(...)',
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_clip_algorithm": "max_grad_norm, which clips by the norm",
    "gradient_clip_val": "max_grad_norm",
    "half": 'precision="16-mixed"',
    "learning_rate": f"lr, {_OPTIMIZER}",
    "limit_eval_batches": "limit_validation_batches",
    "limit_val_batches": "limit_validation_batches",
    "load_best_model_at_end": "Task.from_checkpoint(result.best_checkpoint)",
    "log_every_n_steps": "log_every",
    "logger": "loggers",
    "logging_dir": "run_dir",
    "logging_nan_inf_filter": "on_nonfinite",
    "logging_steps": "log_every",
    "lr": f"lr, {_OPTIMIZER}",
    "lr_scheduler": f"schedule, {_OPTIMIZER}",
    "lr_scheduler_type": f"schedule, {_OPTIMIZER}",
    "max_duration": "max_epochs, max_steps or max_time",
    "max_train_steps": "max_steps",
    "max_restarts": "drivetrain launch --max-restarts N train.py",
    "metric_for_best_model": "checkpoint=CheckpointConfig(by=...)",
    "micro_batch_size": "micro_batch",
    "microbatch": "micro_batch",
    "min_epochs": "EarlyStopping(min_epochs=...), a callback",
    "mixed_precision": "precision",
    "num_processes": "devices",
    "num_sanity_val_steps": "trainer.validate(task, data), before the fit",
    "num_train_epochs": "max_epochs",
    "offload_activations": 'memory={"offload_activations": True}',
    "optim": f"the name, {_OPTIMIZER}",
    "optimizer": f"the name, {_OPTIMIZER}",
    "optimizer_in_backward": 'memory={"release_gradients": True}',
    "optimizers": f"the name, {_OPTIMIZER}",
    "output_dir": "run_dir",
    "overfit_batches": "limit_train_batches",
    "per_device_train_batch_size": "batch_size",
    "persistent_workers": _LOADER,
    "pin_memory": _LOADER,
    "prefetch_factor": _LOADER,
    "profiler": "callbacks=[Throughput()] for time and [MemoryReport()] for memory, or torch.profiler around"
    " trainer.steps(...)",
    "release_gradients": 'memory={"release_gradients": True}',
    "report_to": "loggers",
    "resume_from_checkpoint": 'trainer.fit(..., resume="auto"), or a path',
    "save_steps": "checkpoint=CheckpointConfig(every=...)",
    "save_strategy": "checkpoint=CheckpointConfig(every=...)",
    "save_total_limit": "checkpoint=CheckpointConfig(keep_last=...)",
    "schedulers": f"schedule, {_OPTIMIZER}",
    "sync_batchnorm": "strategy=DDPConfig(sync_batchnorm=True)",
    "terminate_on_nan": "on_nonfinite",
    "tf32": 'precision="tf32"',
    "torch_compile": "compile",
    "torch_compile_backend": 'compile={"backend": ...}',
    "torch_compile_mode": 'compile={"mode": ...}',
    "torch_dtype": "precision",
    "train_batch_size": "batch_size",
    "use_distributed_sampler": "already_split(data) for data that you have divided; else nothing is needed",
    "val_check_interval": "validate_every",
    "warmup_ratio": f"warmup_ratio, {_OPTIMIZER}",
    "warmup_steps": f"warmup_steps, {_OPTIMIZER}",
    "weight_decay": f"weight_decay, {_OPTIMIZER}",
}
"""Arguments of Lightning's Trainer, Hugging Face's TrainingArguments and Composer's Trainer."""

FIT_ARGUMENTS = {
    "ckpt_path": "resume",
    "data": "train_data",
    "datamodule": "train_data, an object with train_data() and validation_data()",
    "eval_dataset": "validation_data",
    "model": "task",
    "resume_from_checkpoint": "resume",
    "train_dataloader": "train_data",
    "train_dataloaders": "train_data",
    "train_dataset": "train_data",
    "val_data": "validation_data",
    "val_dataloader": "validation_data",
    "val_dataloaders": "validation_data",
}
"""Arguments of the verbs that train, in Lightning and Hugging Face."""

EVALUATION_ARGUMENTS = {
    "ckpt_path": "checkpoint",
    "dataloaders": "data",
    "datamodule": "data, an object with validation_data(), test_data() or predict_data()",
    "eval_dataset": "data",
    "model": "task",
    "test_dataset": "data",
    "val_dataloaders": "data",
}
"""Arguments of their verbs that evaluate."""

ENGINE_ARGUMENTS = {
    **{name: ARGUMENTS[name] for name in ("accelerator", "amp", "bf16", "dtype", "fp16", "fp8", "half")},
    **{name: ARGUMENTS[name] for name in ("deepspeed", "fsdp", "mixed_precision", "num_processes", "tf32")},
    **{name: ARGUMENTS[name] for name in ("activation_checkpointing", "gradient_checkpointing")},
    "cpu": 'strategy="cpu"',
    "deepspeed_plugin": "strategy=DeepSpeedConfig(...)",
    "dynamo_plugin": "compile",
    "fsdp_plugin": "strategy=FSDPConfig(...)",
    "gradient_accumulation_steps": "as many engine.backward(loss) before an engine.step(optimizer)",
    "max_grad_norm": "engine.step(optimizer, max_grad_norm=...)",
    "micro_batch": "Trainer(micro_batch=...): in a loop of your own the parts are yours to make",
    "split_batches": "already_split(data) for data that you have divided; else nothing is needed",
}
"""Arguments of Accelerate's Accelerator and Lightning's Fabric, and some of our Trainer's."""

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

COMPILE_ARGUMENTS = {
    "disable": "compile=False",
    "full_graph": "fullgraph",
    "torch_compile_backend": "backend",
}
"""Arguments of torch.compile and Hugging Face's Trainer."""

MEMORY_ARGUMENTS = {
    "activation_offloading": "offload_activations",
    "cpu_offload": "strategy=FSDPConfig(cpu_offload=True), for parameters",
    "gradient_checkpointing": "activation_checkpointing",
    "optimizer_in_backward": "release_gradients",
}
"""What torchtune, Composer and Hugging Face's Trainer call them."""

FSDP_ARGUMENTS = {
    "auto_wrap_policy": "wrap",
    "ignored_modules": "ignored",
    "min_num_params": "wrap=100_000_000, such a number",
    "sharding_strategy": "sharding",
    "transformer_layer_cls_to_wrap": "wrap",
}
"""Arguments of torch's FSDP and of Accelerate's plugin."""

FLOAT8_ARGUMENTS = {
    "filter_fqns": "leave_out",
    "float8_recipe_name": "recipe",
    "module_filter_fn": "leave_out",
    "recipe_name": "recipe",
}
"""Arguments of torchao and torchtitan."""

EARLY_STOPPING_ARGUMENTS = {
    "early_stopping_patience": "patience",
    "early_stopping_threshold": "threshold",
    "min_delta": "threshold",
    "monitor": "metric",
    "stopping_threshold": "stop_at",
}
"""Arguments of Lightning's and Hugging Face's callbacks."""

OPTIMIZER_ARGUMENTS = {
    "adam_beta1": "betas=(0.9, 0.999)",
    "adam_epsilon": "eps",
    "learning_rate": "lr",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_norm": "max_grad_norm",
    "min_8bit_size": "none: small states of torchao's optimizers stay as they are",
    "num_warmup_steps": "warmup_steps",
}
"""Arguments of Hugging Face's Trainer and bitsandbytes."""

PRECISIONS = {
    **dict.fromkeys(("32-true", "fp32", "float32", "float", "full", "no", "none"), "32"),
    **dict.fromkeys(("64-true", "fp64", "float64", "double"), "64"),
    **dict.fromkeys(("bf16", "bfloat16", "amp_bf16"), "bf16-mixed"),
    **dict.fromkeys(("16", "fp16", "float16", "half", "amp", "amp_fp16"), "16-mixed"),
    **dict.fromkeys(("float8", "amp_fp8", "transformer-engine", "transformer-engine-float16"), "fp8"),
    "high": "tf32",
}
"""Precisions of Lightning, Hugging Face, Accelerate and Composer, and torch's dtypes."""

OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fusedadam"), "adamw"
    ),
    **dict.fromkeys(("decoupledadamw", "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw8bit"),
    **dict.fromkeys(("paged_adamw_8bit", "pagedadamw8bit", "bnb.adamw8bit"), "adamw8bit"),
    "adam_8bit": "adam8bit",
    "adamw_torch_4bit": "adamw4bit",
    "adamw_torch_fp8": "adamwfp8",
    "rmsprop_bnb": "rmsprop",
}
"""Optimizers of Hugging Face's Trainer, bitsandbytes and Composer."""

PREEMPTION_ARGUMENTS = {
    "grace_period": "deadline",
    "requeue_signal": "requeue",
    "signals": "requeue",
    "timeout": "deadline",
}
"""Arguments of Lightning's SLURMEnvironment and of Composer's and batch systems' ways to be told."""

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
    names = sorted(allowed)
    ours = elsewhere.get(name, elsewhere.get(name.lower()))
    if ours is None or name.lower() in names:
        return nearest(name, names)
    here = f"called {ours!r}" if ours in names else ours
    return f"Here it is {here}. Allowed: {', '.join(map(repr, names))}."
