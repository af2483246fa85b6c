"""Callbacks and loggers among the arguments of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

import torch

from drivetrain.callbacks import (
    DeviceStats,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    Profile,
    ProgressBar,
    WeightAverage,
)
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.config import as_policies
from drivetrain.core.direction import direction_of
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.messages import logger
from drivetrain.core.validation import one_of
from drivetrain.integrations.lightning.arguments_table import (
    CALLBACKS,
    LOGGERS,
    PROFILERS,
    REFUSED,
    LightningRow,
)
from drivetrain.integrations.lightning.kinds import is_overridden, is_theirs
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.loggers.base import LOGGERS as OUR_LOGGERS

_LOG = logger(__name__)

Note = Callable[[str, str, Any], None]

_DEFAULT = CheckpointConfig(every="1 epoch", keep_last=1, best=0, by=None)
"""Lightning's own: the newest after each epoch."""


@dataclass
class TakenCallbacks:
    """The counterparts of callbacks.

    Attributes:
        checkpoint: The policy of each `ModelCheckpoint`, or Lightning's default, or False.
        callbacks: Callbacks of drivetrain.
        bridged: Callbacks of Lightning, whose hooks are called.
        max_time: The time of a `Timer`.
        accumulation: The schedule of a `GradientAccumulationScheduler`, or None.
    """

    checkpoint: bool | tuple[CheckpointConfig, ...] = True
    callbacks: list[Any] = field(default_factory=list)
    bridged: list[Any] = field(default_factory=list)
    max_time: timedelta | None = None
    accumulation: dict[Any, int] | None = None


def refuse_configuration(name: str, value: Any) -> None:
    """Refuse what LightningCLI makes objects of.

    Raises:
        ConfigError: A mapping with "class_path", or a list of them.
    """
    for each in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(each, Mapping) and "class_path" in each:
            raise ConfigError(
                f"{name} has {dict(each)!r}, a description that LightningCLI reads. Make the object and pass"
                " it: from_lightning_arguments(callbacks=[EarlyStopping('val_loss')]). The command here is"
                " `drivetrain fit`"
            )


def take_profiler(given: Any) -> list[Profile]:
    """Return the counterpart of Lightning's `profiler`, if there is one.

    Raises:
        ConfigError: It has none; says what to use.
    """
    if given is None:
        return []
    if given == "xla":
        raise ConfigError(f"profiler={given!r}: use torch_xla.debug.profiler, or callbacks=[XLAReport()]")
    if isinstance(given, str):
        return [Profile(kinds=PROFILERS[one_of("profiler", given, PROFILERS)])]
    if type(given).__name__ != "SimpleProfiler" or not is_theirs(type(given)):
        raise ConfigError(
            f"profiler={type(given).__name__}(...) cannot be taken over. Give callbacks=[Profile(...)] of"
            " drivetrain, whose schedule= and options= are those of torch.profiler"
        )
    return [Profile(kinds="table")]


def module_callbacks(module: Any, given: Any = ()) -> TakenCallbacks:
    """Return the counterparts of callbacks of a module, which join the Trainer's.

    Args:
        module: The module, whose `configure_callbacks` is asked.
        given: Further callbacks, of `as_task`.

    Raises:
        ConfigError: A callback of Lightning that cannot run here, or one that is an argument of the Trainer
            here; says what to write.
    """
    where, listed = "as_task(callbacks=)", _listed(given)
    if is_overridden(module, "configure_callbacks"):
        own = _listed(module.configure_callbacks())
        where = f"{type(module).__name__}.configure_callbacks" if own else where
        kinds = set(map(type, own))
        listed = [*(each for each in listed if type(each) not in kinds), *own]
    for each in listed:
        row = _row(each, CALLBACKS, where)
        name = None if row is None or row.name == "Callback" else row.name
        if name in ("ModelCheckpoint", "Timer"):
            what = "max_time=..." if name == "Timer" else _written(_policy(each, _unsaid))
            raise ConfigError(
                f"{where} has a {name}, which is an argument of the Trainer here: give it {what}, and leave"
                f" the {name} out"
            )
    return take_callbacks(
        listed, False, lambda _, text, name: _LOG.info("%s has %s: %s", where, name, text), where
    )


def _written(policy: CheckpointConfig) -> str:
    """Return a policy as the argument that makes it."""
    chosen = {
        each.name: value
        for each in fields(policy)
        if each.init and (value := getattr(policy, each.name)) != each.default
    }
    listed = ", ".join(
        f"{name}={str(value)!r}" if isinstance(value, Every) else f"{name}={value!r}"
        for name, value in chosen.items()
    )
    return f"checkpoint=CheckpointConfig({listed})"


def _unsaid(*_: Any) -> None: ...


def take_callbacks(given: Any, enabled: bool, note: Note, where: str = "callbacks") -> TakenCallbacks:
    """Return the counterparts of Lightning's callbacks; all others are passed on.

    Args:
        given: A callback, a list of them, or None.
        enabled: Whether checkpoints are saved.
        note: Takes the name, the difference and the object.
        where: The name of what has the callbacks, for messages.

    Raises:
        ConfigError: A callback of Lightning without a counterpart; names what to use.
    """
    taken = TakenCallbacks()
    policies: list[CheckpointConfig] = []
    for each in _listed(given):
        row = _row(each, CALLBACKS, where)
        if row is None:
            taken.callbacks.append(each)
            continue
        if row.differs:
            note("callbacks", row.differs, row.name)
        if row.name == "Callback":
            taken.bridged.append(each)
        elif row.name == "ModelCheckpoint":
            policies.append(_policy(each, note))
        elif row.name == "EarlyStopping":
            taken.callbacks.append(_early_stopping(each, note))
        elif row.name == "LearningRateMonitor":
            if each.log_momentum or each.log_weight_decay:
                raise ConfigError(
                    "LearningRateMonitor(log_momentum=..., log_weight_decay=...) has no counterpart: log them"
                    " in a callback's on_log, by run.log(name, value)"
                )
            taken.callbacks.append(LearningRateMonitor())
        elif row.name == "EMAWeightAveraging":
            taken.callbacks.append(_weight_average(each, note))
        elif row.name == "DeviceStatsMonitor":
            taken.callbacks.append(DeviceStats())
        elif row.name == "Timer":
            left = each.time_remaining()
            taken.max_time = None if left is None else timedelta(seconds=left)
        elif row.name == "GradientAccumulationScheduler":
            taken.accumulation = {f"{epoch} epochs": steps for epoch, steps in each.scheduling.items()}
        else:
            bar = ProgressBar(style="rich" if "Rich" in row.name else "tqdm")
            taken.callbacks.append(ModelSummary() if "Summary" in row.name else bar)
    if policies and not enabled:
        raise ConfigError("checkpoints are off, but callbacks has a ModelCheckpoint. Give one of the two")
    taken.checkpoint = as_policies(policies or [_DEFAULT]) if enabled else False
    return taken


def take_loggers(given: Any, note: Note) -> tuple[Any, ...]:
    """Return the counterparts of Lightning's loggers; all others are passed on.

    Raises:
        ConfigError: A logger of Lightning without a counterpart; names what to use.
    """
    if given is None or given is True:
        return ("tensorboard",)
    if given is False:
        return ()
    made: list[Any] = []
    for each in _listed(given):
        row = _row(each, LOGGERS, "logger")
        if row is None:
            made.append(each)
            continue
        if row.differs:
            note("logger", row.differs, row.name)
        options = vars(each)  # no other way leads to these
        for name, nothing in {**_WITHOUT, **_WITHOUT_HERE.get(row.name, {})}.items():
            value = options.get(name, nothing)
            if value != nothing and value is not None:
                raise ConfigError(f"{row.name}({name.strip('_')}={value!r}) has no counterpart; leave it out")
        made.append(_LOGGERS[row.name](each, options))
    return tuple(made)


_WITHOUT: Mapping[str, Any] = {"_prefix": ""}
"""Options of loggers without a counterpart, and their defaults."""

_WITHOUT_HERE: Mapping[str, Mapping[str, Any]] = {
    "WandbLogger": {"_checkpoint_name": None, "add_file_policy": "mutable"},
    "MLFlowLogger": {"_artifact_location": None},
}
"""Those of one class."""


def _artifacts(log_model: bool | Literal["all"]) -> Literal["none", "best", "all"]:
    """Return the argument `artifacts` for `log_model`."""
    if log_model == "all":
        return "all"
    return "best" if log_model else "none"


def _wandb(given: Any, options: Mapping[str, Any]) -> Any:
    experiment = options["_experiment"]
    if experiment is not None:
        import wandb

        if experiment is not wandb.run:
            raise ConfigError(
                "WandbLogger(experiment=...) has a run that is not the open one, wandb.run. Make it by"
                " wandb.init(), which opens it, and do not finish it before the fit"
            )
    begun = dict(options["_wandb_init"])
    named = {name: begun.pop(name, None) for name in ("project", "name", "id")}
    directory = begun.pop("dir", None)
    if begun.get("resume") == "allow":  # the default; ours does that where W&B can
        del begun["resume"]
    further = {name: value for name, value in begun.items() if value is not None}
    if options["_offline"]:
        further["mode"] = "offline"
    made: Any = OUR_LOGGERS["wandb"]
    return made(directory, **named, artifacts=_artifacts(options["_log_model"]), options=further)


def _comet(given: Any, options: Mapping[str, Any]) -> Any:
    made: Any = OUR_LOGGERS["comet"]
    return made(
        project=options["_project_name"],
        workspace=options["_workspace"],
        online=options["_online"],
        options=options["_kwargs"],
    )


def _mlflow(given: Any, options: Mapping[str, Any]) -> Any:
    if options["_log_batch_kwargs"].get("synchronous"):
        raise ConfigError(
            "MLFlowLogger(synchronous=True) has no counterpart: a thread sends, and the end of the fit waits"
            " for it. Leave it out"
        )
    made: Any = OUR_LOGGERS["mlflow"]
    return made(
        tracking_uri=options["_tracking_uri"],
        experiment=options["_experiment_name"],
        run_name=options["_run_name"],
        tags={name: str(value) for name, value in (given.tags or {}).items()},
        id=options["_run_id"],
        artifacts=_artifacts(options["_log_model"]),
    )


_LOGGERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "CSVLogger": lambda given, _: CSVLogger(given.log_dir),
    "CometLogger": _comet,
    "MLFlowLogger": _mlflow,
    "TensorBoardLogger": lambda given, options: TensorBoardLogger(
        given.log_dir, graph=bool(options["_log_graph"])
    ),
    "WandbLogger": _wandb,
}
"""The function that makes the counterpart of a logger, by the name of its class."""


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _row(thing: Any, table: Mapping[str, LightningRow], argument: str) -> LightningRow | None:
    """Return the row of an object of Lightning; None for any other object.

    The row of `Callback` is for those whose hooks are called: of users, of libraries, and users' subclasses
    of `EarlyStopping`.

    Raises:
        ConfigError: It has no counterpart, or is of a user's subclass, whose methods would not be called.
    """
    kind = next((each for each in type(thing).__mro__ if is_theirs(each) and each.__name__ in table), None)
    if kind is None:
        return None
    row, name = table[kind.__name__], type(thing).__name__
    own = name if name == row.name else f"{name}, a subclass of Lightning's {row.name}"
    if row.status == REFUSED:
        raise ConfigError(f"{argument} has {own}: {row.text}")
    is_own = type(thing) is not kind
    if row.name in ("Callback", "LambdaCallback") or (is_own and row.name == "EarlyStopping"):
        return table["Callback"]
    if is_own:
        raise ConfigError(
            f"{argument} has {own}: what it overrides would not be called. Give Lightning's class, or write a"
            " drivetrain.Callback, whose hooks are each given the run"
        )
    return row


def _policy(given: Any, note: Note) -> CheckpointConfig:
    """Return the policy of a ModelCheckpoint."""
    if given.save_top_k and given.monitor not in ("step", "epoch"):
        warn_of_default_mode(given, given.monitor)
    options = vars(given)  # its intervals have no public names
    steps, time = options["_every_n_train_steps"], options["_train_time_interval"]
    every: Every | None = Every("1 epoch")
    if steps:
        every = Every(steps, "steps")
    elif time is not None:
        every = Every(time)
    else:
        every = Every(options["_every_n_epochs"], "epochs") if options["_every_n_epochs"] else None
    if options.get("_save_on_train_epoch_end"):
        note(
            "callbacks",
            "save_on_train_epoch_end: saves follow the validation of the same epoch",
            "ModelCheckpoint",
        )
    if given.save_on_exception:
        note(
            "callbacks",
            "save_on_exception: signals save and end a run; an error does not save",
            "ModelCheckpoint",
        )
    if given.filename:
        what = f"filename={given.filename!r} is not used: directories are named after the step"
        note("callbacks", what, "ModelCheckpoint")
    if given.monitor in ("step", "epoch") and given.save_top_k:
        if given.mode != "max":
            raise ConfigError(
                f"ModelCheckpoint(monitor={given.monitor!r}, mode={given.mode!r}) keeps the oldest"
                " checkpoints. Give it mode='max', which keeps the newest"
            )
        return CheckpointConfig(
            every=every,
            keep_last=None if given.save_top_k == -1 else given.save_top_k,
            best=0,
            by=None,
            directory=given.dirpath,
            resumable=not given.save_weights_only,
        )
    if given.monitor is None:
        everything = given.save_top_k == -1
        if given.save_top_k == 0 and not given.save_last:
            every = None
        return CheckpointConfig(
            every=every,
            keep_last=None if everything else 1,
            best=0,
            by=None,
            directory=given.dirpath,
            resumable=not given.save_weights_only,
        )
    return CheckpointConfig(
        every=every,
        keep_last=None if given.save_top_k == -1 else 1,
        best=max(given.save_top_k, 1) if given.save_top_k else 0,
        by=given.monitor if given.save_top_k else None,
        mode=given.mode,
        directory=given.dirpath,
        resumable=not given.save_weights_only,
    )


def warn_of_default_mode(given: Any, monitor: str | None) -> None:
    """Warn if an object has the default mode of Lightning and of torch, "min", and more of its value is
    better: its program would keep the worst, stop or lower the rate while it improves.
    """
    if given.mode == "min" and monitor is not None and direction_of(monitor) == "max":
        _LOG.warning(
            f"{type(given).__name__} monitors {monitor!r} with mode='min', which is the default, and takes"
            " the lowest value for the best. Give it mode='max' unless that is meant"
        )


def _early_stopping(given: Any, note: Note) -> EarlyStopping:
    warn_of_default_mode(given, given.monitor)
    if not given.check_finite:
        note(
            "callbacks",
            "check_finite=False: a loss of a validation that is not finite still does as"
            " Trainer(on_nonfinite=) says",
            "EarlyStopping",
        )
    return EarlyStopping(
        given.monitor,
        given.mode,
        patience=max(1, given.patience),  # 0 and 1 mean the same there
        threshold=abs(given.min_delta),
        stop_at=given.stopping_threshold,
        diverged_at=given.divergence_threshold,
        check_finite=given.check_finite,
        strict=given.strict,
    )


def _weight_average(given: Any, note: Note) -> WeightAverage:
    options = vars(given)  # its average has no public name
    average = options["_kwargs"]["avg_fn"]
    kept = float(average(torch.ones(()), torch.zeros(()), 1))  # of the old average in one step
    if given.update_starting_at_epoch is not None:
        raise ConfigError(
            "EMAWeightAveraging(update_starting_at_epoch=...) averages at the ends of epochs too. Give"
            " Trainer(callbacks=[WeightAverage(every=..., start=...)]); see docs/how-to/average-weights.md"
        )
    if given.update_every_n_steps > 1 or given.update_starting_at_step:
        note("callbacks", "steps are counted from 1, and there from 0", "EMAWeightAveraging")
    return WeightAverage(
        decay=round(kept, 7),
        every=f"{given.update_every_n_steps} steps",
        start=f"{given.update_starting_at_step} steps" if given.update_starting_at_step else None,
    )
