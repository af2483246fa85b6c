"""The Trainer: validated arguments, and the verbs that turn them into runs."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from drivetrain.core.intervals import Interval
from drivetrain.core.notebook.output import in_notebook
from drivetrain.core.synonyms import missing
from drivetrain.core.validation import by_name
from drivetrain.distributed.processes import rank
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule

if TYPE_CHECKING:
    from drivetrain.engine.weighting import StepResult
    from drivetrain.trainer.find_batch_size import BatchSizeResult
    from drivetrain.trainer.find_learning_rate import LearningRateCurve
    from drivetrain.trainer.plan.plan import Plan
    from drivetrain.trainer.result import FitResult


@by_name
@dataclass(frozen=True, kw_only=True, repr=False)
class Trainer(RunSettings):
    """The configuration of runs: validated when it is made, never changed. Each `fit` builds a new run.

    Its arguments are in eight groups: length, where it runs, numbers, gradient, data, evaluation, records and
    safety. To train, give `max_epochs`, `max_steps`, `max_time` or `max_tokens`; every other argument has a
    default.

    Attributes: Length
        max_epochs: Passes over the training data; a fraction (2.5) needs data of known length. Default:
            None. Example: max_epochs=10.
        max_steps: Optimizer steps. Default: None. Example: max_steps=10_000.
        max_time: Wall time over all restarts: "2 hours", seconds, or a timedelta. Default: None. Example:
            max_time="12 hours".
        max_tokens: Tokens over all processes and restarts, as `TaskModule.tokens` counts them; the fit ends
            with the step that reaches them. Default: None. Example: max_tokens="10B tokens".
        min_steps: The steps before which no callback, such as `EarlyStopping`, ends a fit. The limits,
            signals and non-finite losses still end it. Default: None. Example: min_steps=1_000.
        dry_run: A trial fit. True ("batches") or a number fits one epoch with one batch, or that many
            batches, of each loader. It starts afresh and writes nothing: no checkpoints, logs, results or
            predictions. `validate`, `test` and `predict` take the same number of batches. Callbacks that need
            files are left out and named. Default: None. Example: dry_run=True.

    Attributes: Where it runs
        strategy: The strategy: "auto", "cpu", "cuda", "mps", "xpu", "ddp", a configuration such as
            `DDPConfig(...)`, an instance, or another package's name. Default: "auto". Example:
            strategy="fsdp".
        devices: The number of processes, one for each GPU that CUDA_VISIBLE_DEVICES leaves visible; or
            "auto". Default: "auto". Example: devices=2.
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
        seed: Seeds the order of the data and every random stream of a run. Default: 0. Example: seed=1.
        data_seed: Seeds the order of the training data, and the random numbers that loading it draws,
            separately from all other random streams; None takes `seed`. Default: None. Example: data_seed=2.
        deterministic: Insist on deterministic kernels while a run lasts. Default: False. Example:
            deterministic=True.

    Attributes: Gradient
        gradient_accumulation_steps: Micro-batches per step: a number, or numbers by points of the run, such
            as {0: 8, "4 epochs": 4}. Points are intervals from its start in steps, whole epochs, samples or
            tokens; see `ramp`. Or the tokens of a step over all processes, "524_288 tokens", for rows of one
            length and `by_tokens`. Default: 1. Example: gradient_accumulation_steps=4.
        max_grad_norm: Clip the gradient's global norm to this; None disables clipping. Default: None.
            Example: max_grad_norm=1.0.
        max_grad_value: Clip each element of the gradient to between minus this and this, instead of the norm.
            Default: None. Example: max_grad_value=0.5.
        micro_batch: Samples of a training batch that are run at once: a number, "auto" for half as many
            whenever memory runs out, or None for all. The batch of a step does not change. Default: None.
            Example: micro_batch="auto".

    Attributes: Data
        batch_size: Samples in a micro-batch of each process, for data given as a bare Dataset. Without it,
            the items of an `IterableDataset` are ready batches. Numbers by points of the run, as for
            `gradient_accumulation_steps`, need training data with a length. Default: None. Example:
            batch_size=32.
        num_workers: Worker processes for data given as a bare Dataset. Default: 0. Example: num_workers=4.
        collate: A function that makes a batch from a list of samples, for data given as a bare Dataset; None
            takes torch's default. Default: None. Example: collate=pad.
        group_by_length: Put samples of similar lengths into the same step, for training data given as a
            bare Dataset. The name of a column with a number or with tokens ("input_ids"), or a function of a
            sample that returns its length. It is read once for each sample before training. None only
            shuffles. Default: None. Example: group_by_length="input_ids".
        limit_train_batches: At most this many micro-batches an epoch; a number below 1, such as 0.1, is a
            fraction of them, rounded down, at least one. Default: None. Example: limit_train_batches=0.1.
        on_bad_batch: What to do with a training batch that cannot be made: "raise", or "skip" to leave it
            out, report it and count it in `progress.bad_batches`, as long as such batches are few. Default:
            "raise". Example: on_bad_batch="skip".

    Attributes: Evaluation
        validate_every: When to validate during a fit. A fit that has not validated before its end validates
            there. None disables validation. Default: "1 epoch". Example: validate_every="500 steps".
        validate_from: The point before which no validation is due, as an interval from the run's start ("2
            epochs"). A validation that is due exactly at this point is made. None means no delay. Default:
            None. Example: validate_from="2 epochs".
        evaluation_batch_size: The samples of a batch in evaluations and predictions of a bare Dataset; None
            takes `batch_size`, or the largest one if it changes. Default: None. Example:
            evaluation_batch_size=128.
        limit_validation_batches: As `limit_train_batches`, of each validation loader. Default: None. Example:
            limit_validation_batches=20.
        limit_test_batches: The same of each test loader. Default: None. Example: limit_test_batches=20.
        limit_predict_batches: The same of each loader to predict. Default: None. Example:
            limit_predict_batches=20.
        sanity_validation: The number of batches of each loader to validate on before training, so that a
            fault in validation shows at once. The values are dropped. The hooks of an evaluation are called,
            with `run.evaluation.is_sanity_check` set; readers of a whole evaluation, such as
            `compute_metrics`, are not. "auto" takes 2 if they are under a hundredth of an epoch's batches,
            else none; None takes none. A resumed fit makes none. Default: "auto". Example:
            sanity_validation=5.

    Attributes: Records
        checkpoint: True for the default policy (with named validation loaders the first one's loss ranks),
            "async" for the same in the background, False for none, a `CheckpointConfig`, or a list of several
            that all apply. Default: True. Example: checkpoint=CheckpointConfig(by="validation/accuracy").
        assets: Files to store beside the weights in each checkpoint: a list, or a mapping of names, of paths,
            objects with `save_pretrained(folder)`, or functions of the folder to write into. Default: ().
            Example: assets=["vocabulary.txt"].
        run_dir: Where checkpoints, logs and the ledger of the run's time are kept; None makes a new
            `runs/<task>-<time>` for every fit that writes. Default: None. Example: run_dir="runs/first".
        run_name: The name of the run: a new run directory is called `runs/<run_name>-<time>`, and loggers
            find it as `config["trainer"]["run_name"]` in what `log_config` is given. Default: None. Example:
            run_name="baseline".
        loggers: Names ("tensorboard", "csv", "jsonl") or instances; `()` for none. Default: ("tensorboard",
            "csv"). Example: loggers="jsonl".
        log_every: When to log. "auto" is every 50 steps and at the end of every epoch; if an epoch has fewer
            steps, only at its end. Default: "auto". Example: log_every="10 steps".
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
            continues with a warning. Default: "raise". Example: on_nonfinite="skip".
        on_save_error: What to do when a checkpoint or a log cannot be written: "raise", or "warn" to
            continue, say what was not saved, and try again when the next one is due. If the end of a run
            cannot be saved, an error is raised with either value. Default: "raise". Example:
            on_save_error="warn".
        hang_timeout: The time without progress after which all processes are ended, with exit code 75:
            seconds, a timedelta, or a text such as "10 minutes". The stacks are printed, and the rank that is
            behind is named. None disables it. Compiling, saving and loading have an hour more. Default:
            600.0. Example: hang_timeout="30 minutes".
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
        optimizer_settings: str | None = None,
        new_data: bool = False,
        skip: Interval | None = None,
    ) -> FitResult:
        """Train.

        Args:
            task: What to train; its parameters are trained in place.
            train_data: A DataLoader, a Dataset, an iterable of batches, or an object with `train_data()`.
            validation_data: The same, or a mapping of named loaders; None for none.
            resume: "auto" for the newest good checkpoint of `run_dir` or a fresh start, a path to resume from
                there, None for a fresh start.
            optimizer_settings: Whose settings of optimizers and schedules, such as the rate, the weight decay
                and betas, a resume uses if the program's and the checkpoint's differ: "program", or
                "checkpoint", with a warning. Without it a difference is an error.
            new_data: Whether a resume starts at the beginning of the training data, which may be other data,
                for a second stage of training. Weights, optimizer, schedules, steps and complete epochs
                continue; an epoch that was under way begins again.
            skip: Training data that a resume leaves out after the checkpoint's position, such as "2_000
                steps", "64_000 samples", "10M tokens" or "0.1 epochs": for example data that caused a spike
                of the loss. Tokens need rows of one length, and are rounded up to whole samples, or to whole
                batches of a stream. The run is the same as if the data did not contain that part. None leaves
                out nothing. With resume="auto", a checkpoint of a fit with the same `new_data` and `skip`
                continues at its position.

        Raises:
            ConfigError: Arguments, task and data do not fit together.
            DataError: The data is empty, of an unknown kind, or raised; names the batch.
            CheckpointError: A checkpoint cannot be read or written, or does not fit the task.
            NonFiniteError: A loss was NaN or infinite.
            Preempted: A signal has ended the run in order; the program ends with exit code 75.
            KeyboardInterrupt: Ctrl-C has ended the run in order; a second Ctrl-C ends it at once.
        """
        from drivetrain.trainer.verbs import fit

        return fit(self, task, train_data, validation_data, resume, optimizer_settings, new_data, skip)

    @by_name
    def steps(
        self,
        task: TaskModule,
        train_data: Any,
        validation_data: Any = None,
        *,
        resume: str | None = None,
        optimizer_settings: str | None = None,
        new_data: bool = False,
        skip: Interval | None = None,
    ) -> Generator[StepResult, None, None]:
        """Train as `fit` does, but yield after every step, for your own loop body.

        The validation and the checkpoint of a step see what the body did after it. Leaving the loop ends
        the run in order. If only one of several ranks leaves, it first finishes the step that the others
        have begun, and the loops of all ranks end. Arguments and errors are those of `fit`.
        """
        from drivetrain.trainer.verbs import steps

        return steps(self, task, train_data, validation_data, resume, optimizer_settings, new_data, skip)

    @by_name
    def validate(self, task: TaskModule, data: Any, *, checkpoint: str | None = None) -> dict[str, float]:
        """Evaluate on validation data; every sample counts once.

        Args:
            task: The task.
            data: As in `fit`, or an object with `validation_data()`.
            checkpoint: Weights to load first: a path, or "best" or "last" of `run_dir`; where several metrics
                rank, "best:validation/loss".

        Returns:
            Values by name: `validation/loss`, `validation/accuracy`, with named loaders
            `validation/<loader>/loss`.
        """
        from drivetrain.trainer.verbs import evaluate_on

        return evaluate_on(self, "validation", task, data, checkpoint)

    @by_name
    def test(self, task: TaskModule, data: Any, *, checkpoint: str | None = None) -> dict[str, float]:
        """Evaluate on test data; as `validate`, with names that begin with `test/`."""
        from drivetrain.trainer.verbs import evaluate_on

        return evaluate_on(self, "test", task, data, checkpoint)

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
            joined: Whether to return one output for all samples, with the structure of a batch's output: the
                tensors of the batches are concatenated. Joining holds the outputs in memory twice.

        Returns:
            A list with the outputs of each batch; with `joined` one output; with `save_to` the list of files.
            With `metrics` a `PredictResult` of it and the values.

        Raises:
            ConfigError: Both `joined` and `save_to` are given.
            DataError: `joined` is given, and the outputs
                lack one entry for each sample or have different shapes.
        """
        from drivetrain.trainer.verbs import predict_on

        return predict_on(self, task, data, checkpoint, save_to, metrics, joined)

    @by_name
    def plan(self, task: TaskModule, train_data: Any, validation_data: Any = None) -> Plan:
        """Print and return the forecast of a fit: steps, rates, intervals, memory, and conflicts.

        A notebook prints nothing: the last line of a cell shows the returned plan, as a table with the curves
        of the rates.
        Nothing is trained. Arguments and errors are those of `fit`.
        """
        from drivetrain.trainer.plan.plan import make_plan

        plan = make_plan(self, task, train_data, validation_data)
        if rank() == 0 and not in_notebook():
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
            lowest: The rate of the first step. If groups of parameters have rates of their own, it is the
                first group's rate, and the others keep their ratio to it.
            highest: The rate of the last step.
            steps: The number of steps, at least 20.
            metric: The name of the training loss, if the task names its values itself.

        Returns:
            The curve, with a suggestion and a figure.

        Raises:
            ConfigError: An argument is out of its range.
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
