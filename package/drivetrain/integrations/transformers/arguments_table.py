"""Every option of transformers' `TrainingArguments` and `Seq2SeqTrainingArguments`, with its meaning here.

This table is data: `arguments.py` reads it, `docs/how-to/transformers-arguments.md` prints it, and tests
check that the installed release has no option without a row, and that each mapped row has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAPPED, IGNORED, REFUSED = "mapped", "ignored", "refused"

TWO_PROCESSES: Mapping[str, str] = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""The environment that a launcher gives to one of two processes."""


@dataclass(frozen=True)
class Row:
    """An option.

    Attributes:
        name: Its name there.
        status: "mapped", "ignored" or "refused".
        text: What it becomes here, or the reason why it is ignored or refused, with what to use instead.
        example: For a mapped option, a value that has an effect.
        needs: Other options that the example needs.
        environment: Variables of the environment that the example needs.
        default: The default of an option that the installed release does not have.
        is_old: Whether it is a name of versions 4.2x to 4.5x alone.
    """

    name: str
    status: str
    text: str
    example: Any = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    default: Any = None
    is_old: bool = False


def _mapped(name: str, text: str, example: Any, **needs: Any) -> Row:
    return Row(name, MAPPED, text, example, needs)


def _of_several(name: str, text: str, example: Any, rank: str = "0", local: str = "2", **needs: Any) -> Row:
    """A row whose example needs two processes."""
    environment = {**TWO_PROCESSES, "RANK": rank, "LOCAL_WORLD_SIZE": local}
    environment["LOCAL_RANK"] = rank if local == "2" else "0"
    return Row(name, MAPPED, text, example, needs, environment)


def _ignored(name: str, text: str) -> Row:
    return Row(name, IGNORED, text)


def _refused(name: str, text: str) -> Row:
    return Row(name, REFUSED, text)


def _old(name: str, text: str, example: Any, default: Any = None, **needs: Any) -> Row:
    return Row(name, MAPPED, text, example, needs, default=default, is_old=True)


def _old_ignored(name: str, text: str, default: Any = None) -> Row:
    return Row(name, IGNORED, text, default=default, is_old=True)


def _old_refused(name: str, text: str, default: Any = None) -> Row:
    return Row(name, REFUSED, text, default=default, is_old=True)


_SCRIPT = "a flag of the script's own; transformers' Trainer does not read it either"
_SCHEDULE = "transformers' own function of the step, which begins at rate 0: `TransformersOptimizer`"
_EVALUATION: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 10}
_GENERATION: dict[str, Any] = {"predict_with_generate": True}
_HUB: dict[str, Any] = {"push_to_hub": True}
_FSDP: dict[str, Any] = {"fsdp": "full_shard"}
_TRACKIO: dict[str, Any] = {"report_to": "trackio"}

_RUN = (
    _mapped("output_dir", "`Trainer(run_dir=)`", "runs/example"),
    _mapped("run_name", "`Trainer(run_name=)`", "example"),
    _mapped("num_train_epochs", "`Trainer(max_epochs=)`, also fractions", 2.5),
    _mapped("max_steps", "`Trainer(max_steps=)`, which replaces the epochs", 7),
    _mapped("seed", "`Trainer(seed=)`", 7),
    _mapped("data_seed", "`Trainer(data_seed=)`", 7),
    _mapped("full_determinism", "`Trainer(deterministic=True)`", True),
    _mapped("resume_from_checkpoint", "`.resume`, for `fit(..., resume=)`", "runs/example/checkpoints/7"),
    _ignored("ignore_data_skip", "nothing is skipped at a resume: the position in the data is a number"),
    _ignored(
        "restore_callback_states_from_checkpoint", "callbacks with a state are restored from each checkpoint"
    ),
    _ignored("do_train", _SCRIPT),
    _ignored("do_eval", _SCRIPT),
    _ignored("do_predict", _SCRIPT),
    _ignored("local_rank", "read from the launcher's environment"),
)

_STEP = (
    _mapped("per_device_train_batch_size", "`Trainer(batch_size=)`, of each process", 3),
    _mapped("gradient_accumulation_steps", "`Trainer(gradient_accumulation_steps=)`", 2),
    _mapped("max_grad_norm", "`Trainer(max_grad_norm=)`; 0 disables it", 0.5),
    _mapped(
        "auto_find_batch_size",
        '`Trainer(micro_batch="auto")`: the batch of a step stays the same, and is run in parts that fit',
        True,
    ),
    _ignored(
        "average_tokens_across_devices",
        "the loss is always weighted over all processes, so that any number gives the gradient of one",
    ),
    _mapped("label_smoothing_factor", "`TransformersTask(label_smoothing=)`", 0.1),
    _mapped(
        "neftune_noise_alpha", "`TransformersTask(neftune_alpha=)`; nothing of it stays on the model", 5.0
    ),
    _mapped("torch_empty_cache_steps", "a callback empties the allocator's cache after every n-th step", 4),
    _refused(
        "use_liger_kernel",
        "apply the kernels to the model before you make the task:"
        " `transformers.integrations.liger.apply_liger_kernel(model, {...})`",
    ),
    _refused("liger_kernel_config", "see `use_liger_kernel`"),
    _refused(
        "use_cache", "caches are for generation; set `model.config.use_cache = True` if a loss needs one"
    ),
)

_OPTIMIZER = (
    _mapped("learning_rate", "`TransformersOptimizer(learning_rate=)`", 1e-3),
    _mapped(
        "weight_decay",
        "`TransformersOptimizer(weight_decay=)`, for the parameters that transformers chooses",
        0.1,
    ),
    _mapped("adam_beta1", "`TransformersOptimizer(beta1=)`", 0.8),
    _mapped("adam_beta2", "`TransformersOptimizer(beta2=)`", 0.9),
    _mapped("adam_epsilon", "`TransformersOptimizer(eps=)`", 1e-6),
    _mapped("optim", "`TransformersOptimizer(name=)`; see the table of optimizers", "sgd"),
    _mapped("optim_args", "`TransformersOptimizer(options=)`", "momentum=0.9", optim="sgd"),
    _refused(
        "optim_target_modules",
        "for GaLore and APOLLO; give `TransformersTask(optimizer=OptimizerConfig(GaLoreAdamW,"
        " groups=ParameterGroup('*.weight', rank=128)))`",
    ),
    _mapped("lr_scheduler_type", _SCHEDULE, "cosine"),
    _mapped("lr_scheduler_kwargs", _SCHEDULE, {"num_cycles": 0.4}, lr_scheduler_type="cosine"),
    _mapped("warmup_steps", _SCHEDULE + "; below 1 it is a share of all steps", 10),
)

_FULL_EVAL = (
    "`{}` evaluates in 16 bits too; after a fit, evaluate by"
    ' `Trainer(precision="{}").validate(copy.deepcopy(task), data)`'
)

_PRECISION = (
    _mapped("bf16", '`Trainer(precision="bf16-mixed")`', True),
    _mapped("fp16", '`Trainer(precision="16-mixed")`', True),
    _mapped("tf32", '`Trainer(precision="tf32")`; "bf16-mixed" and "16-mixed" leave it little to do', True),
    _refused("bf16_full_eval", _FULL_EVAL.format("bf16", "bf16-true")),
    _refused("fp16_full_eval", _FULL_EVAL.format("fp16", "16-true")),
    _mapped("activation_checkpointing", '`Trainer(memory={"activation_checkpointing": True})`', True),
    _ignored("activation_checkpointing_kwargs", "`use_reentrant` changes no number; others are refused"),
    _mapped("gradient_checkpointing", "the former name of `activation_checkpointing`", True),
    _ignored("gradient_checkpointing_kwargs", "the former name of `activation_checkpointing_kwargs`"),
    _mapped("torch_compile", "`Trainer(compile=True)`", True),
    _mapped("torch_compile_backend", "`CompileConfig(backend=)`", "eager"),
    _mapped("torch_compile_mode", "`CompileConfig(mode=)`", "max-autotune"),
)

_LOGS = (
    _mapped("logging_strategy", '`Trainer(log_every=)`; "no" is None', "epoch"),
    _mapped("logging_steps", "`Trainer(log_every=)`; below 1 it is a share of the run", 7),
    _mapped("logging_first_step", "`Trainer(log_first_step=)`", True),
    _mapped(
        "logging_nan_inf_filter",
        '`Trainer(on_nonfinite="skip")`: a step whose loss or gradient is not finite is left out and'
        ' reported; with False, "raise" ends the run at the next log point',
        False,
    ),
    _mapped(
        "include_num_input_tokens_seen",
        "`TransformersTask(count_tokens=)`: `run.progress.tokens`",
        "non_padding",
    ),
    _mapped("log_level", 'the level of the logger "drivetrain"', "error"),
    _of_several("log_level_replica", "the same, on the other processes", "error", rank="1"),
    _of_several(
        "log_on_each_node",
        "whether the first process of each machine has `log_level`, or the first of all",
        False,
        rank="1",
        local="1",
        log_level="error",
    ),
    _mapped("disable_tqdm", "`Trainer(progress_bar=False)`", True),
    _mapped(
        "report_to",
        "`Trainer(loggers=)`, with the logger of that name; `codecarbon` is the callback `CodeCarbon`, for"
        " the country in `CODECARBON_COUNTRY_ISO_CODE`. Another is refused: write it with the three methods"
        " of `drivetrain.loggers.Logger`, and pass it as `from_training_arguments(args, loggers=[...])`",
        "tensorboard",
    ),
    _mapped("project", '`TrackioLogger(project=)`, if `report_to` has "trackio"', "digits", **_TRACKIO),
    _mapped(
        "trackio_space_id", '`TrackioLogger(space_id=)`, if `report_to` has "trackio"', "me/a", **_TRACKIO
    ),
    _mapped(
        "trackio_bucket_id", '`TrackioLogger(options=)`, if `report_to` has "trackio"', "me/b", **_TRACKIO
    ),
    _ignored("trackio_static_space_id", "no static copy of a Space of Trackio is made after the training"),
    _mapped(
        "skip_memory_metrics",
        "`MemoryReport()`, if it is False; a script's metrics have the memory by stage",
        False,
    ),
    _mapped(
        "debug",
        '"underflow_overflow" is `NonFiniteDetector()`, "tpu_metrics_debug" is `XLAReport()`',
        "underflow_overflow",
    ),
)

_EVALUATIONS = (
    _mapped("eval_strategy", '`Trainer(validate_every=)`; "no" is None', "epoch"),
    _mapped(
        "eval_steps", "`Trainer(validate_every=)`; below 1 it is a share of the run", 7, eval_strategy="steps"
    ),
    _mapped("eval_delay", "`Trainer(validate_from=)`", 20, **_EVALUATION),
    _mapped("eval_on_start", "`.eval_on_start`: call `trainer.validate(task, data)` before the fit", True),
    _mapped("per_device_eval_batch_size", "`Trainer(evaluation_batch_size=)`", 3),
    _mapped("prediction_loss_only", "`.loss_only`: leave `compute_metrics` out of the task", True),
    _ignored(
        "eval_accumulation_steps", "outputs move to the host after each batch, and to disk above a limit"
    ),
    _refused(
        "eval_do_concat_batches",
        "`compute_metrics` gets whole arrays; `batch_eval_metrics=True` gives it one batch at a time",
    ),
    _ignored("eval_use_gather_object", "the outputs of all processes are gathered, tuples and mappings too"),
    _mapped("include_for_metrics", "`TransformersTask(include_for_metrics=)`", ["inputs"]),
    _mapped("batch_eval_metrics", "`TransformersTask(batch_eval_metrics=)`", True),
    _mapped("label_names", "`TransformersTask(label_names=)`", ["labels"]),
    _mapped("remove_unused_columns", "`TransformersTask(remove_unused_columns=)`", False),
    _mapped("predict_with_generate", "`TransformersTask(generate=True)`", True),
    _mapped("generation_max_length", '`TransformersTask(generate={"max_length": ...})`', 9, **_GENERATION),
    _mapped("generation_num_beams", '`TransformersTask(generate={"num_beams": ...})`', 2, **_GENERATION),
    _mapped(
        "generation_config",
        "`TransformersTask(generate=)`, a `GenerationConfig` or the path of one",
        "generation",
        **_GENERATION,
    ),
)

_SAVES = (
    _mapped(
        "save_strategy",
        '`CheckpointConfig(every=)`; "no" is `Trainer(checkpoint=False)`, "best" saves the best and the end',
        "epoch",
    ),
    _mapped("save_steps", "`CheckpointConfig(every=)`; below 1 it is a share of the run", 7),
    _mapped("save_total_limit", '`CheckpointConfig(keep_last=)`; with "best", `best=`', 3),
    _mapped("save_only_model", "`CheckpointConfig(resumable=False)`", True),
    _refused(
        "save_on_each_node",
        "all processes save into one directory, which all machines see, or at an address:"
        ' `Trainer(checkpoint=CheckpointConfig(directory="s3://..."))`',
    ),
    _ignored(
        "enable_jit_checkpoint", "a signal such as SIGTERM always ends a fit in order, with a checkpoint"
    ),
    _mapped(
        "load_best_model_at_end",
        "`CheckpointConfig(restore_best=True)`",
        True,
        eval_strategy="epoch",
        save_strategy="epoch",
    ),
    _mapped(
        "metric_for_best_model",
        '`CheckpointConfig(by=)`: "eval_f1" is "validation/f1"',
        "f1",
        eval_strategy="epoch",
    ),
    _mapped(
        "greater_is_better",
        "`CheckpointConfig(mode=)`",
        True,
        metric_for_best_model="loss",
        eval_strategy="epoch",
    ),
    _mapped("push_to_hub", "`Publish(repository)`, of the extra `[hub]`", True),
    _mapped("hub_model_id", "the repository of `Publish`", "me/example", **_HUB),
    _mapped("hub_strategy", '`Publish(every=)`: "end", "save", "checkpoint" or "all"', "end", **_HUB),
    _mapped("hub_token", "`Publish(token=)`", "hf_example", **_HUB),
    _mapped("hub_private_repo", "`Publish(private=)`", True, **_HUB),
    _mapped("hub_revision", "`Publish(revision=)`", "draft", **_HUB),
    _ignored("hub_always_push", "an upload never skips a save for good: the newest is uploaded next"),
)

_DATA = (
    _mapped(
        "dataloader_drop_last",
        "`.train_data(dataset)` makes a DataLoader with it; only a script's evaluations leave out their last"
        " batch",
        True,
    ),
    _mapped("dataloader_num_workers", "`Trainer(num_workers=)`", 2),
    _ignored("dataloader_pin_memory", "batches are pinned where they are copied to an accelerator"),
    _mapped(
        "dataloader_persistent_workers",
        "always, unless a callback may change the dataset; `.train_data(dataset)`",
        True,
        dataloader_num_workers=2,
    ),
    _mapped("dataloader_prefetch_factor", "`.train_data(dataset)`", 4, dataloader_num_workers=2),
    _mapped(
        "dataloader_multiprocessing_context", "`.train_data(dataset)`", "spawn", dataloader_num_workers=2
    ),
    _refused(
        "dataloader_in_order", "batches come in the order of the epoch, so that a run can resume exactly"
    ),
    _mapped(
        "train_sampling_strategy",
        '"sequential" is `.train_data(dataset)`, "group_by_length" is `Trainer(group_by_length=)`;'
        ' "batch_rebalance" is refused',
        "group_by_length",
    ),
    _mapped(
        "length_column_name", "`Trainer(group_by_length=)`", "size", train_sampling_strategy="group_by_length"
    ),
    _mapped("sortish_sampler", "`Trainer(group_by_length=)`", True),
)

_PLACES = (
    _mapped("use_cpu", '`Trainer(strategy="cpu")`', True),
    _of_several(
        "ddp_find_unused_parameters",
        "`DDPConfig(find_unused_parameters=)`, with several processes",
        True,
    ),
    _of_several("ddp_bucket_cap_mb", "`DDPConfig(bucket_mb=)`", 10),
    _of_several("ddp_broadcast_buffers", "`DDPConfig(broadcast_buffers=)`", False),
    _of_several("ddp_static_graph", "`DDPConfig(static_graph=)`", True),
    _of_several("ddp_timeout", "`timeout=` of the strategy's configuration", 60),
    _ignored("ddp_backend", "NCCL on NVIDIA GPUs, gloo on CPUs, XCCL on Intel GPUs; others are refused"),
    _mapped("fsdp", "`FSDPConfig()`", "full_shard"),
    _mapped(
        "fsdp_config",
        "options of `FSDPConfig` or `XLAFSDPConfig`",
        {"cpu_offload": True},
        **_FSDP,
    ),
    _mapped("deepspeed", "`DeepSpeedConfig(config=)`", {"zero_optimization": {"stage": 1}}),
    _of_several(
        "accelerator_config",
        "`split_batches` divides the batch sizes, `num_steps` is `gradient_accumulation_steps`; the others"
        " are as here or refused",
        {"split_batches": True},
    ),
    _mapped(
        "parallelism_config",
        "`FSDPConfig(sharding=, shard_size=, tensor_parallel=)`; sizes that split sequences are refused",
        {"dp_shard_size": 2},
    ),
)

_OLD = (
    _old("evaluation_strategy", "now `eval_strategy`", "epoch", "no"),
    _old("per_gpu_train_batch_size", "now `per_device_train_batch_size`", 3),
    _old("per_gpu_eval_batch_size", "now `per_device_eval_batch_size`", 3),
    _old("warmup_ratio", "now `warmup_steps`, below 1", 0.1, 0.0),
    _old("no_cuda", "now `use_cpu`", True, False),
    _old("use_mps_device", '`Trainer(strategy="mps")`', True, False),
    _old("logging_dir", "`TensorBoardLogger(directory)`", "logs", report_to="tensorboard"),
    _old("adafactor", 'now `optim="adafactor"`', True, False),
    _old("group_by_length", 'now `train_sampling_strategy="group_by_length"`', True, False),
    _old("include_inputs_for_metrics", 'now `include_for_metrics=["inputs"]`', True, False),
    _old(
        "include_tokens_per_second", '`TransformersTask(count_tokens="all")` and `Throughput()`', True, False
    ),
    _old("torchdynamo", "now `torch_compile_backend`", "eager"),
    _old("tpu_metrics_debug", 'now `debug="tpu_metrics_debug"`', True, False),
    _old("fsdp_min_num_params", "now `fsdp_config`", 1000, 0, **_FSDP),
    _old("fsdp_transformer_layer_cls_to_wrap", "now `fsdp_config`", "BertLayer", **_FSDP),
    Row("split_batches", MAPPED, "now `accelerator_config`", True, environment=TWO_PROCESSES, is_old=True),
    _old("push_to_hub_model_id", "now `hub_model_id`", "me/example", **_HUB),
    _old("push_to_hub_organization", "now the first part of `hub_model_id`", "me", **_HUB),
    _old("push_to_hub_token", "now `hub_token`", "hf_example", **_HUB),
    _old_ignored("dispatch_batches", "each process reads its part of one global order of the data"),
    _old_ignored("save_safetensors", "weights are always safetensors", True),
    _old_ignored("tpu_num_cores", "one process uses all devices of a TPU"),
    _old_ignored("xpu_backend", "XCCL on Intel GPUs"),
    _old_ignored("half_precision_backend", 'torch\'s own mixed precision; "apex" is refused', "auto"),
    _old_ignored("fp16_backend", 'torch\'s own mixed precision; "apex" is refused', "auto"),
    _old_ignored("use_legacy_prediction_loop", "there is one loop", False),
    _old_ignored("ray_scope", "for `hyperparameter_search` of the drop-in Trainer, which reads it", "last"),
    _old_refused(
        "overwrite_output_dir",
        "a run directory with checkpoints is never overwritten: give a new `output_dir`, or resume"
        ' with `fit(..., resume="auto")`',
        False,
    ),
    _old_refused("jit_mode_eval", "tracing is superseded by `torch_compile=True`", False),
    _old_refused(
        "use_ipex", "IPEX has ended; `bf16=True` with `use_cpu=True` uses torch's own kernels", False
    ),
    _old_refused("fp16_opt_level", "an option of apex, which `fp16=True` has replaced", "O1"),
    _old_refused(
        "sharded_ddp",
        'FairScale has ended; `fsdp="full_shard"` or `deepspeed` with stage 2 or 3 shard the same states',
        "",
    ),
    _old_refused(
        "past_index", "no state is passed from one batch to the next; keep it in a task of your own", -1
    ),
    _old_refused("mp_parameters", "SageMaker's model parallelism; `fsdp=True` shards a model", ""),
    _old("tp_size", "`FSDPConfig(tensor_parallel=)`, by the plan of the model's class", 2, 0),
)

ROWS: Mapping[str, Row] = {
    each.name: each
    for part in (
        _RUN,
        _STEP,
        _OPTIMIZER,
        _PRECISION,
        _LOGS,
        _EVALUATIONS,
        _SAVES,
        _DATA,
        _PLACES,
        _OLD,
    )
    for each in part
}
"""The rows by the names of the options."""

SECRETS = ("hub_token", "push_to_hub_token")
"""Options whose values no report shows."""


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer of transformers' `optim`.

    Attributes:
        text: What it becomes here, or what to use instead.
        here: Our name for it; None if it is refused.
        is_adam: Whether it has Adam's betas and epsilon.
        fixed: Options that it always has.
        options: Those that `optim_args` may have, with the function that reads each.
    """

    text: str
    here: str | None = None
    is_adam: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


def _flag(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


_BLOCKS: Mapping[str, Callable[[Any], Any]] = {"block_size": int, "bf16_stochastic_round": _flag}
_CLASS = "give the class: `TransformersTask(optimizer=OptimizerConfig({}, lr=...))`"
_PAGED = (
    '`"adamw_8bit"` here has no pages in the host\'s memory; `FSDPConfig(cpu_offload=True)` and'
    ' `DeepSpeedConfig(offload_optimizer="cpu")` keep the states there'
)
_LOW_RANK = (
    "give the class of its package, with a group for the matrices:"
    " `OptimizerConfig({}, groups=ParameterGroup('*.weight', rank=128, ...))`"
)
_LAYERWISE = 'it steps within backward; use one that does not: `strategy="fsdp"` divides the gradients'

OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw_torch": OptimizerRow('"adamw", not fused', "adamw", is_adam=True, fixed={"fused": False}),
    "adamw_torch_fused": OptimizerRow('"adamw", fused where torch has it', "adamw", is_adam=True),
    "adamw_hf": OptimizerRow('"adamw"; the former name', "adamw", is_adam=True),
    "adamw_torch_xla": OptimizerRow('"adamw"', "adamw", is_adam=True),
    "adamw_torch_npu_fused": OptimizerRow('no NPU is supported; use "adamw_torch"'),
    "adamw_apex_fused": OptimizerRow('apex has ended; use "adamw_torch_fused"'),
    "adafactor": OptimizerRow(
        "transformers' own class, without relative steps",
        "adafactor",
        fixed={"scale_parameter": False, "relative_step": False},
    ),
    "adamw_anyprecision": OptimizerRow('`precision="bf16-true"` loses no small update with "adamw_torch"'),
    "adamw_torch_4bit": OptimizerRow('"adamw4bit", by torchao', "adamw4bit", is_adam=True, options=_BLOCKS),
    "adamw_torch_8bit": OptimizerRow('"adamw8bit", by torchao', "adamw8bit", is_adam=True, options=_BLOCKS),
    "adamw_8bit": OptimizerRow('"adamw8bit", by torchao instead of bitsandbytes', "adamw8bit", is_adam=True),
    "adamw_bnb_8bit": OptimizerRow(
        '"adamw8bit", by torchao instead of bitsandbytes', "adamw8bit", is_adam=True
    ),
    "sgd": OptimizerRow('"sgd"', "sgd", options={"momentum": float, "dampening": float, "nesterov": _flag}),
    "adagrad": OptimizerRow('"adagrad"', "adagrad", options={"lr_decay": float, "eps": float}),
    "rmsprop": OptimizerRow(
        '"rmsprop"',
        "rmsprop",
        options={"momentum": float, "alpha": float, "eps": float, "centered": _flag},
    ),
    "ademamix": OptimizerRow(_CLASS.format("bitsandbytes.optim.AdEMAMix")),
    "ademamix_8bit": OptimizerRow(_CLASS.format("bitsandbytes.optim.AdEMAMix8bit")),
    "lion_32bit": OptimizerRow(_CLASS.format("bitsandbytes.optim.Lion")),
    "lion_8bit": OptimizerRow(_CLASS.format("bitsandbytes.optim.Lion8bit")),
    "rmsprop_bnb": OptimizerRow('"rmsprop" is torch\'s'),
    "rmsprop_bnb_8bit": OptimizerRow(_CLASS.format("bitsandbytes.optim.RMSprop8bit")),
    "rmsprop_bnb_32bit": OptimizerRow('"rmsprop" is torch\'s'),
    "paged_adamw": OptimizerRow(_PAGED),
    "paged_adamw_32bit": OptimizerRow(_PAGED),
    "paged_adamw_8bit": OptimizerRow(_PAGED),
    "paged_ademamix_32bit": OptimizerRow(_PAGED),
    "paged_ademamix_8bit": OptimizerRow(_PAGED),
    "paged_lion_32bit": OptimizerRow(_PAGED),
    "paged_lion_8bit": OptimizerRow(_PAGED),
    "galore_adamw": OptimizerRow(_LOW_RANK.format("galore_torch.GaLoreAdamW")),
    "galore_adamw_8bit": OptimizerRow(_LOW_RANK.format("galore_torch.GaLoreAdamW8bit")),
    "galore_adafactor": OptimizerRow(_LOW_RANK.format("galore_torch.GaLoreAdafactor")),
    "galore_adamw_layerwise": OptimizerRow(_LAYERWISE),
    "galore_adamw_8bit_layerwise": OptimizerRow(_LAYERWISE),
    "galore_adafactor_layerwise": OptimizerRow(_LAYERWISE),
    "apollo_adamw": OptimizerRow(_LOW_RANK.format("apollo_torch.APOLLOAdamW")),
    "apollo_adamw_layerwise": OptimizerRow(_LAYERWISE),
    "lomo": OptimizerRow(_LAYERWISE),
    "adalomo": OptimizerRow(_LAYERWISE),
    "grokadamw": OptimizerRow(_CLASS.format("grokadamw.GrokAdamW")),
    "stable_adamw": OptimizerRow(_CLASS.format("optimi.StableAdamW")),
    "schedule_free_radam": OptimizerRow(_CLASS.format("schedulefree.RAdamScheduleFree")),
    "schedule_free_adamw": OptimizerRow(_CLASS.format("schedulefree.AdamWScheduleFree")),
    "schedule_free_sgd": OptimizerRow(_CLASS.format("schedulefree.SGDScheduleFree")),
}
"""The rows by the names of `optim`, of version 5 and before."""
