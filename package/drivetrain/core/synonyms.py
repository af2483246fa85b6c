"""One table of other libraries' names and ours, for error messages. No foreign name is ever accepted.

`SYNONYMS` has a section for each kind of name. A key holds one name, or several with the same answer. An
answer is one of these:

- `Place.name` or `Place.name=value`: one of our arguments. Several are joined by ` | `; a note follows `; `.
  The message shows how to write it from the user's place, by `PLACES`.
- `none: reason`: we have no counterpart.
- `same` or `same: note`: ours has the same name.
- One of our names, or a phrase that completes "Here it is".
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.public import public_classes

PLACES = {
    "Trainer": "Trainer({})",
    "fit": "trainer.fit({})",
    "test": "trainer.test({})",
    "predict": "trainer.predict({})",
    "CheckpointConfig": "Trainer(checkpoint=CheckpointConfig({}))",
    "CompileConfig": "Trainer(compile=CompileConfig({}))",
    "MemoryConfig": "Trainer(memory=MemoryConfig({}))",
    "PreemptionConfig": "Trainer(preemption=PreemptionConfig({}))",
    "DDPConfig": "Trainer(strategy=DDPConfig({}))",
    "FSDPConfig": "Trainer(strategy=FSDPConfig({}))",
    "DeepSpeedConfig": "Trainer(strategy=DeepSpeedConfig({}))",
    "Float8": "Trainer(precision=Float8({}))",
    "EarlyStopping": "Trainer(callbacks=[EarlyStopping({})])",
    "OptimizerConfig": "OptimizerConfig({}), returned by the task's configure_optimizers",
    "DataLoader": "DataLoader({}), the loader that you give to fit",
}
"""How to write an argument of each place, seen from another place."""

LIBRARIES = {
    "accelerate": "Accelerate",
    "composer": "Composer",
    "datasets": "datasets",
    "lightning": "Lightning",
    "lightning_fabric": "Lightning",
    "peft": "PEFT",
    "pytorch_lightning": "Lightning",
    "transformers": "transformers",
}
"""Packages whose objects are recognised by the names of their base classes; none of them is imported."""

_EVALUATES = "on_evaluation_start"
_EVALUATED = "on_evaluation_end"
_DEAD = "none: transformers itself has dropped it"
_HUB = "Trainer(callbacks=[Publish('org/name')]), of drivetrain.integrations.hub; see docs/how-to/publish.md"
_NO_SEARCH = "none: hyper-parameters are not searched here; let a tuner call trainer.fit with new arguments"
_OF_HF = "TransformersTask({}), of drivetrain.integrations.transformers"
_NO_MODES = "none: the engine sets training and evaluation mode itself; self.training says which"
_CLASS_OF_OURS = "drivetrain's class of that name, whose arguments differ"
_PAGE = "docs/how-to/from-other-libraries.md"
_RANK_0 = "none: rank 0 alone writes to files and to the screen"
_STEP_RETURNS = "none: removed in Lightning 2; a step returns its values, and metrics() collects over steps"
_TRACKED = "none: write a logger with log_metrics, log_config and close; see docs/how-to/loggers.md"

SYNONYMS: dict[str, dict[str, str]] = {
    # Arguments: of Lightning's Trainer, its verbs, ModelCheckpoint and EarlyStopping; of transformers' Trainer
    # and its TrainingArguments; of Composer, Accelerate, Fabric, torch, torchao and bitsandbytes.
    "argument": {
        "accelerator": "Trainer.strategy",
        "accelerator_config": "strategy=AccelerateConfig(...)",
        "accumulate_grad_batches": "Trainer.gradient_accumulation_steps",
        "activation_checkpointing gradient_checkpointing": "MemoryConfig.activation_checkpointing=True",
        "activation_checkpointing_kwargs gradient_checkpointing_kwargs": "MemoryConfig.activation_checkpointing",
        "activation_offloading offload_activations": "MemoryConfig.offload_activations=True",
        "adam_beta1 adam_beta2": "OptimizerConfig.betas=(0.9, 0.999)",
        "adam_epsilon": "OptimizerConfig.eps",
        "args": "from_training_arguments(args), of drivetrain.integrations.transformers, or its fields one by one as arguments of the Trainer",
        "async_save": "CheckpointConfig.asynchronous",
        "auto_find_batch_size auto_scale_batch_size": 'Trainer.micro_batch="auto"',
        "auto_insert_metric_name filename": 'CheckpointConfig.name="loss={validation/loss:.3f}"; each name begins with its update',
        "auto_wrap_policy transformer_layer_cls_to_wrap": "FSDPConfig.wrap",
        "average_tokens_across_devices": "none: losses are always weighted over all ranks, by the task's loss_weight(batch)",
        "barebones": "checkpoint=False, loggers=(), progress_bar=False",
        "batch_eval_metrics": "none: the task's metrics() are always updated batch by batch",
        "benchmark": "torch.backends.cudnn.benchmark = True",
        "bf16": 'Trainer.precision="bf16-mixed"',
        "bf16_full_eval": 'Trainer.evaluation_precision="bf16-true"',
        "callbacks": "same: a sequence of objects whose hooks are given the run",
        "check_finite": "EarlyStopping.check_finite",
        "check_on_train_epoch_end": 'EarlyStopping.metric="train/loss"; a metric of training is judged at each log point',
        "check_val_every_n_epoch": 'Trainer.validate_every; "2 epochs"',
        "ckpt_path": "fit.resume | test.checkpoint",
        "compile_config": "Trainer.compile",
        "compute_loss_func": "the task's loss(outputs, batch)",
        "compute_metrics": "the task's metrics(): objects with update, compute and reset, by name, or OverAll(function) of all outputs and targets; or "
        + _OF_HF.format("compute_metrics=..."),
        "cpu": 'Trainer.strategy="cpu"',
        "cpu_offload": "FSDPConfig.cpu_offload=True",
        "data_collator": "Trainer.collate; for a bare Dataset, or DataLoader(collate_fn=...)",
        "data_seed": "same: it orders the training data",
        "dataloader_drop_last": "DataLoader.drop_last",
        "dataloader_in_order": "DataLoader.in_order",
        "dataloader_multiprocessing_context": "DataLoader.multiprocessing_context",
        "dataloader_num_workers": "Trainer.num_workers",
        "dataloader_persistent_workers persistent_workers": "DataLoader.persistent_workers",
        "dataloader_pin_memory pin_memory": "DataLoader.pin_memory",
        "dataloader_prefetch_factor prefetch_factor": "DataLoader.prefetch_factor",
        "dataloaders": "test.data",
        "datamodule": "fit.train_data; an object with train_data() and validation_data() | test.data; an object with validation_data(), test_data() or predict_data()",
        "ddp_backend": "none: ranks talk by NCCL on GPUs and by gloo on CPUs",
        "ddp_broadcast_buffers": "DDPConfig.broadcast_buffers",
        "ddp_bucket_cap_mb": "DDPConfig.bucket_mb",
        "ddp_find_unused_parameters": "DDPConfig.find_unused_parameters=True",
        "ddp_static_graph": "DDPConfig.static_graph",
        "ddp_timeout": "DDPConfig.timeout | FSDPConfig.timeout",
        "debug": "callbacks=[NonFiniteDetector(history=21)] for 'underflow_overflow', and [XLAReport()] for 'tpu_metrics_debug'",
        "deepspeed": 'strategy="deepspeed", or DeepSpeedConfig(config=...)',
        "deepspeed_plugin": "strategy=DeepSpeedConfig(...)",
        "default_root_dir logging_dir output_dir": "Trainer.run_dir",
        "detect_anomaly": "torch.autograd.set_detect_anomaly(True)",
        "deterministic": "same: True or False",
        "device_train_microbatch_size micro_batch_size microbatch": "Trainer.micro_batch",
        "devices": 'same: a number of processes, a list of GPUs such as [0, 2], or "auto"',
        "dirpath save_folder": "CheckpointConfig.directory",
        "disable_tqdm": "Trainer.progress_bar=False",
        "divergence_threshold": "EarlyStopping.diverged_at",
        "do_eval do_predict do_train": "the verb that you call: trainer.fit, validate, test or predict",
        "dtype torch_dtype": "Trainer.precision",
        "dynamo_plugin": "Trainer.compile",
        "early_stopping_patience": "EarlyStopping.patience",
        "early_stopping_threshold min_delta": "EarlyStopping.threshold",
        "enable_autolog_hparams": "none: each logger's log_config is given the Trainer's arguments and task.hparams",
        "enable_checkpointing": "Trainer.checkpoint",
        "enable_jit_checkpoint": "Trainer.preemption=True; on by default: SIGTERM saves and ends the fit",
        "enable_model_summary": "Trainer.progress_bar; False leaves out the summary too, and callbacks=[ModelSummary()] shows it alone",
        "enable_progress_bar": "Trainer.progress_bar",
        "enable_version_counter": "none: a new run gets a run_dir of its own",
        "epochs num_train_epochs": "Trainer.max_epochs",
        "eval_accumulation_steps": "none: predict moves each batch's outputs to the CPU; with save_to= it streams them to files",
        "eval_batch_size per_device_eval_batch_size": "Trainer.evaluation_batch_size; for a bare Dataset, or DataLoader(batch_size=...)",
        "eval_dataset": "fit.validation_data | test.data",
        "eval_delay": 'Trainer.validate_from; an interval from the start, "2 epochs" or "500 steps"',
        "eval_do_concat_batches": "predict.joined; True returns one output for all samples",
        "eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval": "Trainer.validate_every",
        "eval_on_start": "trainer.validate(task, data), before the fit",
        "eval_use_gather_object": "none: evaluations always gather the values of all ranks",
        "every_n_epochs every_n_train_steps save_interval save_steps save_strategy train_time_interval": "CheckpointConfig.every",
        "fast_dev_run": 'Trainer.try_out="batches"; or the number of batches',
        "filter_fqns module_filter_fn": "Float8.leave_out",
        "float8_recipe_name recipe_name": "Float8.recipe",
        "fp16 amp half": 'Trainer.precision="16-mixed"',
        "fp16_full_eval": 'Trainer.evaluation_precision="16-true"',
        "fp8": 'Trainer.precision="fp8"',
        "fsdp fsdp_config": 'strategy="fsdp", or FSDPConfig(...)',
        "fsdp_plugin": "strategy=FSDPConfig(...)",
        "full_determinism": "Trainer.deterministic=True",
        "full_graph": "CompileConfig.fullgraph",
        "generation_config generation_max_length generation_num_beams predict_with_generate": _OF_HF.format(
            "generate={...}"
        )
        + ", or model.generate(...) in the task's predict_step",
        "grace_period": "PreemptionConfig.deadline",
        "gradient_accumulation_steps": "same: the mean over all samples of the update, exact in a short last window too",
        "clip_value clipvalue": "Trainer.max_grad_value",
        "gradient_clip_algorithm": "max_grad_norm=..., which clips by the norm, or max_grad_value=..., which clips by value",
        "gradient_clip_val max_norm": "Trainer.max_grad_norm",
        "group_by_length": 'same: the column that has the length, "input_ids", or a function of a sample',
        "greater_is_better": 'CheckpointConfig.mode="max" | EarlyStopping.mode="max"',
        "length_column_name train_sampling_strategy sortish_sampler": "Trainer.group_by_length; the name of a column or a function of a sample",
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token": _HUB,
        "ignore_data_skip": "none: a resumed fit continues at its place in the data; no batch is fetched only to be skipped",
        "ignored_modules": "FSDPConfig.ignored",
        "include_for_metrics label_names preprocess_logits_for_metrics": "the task's metric_inputs(outputs, batch), or the argument of that name of "
        + _OF_HF.format("..."),
        "include_num_input_tokens_seen": "the task's tokens(batch), which run.progress.tokens adds up, or "
        + _OF_HF.format('count_tokens="all"'),
        "inference_mode": "none: evaluations run under torch.no_grad",
        "label_smoothing_factor": "F.cross_entropy(..., label_smoothing=0.1) in the task's loss, or "
        + _OF_HF.format("label_smoothing=0.1"),
        "learning_rate lr": "OptimizerConfig.lr",
        "liger_kernel_config use_liger_kernel": "none: call Liger's function on the model before the fit",
        "limit_eval_batches limit_val_batches": "Trainer.limit_validation_batches",
        "limit_predict_batches limit_test_batches limit_train_batches": "same: a whole number, or a fraction below 1",
        "save_best_only": "CheckpointConfig.by",
        "initial_value_threshold": "none: the first value is kept, and each better one after it",
        "loss_weights": 'a mapping from the task\'s loss(outputs, batch): its "loss" is the weighted sum',
        "sample_weight": "a column of the batch, which the task's loss(outputs, batch) multiplies by, and loss_weight(batch), which returns its sum",
        "shuffle": "DataLoader.shuffle; a bare Dataset is shuffled in training and never in an evaluation",
        "steps_per_execution": "none: each update is one call; Trainer(compile=True) compiles the blocks",
        "validation_batch_size": "Trainer.evaluation_batch_size; for a bare Dataset, or DataLoader(batch_size=...)",
        "workers use_multiprocessing": "Trainer.num_workers; for a bare Dataset, or DataLoader(num_workers=...)",
        "max_queue_size": "DataLoader.prefetch_factor",
        "ema ema_decay ema_momentum use_ema swa": "Trainer.callbacks=[WeightAverage()]",
        "early_stopping": 'Trainer.callbacks=[EarlyStopping("validation/loss")]',
        "loss_scale_factor": 'Trainer.precision="16-mixed"; the scale is found by itself',
        "zero_stage": "DeepSpeedConfig.stage",
        "data_parallel_size dp_size gpus n_gpu n_gpus num_gpus nproc_per_node world_size": "Trainer.devices",
        "nnodes": "Trainer.num_nodes",
        "tpu_cores": 'Trainer.strategy="xla"',
        "device": "Trainer.strategy",
        "clip_grad_norm grad_clip gradient_clip grad_norm": "Trainer.max_grad_norm",
        "accum accumulation_steps grad_accum grad_accumulation gradient_accumulation": "Trainer.gradient_accumulation_steps",
        "autocast mixed use_amp": 'Trainer.precision="bf16-mixed"',
        "log_dir logdir save_dir work_dir": "Trainer.run_dir",
        "checkpoint_dir checkpoint_path ckpt_dir": "CheckpointConfig.directory",
        "experiment_name": "Trainer.run_name",
        "random_seed random_state rng_seed": "Trainer.seed",
        "warmup": "OptimizerConfig.warmup_steps",
        "max_length": "none: the data decides the lengths of samples",
        "run_eagerly": "Trainer.compile; False is the default",
        "baseline": "none: EarlyStopping(stop_at=...) ends a run at a value, and patience without a better one",
        "filepath": "CheckpointConfig.directory",
        "save_freq": 'CheckpointConfig.every="1 epoch"',
        "decay": "OptimizerConfig.weight_decay; for a rate that falls schedule=...",
        "clipnorm global_clipnorm": "OptimizerConfig.max_grad_norm",
        "offload": "FSDPConfig.cpu_offload=True | MemoryConfig.offload_activations=True",
        "tp_size tensor_parallel_size tensor_model_parallel_size": "FSDPConfig.tensor_parallel",
        "expert_parallel expert_parallel_size ep_size": "none: experts are not divided over processes; strategy='fsdp' shards their weights",
        "sequence_parallel": "none: sequences are not divided over processes; a style SequenceParallel() in the task's parallel_plan() divides norms",
        "use_orig_params": "none: FSDP2 always keeps the original parameters",
        "sync_module_states": "none: always; all ranks begin with rank 0's values",
        "reshard_after_forward": "FSDPConfig.sharding",
        "validation_freq": "Trainer.validate_every",
        "steps_per_epoch": "Trainer.limit_train_batches",
        "validation_steps": "Trainer.limit_validation_batches",
        "initial_epoch": "fit.resume",
        "validation_split": "fit.validation_data; split the dataset with torch.utils.data.random_split",
        "class_weight": "F.cross_entropy(..., weight=...) in the task's loss",
        "limit_all_gathers": "none: FSDP2 limits what is gathered at a time by itself",
        "context_parallel_size context_parallel cp_size": "none: sequences are not divided over processes",
        "pipeline_parallel pipeline_parallel_size pp_size": "none: layers are not divided over processes; strategy='fsdp' shards them",
        "restore_best_weights": "CheckpointConfig.by; then Task.from_checkpoint(result.best_checkpoint)",
        "load_best_model_at_end": "Task.from_checkpoint(result.best_checkpoint)",
        "local_rank": "none: it is read from the launcher's environment; drivetrain.local_rank() returns it",
        "log_every_n_steps logging_steps logging_strategy": "Trainer.log_every",
        "log_level log_level_replica": "none: logging.getLogger('drivetrain').setLevel(...), or the environment variable DRIVETRAIN_LOG_LEVEL",
        "log_on_each_node log_rank_zero_only": _RANK_0,
        "logger report_to": "Trainer.loggers",
        "logging_first_step": "Trainer.log_first_step",
        "logging_nan_inf_filter terminate_on_nan": "Trainer.on_nonfinite",
        "lr_scheduler lr_scheduler_type scheduler schedulers": "OptimizerConfig.schedule",
        "lr_scheduler_kwargs": "OptimizerConfig.schedule_options",
        "max_depth": "ModelSummary.depth",
        "max_duration": "max_epochs, max_steps or max_time",
        "max_epochs": "same: a positive number; without it, give max_steps or max_time",
        "max_grad_norm": "same: engine.step(optimizer, max_grad_norm=...) in a loop of your own",
        "max_restarts": "drivetrain launch --max-restarts N train.py",
        "max_steps": "same: updates, at least 1; without it, give max_epochs or max_time",
        "max_time": 'same: "12 hours", seconds, or a timedelta',
        "max_train_steps": "Trainer.max_steps",
        "metric_for_best_model monitor": "CheckpointConfig.by | EarlyStopping.metric",
        "min_8bit_size": "none: torchao's optimizers never quantize small states",
        "min_epochs": "same: no callback stops a fit before",
        "min_num_params": "FSDPConfig.wrap=100_000_000",
        "min_steps": "same: no callback stops a fit before",
        "mixed_precision": "Trainer.precision",
        "mode": "same",
        "model": "fit.task | test.task",
        "model_init": "none: make a new task for each fit",
        "model_registry": "none: a finished fit leaves model.safetensors in its run_dir",
        "neftune_noise_alpha": _OF_HF.format("neftune_alpha=5"),
        "num_nodes": "same",
        "num_processes": "Trainer.devices",
        "num_sanity_val_steps": "Trainer.sanity_validation; the number of batches, or None",
        "num_warmup_steps warmup_steps": "OptimizerConfig.warmup_steps",
        "optim optimizer": "OptimizerConfig.name",
        "optim_args": "the keywords of OptimizerConfig(...), returned by the task's configure_optimizers",
        "optim_target_modules": "OptimizerConfig.parameters; or give GaLore's or APOLLO's optimizer class as its name",
        "optimizer_cls_and_kwargs": "OptimizerConfig.name; it takes a class, and its keywords",
        "optimizer_in_backward release_gradients": 'strategy="fsdp", which divides the gradients; updates are never made within backward',
        "optimizers": "OptimizerConfig(...), or a function of the parameters that gives (optimizer, schedule): the task's configure_optimizers returns either",
        "overfit_batches": 'Trainer.try_out="overfit"; with limit_train_batches batches',
        "parallelism_config": "strategy=FSDPConfig(shard_size=..., tensor_parallel=...)",
        "patience": "same",
        "peft_config": "get_peft_model(model, peft_config), before the model is given to the task",
        "per_device_train_batch_size train_batch_size": "Trainer.batch_size; for a bare Dataset, or DataLoader(batch_size=...)",
        "plugins": "none: precision=, strategy= and checkpoint= take what plugins are for",
        "precision": "same",
        "prediction_loss_only": "none: a task without metrics() gives its loss alone",
        "processing_class tokenizer": "Trainer.assets=[tokenizer]; or "
        + _OF_HF.format("processing_class=tokenizer"),
        "profiler": "callbacks=[Profile()], with a table of times, traces of torch.profiler, memory and cProfile",
        "project trackio_bucket_id trackio_space_id trackio_static_space_id": "none: options of the tracker, which your logger is made with; run_name=... names the run",
        "rampup_batch_size": 'Trainer.batch_size=ramp(32, 256, over="100_000 samples", by=32)',
        "reload_dataloaders_every_n_epochs": "a callback's on_epoch_start that changes the dataset",
        "remove_unused_columns": _OF_HF.format("remove_unused_columns=...")
        + "; any task's inputs(batch) gives forward the columns that its parameters name",
        "requeue_signal signals": "PreemptionConfig.requeue",
        "restore_callback_states_from_checkpoint": "none: callbacks with state_dict and load_state_dict are always restored",
        "resume_from_checkpoint": 'fit.resume="auto"; or a path',
        "return_predictions": "predict.save_to; it streams the outputs to files",
        "run_name": "same: it names a new run_dir, and loggers find it in their configuration",
        "save_last": "CheckpointConfig.keep_last=1",
        "save_num_checkpoints_to_keep save_total_limit": "CheckpointConfig.keep_last",
        "save_on_each_node": "none: all ranks write to one directory, which every node can see",
        "save_on_exception": 'none: signals save and end a fit; after any other failure, trainer.fit(..., resume="auto") goes on from the newest checkpoint',
        "save_on_train_epoch_end": "CheckpointConfig.every; a checkpoint follows its update's validation",
        "save_only_model save_weights_only": "CheckpointConfig.resumable=False",
        "save_top_k": "CheckpointConfig.best",
        "seed": "same",
        "sharding_strategy": "FSDPConfig.sharding",
        "skip_memory_metrics": "callbacks=[MemoryReport()]",
        "split_batches use_distributed_sampler": "already_split(data) for data that you have divided; else nothing is needed",
        "stopping_threshold": "EarlyStopping.stop_at",
        "strategy": "same",
        "strict": "EarlyStopping.strict",
        "sync_batchnorm": "DDPConfig.sync_batchnorm=True | FSDPConfig.sync_batchnorm=True",
        "test_dataset": "test.data",
        "tf32": 'Trainer.precision="tf32"',
        "torch_compile": "Trainer.compile",
        "torch_compile_backend": "CompileConfig.backend",
        "torch_compile_mode": "CompileConfig.mode",
        "torch_empty_cache_steps": "callbacks=[EmptyCache(every=100)]",
        "train_dataloader train_dataloaders train_dataset": "fit.train_data",
        "use_cache": "model.config.use_cache = False, before the fit",
        "use_cpu no_cuda": 'Trainer.strategy="cpu"',
        "val_data val_dataloader val_dataloaders": "fit.validation_data | test.data",
        "verbose": "Trainer.progress_bar; verbs return their values",
        "warmup_ratio": "OptimizerConfig.warmup_ratio",
        "weight_decay": "OptimizerConfig.weight_decay",
        "weights_only": "none: weights are always read without running what a file names",
        # Of transformers 4, gone in 5.
        "adafactor": 'OptimizerConfig("adafactor"), returned by the task\'s configure_optimizers',
        "dispatch_batches": "none: each rank reads its own batches",
        "fp16_backend fp16_opt_level half_precision_backend": 'Trainer.precision="16-mixed"; torch\'s own, as Apex is gone',
        "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap": "FSDPConfig.wrap",
        "include_inputs_for_metrics": "the task's metric_inputs(outputs, batch), which has the whole batch",
        "include_tokens_per_second": "callbacks=[Throughput()], and the task's tokens(batch)",
        "jit_mode_eval torchdynamo": "Trainer.compile",
        "mp_parameters": "none: options of SageMaker are not offered",
        "overwrite_output_dir": "none: a run never overwrites another's checkpoints; give a new run_dir, or resume",
        "past_index": "none: a state that goes from batch to batch is an attribute of the task",
        "per_gpu_eval_batch_size": "Trainer.evaluation_batch_size; for a bare Dataset",
        "per_gpu_train_batch_size": "Trainer.batch_size; for a bare Dataset",
        "save_safetensors": "none: weights are always stored as safetensors",
        "sharded_ddp": 'Trainer.strategy="zero2"; or "zero3" or "fsdp"',
        "tpu_metrics_debug": "callbacks=[XLAReport()]",
        "tpu_num_cores": 'Trainer.strategy="xla_fsdp_v2"; which takes all devices',
        "use_ipex": 'none: PyTorch has what IPEX had; precision="bf16-mixed" works on a CPU',
        "use_legacy_prediction_loop": _DEAD,
        "use_mps_device": 'Trainer.strategy="mps"',
        "xpu_backend": 'none: ranks talk by NCCL on GPUs and by gloo on CPUs; one Intel GPU is strategy="xpu"',
        # Of transformers' search, and of TRL.
        "backend compute_objective direction hp_name hp_space n_trials ray_scope trial": _NO_SEARCH,
        "dataset_text_field max_seq_length packing": "none: the dataset and collate=... make the samples",
        # General words, each with the one place where it has this meaning.
        "CompileConfig.disable compile.disable": "compile=False",
        "Engine.gradient_accumulation_steps": "as many engine.backward(loss) before an engine.step(optimizer)",
        "Engine.max_grad_norm": "engine.step(optimizer, max_grad_norm=...)",
        "Engine.micro_batch": "Trainer(micro_batch=...): in a loop of your own the parts are yours to make",
        "PreemptionConfig.timeout": "PreemptionConfig.deadline",
        "Trainer.metrics Trainer.fit.metrics": "the task's metrics(), a mapping of names to metrics",
        "Trainer.loss": "the task's loss(outputs, batch)",
        "Trainer.ckpt_path": "fit.resume | test.checkpoint",
        "Trainer.fit.x Trainer.fit.y Trainer.x Trainer.y": "fit.train_data=TensorDataset(x, y); with Trainer(batch_size=...)",
        "Trainer.fit.test_data Trainer.test_data": "test.data",
        "EarlyStopping.verbose": "none: result.stop_reason says why a fit ended, and ProgressBar shows the values",
        "Trainer.fit.data Trainer.steps.data Trainer.plan.data": "fit.train_data",
    },
    # Methods that Lightning and transformers call by themselves. Ours are hooks of callbacks, never of a task.
    "hook": {
        "automatic_optimization": "a generator step, which yields the loss of each optimizer in turn, or Engine, for a loop of your own; see docs/how-to/several-optimizers.md",
        "configure_callbacks": "Trainer(callbacks=[...])",
        "configure_gradient_clipping": "Trainer(max_grad_norm=...), which clips by the norm, or on_before_optimizer_step",
        "configure_model configure_sharded_model": 'the constructor; make a large task under torch.device("meta")',
        "lr_scheduler_step": "none: the engine steps each schedule once per update, and a TorchSchedule by epoch or with a metric",
        "on_after_backward on_pre_optimizer_step": "on_before_optimizer_step",
        "on_after_batch_transfer": "the start of training_step and validation_step, which get the batch on the device",
        "on_before_backward": "none: training_step has the loss; the engine runs backward on what it returns",
        "on_before_batch_transfer": "collate_fn of the DataLoader",
        "on_before_optimizer_step on_epoch_end on_epoch_start on_exception on_fit_end on_fit_start": "same",
        "on_log on_step_end": "same",
        "on_before_zero_grad": "none: gradients are freed after each update; on_before_optimizer_step sees them",
        "on_epoch_begin on_train_epoch_start": "on_epoch_start",
        "on_evaluate on_test_end on_test_epoch_end on_validation_end on_validation_epoch_end": _EVALUATED,
        "on_init_end": "check_trainer(trainer, strategy)",
        "on_load_checkpoint": "on_checkpoint_loaded, and a callback's own state comes back by load_state_dict(state)",
        "on_optimizer_step on_train_batch_end": "on_step_end",
        "on_predict on_predict_end on_predict_epoch_end": _EVALUATED,
        "on_predict_batch_end on_prediction_step on_test_batch_end on_validation_batch_end": "on_evaluation_step_end",
        "on_predict_batch_start on_test_batch_start on_validation_batch_start": "none: the step itself begins the batch; on_evaluation_step_end follows it",
        "on_predict_epoch_start on_predict_start on_test_epoch_start on_test_start": _EVALUATES,
        "on_predict_model_eval on_test_model_eval on_test_model_train": _NO_MODES,
        "on_push_begin": _HUB,
        "on_sanity_check_end on_sanity_check_start": "none: trainer.validate(task, data) before the fit is the check",
        "on_save": "on_checkpoint_saved",
        "on_save_checkpoint": "state_dict(), whose value is in each checkpoint; tensors of the task belong in buffers",
        "on_step_begin on_train_batch_start": "on_step_start",
        "on_substep_end": "on_micro_batch_end",
        "on_train_begin on_train_start": "on_fit_start",
        "on_train_end": "on_fit_end",
        "on_train_epoch_end": "on_epoch_end",
        "on_validation_epoch_start on_validation_start": _EVALUATES,
        "on_validation_model_eval on_validation_model_train on_validation_model_zero_grad": _NO_MODES,
        "backward": "none: the engine runs loss.backward() on what training_step returns. A factor of the loss belongs into `loss`, what changes gradients in a callback's on_before_optimizer_step, and other passes in a loop of your own with drivetrain.Engine",
        "optimizer_step": "none: the engine makes the update. A warm-up is OptimizerConfig(warmup_steps=...); what changes gradients belongs in a callback's on_before_optimizer_step",
        "optimizer_zero_grad": "none: the engine frees the gradients after each update",
        "predict_dataloader": "the data of trainer.predict(task, data)",
        "predict_epoch_end test_epoch_end training_epoch_end validation_epoch_end": _STEP_RETURNS,
        "test_dataloader": "the data of trainer.test(task, data)",
        "test_step_end training_step_end validation_step_end": _STEP_RETURNS,
        "train_dataloader": "the train_data of trainer.fit(task, train_data, validation_data)",
        "transfer_batch_to_device": "a batch object with a method to(device), which the engine calls",
        "val_dataloader": "the validation_data of trainer.fit(task, train_data, validation_data)",
    },
    # Methods that Lightning calls too, and that a class may have for a purpose of its own.
    "common hook": {
        "compute_loss": "loss(outputs, batch)",
        "create_optimizer create_optimizer_and_scheduler create_scheduler": "configure_optimizers()",
        "evaluation_loop prediction_loop": "none: there is one loop; the step is validation_step(batch)",
        "get_eval_dataloader": "the validation_data of trainer.fit(task, train_data, validation_data)",
        "get_test_dataloader": "the data of trainer.test(task, data) or trainer.predict(task, data)",
        "get_train_dataloader": "the train_data of trainer.fit(task, train_data, validation_data)",
        "prediction_step": "validation_step(batch), test_step(batch) or predict_step(batch)",
        "prepare_data": "with drivetrain.one_at_a_time(path): ... before the fit",
        "setup": "the constructor, or a callback's on_fit_start",
        "teardown": "a callback's on_fit_end or on_exception",
    },
    # Attributes that a LightningModule or LightningDataModule offers to its own methods.
    "attribute": {
        "Run.callback_metrics Run.logged_metrics": "run.metrics, the latest value of every name",
        "Run.current_epoch": "run.progress.epoch",
        "Run.device": "run.engine.device",
        "Run.global_rank Run.is_global_zero Run.is_world_process_zero": "run.is_main, or drivetrain.rank()",
        "Run.args": "the Trainer, which a callback's check_trainer(trainer, strategy) is given",
        "Run.best_global_step Run.best_metric Run.best_model_checkpoint": "the best_checkpoint of what fit returns; `drivetrain checkpoint list` shows its value",
        "Run.epoch": "run.progress.epoch",
        "Run.eval_dataloader": "run.evaluation_feeds",
        "Run.eval_steps Run.logging_steps Run.save_steps": "none: the Trainer's validate_every and log_every, and CheckpointConfig(every=...)",
        "Run.is_hyper_param_search Run.trial_name Run.trial_params": _NO_SEARCH,
        "Run.is_local_process_zero": "drivetrain.local_rank() == 0",
        "Run.load_from_json Run.save_to_json": "run.progress.load_json(...) and run.progress.to_json()",
        "Run.log_history": "the history of what fit returns, or run.metrics for the latest values",
        "Run.logs": "run.logged",
        "Run.max_steps": "run.totals.updates",
        "Run.num_input_tokens_seen": "run.progress.tokens",
        "Run.num_train_epochs": "run.totals.epochs",
        "Run.processing_class Run.tokenizer": "none: the task or the callback holds it; Trainer(assets=[tokenizer]) stores it",
        "Run.should_epoch_stop": "run.end_epoch()",
        "Run.should_evaluate": "run.validate()",
        "Run.should_log": "run.log_now()",
        "Run.should_save": "run.save()",
        "Run.stateful_callbacks": "run.callbacks; state_dict and load_state_dict keep a callback's state",
        "Run.total_flos": "run.metrics['throughput/model_flops'], with callbacks=[Throughput()]",
        "Run.train_batch_size": "run.totals.samples_per_update",
        "Run.train_dataloader": "run.train_feed",
        "Run.global_step": "run.progress.updates",
        "Run.logger": "run.log(name, value), which all loggers are given",
        "Run.model Run.lightning_module Run.pl_module": "run.task",
        "Run.optimizer Run.optimizers Run.lr_scheduler": "run.engine.updaters, by name; each has an optimizer",
        "Run.should_stop Run.should_training_stop": "run.stop(reason)",
        "Run.state Run.control": "run.progress for where the run is, and run.stop(reason), run.log_now(), run.validate(), run.save() or run.end_epoch()",
        "Run.trainer": "the run itself: it has the task, the engine, progress and metrics",
        "Trainer.callback_metrics Trainer.logged_metrics": "the metrics of what fit returns, or run.metrics in a callback",
        "Trainer.current_epoch Trainer.global_step Trainer.state": "the progress of what fit returns, or run.progress in a callback; its history has what was logged",
        "Trainer.evaluate": "trainer.validate(task, data), or trainer.test(task, data)",
        "Trainer.evaluate_generator Trainer.eval Trainer.test_on_batch": "trainer.validate(task, data), or trainer.test(task, data)",
        "Trainer.fit_generator": "trainer.fit(task, data)",
        "Trainer.predict_generator Trainer.predict_on_batch": "trainer.predict(task, data)",
        "Trainer.train_on_batch": "trainer.steps(task, data), which yields after every update",
        "Trainer.get_weights Trainer.set_weights Trainer.trainable_variables": "task.state_dict() and task.load_state_dict(...)",
        "Trainer.load_weights": "task.load_weights(path)",
        "Trainer.save Trainer.save_weights": "the model.safetensors that a finished fit leaves in its run_dir",
        "Trainer.summary": "drivetrain.callbacks.summarize(task), or ModelSummary() among the callbacks",
        "Trainer.model": "the task, which is trained in place",
        "Trainer.save_checkpoint": "Trainer(checkpoint=CheckpointConfig(every=...)), or run.save() in a callback; a finished fit is saved without it",
        "Trainer.save_model": "the model.safetensors that a finished fit leaves in its run_dir",
        "Trainer.should_stop": "run.stop(reason), in a callback's hook",
        "Trainer.accelerator": "none: strategy=... says where a run takes place",
        "Trainer.add_callback Trainer.pop_callback Trainer.remove_callback": "dataclasses.replace(trainer, callbacks=[...]), as a Trainer never changes",
        "Trainer.args": "trainer.to_json(), or the Trainer's own attributes",
        "Trainer.autocast_smart_context_manager Trainer.compute_loss_context_manager": "Trainer(precision=...)",
        "Trainer.call_model_init": "none: make a new task for each fit",
        "Trainer.callback_handler Trainer.control": "none: hooks are given the run, which has stop, save, validate and end_epoch",
        "Trainer.compute_loss": "the task's loss(outputs, batch)",
        "Trainer.create_accelerator_and_postprocess Trainer.set_initial_training_values": "none: it is done when fit begins",
        "Trainer.create_model_card": "the card that Publish makes; see docs/how-to/publish.md",
        "Trainer.create_optimizer Trainer.create_optimizer_and_scheduler Trainer.create_scheduler": "the task's configure_optimizers()",
        "Trainer.data_collator": "trainer.collate",
        "Trainer.end": "run.stop(reason), in a callback's hook",
        "Trainer.eval_dataset Trainer.train_dataset": "the data that you give to fit",
        "Trainer.evaluation_loop Trainer.prediction_loop": "trainer.validate(task, data), test or predict",
        "Trainer.floating_point_ops Trainer.store_flos Trainer.current_flos": "callbacks=[Throughput()], which logs throughput/model_flops",
        "Trainer.get_batch_samples": "none: run.window has the micro-batches of an update",
        "Trainer.get_decay_parameter_names": "OptimizerConfig(groups=[ParameterGroup(pattern, weight_decay=0)])",
        "Trainer.get_eval_dataloader Trainer.get_test_dataloader Trainer.get_train_dataloader": "a data object with train_data(), validation_data(), test_data() and predict_data()",
        "Trainer.get_optimizer_cls_and_kwargs": "OptimizerConfig(...), whose factory and options say the same",
        "Trainer.get_cp_size Trainer.get_sp_size Trainer.get_tp_size": "FSDPConfig(tensor_parallel=...)",
        "Trainer.get_total_train_batch_size Trainer.num_examples": "trainer.plan(task, data).samples_per_update, and run.progress.samples",
        "Trainer.hyperparameter_search Trainer.objective": _NO_SEARCH,
        "Trainer.hub_model_id Trainer.init_git_repo Trainer.init_hf_repo Trainer.push_to_hub": _HUB,
        "Trainer.is_fsdp_enabled Trainer.is_deepspeed_enabled Trainer.is_model_parallel": "trainer.select_strategy().name",
        "Trainer.is_in_train": "run.stage, in a callback",
        "Trainer.is_local_process_zero": "drivetrain.local_rank() == 0",
        "Trainer.is_world_process_zero": "drivetrain.rank() == 0, or run.is_main in a callback",
        "Trainer.load_generation_config": _OF_HF.format("generate={...}"),
        "Trainer.loss_is_scaled_for_ga": "none: losses are always weighted exactly over the update",
        "Trainer.log": "run.log(name, value), in a callback's hook",
        "Trainer.log_metrics Trainer.metrics_format Trainer.save_metrics": 'what validate and test return; save_to="results.json" writes it',
        "Trainer.lr_scheduler Trainer.optimizer": "run.engine.updaters, in a callback; each has an optimizer",
        "Trainer.model_wrapped": "run.engine.model, in a callback",
        "Trainer.place_model_on_device": "none: the strategy always places the model",
        "Trainer.prediction_step Trainer.training_step": "the task's step of that kind",
        "Trainer.processing_class Trainer.tokenizer": "trainer.assets",
        "Trainer.save_state": "Trainer(checkpoint=CheckpointConfig(every=...)); every checkpoint has the whole state",
        "Trainer.train": "trainer.fit(task, train_data, validation_data)",
        "CHECKPOINT_HYPER_PARAMS_KEY CHECKPOINT_HYPER_PARAMS_NAME CHECKPOINT_HYPER_PARAMS_TYPE": "self.hparams",
        "all_gather": "torch.distributed.all_gather; metrics() and logged values are gathered automatically",
        "clip_gradients": "Trainer(max_grad_norm=...), or torch.nn.utils in a callback's on_before_optimizer_step",
        "current_epoch": "self.progress.epoch, in a fit; run.progress.epoch in a callback's hook",
        "device": "the batch's: batches come on the device; outside a step, next(self.parameters()).device",
        "device_mesh": "run.engine.strategy, in a callback's hook",
        "dtype": "next(self.parameters()).dtype",
        "example_input_array": "none: summarize(task, batch=...) shows the shapes for a batch",
        "fabric": "Engine, for a loop of your own",
        "freeze": "Freeze(...), for Trainer(callbacks=...); or self.requires_grad_(False) and self.eval()",
        "from_datasets": "DataLoader(dataset, batch_size=...)",
        "global_rank": "drivetrain.rank()",
        "global_step": "self.progress.updates, in a fit; run.progress.updates in a callback's hook",
        "hparams": "same",
        "hparams_initial": "self.hparams",
        "load_from_checkpoint": "from_checkpoint(path)",
        "local_rank": "drivetrain.local_rank()",
        "log log_dict": 'the mapping that a step or loss returns, {"loss": loss, "accuracy": value}, or metrics() for what is no mean',
        "logger loggers": "run.log(name, value) in a callback's on_log, or the mapping that a step returns",
        "lr_schedulers": "the engine's, which steps each schedule once per update; see docs/how-to/optimizers-and-schedules.md",
        "manual_backward optimizers": "a generator step, which yields the loss of each optimizer in turn; see docs/how-to/several-optimizers.md",
        "name": "none: task.hparams and the class name are in each checkpoint",
        "on_gpu": "next(self.parameters()).is_cuda",
        "print": "print(...) if drivetrain.rank() == 0",
        "remove_ignored_hparams save_hyperparameters": "self.hparams, which has the constructor's arguments already",
        "state_key": "none: callbacks' states are kept by class and position",
        "strict_loading": "load_weights(source, strict=...)",
        "to_onnx": "torch.onnx.export(task, ...)",
        "to_tensorrt": "torch_tensorrt.compile(task, ...)",
        "to_torchscript": "torch.jit.trace(task, inputs)",
        "toggle_optimizer toggled_optimizer untoggle_optimizer": "a generator step: each yield lets gradients flow to its optimizer's parameters alone",
        "trainer": "the run, which callbacks are given; a task knows no trainer, and drivetrain.rank() and drivetrain.world_size() work anywhere",
        "unfreeze": "Freeze(..., until=...), for Trainer(callbacks=...); or self.requires_grad_(True) and self.train()",
    },
    # A task's own methods, which have the same names here.
    "method": {
        "configure_optimizers": "same: it returns an OptimizerConfig, or a function of the parameters",
        "predict_step test_step training_step validation_step": "same: with the batch alone",
    },
    # Classes and functions, as names of the `drivetrain` package and as objects given to it.
    "name": {
        "Accelerator Fabric": "Engine",
        "AdvancedProfiler": 'Profile(kinds="python"), which uses cProfile',
        "PassThroughProfiler Profiler": "Profile, with kinds= and schedule=, for Trainer(callbacks=...)",
        "PyTorchProfiler": 'Profile(kinds="trace"), which uses torch.profiler',
        "SimpleProfiler": 'Profile(kinds="table")',
        "XLAProfiler": 'torch_xla.debug.profiler; Profile(kinds="table") has the host\'s times',
        "AsyncCheckpointIO": 'Trainer(checkpoint="async")',
        "BackboneFinetuning BaseFinetuning": "Freeze, with until=",
        "BasePredictionWriter": "trainer.predict(..., save_to=directory)",
        "BatchSizeFinder": 'Trainer(micro_batch="auto"), which splits a batch that does not fit',
        "BitsandbytesPrecision": 'OptimizerConfig("adamw8bit"), for the optimizer; weights of 8 bits are not offered',
        "CSVLogger EarlyStopping LambdaCallback LearningRateMonitor ModelSummary ProgressBar TensorBoardLogger": f"same: {_CLASS_OF_OURS}",
        "Callback": "drivetrain.Callback, whose hooks are each given the run",
        "Checkpoint CheckpointIO ModelCheckpoint TorchCheckpointIO XLACheckpointIO": "CheckpointConfig, for Trainer(checkpoint=...)",
        "CometLogger LitLogger Logger MLFlowLogger WandbLogger": "an object with log_metrics(metrics, step), log_config(config) and close(), for Trainer(loggers=...); see docs/how-to/loggers.md",
        "ComposerModel": f"TaskModule, with forward, loss and metrics; see {_PAGE}",
        "DDPStrategy": "DDPConfig, for Trainer(strategy=...)",
        "DataCollator DataCollatorForLanguageModeling DataCollatorForSeq2Seq DataCollatorMixin": "collate_fn of the DataLoader",
        "DataCollatorWithPadding DefaultDataCollator": "collate_fn of the DataLoader",
        "DatasetDict IterableDatasetDict": 'one of its sets for each argument: trainer.fit(task, sets["train"], sets["validation"])',
        "DeepSpeedPrecision DoublePrecision FSDPPrecision HalfPrecision MixedPrecision XLAPrecision": 'a name for Trainer(precision=...), such as "bf16-mixed"',
        "DeepSpeedStrategy": "DeepSpeedConfig, for Trainer(strategy=...)",
        "DefaultFlowCallback": "none: the Trainer's intervals are enough",
        "DeviceStatsMonitor MemoryMonitor SystemMetricsMonitor": "DeviceStats, a callback",
        "EMAWeightAveraging StochasticWeightAveraging WeightAveraging": "WeightAverage",
        "EarlyStoppingCallback": "EarlyStopping",
        "FSDPStrategy ModelParallelStrategy": "FSDPConfig, for Trainer(strategy=...)",
        "GradientAccumulationScheduler": 'Trainer(gradient_accumulation_steps={0: 8, "4 epochs": 4})',
        "LayerSync TorchSyncBatchNorm": "DDPConfig(sync_batchnorm=True), for Trainer(strategy=...)",
        "LearningRateFinder Tuner": "none: compare short fits, Trainer(max_steps=..., loggers=()), at several rates",
        "LightningCLI": "the command `drivetrain fit`; see docs/how-to/command-line.md",
        "LightningDataModule": "as_data(...) around it, of drivetrain.integrations.lightning, or an object with train_data(), validation_data(), test_data() and predict_data(): rename train_dataloader() and its like",
        "LightningModule": f"drivetrain.TaskModule: subclass that instead, with training_step(self, batch), or keep the module and pass as_task(module) of drivetrain.integrations.lightning; in a TaskModule each other name of Lightning's is answered with ours. See {_PAGE}",
        "ModelPruning": "none: torch.nn.utils.prune and a callback; see docs/how-to/prune.md",
        "OnExceptionCheckpoint": "Trainer(preemption=True), the default: signals save and end a fit",
        "PeftModel PreTrainedModel": "an attribute of a TaskModule: `self.model = model` in its constructor, and `def forward(self, **batch): return self.model(**batch)`; its loss is found in the outputs",
        "PrinterCallback ProgressCallback RichProgressBar TQDMProgressBar": "ProgressBar",
        "Precision": "same: a frozen value",
        "RichModelSummary": "ModelSummary",
        "Seq2SeqTrainingArguments TrainingArguments": "the arguments of Trainer, one by one; each that it does not take is answered with ours",
        "Seq2SeqTrainer": "Trainer",
        "SeqLengthWarmup": "SequenceLength, a callback",
        "SingleDeviceStrategy": 'Trainer(strategy="cpu"), "cuda" or "mps"',
        "SpikeDetection": "LossSpike, a callback",
        "Strategy ParallelStrategy": "a strategy of your own; see docs/how-to/write-a-strategy.md",
        "ThroughputMonitor": "Throughput, a callback",
        "Timer": "Trainer(max_time=...)",
        "BackupAndRestore": 'trainer.fit(..., resume="auto")',
        "History": "the history of what fit returns",
        "LearningRateScheduler": "OptimizerConfig(schedule=...), a name or a function of the update's number",
        "ReduceLROnPlateau": 'OptimizerConfig(schedule="reduce_on_plateau")',
        "Model Sequential": "TaskModule, with forward and loss; its network is any torch.nn.Module",
        "TensorBoard": "TensorBoardLogger",
        "TerminateOnNaN": 'Trainer(on_nonfinite="stop")',
        "Trainer": "same",
        "TrainerCallback": "drivetrain.Callback, whose hooks are each given the run, or CallbackAdapter([...]) of drivetrain.integrations.transformers, which calls callbacks of transformers",
        "TrainerControl TrainerState": "the run, which each hook is given",
        "TransformerEnginePrecision": 'Trainer(precision="fp8")',
        "rank_zero_info rank_zero_only rank_zero_warn": "run.is_main in callbacks, or drivetrain.rank() == 0",
        "seed_everything set_seed": "Trainer(seed=...), and torch.manual_seed(...) before the task is made",
    },
    # Values of arguments.
    "precision": {
        "16 fp16 float16 half amp amp_fp16": "16-mixed",
        "32-true fp32 float32 float full no none": "32",
        "64-true fp64 float64 double": "64",
        "bf16 bfloat16 amp_bf16": "bf16-mixed",
        "float8 amp_fp8 transformer-engine transformer-engine-float16": "fp8",
        "high": "tf32",
    },
    "optimizer": {
        "adam_8bit": "adam8bit",
        "adamw_8bit adamw_bnb_8bit adamw_torch_8bit bnb.adamw8bit paged_adamw_8bit pagedadamw8bit": "adamw8bit",
        "adamw_apex_fused adamw_hf adamw_torch adamw_torch_fused decoupledadamw fusedadam": "adamw",
        "adamw_torch_4bit": "adamw4bit",
        "adamw_torch_fp8": "adamwfp8",
        "paged_adamw paged_adamw_32bit": "adamw",
        "rmsprop_bnb": "rmsprop",
    },
    "strategy": {
        "npu": "none: Ascend NPUs are not supported",
        "hpu habana": "none: Gaudi HPUs are not supported",
        "mlu musa": "none: this accelerator is not supported",
        "ipu": "none: Graphcore's IPUs are not supported",
        "neuron trainium inferentia": "none: AWS Trainium is not supported",
        "fsdp2": "fsdp",
        "bagua data_parallel ddp2 distributed distributed_data_parallel horovod sagemaker": "ddp",
        "colossalai fairscale fully_sharded model_parallel": "fsdp",
        "hip rocm": "cuda",
        "single_device": "cpu",
        "metal apple": "mps",
        "trn": "none: AWS Trainium is not supported",
        "megatron megatron_lm tp tensor_parallel": "FSDPConfig(tensor_parallel=2)",
        "pp pipeline pipeline_parallel gpipe": "none: layers are not divided over processes; 'fsdp' shards them",
        "cp context_parallel sequence_parallel": "none: sequences are not divided over processes",
        "ep expert_parallel": "none: experts are not divided over processes; 'fsdp' shards their weights",
        "ddp_find_unused_parameters_true": "DDPConfig(find_unused_parameters=True)",
        "ddp_fork ddp_notebook ddp_spawn dp": "ddp",
        "deepspeed_stage_1": "zero1",
        "deepspeed_stage_2": "zero2",
        "deepspeed_stage_2_offload": "zero2_offload",
        "deepspeed_stage_3": "zero3",
        "deepspeed_stage_3_offload": "zero3_offload",
        "fsdp_native full_shard": "fsdp",
        "gpu": "cuda",
        "hybrid_shard": "FSDPConfig(sharding='hybrid')",
        "shard_grad_op": "FSDPConfig(sharding='shard_grad_op')",
        "tpu": "xla",
        "xla_spmd": "xla_fsdp_v2",
    },
    # Options of torchrun, of `accelerate launch` and of LightningCLI, without dashes.
    "option": {
        "gpus nproc nproc_per_node num_processes": "--devices",
        "machine_rank": "--node-rank",
        "model": "--task",
        "main_process_ip master_addr main_process_port master_port": "--address",
        "nnodes num_machines": "--nodes",
        "rdzv_endpoint": "--rendezvous",
        "rdzv_id": "--job",
    },
    "logger": {"clearml comet comet_ml mlflow neptune swanlab trackio wandb": _TRACKED},
}

_ROWS = {
    (kind, name): ours
    for kind, section in SYNONYMS.items()
    for names, ours in section.items()
    for name in names.split()
}

_MANY = 4
"""The most places that may take an argument of one name for all of them to count."""

STEPS = {"training_step", "validation_step", "test_step", "predict_step"}

_OF_TASKS = ("attribute", "hook", "common hook")

_INDICES = ("batch_idx", "batch_nb", "dataloader_idx", "optimizer_idx")

_WARNED: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that have been warned about."""


def row(name: str, kind: str, owner: str = "") -> str | None:
    """Return the table's answer to a name.

    Args:
        name: The name that the user wrote; lower case is tried too.
        kind: The table's section.
        owner: The place where it was written: "Trainer", "Trainer.fit". A row for the owner comes first.
    """
    found = _ROWS.get((kind, f"{owner}.{name}"))
    return found or _ROWS.get((kind, name)) or _ROWS.get((kind, name.lower()))


def help_with(name: str, allowed: Iterable[str], kind: str = "argument", owner: str = "") -> str:
    """Return a hint for a wrong name: our counterpart if the table has one, else the nearest name.

    Args:
        name: The wrong name.
        allowed: All valid names.
        kind: The table's section.
        owner: As in `row`.
    """
    names = sorted(allowed)
    ours = None if name.lower() in names else row(name, kind, owner)
    listed = f"Allowed: {', '.join(map(repr, names)) or 'none'}."
    if ours is not None and not ours.startswith("same"):
        return f"{_sentence(ours, names, owner)} {listed}"
    if kind == "argument" and (places := takers(name, owner)):
        return f"It is an argument of {' or '.join(places[:3])}. {listed}"  # of verbs, the first three
    return nearest(name, names)


def takers(name: str, owner: str = "") -> list[str]:
    """Return the calls of ours that take an argument, as a user writes them; those of `owner` come first.

    Args:
        name: The argument.
        owner: The place that does not take it: "Trainer", "Trainer.fit".
    """
    first = owner.partition(".")[0]
    places = [first, "Trainer", *PLACES]
    found: dict[str, int] = {}
    for kind in public_classes():
        title = kind.__name__
        order = places.index(title) if title in places else len(places)
        for method in dir(kind):
            call = getattr(kind, method, None)
            taken = getattr(call, "arguments_by_name", ())
            if method == "__init__" and not taken and title in PLACES:
                taken = inspect.signature(kind).parameters
            if name not in taken:
                continue
            if method == "__init__":
                shown = PLACES.get(title, f"{title}({{}})")
            elif title == "Trainer":
                shown = PLACES.get(method, f"trainer.{method}({{}})")
            else:
                continue
            found.setdefault(shown.format(f"{name}=..."), order)
    if len(found) > _MANY:  # a common word, which means something of its own in each place
        found = {shown: order for shown, order in found.items() if order < len(places) and first == "Trainer"}
    return sorted(found, key=found.__getitem__)


def _sentence(ours: str, allowed: Iterable[str] = (), owner: str = "") -> str:
    """Put an answer of the table into words; `owner` is the place that takes the allowed names."""
    if ours.startswith("none: "):
        return f"It has no counterpart here: {ours.removeprefix('none: ')}."
    shown: list[str] = []
    for part in ours.split(" | "):
        place, _, rest = part.partition(".")
        if place not in PLACES:
            shown.append(f"called {part!r}" if part in allowed else part)
            continue
        argument, _, note = rest.partition("; ")
        name, _, value = argument.partition("=")
        note = f", {note}" if note else ""
        is_verb = place in ("fit", "test", "predict")
        if name in allowed and (is_verb == ("." in owner) or not owner.startswith("Trainer")):
            called = argument if value not in ("", "True") else f"called {name!r}"
            return f"Here it is {called}{note}."
        shown.append(PLACES[place].format(argument if value else f"{name}=...") + note)
    return f"Here it is {' or '.join(shown)}."


def missing(owner: type, name: str) -> str:
    """Return the message for a missing attribute: Python's, and a hint if the table has a row.

    Args:
        owner: The class. "Trainer" and "Run" have rows of their own; all other rows are a task's.
        name: The attribute.
    """
    told = f"'{owner.__name__}' object has no attribute '{name}'"
    ours = _ROWS.get(("attribute", f"{owner.__name__}.{name}"))
    rows = [ours] if owner.__name__ in ("Run", "Trainer") else [_ROWS.get((kind, name)) for kind in _OF_TASKS]
    for ours in rows:
        if ours is not None:
            return f"{told}. {_sentence(ours).removesuffix('.')}"  # Python may add a sentence
    return told


class Elsewhere:
    """An attribute that other libraries' classes have. Reading or setting it raises an error that names ours."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(missing(owner, self._name))

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise AttributeError(missing(type(instance), self._name))


def foreign(thing: object) -> str | None:
    """Return our counterpart of another library's object, in words; None for any other object.

    The object's base classes are recognised by name: neither Lightning nor transformers is imported.
    """
    for kind in type(thing).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        ours = row(kind.__name__, "name") if library else None
        if ours is not None:
            given = type(thing).__name__
            known = (
                f"{given} of {library}"
                if given == kind.__name__
                else f"{given} ({kind.__name__} of {library})"
            )
            return f"{known}. {_sentence(_CLASS_OF_OURS if ours.startswith('same') else ours)}"
    return None


def defined_by_user(thing: object) -> dict[str, Any]:
    """Return the attributes that an object has itself, and those that its user-written classes define."""
    found: dict[str, Any] = {}
    for kind in reversed(type(thing).__mro__):
        if kind.__module__.partition(".")[0] not in ("builtins", "drivetrain", "torch", *LIBRARIES):
            found.update(vars(kind))
    return {**found, **vars(thing)}


def check_task_names(task: object, hooks: Collection[str]) -> None:
    """Raise if a task defines methods of another library that we never call; all in one error.

    Args:
        task: The task.
        hooks: The hooks of our callbacks.

    Raises:
        ConfigError: A hook or a step of Lightning or transformers; names our counterpart of each.
    """
    owner = type(task).__name__
    defined = defined_by_user(task)
    lines: list[str] = []
    for name in defined:
        ours = name if name in hooks else row(name, "hook")
        if ours is None or (name == "automatic_optimization" and getattr(task, name) is not False):
            continue
        ours = f"a callback's {ours}" if ours.startswith("on_") else ours
        lines.append(f"\n- {owner}.{name} is never called. {_sentence(ours)}")
    for name in STEPS & defined.keys():
        given = _more_than_the_batch(getattr(task, name))
        if given:
            lines.append(
                f"\n- {owner}.{name} takes {', '.join(map(repr, given))}, but is given the batch alone. Write"
                f" it as `def {name}(self, batch)`. Where a run is, callbacks see: run.progress.epoch_batches,"
                " run.evaluation.batch and run.evaluation.loader"
            )
    if lines:
        raise ConfigError(
            f"{owner} is written for another library; change this first (see {_PAGE}):"
            + "".join(sorted(lines))
        )
    warn_of_common_hooks(task)


def _more_than_the_batch(step: Callable[..., Any]) -> list[str]:
    """Return the required parameters of a step beyond the batch, and those that only another library passes."""
    parameters = inspect.signature(step, follow_wrapped=False).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return [each.name for each in named[1:] if each.default is each.empty or each.name in _INDICES]


def warn_of_common_hooks(thing: object) -> None:
    """Warn, once per class, of methods that Lightning calls automatically and we never do."""
    if type(thing) in _WARNED:
        return
    _WARNED.add(type(thing))
    owner, defined = type(thing).__name__, defined_by_user(thing)
    found = {name: row(name, "common hook") for name in defined if callable(defined[name])}
    lines = [f"\n- {owner}.{name}: {_sentence(ours)}" for name, ours in found.items() if ours]
    if lines:
        warnings.warn(
            f"Lightning or transformers calls these by itself, drivetrain does not. If {owner} calls them, all is well:"
            + "".join(lines),
            stacklevel=2,
        )
