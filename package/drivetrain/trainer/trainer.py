"""The Trainer: validated arguments, and the verbs that turn them into runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.progress import Progress
from drivetrain.core.synonyms import missing
from drivetrain.core.validation import by_name, flag, local_path
from drivetrain.distributed.launch.environment import detect
from drivetrain.distributed.launch.programs import rerun_obstacle
from drivetrain.engine.split_batch import join_batches
from drivetrain.engine.weighting import StepResult
from drivetrain.loggers.files import prepare_results_file, write_results
from drivetrain.loggers.history import read_history, table_of
from drivetrain.run.ledger_report import NAME as LEDGER
from drivetrain.run.loop import evaluate, predict, train_steps
from drivetrain.run.messages import as_given, is_part, is_resumable
from drivetrain.run.preemption import Preemption
from drivetrain.run.run import Run
from drivetrain.run.session import left_with_program, run_context
from drivetrain.run.settings import RunSettings
from drivetrain.task.optim.given import KEEP
from drivetrain.task.task import TaskModule
from drivetrain.trainer.assembly import build_evaluation, build_fit
from drivetrain.trainer.curves import plot
from drivetrain.trainer.dry_run import as_tried, writes_nothing
from drivetrain.trainer.observer import observed, observed_loop
from drivetrain.trainer.start import start_from

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from drivetrain.callbacks.checkpoint import CheckpointSaver
    from drivetrain.trainer.find_batch_size import BatchSizeResult
    from drivetrain.trainer.find_learning_rate import LearningRateCurve
    from drivetrain.trainer.plan.plan import Plan

_LOG = logger(__name__)

_LARGEST_SEED = 2**32
"""A program gives smaller seeds; larger ones are torch's own."""

T = TypeVar("T")


@dataclass(frozen=True)
class FitResult:
    """The result of a finished fit.

    Attributes:
        metrics: The latest value of every logged name.
        progress: The counts at the end.
        stop_reason: Why training ended.
        run_dir: Where files went, or None when none were asked for.
        last_checkpoint: The newest checkpoint, or None.
        best_checkpoint: The best checkpoint, or None; of several policies, by the first that keeps any.
        model_path: The finished weights: the file, or the folder that the task writes; or None.
        history_path: The file that `history` reads, or None.
        best_checkpoints: The best checkpoint by each metric that ranks and has had a value.
        best_value: The value of the metric that `best_checkpoint` is the best by, or None.
    """

    metrics: dict[str, float]
    progress: Progress
    stop_reason: str
    run_dir: Path | None
    last_checkpoint: str | None
    best_checkpoint: str | None
    model_path: str | None
    history_path: str | None = None
    best_checkpoints: dict[str, str] = field(default_factory=dict)
    best_value: float | None = None

    @property
    def history(self) -> list[dict[str, float]]:
        """The logged values from the start of the run, before a resume too: for each log point a mapping with
        "step", the number of steps made, and the values by name.

        They are read from the file of the logger "csv" or "jsonl", so that a long run holds none in memory.

        Raises:
            ConfigError: Neither logger was in use, or the file is gone.
        """
        if self.history_path is None:
            raise ConfigError(
                "this fit has no history: it is read from the file of the logger 'csv' or 'jsonl', and the"
                " fit had neither. Give the Trainer loggers='csv'"
            )
        return read_history(Path(self.history_path))

    def _repr_html_(self) -> str:
        """Return the result as a table, which a notebook shows."""
        from drivetrain.callbacks.progress.notebook_table import html_table

        progress = self.progress
        facts: list[tuple[str, object]] = [("ended", self.stop_reason)]
        facts += [("steps, epochs", f"{progress.steps:,}, {progress.epoch}")]
        facts += [("time", f"{progress.seconds:,.1f} s")]
        places = {"run directory": self.run_dir, "weights": self.model_path}
        places |= {f"best by {by}": path for by, path in self.best_checkpoints.items()}
        facts += [(name, path) for name, path in places.items() if path is not None]
        values = [(name, f"{value:.6g}") for name, value in self.metrics.items()]
        return html_table((), facts) + html_table(("value", "last"), values)

    def plot(self, *names: str) -> Figure:
        """Return the logged values as a figure of matplotlib, which a notebook shows.

        `figure.savefig("curves.png")` writes it. "train/loss" and "validation/loss" share a plot.

        Args:
            *names: Of the values, such as "train/loss"; without any, all of them.

        Raises:
            ConfigError: There is no `history`, or no value has the name.
            MissingDependencyError: matplotlib is not installed.
        """
        return plot(self.history, names)


@dataclass(frozen=True)
class PredictResult:
    """The result of `Trainer.predict(..., metrics=True)`.

    Attributes:
        outputs: What `predict` returns without metrics: the outputs of each batch, those of all samples
            with `joined`, or the list of files.
        metrics: What `validate` returns on the same data.
    """

    outputs: Any
    metrics: dict[str, float]


@by_name
@dataclass(frozen=True, kw_only=True)
class Trainer(RunSettings):
    """The configuration of runs: validated when it is made, never changed. Every verb builds a new run.

    Its arguments are in eight groups: length, where it runs, numbers, gradient, data, evaluation, records and
    safety. One of the first three must be given to train; every other has a default.

    Attributes: Length
        max_epochs: Passes over the training data, of known length for a fraction (2.5); one of the three
            limits must be given to train. Default: None. Example: max_epochs=10.
        max_steps: Optimizer steps. Default: None. Example: max_steps=10_000.
        max_time: Wall time over all restarts: "2 hours", seconds, or a timedelta. Default: None. Example:
            max_time="12 hours".
        min_epochs: No callback, such as `EarlyStopping`, ends a fit before so many epochs are complete. The
            three limits, signals and non-finite losses do. Default: None. Example: min_epochs=3.
        min_steps: The same in steps; if both are given, both must be reached. Default: None. Example:
            min_steps=1_000.
        dry_run: A trial: True ("batches") or a number fits one epoch of one batch (or so many) of each
            loader, begins afresh, and writes nothing: no checkpoints, logs, results or predictions. Other
            verbs take as many. "overfit" trains and validates on the first `limit_train_batches` batches of
            the training data (1 if that is None) in every epoch, and saves no checkpoints. Callbacks that
            need checkpoints are left out and named. Default: None. Example: dry_run=True.

    Attributes: Where it runs
        strategy: The strategy: "auto", "cpu", "cuda", "mps", "xpu", "ddp", a configuration such as
            `DDPConfig(...)`, an instance, or another package's name; see `drivetrain strategies`. Default:
            "auto". Example: strategy="fsdp".
        devices: The number of processes; or which GPUs to use, by index, such as [0, 2], one process for
            each; or "auto". An index counts the GPUs that CUDA_VISIBLE_DEVICES leaves visible. Default:
            "auto". Example: devices=2.
        num_nodes: The number of machines. Default: 1. Example: num_nodes=2.
        compile: True, or a `CompileConfig`, to run the task's repeated blocks in compiled form. Default:
            False. Example: compile=True.
        memory: A `MemoryConfig`, or a mapping of its options: which tensors to recompute in backward, to keep
            in the host's memory, or to free early. Default: None. Example:
            memory=MemoryConfig(activation_checkpointing=True).

    Attributes: Numbers
        precision: "32", "tf32", "bf16-mixed", "16-mixed", "fp8", "bf16-true", "16-true", "64", or a
            `Precision`; "auto" takes it from `accelerate launch` or an Accelerator, else "32". Default:
            "auto". Example: precision="bf16-mixed".
        evaluation_precision: The precision that weights are stored in during evaluations and predictions,
            also those of a fit: "bf16-true", "16-true" or "64"; the weights of before return bitwise. None
            evaluates in `precision`. Default: None. Example: evaluation_precision="bf16-true".
        seed: Seeds the order of the data and every random stream of a run. Default: 0. Example: seed=1.
        data_seed: Seeds the order of the training data, and what loading it draws, apart from all other
            streams; None takes `seed`. Default: None. Example: data_seed=2.
        deterministic: Insist on deterministic kernels while a run lasts. Default: False. Example:
            deterministic=True.

    Attributes: Gradient
        gradient_accumulation_steps: Micro-batches per step: a number, or numbers by points of the run, such
            as {0: 8, "4 epochs": 4}. Points are intervals from its start in steps, whole epochs or samples;
            see `ramp`. Default: 1. Example: gradient_accumulation_steps=4.
        max_grad_norm: Clip the gradient's global norm to this; None disables clipping. Default: None.
            Example: max_grad_norm=1.0.
        max_grad_value: Clip each element of the gradient to between minus this and this, instead of the norm.
            Default: None. Example: max_grad_value=0.5.
        micro_batch: Samples of a training batch that are run at once: a number, "auto" for half as many
            whenever memory runs out, or None for all. The batch of a step stays what it is. Default: None.
            Example: micro_batch="auto".

    Attributes: Data
        batch_size: For data given as a bare Dataset. The items of an `IterableDataset` are samples with it,
            and ready batches without. Numbers by points of the run, as for `gradient_accumulation_steps`, for
            training data with a length. Default: None. Example: batch_size=32.
        num_workers: Worker processes for data given as a bare Dataset. Default: 0. Example: num_workers=4.
        collate: A function that makes a batch from a list of samples, for data given as a bare Dataset; None
            takes torch's default. Default: None. Example: collate=pad.
        group_by_length: Put samples of similar lengths into the same step, for training data given as a
            bare Dataset. The name of a column with a number or with tokens ("input_ids"), or a function of a
            sample that returns its length. It is read once for each sample before training. None only
            shuffles. Default: None. Example: group_by_length="input_ids".
        limit_train_batches: At most this many micro-batches an epoch; a number below 1, such as 0.1, is a
            fraction of them, rounded down, at least one. Default: None. Example: limit_train_batches=0.1.
        on_bad_batch: What to do with a training batch that the data raises for: "raise", or "skip" to leave
            it out, report it and count it in `progress.bad_batches`, as long as they are few. Default:
            "raise". Example: on_bad_batch="skip".

    Attributes: Evaluation
        validate_every: When to validate during a fit, which validates at its end if it has not before; None
            disables it. Default: "1 epoch". Example: validate_every="500 steps".
        validate_from: No validation is due before this point, an interval from the run's start ("2 epochs").
            One that is due at the point itself is made. None delays nothing. Default: None. Example:
            validate_from="2 epochs".
        evaluation_batch_size: The samples of a batch in evaluations and predictions of a bare Dataset; None
            takes `batch_size`, and of several numbers the largest. Default: None. Example:
            evaluation_batch_size=128.
        limit_validation_batches: As `limit_train_batches`, of each validation loader. Default: None. Example:
            limit_validation_batches=20.
        limit_test_batches: The same of each test loader. Default: None. Example: limit_test_batches=20.
        limit_predict_batches: The same of each loader to predict. Default: None. Example:
            limit_predict_batches=20.
        sanity_validation: Validate on so many batches of each loader before training, so that a fault in
            validation shows at once. Nothing of it is kept. The hooks of an evaluation are called, with
            `run.evaluation.is_sanity_check` set; what reads a whole evaluation, such as `compute_metrics`, is
            not. "auto" takes 2 if they are under a hundredth of an epoch's batches, else none; None takes
            none. A resumed fit makes none. Default: "auto". Example: sanity_validation=5.

    Attributes: Records
        checkpoint: True for the default policy (with named validation loaders the first one's loss ranks),
            "async" for the same in the background, False for none, a `CheckpointConfig`, or a list of several
            that all apply. Default: True. Example: checkpoint=CheckpointConfig(by="validation/accuracy").
        assets: Files to store beside the weights in each checkpoint: a list, or a mapping of names, of paths,
            objects with `save_pretrained(folder)`, or functions of the folder to write into. Default: ().
            Example: assets=["vocabulary.txt"].
        run_dir: Where checkpoints, logs and the ledger of what the time went to are kept; None makes a new
            `runs/<task>-<time>` for every fit that writes. Default: None. Example: run_dir="runs/first".
        run_name: The name of the run: a new run directory is called `runs/<run_name>-<time>`, and loggers
            find it as `config["trainer"]["run_name"]` in what `log_config` is given. Default: None. Example:
            run_name="baseline".
        loggers: Names ("tensorboard", "csv", "jsonl") or instances; `()` for none. Default: ("tensorboard",
            "csv"). Example: loggers="jsonl".
        log_every: When to log. "auto" is every 50 steps and at the end of every epoch; where an epoch has
            fewer steps, at its end alone. Default: "auto". Example: log_every="10 steps".
        log_first_step: Whether to log after the first step of the run too. Default: False. Example:
            log_first_step=True.
        train_metrics: Whether declared metrics are updated in training too. Default: True. Example:
            train_metrics=False.
        progress_bar: Show progress, and a table of the task before training: True or "tqdm", "rich" for a bar
            of rich, False for neither. Default: True. Example: progress_bar=False.
        callbacks: Objects with hooks; see `drivetrain.callbacks.Callback`. Default: (). Example:
            callbacks=[EarlyStopping("validation/loss")].

    Attributes: Safety
        on_nonfinite: What to do about a NaN or infinite loss: "raise" at the next log point, "skip" each
            step with such a loss or gradient, or "stop" the run in order. If a validation loss or the
            metric of `EarlyStopping` is not finite, "raise" and "stop" end the run after a save, and "skip"
            goes on with a warning. Default: "raise". Example: on_nonfinite="skip".
        on_save_error: What to do when a checkpoint or a log cannot be written: "raise", or "warn" to go on,
            say what was not saved, and try again when the next one is due. A run whose end cannot be saved
            raises in any case. Default: "raise". Example: on_save_error="warn".
        hang_timeout: Seconds, a timedelta, or "10 minutes", without progress after which all processes are
            ended with exit code 75 and their stacks, naming the rank that is behind; None disables it.
            Compiling, saving and loading have an hour more. Default: 600.0. Example:
            hang_timeout="30 minutes".
        preemption: Whether signals such as SIGTERM and SIGINT end a fit in order, saved and with an exit code
            that says so; or a `PreemptionConfig`, or a mapping of its options. Default: True. Example:
            preemption=False.

    Raises:
        ConfigError: A value that is not allowed; says what is.
        StrategyError: A strategy, number of devices or precision that cannot run here.
    """

    if not TYPE_CHECKING:  # mypy would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(missing(type(self), name))

    @by_name
    def fit(
        self,
        task: TaskModule,
        train_data: Any,
        validation_data: Any = None,
        *,
        resume: str | None = None,
        override: Sequence[str] = (),
    ) -> FitResult:
        """Train.

        Args:
            task: What to train; its parameters are trained in place.
            train_data: A DataLoader, a Dataset, an iterable of batches, or an object with `train_data()`.
            validation_data: The same, or a mapping of named loaders; None for none.
            resume: "auto" for the newest good checkpoint of `run_dir` or a fresh start, a path to resume from
                there, None for a fresh start.
            override: What a resume does where the settings of optimizers and schedules, such as the rate, the
                weight decay and betas, differ from those of the checkpoint's run: `["optimizer"]` takes those
                of this program, `["keep-optimizer"]` keeps the checkpoint's, with a warning. Without it a
                difference is an error.

        Raises:
            ConfigError: Arguments, task and data do not fit together.
            DataError: The data is empty, of an unknown kind, or raised; names the batch.
            CheckpointError: A checkpoint cannot be read, fitted or written.
            NonFiniteError: A loss was NaN or infinite.
            Preempted: A signal has ended the run in order; the program ends with exit code 75.
            KeyboardInterrupt: Likewise by Ctrl-C; once more ends it at once.
        """
        if self._has_to_fork():
            return self._forked(
                lambda: self.fit(task, train_data, validation_data, resume=resume, override=override)
            )
        with self._begin(task, train_data, validation_data, resume, override) as (trainer, run, saver):
            for _ in train_steps(run):
                pass
        result = _result(trainer, run, saver)
        if result.history_path and result.run_dir and (result.run_dir / LEDGER).exists() and not is_part():
            _LOG.info("curves: drivetrain runs report %s", result.run_dir)
        _report_early_end(run)
        return result

    @by_name
    def steps(
        self,
        task: TaskModule,
        train_data: Any,
        validation_data: Any = None,
        *,
        resume: str | None = None,
        override: Sequence[str] = (),
    ) -> Generator[StepResult, None, None]:
        """Train as `fit` does, but yield after every step, for your own loop body.

        The validation and the checkpoint of a step see what the body did after it. Leaving the loop ends
        the run in order. If only one of several ranks leaves, it first finishes the step that the others
        have begun, and the loops of all ranks end. Arguments and errors are those of `fit`.
        """
        return left_with_program(self._steps(task, train_data, validation_data, resume, override))

    def _steps(
        self,
        task: TaskModule,
        train_data: Any,
        validation_data: Any,
        resume: str | None,
        override: Sequence[str],
    ) -> Generator[StepResult, None, None]:
        with self._begin(task, train_data, validation_data, resume, override, body=True) as (_, run, _):
            run.loop = train_steps(run)
            try:
                yield from observed_loop(run.loop)
            finally:
                run.loop = None
        _report_early_end(run)

    @contextmanager
    def _begin(
        self,
        task: TaskModule,
        train_data: Any,
        validation_data: Any,
        resume: str | None,
        override: Sequence[str],
        body: bool = False,
    ) -> Iterator[tuple[Trainer, Run, CheckpointSaver | None]]:
        """Build a fit, start it from its checkpoint, and run the block, its loop, inside `run_context`.

        Yields the settings, the run, and its saver unless checkpoints are off.
        """
        overrides = _overrides(override, resume)
        trainer, resume = observed(self, is_fit=True, resume=resume)
        trainer, resume = as_tried(trainer, "fit"), resume if trainer.dry_run is None else None
        torch_seed = torch.initial_seed()
        with Preemption(self.preemption) as preemption:
            trainer, run, saver, start = build_fit(trainer, task, train_data, validation_data, resume, body)
            if run.is_main and self.seed == 0 < torch_seed < _LARGEST_SEED:
                _LOG.info(
                    f"torch.manual_seed({torch_seed}) does not seed this fit: the order of the data, and what"
                    f" steps draw, come from Trainer(seed=0). For another run give Trainer(seed={torch_seed})"
                )
            with run_context(trainer, run):
                start_from(trainer, run, saver, start, overrides)
                preemption.attach(run, is_resumable(trainer))
                yield trainer, run, saver

    @by_name
    def validate(
        self,
        task: TaskModule,
        data: Any,
        *,
        checkpoint: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
    ) -> dict[str, float]:
        """Evaluate on validation data; every sample counts once.

        Args:
            task: The task.
            data: As in `fit`, or an object with `validation_data()`.
            checkpoint: Weights to load first: a path, or "best" or "last" of `run_dir`; where several metrics
                rank, "best:validation/loss".
            save_to: A file to write the values to as JSON too, such as "results.json"; it replaces one of
                that name.

        Returns:
            Values by name: `validation/loss`, `validation/accuracy`, with named loaders
            `validation/<loader>/loss`.
        """
        return self._evaluate("validation", task, data, checkpoint, save_to)

    @by_name
    def test(
        self,
        task: TaskModule,
        data: Any,
        *,
        checkpoint: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
    ) -> dict[str, float]:
        """Evaluate on test data; as `validate`, with names that begin with `test/`."""
        return self._evaluate("test", task, data, checkpoint, save_to)

    def _evaluate(
        self,
        stage: str,
        task: TaskModule,
        data: Any,
        checkpoint: str | None,
        save_to: str | os.PathLike[str] | None,
    ) -> dict[str, float]:
        if save_to is not None:
            prepare_results_file(save_to, makes_folder=not writes_nothing(self))
        if self._has_to_fork():
            return self._forked(lambda: self._evaluate(stage, task, data, checkpoint, save_to))
        with self._begin_evaluation(stage, task, data, checkpoint) as run:
            values = evaluate(run, stage, run.evaluation_feeds)
            if save_to is not None and not writes_nothing(self):
                run.engine.ranks.first(lambda: write_results(values, save_to))
            return values

    @by_name
    def predict(
        self,
        task: TaskModule,
        data: Any,
        *,
        checkpoint: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
        metrics: bool = False,
        joined: bool = False,
    ) -> Any:
        """Return the outputs of `predict_step` for every batch, on the CPU, in the order of the dataset.

        Args:
            task: The task.
            data: As in `fit`, or an object with `predict_data()`. Only torch's own shuffling is left out; any
                other sampler or batch sampler gives the samples and their order.
            checkpoint: As in `validate`.
            save_to: A directory to stream the outputs to, one file a batch, so that memory stays flat.
            metrics: Whether to return the values of a validation of the same pass too. The data needs
                targets. A task with a `validation_step` or `predict_step` of its own runs both on each batch;
                any other runs its forward once.
            joined: Whether to return one output for all samples, of the same structure as that of a batch:
                the tensors of the batches are concatenated. Joining holds the outputs in memory twice.

        Returns:
            A list with the outputs of each batch; with `joined` one output; with `save_to` the list of files.
            With `metrics` a `PredictResult` of it and the values.

        Raises:
            ConfigError: Both `joined` and `save_to` are given.
            DataError: `metrics` is given, and the data lacks targets; or `joined` is given, and the outputs
                lack one entry for each sample or have different shapes.
        """
        flag("predict(metrics=)", metrics)
        flag("predict(joined=)", joined)
        if save_to is not None:
            local_path("save_to", save_to)
            if joined:
                raise ConfigError(
                    f"predict(joined=True, save_to={str(save_to)!r}): save_to streams one file a batch, and"
                    " joined returns the outputs of all from memory. Leave one of them out"
                )
        if self._has_to_fork():
            return self._forked(
                lambda: self.predict(
                    task, data, checkpoint=checkpoint, save_to=save_to, metrics=metrics, joined=joined
                )
            )
        values: dict[str, float] | None = {} if metrics else None
        sizes: list[int] = []
        # Closed at once even when writing fails: a suspended pass would leave gradients disabled for the
        # caller.
        with (
            self._begin_evaluation("predict", task, data, checkpoint, metrics) as run,
            closing(predict(run, run.evaluation_feeds[0][1], values, sizes)) as outputs,
        ):
            found: Any = self._collected(run, outputs, save_to)
        if joined:
            found = join_batches(found, sizes)
        return found if values is None else PredictResult(found, values)

    def _collected(
        self, run: Run, outputs: Iterator[Any], save_to: str | os.PathLike[str] | None
    ) -> list[Any]:
        """Return all outputs, or write them and return the files."""
        if save_to is None:
            return list(outputs)
        if writes_nothing(self):
            for _ in outputs:
                pass
            return []
        from drivetrain.checkpoint.prediction_files import write_predictions

        return write_predictions(outputs, Path(save_to), run.engine.ranks)

    @contextmanager
    def _begin_evaluation(
        self, stage: str, task: TaskModule, data: Any, checkpoint: str | None, metrics: bool = True
    ) -> Iterator[Run]:
        """Build a validation, test or prediction, and run the block inside `run_context`."""
        trainer, _ = observed(self, is_fit=False)
        trainer = as_tried(trainer, stage)
        if trainer.dry_run is not None and str(checkpoint).partition(":")[0] in ("best", "last"):
            checkpoint = None  # the trial of a fit has saved none
        run = build_evaluation(trainer, task, data, stage, checkpoint, metrics)
        with run_context(trainer, run):
            yield run

    def _has_to_fork(self) -> bool:
        """Return whether to start the other ranks as copies of this process: where the engine cannot start
        them by running the program again, as in a notebook.
        """
        if self.select_strategy().world_size == 1 or self.num_nodes > 1 or torch.distributed.is_initialized():
            return False
        return detect(os.environ) is None and rerun_obstacle() is not None

    def _forked(self, act: Callable[[], T]) -> T:
        """Run a function as every rank, in copies of this process, and remove their traces afterwards."""
        from drivetrain.distributed.group import disband
        from drivetrain.distributed.launch.forks import fork_ranks

        def act_and_leave() -> T:
            try:
                return act()
            finally:
                disband()

        gc.collect()  # the copies must not inherit remains of an earlier run's process group
        return fork_ranks(act_and_leave, self.select_strategy().world_size)

    @by_name
    def plan(self, task: TaskModule, train_data: Any, validation_data: Any = None) -> Plan:
        """Print and return the forecast of a fit: steps, rates, intervals, memory, and conflicts.

        Nothing is trained. Arguments and errors are those of `fit`.
        """
        from drivetrain.trainer.plan.plan import make_plan

        plan = make_plan(self, task, train_data, validation_data)
        print(plan)
        return plan

    @by_name
    def find_learning_rate(
        self,
        task: TaskModule,
        data: Any,
        *,
        lowest: float = 1e-7,
        highest: float = 10.0,
        steps: int = 100,
        metric: str | None = None,
    ) -> LearningRateCurve:
        """Train a copy of the task with a rate that rises from step to step, and return the loss by rate.

        The task, its data and all random streams stay as they are. The schedule, callbacks and the Trainer's
        length play no part, and nothing is written. Data that can be read only once is used up. The test
        ends early once the loss has diverged.

        Args:
            task: The task.
            data: As in `fit`.
            lowest: The rate of the first step. If groups of parameters have rates of their own, it is that of
                the first, and the others keep their ratio to it.
            highest: The rate of the last step.
            steps: The number of steps, at least 20.
            metric: The name of the training loss, if the task names its values itself.

        Returns:
            The curve, with a suggestion and a figure.

        Raises:
            ConfigError: An argument is out of its range, or the task cannot be copied.
        """
        from drivetrain.trainer.find_learning_rate import find_learning_rate

        return find_learning_rate(self, task, data, type(self).fit, lowest, highest, steps, metric)

    @by_name
    def find_batch_size(
        self, task: TaskModule, data: Any, *, memory: int | str | None = None, largest: int | None = None
    ) -> BatchSizeResult:
        """Find the largest `batch_size` whose step fits into memory, by real steps on copies of the task.

        Two steps of each size are made, because the first one makes the optimizer's state, and the peak of
        the second is measured as by `MemoryReport`. Sizes double from the Trainer's `batch_size` (2 without
        one) until one does not fit, and the range in which the largest one lies is then halved down to one
        sample. The task, its data and all random streams stay as they are; callbacks and validations play no
        part. Samples of different lengths need different memory: give the longest, or leave a margin.

        Args:
            task: The task.
            data: A dataset with a length, or an object whose `train_data()` returns one.
            memory: The most bytes of a process, such as "4 GiB". None takes all that a GPU has; a CPU and
                several processes need a limit.
            largest: The largest size to try. None takes the length of the data.

        Returns:
            The size, and the memory of each that was tried.

        Raises:
            ConfigError: The data is a loader, a limit is missing, or not even one sample fits.
            StrategyError: The memory of the strategy's step cannot be observed; see `MemoryReport`.
        """
        from drivetrain.trainer.find_batch_size import find_batch_size

        return find_batch_size(self, task, data, type(self).fit, memory, largest)


def _result(settings: RunSettings, run: Run, saver: CheckpointSaver | None) -> FitResult:
    """Return what a fit returns, its paths as the user would write them."""
    assert run.stop_reason is not None
    shown = partial(as_given, settings)
    directory = run.run_dir if run.run_dir is not None and run.run_dir.exists() else None
    table = table_of(settings.loggers, run.run_dir) if run.metrics else None
    best: dict[str, str] = {}
    if saver is not None:
        best = {by: shown(path) or path for by, path in saver.best_checkpoints().items()}
    return FitResult(
        dict(run.metrics),
        run.progress,
        run.stop_reason,
        None if directory is None else Path(shown(str(directory)) or directory),
        shown(run.last_checkpoint),
        next(iter(best.values()), None),
        shown(saver.weights) if saver and run.nonfinite.spoiled is None else None,
        None if table is None else shown(str(table)),
        best,
        saver.best_value() if saver else None,
    )


def _report_early_end(run: Run) -> None:
    """Log why a fit has ended before its planned length, if it has."""
    totals, reason = run.totals, run.stop_reason or ""
    planned = ["max_steps=", "max_epochs="]
    if totals.max_steps is None and totals.max_epochs is None:
        planned.append("max_time=")
    if not reason.startswith(tuple(planned)) and not is_part():
        of = "" if totals.steps is None else f" of {totals.steps}"
        _LOG.info(f"the fit ended early, after step {run.progress.steps}{of}: {reason}")


def _overrides(given: object, resume: object) -> str:
    """Return the word for the optimizer's settings in a resume; empty if there is none."""
    words = list(given) if isinstance(given, (list, tuple)) else [None]
    if len(words) > 1 or any(each not in ("optimizer", KEEP) for each in words):
        raise ConfigError(
            "override must be a list with one of two words, ['optimizer'] for the settings of this program or"
            f" [{KEEP!r}] for those of the checkpoint; not {given!r}"
        )
    if words and resume is None:
        raise ConfigError(f"override={given!r} is for a resume: give resume='auto', or leave it out")
    return str(words[0]) if words else ""
