"""What DeepSpeed's configuration may hold: the names that it reads, and what the engine cannot honour."""

from __future__ import annotations

SECTIONS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "checkpoint",
        "comet",
        "comms_logger",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "datastates",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "hybrid_engine",
        "nebula",
        "optimizer",
        "pipeline",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "sparse_attention",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "wandb",
        "weight_quantization",
        "zero_optimization",
    }
)
"""Names whose values are mappings."""

FLAGS = frozenset(
    {
        "dataloader_drop_last",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "fp32_allreduce",
        "graph_harvesting",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "prescale_gradients",
        "sparse_gradients",
        "use_data_before_expert_parallelism",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    }
)
"""Names whose values are true or false."""

NUMBERS = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0,
    "gradient_predivide_factor": 0,
    "sequence_parallel_size": 1,
    "steps_per_print": 0,
    "train_batch_size": 1,
    "train_micro_batch_size_per_gpu": 1,
}
"""Names whose values are numbers, with the least allowed."""

_WORDS = {
    "allgather_size",
    "communication_data_type",
    "gradient_allreduce_op",
    "log_level",
    "seq_parallel_communication_data_type",
    "vocabulary_size",
}

NAMES = SECTIONS | FLAGS | NUMBERS.keys() | _WORDS
"""All names that DeepSpeed reads, or once read; others it passes over."""

_GONE = "DeepSpeed 0.19 no longer has"

REFUSED = {
    "tensor_parallel": "splits layers over processes that must then get the same data; use strategy 'fsdp'"
    " with FSDPConfig(tensor_parallel=...)",
    "sequence_parallel_size": "splits sequences over processes, which the data's shares do not know",
    "expert_parallel": "replaces modules, so that checkpoints would fit no other strategy",
    "elasticity": "chooses the batch size; give the Trainer's data the one that you want",
    "curriculum_learning": "changes the data behind the engine's back; do it in the data set",
    "data_efficiency": "changes the data behind the engine's back; do it in the data set",
    "compression_training": "replaces modules, so that checkpoints would fit no other strategy",
    "hybrid_engine": "replaces modules to generate text, so that checkpoints would fit no other strategy",
    "torch_autocast": "is the Trainer's: give precision='bf16-mixed'",
    "amp": "needs NVIDIA's apex; give precision='16-mixed'",
    "autotuning": "runs the program many times over to try batch sizes; give the one that you want",
    "gradient_allreduce_op": "would add the gradients of all processes up, where the engine's weights ask for"
    " their mean; take it out",
    "nebula": _GONE,
    "quantize_training": _GONE,
    "sparse_gradients": f"{_GONE}: an embedding with sparse=True needs no setting",
    "eigenvalue": _GONE,
    "sparse_attention": _GONE,
    "graph_harvesting": _GONE,
    "progressive_layer_drop": f"{_GONE}; drop layers in the task's forward",
}
"""What the engine cannot honour, each with the reason and what to do instead."""

REFUSED_ZERO = {
    "round_robin_gradients": "DeepSpeed 0.19 then loses track of where in its pieces a parameter lies, so"
    " that weights would be mixed up in checkpoints, its own included",
    "mics_shard_size": "checkpoints could not be put together from shards of groups of processes; use"
    " strategy 'fsdp' with FSDPConfig(sharding='hybrid')",
    "mics_hierarchical_params_gather": f"{_GONE} it",
    "zeropp_loco_param": f"{_GONE} it",
    "zero_hpz_partition_size": "the second copy of the weights that it keeps would stay as it was when a"
    " checkpoint is read",
    "elastic_checkpoint": "it is about DeepSpeed's own checkpoints, which are not written",
    "zenflow": "it makes updates at other times than the engine",
    "super_offload": "it makes updates at other times than the engine",
}
"""The same within "zero_optimization"."""

REFUSED_PRECISION = (
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
    "fp16_master_weights_and_grads",
)
"""Switches within "bf16" and "fp16" that the engine cannot honour."""

SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization.",
    "DeepSpeedBF16Config": "bf16.",
    "DeepSpeedFP16Config": "fp16.",
    "CompileConfig": "compile.",
    "HybridEngineConfig": "hybrid_engine.",
    "DeepSpeedMonitorConfig": "",
    "CommsLoggerConfig": "comms_logger.",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler.",
    "WeightQuantConfig": "weight_quantization.",
}
"""Which section each of DeepSpeed's own classes reads."""
