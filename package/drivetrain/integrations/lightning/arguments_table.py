"""Every argument of Lightning's Trainer, and what it gives as callbacks and loggers, with their meaning here.

This table is data: `arguments.py` reads it, `docs/reference/lightning-arguments.md` prints it, and tests
check that the installed release has no argument without a row, and that each mapped row has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAPPED, IGNORED, REFUSED = "mapped", "ignored", "refused"


@dataclass(frozen=True)
class LightningRow:
    """An argument, a class or a value.

    Attributes:
        name: Its name there.
        status: "mapped", "ignored" or "refused".
        text: What it becomes here, or why it is ignored or refused, with what to use instead.
        differs: For a mapped one, what is different here; empty if the meaning is the same.
        example: For a mapped argument, a value that has an effect.
        needs: Other arguments that the example needs.
    """

    name: str
    status: str
    text: str
    differs: str = ""
    example: Any = None
    needs: Mapping[str, Any] = field(default_factory=dict)


def _mapped(name: str, text: str, example: Any, differs: str = "", **needs: Any) -> LightningRow:
    return LightningRow(name, MAPPED, text, differs, example, needs)


def _ignored(name: str, text: str) -> LightningRow:
    return LightningRow(name, IGNORED, text)


def _refused(name: str, text: str) -> LightningRow:
    return LightningRow(name, REFUSED, text)


_SHORT_WINDOW = (
    "a short last window of an epoch is weighted by its samples; Lightning divides by the full number"
)

_ARGUMENTS = (
    _mapped("accelerator", "the device of `Trainer(strategy=)`", "cpu"),
    _mapped("strategy", "`Trainer(strategy=)`; the names are below", "ddp_find_unused_parameters_true"),
    _mapped("devices", '`Trainer(devices=)`; -1 is "auto"; for a list set CUDA_VISIBLE_DEVICES', 2),
    _mapped("num_nodes", "`Trainer(num_nodes=)`", 2, devices=2),
    _mapped("precision", "`Trainer(precision=)`; the names are below", "bf16-mixed"),
    _mapped("logger", "`Trainer(loggers=)`; the classes are below", False),
    _mapped("callbacks", "`Trainer(callbacks=)` and others; the classes are below", ()),
    _mapped(
        "fast_dev_run",
        '`Trainer(dry_run="batches")`, or the number of batches',
        True,
        "callbacks that need no checkpoints stay on",
    ),
    _mapped("max_epochs", "`Trainer(max_epochs=)`; -1 is no limit, and without any limit it is 1000", 3),
    _mapped("min_epochs", "the least number of epochs; it needs data of known length", 2),
    _mapped(
        "max_steps",
        "`Trainer(max_steps=)`; -1 is no limit",
        7,
        "a step counts once: in manual optimization Lightning counts each optimizer's step",
    ),
    _mapped("min_steps", "`Trainer(min_steps=)`", 2),
    _mapped(
        "max_time",
        '`Trainer(max_time=)`; "DD:HH:MM:SS", a timedelta or a mapping',
        "00:12:00:00",
        "the time counts over all restarts",
    ),
    _mapped("limit_train_batches", "`Trainer(limit_train_batches=)`", 0.25),
    _mapped("limit_val_batches", "`Trainer(limit_validation_batches=)`; 0 is `validate_every=None`", 3),
    _mapped("limit_test_batches", "`Trainer(limit_test_batches=)`", 3),
    _mapped("limit_predict_batches", "`Trainer(limit_predict_batches=)`", 3),
    _refused(
        "overfit_batches",
        "give fit a list of the first batches, such as few = [*itertools.islice(loader, 2)], as the training"
        " data and as the validation data",
    ),
    _mapped(
        "val_check_interval",
        "`Trainer(validate_every=)`: a fraction of an epoch, batches, or a time",
        0.5,
        "a number of batches is counted over the whole run, as by check_val_every_n_epoch=None",
    ),
    _mapped("check_val_every_n_epoch", "`Trainer(validate_every=)`, in epochs", 2),
    _mapped("num_sanity_val_steps", "`Trainer(sanity_validation=)`; 0 disables it", 0),
    _mapped("log_every_n_steps", "`Trainer(log_every=)`, in steps", 5),
    _mapped("enable_checkpointing", "`Trainer(checkpoint=)`", False),
    _mapped("enable_progress_bar", "`Trainer(progress_bar=)`", False),
    _mapped("enable_model_summary", "`ModelSummary`, which `Trainer(progress_bar=True)` has too", False),
    _mapped(
        "accumulate_grad_batches",
        "`Trainer(gradient_accumulation_steps=)`",
        4,
        _SHORT_WINDOW,
    ),
    _mapped("gradient_clip_val", "`Trainer(max_grad_norm=)` or `max_grad_value`; 0 disables it", 0.5),
    _mapped("gradient_clip_algorithm", "which of the two the value is", "value", gradient_clip_val=0.5),
    _mapped("deterministic", '`Trainer(deterministic=)`; "warn" holds for the length of a run too', True),
    _mapped("benchmark", "torch.backends.cudnn.benchmark, for the length of a run", True),
    _ignored("inference_mode", "evaluations run under torch.no_grad"),
    _refused(
        "use_distributed_sampler",
        "data is divided among the ranks when it is read. For loaders that give each process its own part,"
        " pass drivetrain.already_split(loader)",
    ),
    _mapped(
        "profiler",
        '`Profile`: "simple" is its table, "pytorch" its trace; "advanced" is refused',
        "simple",
        "phases and files have other names; the last two take the steps 10 to 12, or those of"
        " `Profile(schedule=)`",
    ),
    _mapped("detect_anomaly", "torch.autograd.set_detect_anomaly, for the length of a run", True),
    _mapped(
        "barebones",
        "`Trainer(checkpoint=False, loggers=(), progress_bar=False, log_every=None, sanity_validation=None)`",
        True,
        "self.log still works",
    ),
    _refused(
        "plugins",
        "precisions are names, Trainer(precision=...); launchers and batch systems are found by their"
        " environment; storages and strategies are drivetrain's own",
    ),
    _mapped(
        "sync_batchnorm",
        "`DDPConfig(sync_batchnorm=True)`, or of `FSDPConfig`",
        True,
        strategy="ddp",
        devices=2,
    ),
    _refused(
        "reload_dataloaders_every_n_epochs",
        "the Trainer does not ask for loaders: give as_data(data, reload_every_n_epochs=1) to its fit",
    ),
    _mapped(
        "default_root_dir",
        "`Trainer(run_dir=)`",
        "runs/example",
        "it is the directory of one run, without lightning_logs/version_N below it: give each run its own",
    ),
    _ignored("enable_autolog_hparams", "each logger's log_config is always given the task's hparams"),
    _refused(
        "model_registry", "a finished fit leaves model.safetensors in its run_dir; see docs/how-to/publish.md"
    ),
)
ROWS: Mapping[str, LightningRow] = {each.name: each for each in _ARGUMENTS}
"""The arguments by name."""

_AMP = "give precision='16-mixed' or 'bf16-mixed'"
_HYDRA = "a key of hydra: give instantiate(cfg.trainer) the _target_ of from_lightning_arguments"

OLD: Mapping[str, str] = {
    "_convert_": _HYDRA,
    "_partial_": _HYDRA,
    "_recursive_": _HYDRA,
    "_target_": _HYDRA,
    "amp_backend": _AMP,
    "amp_level": _AMP,
    "auto_lr_find": "call trainer.find_learning_rate",
    "auto_scale_batch_size": "call trainer.find_batch_size",
    "auto_select_gpus": "give devices=1",
    "checkpoint_callback": "give enable_checkpointing",
    "distributed_backend": "give strategy",
    "flush_logs_every_n_steps": "leave it out: every log point is flushed",
    "gpus": "give devices=N, accelerator='gpu'",
    "ipus": "leave it out: no strategy of drivetrain runs there",
    "log_gpu_memory": "give callbacks=[DeviceStatsMonitor()]",
    "move_metrics_to_cpu": "leave it out: logged values are numbers",
    "multiple_trainloader_mode": "return a CombinedLoader(loaders, mode)",
    "num_processes": "give devices=N, accelerator='cpu'",
    "overfit_pct": "give overfit_batches",
    "prepare_data_per_node": "set the attribute prepare_data_per_node of the data module",
    "process_position": "leave it out",
    "progress_bar_refresh_rate": "give enable_progress_bar",
    "reload_dataloaders_every_epoch": "give reload_dataloaders_every_n_epochs=1",
    "replace_sampler_ddp": "give use_distributed_sampler",
    "resume_from_checkpoint": "call trainer.fit(task, data, resume=path)",
    "stochastic_weight_avg": "give callbacks=[drivetrain.callbacks.WeightAverage(...)]",
    "terminate_on_nan": "leave it out: a NaN ends training, unless Trainer(on_nonfinite=) says otherwise",
    "tpu_cores": "give accelerator='tpu', devices=N",
    "track_grad_norm": "give callbacks=[drivetrain.callbacks.GradientNorms()]",
    "truncated_bptt_steps": "divide the sequence in training_step",
    "weights_save_path": "give default_root_dir",
    "weights_summary": "give enable_model_summary",
}
"""The advice for arguments of Lightning 1, and for keys of hydra."""

_FORKED = "processes run the program again; a notebook's are forked"
_DP = 'use strategy="ddp", which starts a process for each device'

STRATEGIES: Mapping[str, LightningRow] = {
    each.name: each
    for each in (
        _mapped("auto", '"auto", or the accelerator', None),
        _mapped("ddp", '"ddp"', None),
        _mapped("ddp_find_unused_parameters_false", '"ddp"', None),
        _mapped("ddp_find_unused_parameters_true", "`DDPConfig(find_unused_parameters=True)`", None),
        *(
            _mapped(f"ddp_{kind}{end}", here, None, _FORKED)
            for kind in ("spawn", "fork", "notebook")
            for end, here in (
                ("", '"ddp"'),
                ("_find_unused_parameters_false", '"ddp"'),
                ("_find_unused_parameters_true", "`DDPConfig(find_unused_parameters=True)`"),
            )
        ),
        _mapped("deepspeed", '"zero2"', None),
        _mapped("deepspeed_stage_1", '"zero1"', None),
        _mapped("deepspeed_stage_2", '"zero2"', None),
        _mapped("deepspeed_stage_2_offload", '"zero2_offload"', None),
        _mapped("deepspeed_stage_3", '"zero3"', None),
        _mapped("deepspeed_stage_3_offload", '"zero3_offload"', None),
        _refused(
            "deepspeed_stage_3_offload_nvme",
            'use "deepspeed_stage_3_offload", or DeepSpeedConfig(config=...)',
        ),
        _mapped(
            "fsdp", '"fsdp"', None, "each repeated block is gathered by itself; Lightning wraps by a policy"
        ),
        _mapped("fsdp_cpu_offload", "`FSDPConfig(cpu_offload=True)`", None),
        _mapped("single_device", '"auto" with one device, or the accelerator', None),
        _mapped("single_tpu", '"xla"', None),
        _mapped("single_xla", '"xla"', None),
        _mapped("xla", '"xla"', None),
        _refused("xla_debug", 'use strategy="xla", and set PT_XLA_DEBUG=1 yourself'),
        _refused("dp", _DP),
    )
}
"""The names of strategies."""

CALLBACKS: Mapping[str, LightningRow] = {
    each.name: each
    for each in (
        _mapped(
            "ModelCheckpoint",
            "`Trainer(checkpoint=CheckpointConfig(...))`, several as a list",
            None,
            "a checkpoint is a directory whose name begins with its step; one serves all policies; the newest"
            " is always kept",
        ),
        _mapped(
            "EarlyStopping",
            "`EarlyStopping`",
            None,
            "a value that is not finite ends the run with an error, or as `Trainer(on_nonfinite=)` says",
        ),
        _mapped("LearningRateMonitor", "`LearningRateMonitor`", None, "rates are logged at each log point"),
        _mapped(
            "DeviceStatsMonitor",
            "`DeviceStats`",
            None,
            'names begin with "device/", and values are read at each log point',
        ),
        _mapped("ModelSummary", "`ModelSummary`", None),
        _mapped("RichModelSummary", "`ModelSummary`", None),
        _mapped("ProgressBar", "`ProgressBar`", None),
        _mapped("TQDMProgressBar", "`ProgressBar`", None, "its options are its own"),
        _mapped("RichProgressBar", '`ProgressBar(style="rich")`', None, "its options are its own"),
        _mapped("Timer", "`Trainer(max_time=)`", None, "the time counts over all restarts"),
        _mapped(
            "GradientAccumulationScheduler",
            '`Trainer(gradient_accumulation_steps={0: 8, "4 epochs": 4})`',
            None,
            _SHORT_WINDOW,
        ),
        _mapped(
            "EMAWeightAveraging",
            "`WeightAverage`",
            None,
            "buffers are not averaged, and checkpoints hold the average as the model",
        ),
        _mapped("Callback", "a callback of a user or a library stays as it is: its hooks are called", None),
        _mapped("LambdaCallback", "it stays as it is: its hooks are called", None),
        _refused("BackboneFinetuning", "give Trainer(callbacks=[Freeze(...)]); see docs/how-to/freeze.md"),
        _refused("BaseFinetuning", "give Trainer(callbacks=[Freeze(...)]); see docs/how-to/freeze.md"),
        _refused("BasePredictionWriter", "use trainer.predict(..., save_to=directory)"),
        _refused(
            "BatchSizeFinder", 'use Trainer(micro_batch="auto"), which splits a batch that does not fit'
        ),
        _refused(
            "Checkpoint",
            "give the policy by drivetrain: dataclasses.replace(trainer, checkpoint=CheckpointConfig(...))",
        ),
        _refused(
            "LearningRateFinder", "compare short fits, Trainer(max_steps=..., loggers=()), at several rates"
        ),
        _refused("ModelPruning", "use torch.nn.utils.prune and a callback; see docs/how-to/prune.md"),
        _refused(
            "OnExceptionCheckpoint", "signals save and end a fit by Trainer(preemption=True), the default"
        ),
        _refused(
            "StochasticWeightAveraging",
            "give Trainer(callbacks=[WeightAverage(...)]); see docs/how-to/average-weights.md",
        ),
        _refused("ThroughputMonitor", "use callbacks.Throughput, whose values have other names"),
        _refused(
            "WeightAveraging",
            "give Trainer(callbacks=[WeightAverage(...)]); see docs/how-to/average-weights.md",
        ),
        _refused("SpikeDetection", "use callbacks.LossSpike"),
    )
}
"""The callbacks, by the names of their classes."""

_TRACKED = (
    "give CometLogger, MLFlowLogger or WandbLogger of Lightning, a logger of drivetrain by"
    ' dataclasses.replace(trainer, loggers="trackio"), or an object with log_metrics(metrics, step),'
    " log_config(config) and close() as"
    " `logger`; see docs/how-to/loggers-in-detail.md"
)

_MODELS = "log_model=True stores the best checkpoint and the finished weights"

LOGGERS: Mapping[str, LightningRow] = {
    each.name: each
    for each in (
        _mapped("TensorBoardLogger", "`TensorBoardLogger`, in the same directory", None),
        _mapped(
            "CSVLogger", "`CSVLogger`, in the same directory", None, "there is a row for each logged step"
        ),
        _mapped(
            "MLFlowLogger",
            "`MLflowLogger` of `drivetrain.integrations.trackers`, with the same server, experiment and run",
            None,
            _MODELS,
        ),
        _mapped(
            "WandbLogger",
            "`WandbLogger` of `drivetrain.integrations.trackers`, with the arguments of `wandb.init`",
            None,
            _MODELS,
        ),
        _mapped(
            "CometLogger",
            "`CometLogger` of `drivetrain.integrations.trackers`, which uses the experiment that is open",
            None,
        ),
        _refused("LitLogger", _TRACKED),
        _refused("Logger", _TRACKED),
        _refused(
            "NeptuneLogger",
            "the service has ended, and the newest Lightning has no such logger either. For a Neptune server"
            ' of your own, give dataclasses.replace(trainer, loggers="neptune")',
        ),
    )
}
"""The loggers, by the names of their classes."""

PROFILERS: Mapping[str, str] = {"simple": "table", "pytorch": "trace"}
"""The kinds of `Profile` by the names of profilers."""

PRECISIONS: Mapping[str, str] = {
    "32-true": "32",
    "32": "32",
    "64-true": "64",
    "64": "64",
    "16-mixed": "16-mixed",
    "16": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
}
"""The names of precisions."""

NO_PRECISION = (
    'is not supported: use precision="fp8" of drivetrain, which is torchao\'s, on a GPU that has it'
)
"""Of Transformer Engine's precisions."""

OTHERS: Mapping[str, str] = {
    "LightningCLI": "it makes the Trainer and the module itself. `drivetrain fit` is the command here; for a"
    " configuration of LightningCLI, make the objects that it names by `class_path`, and pass them",
    "to_torchscript": "a method of the module, which works as before. torch has deprecated TorchScript:"
    " torch.export.export(module, inputs) replaces it",
    "Tuner": "compare short fits, Trainer(max_steps=..., loggers=()), at several rates",
}
"""What is beside the Trainer."""
