"""`TrainingArguments` for a run that was made without any, because callbacks read them."""

from __future__ import annotations

import sys

import torch
from transformers import TrainingArguments

from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint.saving.config import rankings
from drivetrain.core.intervals import Every
from drivetrain.distributed.processes import local_rank, rank, world_size
from drivetrain.integrations.transformers.log_names import to_transformers
from drivetrain.run.run import Run

UNLIMITED = sys.maxsize
"""A number of steps or epochs that is not known beforehand; transformers has this for it, too."""


class RunArguments(TrainingArguments):  # type: ignore[misc]
    """Arguments that describe a run.

    transformers' own class makes a process group when it is made, and resets Accelerate's state. A run has
    both already, so this one leaves them alone.
    """

    @property
    def _setup_devices(self) -> torch.device:  # the constructor of the base class reads it
        self.distributed_state = None
        self._n_gpu = int(not self.use_cpu)
        found = None if self.use_cpu else torch.accelerator.current_accelerator()
        return found or torch.device("cpu")

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return world_size()

    @property
    def process_index(self) -> int:
        """This process's number."""
        return rank()

    @property
    def local_process_index(self) -> int:
        """This process's number on its machine."""
        return local_rank()


def saver_of(run: Run) -> CheckpointSaver | None:
    """Return the run's saver of checkpoints; None if it saves none."""
    return next((each for each in run.callbacks if isinstance(each, CheckpointSaver)), None)


def arguments_of(run: Run) -> TrainingArguments:
    """Return arguments that say of a run what transformers has an argument for."""
    length, engine, saver = run.length, run.engine, saver_of(run)
    log, evaluate, save = (
        _interval(each)
        for each in (
            run.triggers.log.every,
            run.triggers.validate.every,
            saver.policies[0].interval if saver else None,
        )
    )
    loaders = [name for name, _ in run.evaluation_feeds]
    # transformers has one of each; of several policies the first counts.
    ranked = next(iter(rankings(saver.policies).values()), None) if saver is not None else None
    feed, updater = run.train_feed, next(iter(engine.updaters.values()), None)
    arguments = RunArguments(
        output_dir=str(run.run_dir or "trainer_output"),
        num_train_epochs=float(UNLIMITED if length.max_epochs is None else length.max_epochs),
        max_steps=length.steps or -1,
        per_device_train_batch_size=(None if feed is None else feed.source.batch_size) or 1,
        gradient_accumulation_steps=1 if feed is None else feed.accumulation,
        seed=engine.seed,
        learning_rate=5e-5 if updater is None else float(updater.optimizer.param_groups[0]["lr"]),
        max_grad_norm=0.0 if updater is None else updater.max_grad_norm or 0.0,
        logging_strategy=log[0],
        logging_steps=log[1],
        eval_strategy=evaluate[0],
        eval_steps=evaluate[1],
        save_strategy=save[0],
        save_steps=save[1],
        metric_for_best_model=None
        if ranked is None or ranked.by is None
        else to_transformers(ranked.by, loaders),
        greater_is_better=None
        if ranked is None or ranked.by is None
        else ranked.with_direction(run.names.direction(ranked.by)).mode == "max",
        report_to="none",
        use_cpu=engine.device.type == "cpu",
    )
    # Set now: the constructor would check them against the hardware, as the engine has.
    arguments.bf16, arguments.fp16 = (engine.precision.name.startswith(each) for each in ("bf16", "16"))
    return arguments


def _interval(every: Every | None) -> tuple[str, int]:
    """Return the strategy and steps; one that transformers has no word for, such as minutes, never ends."""
    if every is None:
        return "no", UNLIMITED
    if every.unit == "epochs" and every.amount == 1:
        return "epoch", UNLIMITED
    return "steps", int(every.amount) if every.unit == "steps" else UNLIMITED
