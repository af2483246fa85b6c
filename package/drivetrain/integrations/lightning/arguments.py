"""From the arguments of Lightning's Trainer to a Trainer."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from drivetrain.callbacks import ModelSummary, ProgressBar
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.intervals import Every
from drivetrain.core.synonyms import help_with
from drivetrain.integrations.lightning.arguments_objects import (
    refuse_configuration,
    take_callbacks,
    take_loggers,
    take_profiler,
)
from drivetrain.integrations.lightning.arguments_table import (
    IGNORED,
    NO_PRECISION,
    OLD,
    PRECISIONS,
    REFUSED,
    ROWS,
    STRATEGIES,
)
from drivetrain.integrations.lightning.bridge import LightningCallbacks
from drivetrain.integrations.lightning.least_epochs import LeastEpochs
from drivetrain.integrations.lightning.torch_flags import TorchFlags
from drivetrain.strategies.ddp import DDPConfig
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.trainer.trainer import Trainer

_DEVICES = {"cpu": "cpu", "cuda": "cuda", "mps": "mps", "tpu": "xla"}
_DAYS = re.compile(r"(\d+):(\d\d?):(\d\d?):(\d\d?)")

DEFAULTS: Mapping[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "max_steps": -1,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "check_val_every_n_epoch": 1,
    "accumulate_grad_batches": 1,
    "inference_mode": True,
    "use_distributed_sampler": True,
    "detect_anomaly": False,
    "barebones": False,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "enable_autolog_hparams": True,
}
"""Lightning's defaults; None for all others."""


class ArgumentDifference(NamedTuple):
    """An argument, or an object among its values, that has another meaning here.

    Attributes:
        name: Its name.
        value: The value.
        text: The difference.
    """

    name: str
    value: Any
    text: str

    def __str__(self) -> str:
        """Return a line."""
        return f"{self.name}={self.value!r}: {self.text}"


class MappedTrainer(NamedTuple):
    """The result of `from_lightning_arguments`.

    Attributes:
        trainer: The Trainer. `dataclasses.replace(trainer, seed=1)` changes it.
        differences: What has another meaning here, one line each.
    """

    trainer: Trainer
    differences: tuple[ArgumentDifference, ...]


@dataclass
class _Given:
    """The arguments, and what was noted about them."""

    values: Mapping[str, Any]
    notes: list[ArgumentDifference] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, DEFAULTS.get(name))

    def is_set(self, name: str) -> bool:
        return name in self.values and self.values[name] != DEFAULTS.get(name)

    def note(self, name: str, text: str, value: Any = None) -> None:
        self.notes.append(ArgumentDifference(name, self[name] if value is None else value, text))

    def refuse(self, name: str, text: str) -> ConfigError:
        return ConfigError(f"{name}={self[name]!r}: {text}")


def from_lightning_arguments(**arguments: Any) -> MappedTrainer:
    """Return the Trainer that the arguments of Lightning's Trainer mean, and what has another meaning here.

    ::

        trainer, differences = from_lightning_arguments(
            max_epochs=10, accelerator="gpu", precision="bf16-mixed"
        )
        trainer.fit(as_task(LitModel()), as_data(LitData()))

    Arguments that are left out have Lightning's defaults: 1000 epochs, a validation and a checkpoint after
    each epoch, and logs for TensorBoard. The newest checkpoint is kept. The callbacks `ModelCheckpoint`,
    `EarlyStopping`, `LearningRateMonitor`, `Timer`, `GradientAccumulationScheduler`, and those that show
    something, are mapped. Other callbacks of Lightning are called as they are; those that reach into its loop
    are refused. Callbacks of drivetrain are passed on. docs/reference/lightning-arguments.md lists
    every argument.

    Args:
        **arguments: Arguments of `lightning.Trainer`.

    Raises:
        ConfigError: An argument or a value that is refused or unknown; says what to use instead.
        StrategyError: The devices or the precision cannot run here.
    """
    given = _Given(arguments)
    for name, value in arguments.items():
        if name in OLD:
            raise ConfigError(f"Lightning's Trainer has no argument {name!r}: {OLD[name]}")
        if name not in ROWS:
            raise ConfigError(
                f"Lightning's Trainer has no argument {name!r}."
                f" {help_with(name, ROWS, 'argument', 'Trainer')}"
            )
        refuse_configuration(name, value)
        row = ROWS[name]
        if row.status == REFUSED and given.is_set(name) and value not in (None, False):
            raise given.refuse(name, row.text)
        if row.status == IGNORED and given.is_set(name):
            given.note(name, f"ignored: {row.text}")
        elif row.differs and given.is_set(name) and value not in (None, False):
            given.note(name, row.differs)
    if arguments.get("use_distributed_sampler") is False:
        raise given.refuse("use_distributed_sampler", ROWS["use_distributed_sampler"].text)
    options = {
        **_length(given),
        **_where(given),
        **_step(given),
        **_evaluation(given),
        **_limits(given),
        **_logs(given),
    }
    saves = not given["barebones"] if given["enable_checkpointing"] is None else given["enable_checkpointing"]
    callbacks = take_callbacks(given["callbacks"], saves, given.note)
    options["checkpoint"] = callbacks.checkpoint
    bridged = [LightningCallbacks(callbacks.bridged)] if callbacks.bridged else []
    options["callbacks"] = [*bridged, *callbacks.callbacks, *_shown(given, options, callbacks.callbacks)]
    options["callbacks"] += take_profiler(given["profiler"])
    warns, anomalies = given["deterministic"] == "warn", bool(given["detect_anomaly"])
    if warns or anomalies or given["benchmark"] is not None:
        options["callbacks"].append(TorchFlags(warns, given["benchmark"], anomalies))
    if given["min_epochs"]:
        options["callbacks"].insert(0, LeastEpochs(given["min_epochs"]))
    if callbacks.max_time is not None:
        limit = options["max_time"]
        options["max_time"] = callbacks.max_time if limit is None else min(limit, callbacks.max_time)
    if callbacks.accumulation is not None:
        _accumulate(given, options, callbacks.accumulation)
    _trial(given, options)
    return MappedTrainer(Trainer(**options), tuple(given.notes))


def _length(given: _Given) -> dict[str, Any]:
    epochs, steps, time = given["max_epochs"], given["max_steps"], _duration(given, "max_time")
    steps = None if steps == -1 else steps
    if epochs is None and steps is None and time is None:
        epochs = 1000
        given.note("max_epochs", "not given, nor another limit: 1000 epochs, as in Lightning", 1000)
    epochs = None if epochs == -1 else epochs
    if epochs is None and steps is None and time is None:
        raise given.refuse("max_epochs", "the training would have no end; give max_steps or max_time too")
    return {
        "max_epochs": epochs,
        "max_steps": steps,
        "max_time": time,
        "min_steps": given["min_steps"] or None,
    }


def _duration(given: _Given, name: str) -> timedelta | None:
    value = given[name]
    if value is None or isinstance(value, timedelta):
        return value
    if isinstance(value, Mapping):
        return timedelta(**value)
    found = _DAYS.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise given.refuse(name, 'give "DD:HH:MM:SS", a timedelta, or a mapping such as {"hours": 12}')
    days, hours, minutes, seconds = map(int, found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _where(given: _Given) -> dict[str, Any]:
    return {
        "strategy": _strategy(given),
        "devices": _devices(given),
        "num_nodes": given["num_nodes"],
        "precision": _precision(given),
    }


def _strategy(given: _Given) -> Any:
    name, device = given["strategy"], _device(given)
    if not isinstance(name, str):
        raise given.refuse(
            "strategy",
            f"an object of {type(name).__name__} cannot be taken over. Give the name, or a configuration of"
            " drivetrain: dataclasses.replace(trainer, strategy=DDPConfig(...))",
        )
    row = STRATEGIES.get(name)
    if row is None:
        raise ConfigError(f"strategy={name!r}: {nearest(name, STRATEGIES)}")
    if row.status == REFUSED:
        raise given.refuse("strategy", row.text)
    if row.differs:
        given.note("strategy", row.differs)
    synchronized = bool(given["sync_batchnorm"])
    unused = name.endswith("_find_unused_parameters_true")
    if name in ("auto", "single_device"):
        if synchronized and given["devices"] not in (1, "1"):
            raise given.refuse("sync_batchnorm", 'name the strategy too: strategy="ddp"')
        return device or "auto"
    if name.startswith("ddp"):
        if unused or synchronized:
            _check_device(given, device)
            return DDPConfig(find_unused_parameters=unused, sync_batchnorm=synchronized)
        return "ddp" if device is None else device
    _check_device(given, device)
    if name.startswith("fsdp"):
        if device == "xla":
            return "xla_fsdp"
        offload = name == "fsdp_cpu_offload"
        chosen = FSDPConfig(cpu_offload=offload, sync_batchnorm=synchronized)
        return chosen if offload or synchronized else "fsdp"
    if synchronized:
        raise given.refuse(
            "sync_batchnorm", f"strategy {name!r} does not synchronise batch norms here; use ddp or fsdp"
        )
    return row.text.strip('"')


def _device(given: _Given) -> str | None:
    """Return our name of the accelerator; None for whatever there is."""
    name = given["accelerator"]
    if not isinstance(name, str):
        raise given.refuse("accelerator", 'give its name: "cpu", "gpu", "mps" or "tpu"')
    if name == "auto":
        return None
    if name == "gpu":
        return "mps" if torch.backends.mps.is_available() else "cuda"
    if name not in _DEVICES:
        raise ConfigError(f"accelerator={name!r}: {nearest(name, ('auto', 'gpu', *_DEVICES))}")
    return _DEVICES[name]


def _check_device(given: _Given, device: str | None) -> None:
    """Check that a strategy that takes what there is takes the accelerator that was asked for."""
    there = torch.accelerator.current_accelerator()
    found = "cpu" if there is None else there.type
    if device is not None and device != found and device != "xla":
        raise given.refuse(
            "accelerator",
            f"strategy={given['strategy']!r} runs on the machine's device, here {found!r}"
            + (". Hide the GPUs with CUDA_VISIBLE_DEVICES=''" if device == "cpu" else ""),
        )


def _devices(given: _Given) -> Any:
    value = given["devices"]
    if given["strategy"] == "single_device" and value == "auto":
        return 1
    if isinstance(value, str) and value != "auto":
        numbers = [each for each in value.replace(" ", "").split(",") if each]
        if not numbers or not all(each.lstrip("-").isdigit() for each in numbers):
            raise given.refuse("devices", 'give a number or "auto"')
        value = list(map(int, numbers)) if "," in value else int(numbers[0])
    if value == -1 or value == [-1]:
        return "auto"
    if isinstance(value, (list, tuple)):
        shown = ",".join(map(str, value))
        raise given.refuse("devices", f"set CUDA_VISIBLE_DEVICES={shown} and give devices={len(value)}")
    return value


def _precision(given: _Given) -> str:
    value = given["precision"]
    if value is None:
        return "32"
    name = str(value)
    if name.startswith("transformer-engine"):
        raise given.refuse("precision", NO_PRECISION)
    if name not in PRECISIONS:
        raise ConfigError(f"precision={value!r}: {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


def _step(given: _Given) -> dict[str, Any]:
    clip, kind = given["gradient_clip_val"] or None, given["gradient_clip_algorithm"] or "norm"
    kind = str(getattr(kind, "value", kind)).lower()
    if kind not in ("norm", "value"):
        raise given.refuse("gradient_clip_algorithm", nearest(kind, ("norm", "value")))
    if clip is None and given["gradient_clip_algorithm"] is not None:
        given.note("gradient_clip_algorithm", "no effect without gradient_clip_val, as in Lightning")
    return {
        "gradient_accumulation_steps": given["accumulate_grad_batches"],
        "max_grad_norm": clip if kind == "norm" else None,
        "max_grad_value": clip if kind == "value" else None,
        "deterministic": given["deterministic"] not in (None, False, "warn"),
    }


def _accumulate(given: _Given, options: dict[str, Any], schedule: dict[Any, int]) -> None:
    """Set the schedule of a GradientAccumulationScheduler."""
    if given["accumulate_grad_batches"] != 1:
        raise given.refuse(
            "accumulate_grad_batches",
            "callbacks has a GradientAccumulationScheduler too; leave one of the two out, as in Lightning",
        )
    every = options["validate_every"]
    if every is not None and every.unit == "steps":
        raise given.refuse(
            "val_check_interval",
            "a number of batches is a changing number of steps with a GradientAccumulationScheduler. Give a"
            " part of an epoch, or dataclasses.replace(trainer, validate_every=...)",
        )
    options["gradient_accumulation_steps"] = schedule


def _evaluation(given: _Given) -> dict[str, Any]:
    checks, epochs = given["val_check_interval"], given["check_val_every_n_epoch"]
    sanity = 2 if given["num_sanity_val_steps"] is None else given["num_sanity_val_steps"]
    made: dict[str, Any] = {"sanity_validation": sys.maxsize if sanity == -1 else sanity or None}
    if given["limit_val_batches"] in (0, 0.0) and given["limit_val_batches"] is not None:
        return {"validate_every": None, "sanity_validation": None}
    checks = 1.0 if checks is None else checks
    if isinstance(checks, (str, Mapping, timedelta)):
        interval = _duration(given, "val_check_interval")
        assert interval is not None
        made["validate_every"] = Every(interval.total_seconds(), "seconds")
    elif isinstance(checks, float) and checks <= 1.0:
        if epochs is None:
            raise given.refuse(
                "val_check_interval", "with check_val_every_n_epoch=None, give a number of batches"
            )
        made["validate_every"] = Every(epochs if checks == 1.0 else checks, "epochs")
    else:
        window = given["accumulate_grad_batches"]
        if checks % window:
            raise given.refuse(
                "val_check_interval", f"batches must be a multiple of accumulate_grad_batches={window}"
            )
        made["validate_every"] = Every(int(checks) // window, "steps")
    if checks != 1.0 and epochs not in (None, 1):
        raise given.refuse(
            "val_check_interval",
            f"with check_val_every_n_epoch={epochs} there is no such interval; give one of the two",
        )
    return made


def _limits(given: _Given) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for theirs, ours in {"train": "train", "val": "validation", "test": "test", "predict": "predict"}.items():
        name = f"limit_{theirs}_batches"
        value = given[name]
        if value is None or (isinstance(value, float) and value == 1.0):
            continue
        if value in (0, 0.0):
            if theirs == "val":
                continue  # `validate_every` is None
            verb = "fit" if theirs == "train" else theirs
            raise given.refuse(name, f"leave out the call of trainer.{verb} instead")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
            raise given.refuse(
                name, "give a number of batches, or a fraction up to 1.0; all batches are the default"
            )
        if value > 1 and value % 1:
            raise given.refuse(name, "above 1 it is a number of batches, which must be whole")
        made[f"limit_{ours}_batches"] = value if value < 1 else int(value)
    return made


def _logs(given: _Given) -> dict[str, Any]:
    every = 50 if given["log_every_n_steps"] is None else given["log_every_n_steps"]
    made: dict[str, Any] = {
        "log_every": Every(every, "steps") if every else None,
        "loggers": take_loggers(given["logger"], given.note),
        "run_dir": given["default_root_dir"],
    }
    if given["barebones"]:
        for name in ("logger", "log_every_n_steps"):
            if given[name]:
                raise given.refuse("barebones", f"{name} is given too; leave one of the two out")
        made |= {"log_every": None, "loggers": ()}
    return made


def _shown(given: _Given, options: dict[str, Any], callbacks: list[Any]) -> list[Any]:
    """Set what is shown, and return the callbacks that show only one of the two."""
    bar, summary = (
        not given["barebones"] if given[name] is None else bool(given[name])
        for name in ("enable_progress_bar", "enable_model_summary")
    )
    if given["barebones"]:
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            if given[name]:
                raise given.refuse("barebones", f"{name}=True is given too; leave one of the two out")
        options["sanity_validation"] = None
    options["progress_bar"] = bar and summary
    if bar == summary:
        return []
    kind = ProgressBar if bar else ModelSummary
    return [] if any(isinstance(each, kind) for each in callbacks) else [kind()]


def _trial(given: _Given, options: dict[str, Any]) -> None:
    if fast := given["fast_dev_run"]:
        options["dry_run"] = "batches" if fast is True else fast
