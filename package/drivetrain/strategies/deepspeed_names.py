"""The names that DeepSpeed's configuration may hold, and what the engine cannot honour."""

from __future__ import annotations

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
"""All names that DeepSpeed reads, or once read; others it passes over."""

REFUSED = {
    "bfloat16": "is called 'bf16' today",
    "tensor_parallel": "splits layers over processes that must then get the same data; use strategy 'fsdp'"
    " with FSDPConfig(tensor_parallel=...)",
    "sequence_parallel_size": "splits sequences over processes, which the data's shares do not know",
    "expert_parallel": "replaces modules, so that checkpoints would fit no other strategy",
    "data_efficiency": "changes the data behind the engine's back; do it in the data set",
    "hybrid_engine": "replaces modules to generate text, so that checkpoints would fit no other strategy",
    "torch_autocast": "is the Trainer's: give precision='bf16-mixed'",
    "autotuning": "runs the program many times over to try batch sizes; give the one that you want",
    "gradient_allreduce_op": "would add the gradients of all processes up, where the engine's weights ask for"
    " their mean; take it out",
}
"""Settings that DeepSpeed takes and the engine cannot honour, each with the reason and what to do instead."""

REFUSED_ZERO = {
    "round_robin_gradients": "DeepSpeed 0.19 then loses track of where in its pieces a parameter lies, so"
    " that weights would be mixed up in checkpoints, its own included",
    "zero_hpz_partition_size": "the second copy of the weights that it keeps would stay as it was when a"
    " checkpoint is read",
    "elastic_checkpoint": "it is about DeepSpeed's own checkpoints, which are not written",
    "zenflow": "it makes updates at other times than the engine",
    "super_offload": "it makes updates at other times than the engine",
    "cpu_offload": 'today that is "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'today that is "offload_param": {"device": "cpu"}',
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
