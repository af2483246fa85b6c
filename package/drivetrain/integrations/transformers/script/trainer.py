"""transformers' Trainer by its constructor and its methods, run by `drivetrain.Trainer`."""

from __future__ import annotations

import copy
import importlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.hooks import RemovableHandle
from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
    trainer_utils,
)
from transformers.optimization import AdafactorSchedule
from transformers.trainer_utils import (
    EvalLoopOutput,
    IntervalStrategy,
    PredictionOutput,
    TrainOutput,
    has_length,
    number_of_arguments,
    speed_metrics,
)

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.checkpoint import as_saved
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot
from drivetrain.checkpoint.saving.assets import checked_assets, make_assets
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS, resolve
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, os_errors
from drivetrain.core.errors import CheckpointError, ConfigError, DataError
from drivetrain.core.messages import logger
from drivetrain.data.orders.length_grouped import LengthGroupedSampler, lengths_of
from drivetrain.distributed.launch.environment import is_started_again, may_start_again
from drivetrain.distributed.processes import local_rank, rank
from drivetrain.distributed.ranks import ALONE
from drivetrain.engine.engine import Engine
from drivetrain.integrations.transformers.arguments import MappedArguments, from_training_arguments
from drivetrain.integrations.transformers.arguments_table import ROWS
from drivetrain.integrations.transformers.batch.collating import Collation, default_collate
from drivetrain.integrations.transformers.callbacks import ONCE, CallbackAdapter, Rates
from drivetrain.integrations.transformers.evaluation import predictions_of
from drivetrain.integrations.transformers.export import replace_pretrained
from drivetrain.integrations.transformers.log_names import (
    EVALUATION,
    TEST,
    all_to_transformers,
    from_metric_for_best_model,
    to_transformers,
)
from drivetrain.integrations.transformers.loss_items import as_tensor
from drivetrain.integrations.transformers.run_arguments import UNLIMITED
from drivetrain.integrations.transformers.saved_tensors import check_shared
from drivetrain.integrations.transformers.schedules import GREEDY, PLATEAU
from drivetrain.integrations.transformers.script.accelerator import ScriptAccelerator
from drivetrain.integrations.transformers.script.beside import has_beside, modules_beside
from drivetrain.integrations.transformers.script.callback_handler import CallbackHandler
from drivetrain.integrations.transformers.script.card import card_options
from drivetrain.integrations.transformers.script.checkpoint_folders import (
    CheckpointFolders,
    MissingCheckpointError,
    check_resumable,
    checkpoint_in,
    is_of_transformers,
    newest,
    not_there,
    set_aside,
    taken_into,
)
from drivetrain.integrations.transformers.script.checks import (
    checked_arguments,
    checked_optimizers,
    enable_own_recomputation,
    has_own_recomputation,
    is_served,
    jit_checkpoint,
    made_callbacks,
    processor_of,
    ranked_by,
)
from drivetrain.integrations.transformers.script.methods import (
    COUNTERPARTS,
    THEIRS,
    check_overrides,
    check_reads,
    counterpart,
    dividers,
    is_overridden,
    is_theirs,
    items_for,
    readers,
)
from drivetrain.integrations.transformers.script.pass_outputs import Pass
from drivetrain.integrations.transformers.script.run import ScriptRun
from drivetrain.integrations.transformers.script.script_task import ScriptTask
from drivetrain.integrations.transformers.script.search import HyperparameterSearch, chosen_search
from drivetrain.integrations.transformers.script.their_files import write_arguments, write_optimizer
from drivetrain.integrations.transformers.script.their_names import TheirNames
from drivetrain.integrations.transformers.stored_model import base_of
from drivetrain.run.checkpoint import snapshot_to_save
from drivetrain.run.run import Run
from drivetrain.task.model_info import info_of
from drivetrain.task.optim.torch_schedule import TorchSchedule
from drivetrain.trainer import trainer as own

_OF_THE_DATA = ("batch_size", "evaluation_batch_size", "num_workers", "group_by_length", "collate")
"""Options that the loaders have, so that `drivetrain.Trainer` gets none of them."""

_OPTIMIZER_METHODS = (
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)


_LOG = logger(__name__)
_STATIC = "torch learns a static graph from the first backward"


def _copied(args: TrainingArguments) -> dict[str, Any]:
    """Return the values of all options, to see later whether a script has set others."""
    return {name: copy.deepcopy(value) for name, value in vars(args).items() if name in ROWS}


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run the block with a model in evaluation mode, as transformers leaves it after an evaluation."""
    modes = [(each, each.training) for each in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


class Trainer(TheirNames):
    """transformers' Trainer, for scripts that are written for it: change the import, and run.

    It makes a `TransformersTask` of the model and a `drivetrain.Trainer` of the arguments, and its methods
    call theirs. Defaults, arguments, results and logged names are those of transformers. Subclasses may
    override the methods that `methods.OVERRIDABLE` lists; overriding another method that transformers
    would call is an error.

    Args:
        model: A `PreTrainedModel` or `PeftModel`; or any module whose forward returns its loss first in a
            tuple, in a mapping, or as an attribute. The loss of such a module is weighted by samples.
        args: The arguments; None takes transformers' defaults and the directory "tmp_trainer".
        data_collator: Makes a batch of samples; by default the samples are padded with `processing_class`.
        train_dataset: The training data: samples by index, or an iterable of samples.
        eval_dataset: The evaluation data; several sets as a mapping.
        processing_class: The tokenizer, processor or image processor.
        model_init: Makes a new model for each `train`. It takes no argument, or one: the trial of a search,
            else None.
        compute_loss_func: See `TransformersTask`.
        compute_metrics: See `TransformersTask`.
        callbacks: transformers' callbacks or their classes, and callbacks of drivetrain.
        optimizers: An optimizer over the model's parameters, and its scheduler.
        optimizer_cls_and_kwargs: The class of the optimizer and its arguments.
        preprocess_logits_for_metrics: See `TransformersTask`.
        tokenizer: The former name of `processing_class`.

    Attributes:
        model: The model, which is trained in place.
        args: The arguments.
        optimizer: The optimizer of the last fit.
        lr_scheduler: Its scheduler; where the rate is a function of the step, an object with `get_last_lr`.
        callback_handler: Calls the callbacks, for methods that a script overrides; has `callbacks`, the list.
        is_in_train: Whether `train` runs.
        accelerator: `backward` for a `training_step`, and facts of this process.

    Raises:
        ConfigError: An argument, an option or an overridden method that cannot be served; says what to use.
    """

    # A subclass may set attributes before it calls this class's constructor.
    is_in_train = False
    _is_made = False
    _given_optimizers: tuple[Optimizer | None, Any] = (None, None)
    _loaders: dict[tuple[str, int], tuple[Any, DataLoader[Any]]]
    _created_lr_scheduler = False
    _search: HyperparameterSearch | None = None
    hp_search_backend: trainer_utils.HPSearchBackend | None = None
    """The backend of a search in progress."""
    loss_is_scaled_for_ga: bool | None = None
    """Without effect: a loss is always weighted as a mean over `num_items_in_batch`, exact in either case."""

    # These need the model, the arguments, the optimizer and the state, which this class has.
    create_optimizer = transformers.Trainer.create_optimizer
    create_scheduler = transformers.Trainer.create_scheduler
    create_optimizer_and_scheduler = transformers.Trainer.create_optimizer_and_scheduler
    get_decay_parameter_names = transformers.Trainer.get_decay_parameter_names
    get_optimizer_cls_and_kwargs = staticmethod(transformers.Trainer.get_optimizer_cls_and_kwargs)
    get_learning_rates = transformers.Trainer.get_learning_rates
    get_num_trainable_parameters = transformers.Trainer.get_num_trainable_parameters
    get_optimizer_group = transformers.Trainer.get_optimizer_group
    log_metrics = transformers.Trainer.log_metrics
    metrics_format = transformers.Trainer.metrics_format
    save_metrics = transformers.Trainer.save_metrics
    save_state = transformers.Trainer.save_state
    _load_callback_state = vars(THEIRS)["_load_callback_state"]
    create_model_card = transformers.Trainer.create_model_card
    floating_point_ops = transformers.Trainer.floating_point_ops

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        check_overrides(type(self), Trainer)
        self.args = checked_arguments(args)
        self.callback_handler = CallbackHandler([DefaultFlowCallback(), *made_callbacks(callbacks)])
        shows: Any = PrinterCallback if self.args.disable_tqdm else ProgressCallback
        if not any(isinstance(each, shows) for each in self._callbacks):
            self._callbacks.append(shows())
        if getattr(self.args, "enable_jit_checkpoint", False):
            self._callbacks.insert(1, jit_checkpoint(self))
        transformers.logging.set_verbosity(self.args.get_process_log_level())
        self._memory_tracker.start()
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._mapped = self._map_arguments(UNLIMITED)  # an interval that is a share of the run is never due
        set_seed(self.args.seed)
        self.model_init = model_init
        self._own_model = self._first_model(model)
        self.processing_class = processor_of(processing_class, tokenizer, data_collator)
        self.data_collator = data_collator or default_collate(self.processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._given_optimizers = checked_optimizers(
            optimizers, optimizer_cls_and_kwargs, model_init, self._settings_of([])
        )
        self._own_optimizer, self._own_scheduler = self._given_optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._keeps_outputs, self._at_log_point = True, False
        self._handles: list[RemovableHandle] = []
        self._begun: Sequence[tuple[Any, dict[str, Any]]] = ()
        self._trained: Optimizer | None = None  # the optimizer of the last fit
        self._ignored_in_fit: list[str] | None = None
        self._adapter, self._runs = self._adapt(TrainerState(), TrainerControl())
        self._task = self._make_task()
        self.accelerator = ScriptAccelerator(
            lambda loss, **options: self._task.run_backward(loss, **options),
            lambda: next(self.model.parameters()).device,
            lambda: self._chosen_strategy.name,
            self.args,
        )
        self._read, self._is_made = _copied(self.args), True
        self._check_evaluation()
        self._check_training()
        check_reads(self, Trainer)
        self._settings()
        if self.is_world_process_zero():
            with os_errors("create output_dir", self.args.output_dir):
                os.makedirs(self.args.output_dir, exist_ok=True)
        self._adapter.init_end(self.model, self.processing_class)
        self._memory_tracker.stop_and_update_metrics()

    def _map_arguments(self, total_steps: int | None) -> MappedArguments:
        mapped = from_training_arguments(self.args, total_steps=total_steps)
        return ranked_by(mapped, self.args, self.eval_dataset)

    def _first_model(self, model: Any) -> Any:
        if (model is None) == (self.model_init is None):
            raise ConfigError("Trainer takes one of `model` and `model_init`")
        return self._init_model() if model is None else model

    def _init_model(self, trial: Any = None) -> Any:
        set_seed(self.args.seed)
        return self.call_model_init(trial)

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a model that `model_init` makes.

        Args:
            trial: What a `model_init` with a parameter gets: the trial of a search, or None.
        """
        assert self.model_init is not None
        count = number_of_arguments(self.model_init)
        if count > 1:
            raise ConfigError("model_init must have no parameter, or one: the trial of a search, else None")
        return self.model_init(*(trial,) * count)

    def _check_evaluation(self) -> None:
        lacks = self.eval_dataset is None and not is_overridden(self, "get_eval_dataloader", "evaluate")
        strategy = IntervalStrategy(self.args.eval_strategy).value
        if lacks and strategy != "no":
            raise ConfigError(
                f'eval_strategy="{strategy}" without an eval_dataset. Give one, or eval_strategy="no"'
            )

    def _check_training(self) -> None:
        endless = self.train_dataset is not None and not has_length(self.train_dataset)
        if endless and self.args.max_steps <= 0 and not is_overridden(self, "get_train_dataloader"):
            raise ConfigError(
                f"train_dataset is a {type(self.train_dataset).__name__} without a length, so epochs have no"
                " end that is known. Give max_steps"
            )
        scaling = readers(type(self), Trainer, "average_tokens_across_devices")
        if scaling and self.args.average_tokens_across_devices and self._chosen_strategy.world_size > 1:
            raise ConfigError(
                f"{scaling[0]} multiplies the loss by the number of processes, as transformers needs it. The"
                " loss is weighted over all processes here: give average_tokens_across_devices=False"
            )
        self._check_division()

    def _check_division(self) -> None:
        steps, name = self.args.gradient_accumulation_steps, "gradient_accumulation_steps"
        dividing = dividers(type(self), Trainer, name) if steps > 1 else ()
        for method in dividing:
            if method.rpartition(".")[2] in ("training_step", "compute_loss"):
                raise ConfigError(
                    f"{method} divides by args.{name}, which is {steps}. The losses of micro-batches are"
                    " weighted here, so that its gradient would be too small. Do not divide, or divide"
                    f" by self.current_{name}, which is 1; or train without accumulation, by {name}=1"
                )

    # The task, the settings and the callbacks.

    def _make_task(self) -> ScriptTask:
        self._loaders = {}  # they leave out the columns that the model before did not take
        options = dict(self._mapped.task_options)
        kind = getattr(getattr(self.model, "config", None), "problem_type", None)
        if options.get("label_smoothing") and kind == "multi_label_classification":
            warnings.warn(
                "Label smoothing is not compatible with multi-label classification, and is left out here",
                UserWarning,
                stacklevel=3,
            )
            options["label_smoothing"] = 0.0
        self._generate = options.pop("generate", None)
        if self._generate is not None and not self.generates:
            raise ConfigError("predict_with_generate=True is for Seq2SeqTrainer: change the class's name")
        if (
            any(self._given_optimizers)
            or self.optimizer_cls_and_kwargs
            or self.args.lr_scheduler_type in (PLATEAU, GREEDY)  # for an object in self.lr_scheduler
            or is_overridden(self, *_OPTIMIZER_METHODS)
        ):
            options["optimizer"] = self._make_optimizers
        return ScriptTask.of(
            self,
            self.model,
            {
                **options,
                "processing_class": self.processing_class,
                "compute_metrics": self.compute_metrics,
                "compute_loss_func": self.compute_loss_func,
                "preprocess_logits_for_metrics": self.preprocess_logits_for_metrics,
            },
        )

    generates = False
    """Whether the class generates sequences in evaluations."""

    def _settings_of(self, callbacks: Sequence[Any]) -> own.Trainer:
        left_out = (*_OF_THE_DATA, "memory") if has_own_recomputation(self.model) else _OF_THE_DATA
        options = {
            name: value for name, value in self._mapped.trainer_options.items() if name not in left_out
        }
        options["progress_bar"] = any(type(each) is ProgressCallback for each in self._callbacks)
        if self._search is not None and not self._search.in_main_thread:  # and in a report, trials may wait
            options |= {"preemption": False, "hang_timeout": None}
        return own.Trainer(**{**options, "callbacks": [*callbacks, *options["callbacks"]]})

    def _settings(self) -> own.Trainer:
        """Return the Trainer that runs the next verb."""
        ours = [each for each in self._callbacks if isinstance(each, Callback)]
        return self._settings_of([self._runs, self._adapter, *ours])

    def _adapt(self, state: TrainerState, control: TrainerControl) -> tuple[CallbackAdapter, ScriptRun]:
        self._adapted = list(self._callbacks)
        theirs = [each for each in self._callbacks if not (isinstance(each, Callback) or is_served(each))]
        adapter = CallbackAdapter(
            theirs, self.args, state=state, control=control, log=self._log_point, pushes=True
        )
        adapter.follows_args = True
        self.callback_handler.serve(adapter)
        if self._runs_own_code():
            adapter.watch_steps()
        adapter.shown_path = lambda path: CheckpointFolders(self.args.output_dir).path(path)
        return adapter, ScriptRun(
            lambda: self._evaluate(None, self._ignored_in_fit),
            self._mapped.eval_on_start,
            adapter,
            self._fit_begins,
            self._checkpoint_saved,
        )

    def _runs_own_code(self) -> bool:
        """Return whether code of the script may run between steps and in them."""
        is_own = not type(self).__module__.startswith("drivetrain.")
        own_callbacks = any(not type(each).__module__.startswith("transformers.") for each in self._callbacks)
        return is_own or own_callbacks or self.compute_loss_func is not None

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Return the metrics of an evaluation in a fit, by `evaluate`; a schedule sees them afterwards."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        if self._search is not None and self._runs.run is not None:
            self._search.report(self._runs.run, metrics, bool(self._mapped.trainer_options["checkpoint"]))
        return metrics

    def _fit_begins(self, run: Run) -> None:
        self._folders = CheckpointFolders(self.args.output_dir)
        run.engine.ranks.first(self._folders.begin)
        (updater,) = run.engine.updaters.values()
        self._own_optimizer = updater.optimizer
        if self._own_scheduler is None or isinstance(self._own_scheduler, Rates):
            self._own_scheduler = updater.scheduler or Rates(updater.optimizer)
        strategy = run.engine.strategy
        self._go_on_with(updater.optimizer, run.progress.steps == 0)
        state = TrainerState()
        state.compute_steps(self.args, run.length.steps or UNLIMITED)
        intervals = ("logging_steps", "eval_steps", "save_steps")
        self._begun = (
            (self.args, dict(self._read)),
            (self._adapter.state, {name: getattr(state, name) for name in intervals}),
        )
        is_static = getattr(getattr(strategy, "config", None), "static_graph", False)
        self._task.hides_gradients = strategy.refuses("value_clipping") or (_STATIC if is_static else "")
        self._task.scales_losses = run.engine.precision.loss_scaling
        self._task.watched = list(self.model.modules()) if self._runs_own_code() else [self.model]
        if strategy.sharded and is_overridden(self, "_save"):
            raise ConfigError(
                f"{type(self).__name__}._save writes the model itself, but the strategy"
                f" {strategy.name!r} shards the model. Train on one device or with 'ddp'"
            )
        resumed = run.last_checkpoint
        if resumed is not None and run.engine.ranks.first(lambda: self._folders.lacks(resumed)):
            self._checkpoint_saved(run)

    # Callbacks, state and this process.

    @property
    def state(self) -> TrainerState:
        """Where training is now, with `log_history`. It may be replaced before `train` or `evaluate`."""
        return self._adapter.fresh_state()

    @state.setter
    def state(self, state: TrainerState) -> None:
        self._check_idle("state")
        self._adapter.state = state

    @property
    def control(self) -> TrainerControl:
        """The requests of the callbacks and of a script's methods, carried out at the end of a step."""
        return self._adapter.control

    @control.setter
    def control(self, control: TrainerControl) -> None:
        self._adapter.control = control

    @property
    def _callbacks(self) -> list[Any]:
        return self.callback_handler.callbacks

    @property
    def model(self) -> Any:
        """The model, which is trained in place. It may be replaced before `train` or `evaluate`."""
        return self._own_model

    @model.setter
    def model(self, model: Any) -> None:
        self._check_idle("model")
        if self._is_made:  # the constructor takes its argument
            self._own_model = model
            self._task = self._make_task()

    @property
    def optimizer(self) -> Any:
        """The optimizer of the last fit. If you set it before `train`, it is used as if it were given."""
        return self._own_optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._own_optimizer = optimizer
        if not self.is_in_train:  # there the methods that make it set it
            self._given_optimizers = optimizer, self._given_optimizers[1]

    @property
    def lr_scheduler(self) -> Any:
        """Its scheduler, or an object with `get_last_lr` alone. It is set as the optimizer is."""
        return self._own_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._own_scheduler = scheduler
        if not self.is_in_train:
            self._given_optimizers = self._given_optimizers[0], scheduler

    def _read_arguments(self) -> bool:
        """Map the arguments again if the script has set others since; returns whether it has."""
        now = _copied(self.args)
        if now == self._read:
            return False
        self._read = now
        self._mapped = self._map_arguments(UNLIMITED)
        self.__dict__.pop("_chosen_strategy", None)
        self._adapter.describe_by(self.args)
        self._check_evaluation()
        self._check_division()
        return True

    def _follow_arguments(self) -> None:
        """Make the task anew for a verb if the arguments are others, and see to changed callbacks."""
        if self._runs.run is None:
            self._follow_callbacks()
        if not self.is_in_train and self._read_arguments():
            self._task = self._make_task()

    def _check_idle(self, name: str) -> None:
        if self.is_in_train:
            raise ConfigError(f"trainer.{name} is set before train(), not while it runs")

    @property
    def model_wrapped(self) -> Any:
        """The model: no strategy replaces it."""
        return self.model

    @property
    def label_names(self) -> list[str]:
        """The columns that are labels."""
        return list(self._task.columns.labels)

    @label_names.setter
    def label_names(self, names: Sequence[str]) -> None:
        self._check_idle("label_names")
        if self._is_made:
            self.args.label_names = list(names)
            self._follow_arguments()

    @property
    def tokenizer(self) -> Any:
        """The former name of `processing_class`."""
        return self.processing_class

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a class of one, for the next `train`, `evaluate` or `predict`."""
        self.callback_handler.add_callback(callback)
        self._follow_callbacks()

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        found = self.callback_handler.pop_callback(callback)
        self._follow_callbacks()
        return found

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def _follow_callbacks(self) -> None:
        """Make the adapter anew if the list of callbacks is another one."""
        if list(map(id, self._callbacks)) == list(map(id, self._adapted)):
            return
        self._adapter, self._runs = self._adapt(self.state, self.control)
        self._adapter.is_initialized = True  # a later callback has missed on_init_end, as in transformers

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return rank() == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first process of its machine."""
        return local_rank() == 0

    # The data.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data; each process reads its part of it."""
        if self.train_dataset is None:
            raise ConfigError("train() needs a train_dataset: Trainer(train_dataset=...)")
        options = self._mapped.data_options
        return self._loader(
            self.train_dataset,
            self._get_train_sampler(self.train_dataset),
            batch_size=options["batch_size"],
            drop_last=options["drop_last"],
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of evaluation data.

        Args:
            eval_dataset: The data, or the name of a set in `eval_dataset`; None for `eval_dataset` itself.
        """
        key = (eval_dataset if isinstance(eval_dataset, str) else "", id(self.data_collator))
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        elif eval_dataset is None:
            eval_dataset = self.eval_dataset
        if eval_dataset is None:
            raise ConfigError("an evaluation needs an eval_dataset: Trainer(eval_dataset=...)")
        known, loader = self._loaders.get(key, (None, None))
        keeps = self.is_in_train or self.args.dataloader_persistent_workers
        if loader is None or known is not eval_dataset or not keeps:
            loader = self.get_test_dataloader(eval_dataset)
            self._loaders[key] = eval_dataset, loader
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of data to predict; `dataloader_drop_last` drops its last batch, too."""
        options, sampler = self._mapped.data_options, self._get_eval_sampler(test_dataset)
        size, batches = options["evaluation_batch_size"], None
        if options["drop_last"] and sampler is not None:  # an evaluation keeps the batches of a batch sampler
            batches = BatchSampler(sampler, size, drop_last=True)
        return self._loader(test_dataset, sampler, batches, batch_size=size)

    def _loader(
        self,
        dataset: Any,
        sampler: Sampler[int] | None,
        batch_sampler: Sampler[list[int]] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        if isinstance(dataset, IterableDataset):
            options.pop("drop_last", None)
        total = options["batch_size"] * self._chosen_strategy.data_size
        if batch_sampler is not None:
            sampler, options = None, {"batch_sampler": batch_sampler}
        given = self._mapped.data_options
        made: DataLoader[Any] = DataLoader(
            dataset,
            sampler=sampler,
            collate_fn=Collation(self._columns(), self.data_collator),
            num_workers=given["num_workers"],
            multiprocessing_context=given["multiprocessing_context"],
            prefetch_factor=given["prefetch_factor"],
            persistent_workers=bool(given["persistent_workers"]),
            **options,
        )
        made.total_batch_size = total
        return made

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Return the sampler of the training data; None for data without a length."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        options = self._mapped.data_options
        if not has_length(dataset):
            if options["group_by_length"] is not None:
                raise ConfigError(
                    f"train_sampling_strategy='group_by_length' needs a dataset with a length, not a"
                    f" {type(dataset).__name__}"
                )
            return None
        if not len(dataset):
            raise DataError(f"train_dataset is empty: it is a {type(dataset).__name__} of length 0")
        if options["group_by_length"] is not None:
            settings = self._settings_of([])
            group = options["batch_size"] * settings.gradient_accumulation_steps
            lengths = lengths_of(dataset, options["group_by_length"], "training")
            return LengthGroupedSampler(lengths, group * settings.select_strategy().data_size)
        return RandomSampler(dataset) if options["shuffle"] else SequentialSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        """Return the sampler of evaluation data; None for data without a length."""
        return SequentialSampler(eval_dataset) if has_length(eval_dataset) else None

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of samples of a loader's dataset."""
        return len(dataloader.dataset)  # type: ignore[arg-type]

    def _evaluation_data(self) -> Any:
        """Return the evaluation data of a fit: loaders by the names of their sets, or one loader, or None."""
        if isinstance(self.eval_dataset, Mapping):
            return {name: self.get_eval_dataloader(name) for name in self.eval_dataset}
        never = IntervalStrategy(self.args.eval_strategy) == IntervalStrategy.NO
        if self.eval_dataset is None and (never or not is_overridden(self, "get_eval_dataloader")):
            return None
        return self.get_eval_dataloader(self.eval_dataset)

    # Training.

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train.

        Args:
            resume_from_checkpoint: True for the newest checkpoint in `output_dir`, or the path of one, such
                as "output_dir/checkpoint-500". Without it, checkpoints that are there are moved to
                `earlier-1`.
            trial: A trial of `hyperparameter_search`, which sets its arguments; None outside one.
            ignore_keys_for_eval: The outputs that evaluations of this fit leave out.

        Returns:
            The number of steps, the mean of their losses, and the metrics of the whole training.

        Raises:
            ConfigError: The arguments do not fit together, or another job trains in `output_dir`.
            CheckpointError: There is no checkpoint to resume from, or it is damaged.
        """
        self._follow_callbacks()
        with self._trial(trial):
            self._read_arguments()
            self._runs.first = self._mapped.eval_on_start
            if self.model_init is not None:
                self._own_model, self._given_optimizers = self._init_model(trial), (None, None)
            checked_optimizers(self._given_optimizers, None, None, self._settings_of([]))
            self._prepare_model()
            self._task = self._make_task()
            if (beside := self._find_beside()) is not None:
                self._task.beside = beside
            self._ignored_in_fit = ignore_keys_for_eval
            resume, train, evaluation = (
                self._resumed(resume_from_checkpoint),
                self.get_train_dataloader(),
                self._evaluation_data(),
            )
            self._mapped = self._map_arguments(self._planned_steps(train))
            self.is_in_train = True
            self._adapter.train_dataloader = train
            self._memory_tracker.start()
            self._log_begin(train)
            saves = self._mapped.trainer_options["checkpoint"]
            self._runs.save_by(None if saves else self._save_without_policy)
            try:
                of_others = self.accelerator.shared_state() if self._runs_own_code() else nullcontext()
                with self._runs.fitting(evaluation), of_others:
                    # transformers keeps the checkpoint's rate, too; a trial has arguments of its own
                    settings = "checkpoint" if trial is None else "program"
                    self._settings().fit(
                        self._task,
                        train,
                        evaluation,
                        resume=resume,
                        optimizer_settings=None if resume is None else settings,
                    )
            finally:
                self.is_in_train = False
                self._stop_measuring()
                while self._handles:
                    self._handles.pop().remove()
            metrics = self._adapter.train_metrics
            return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    @contextmanager
    def _trial(self, trial: Any) -> Iterator[None]:
        """Run the block, a fit, with the arguments of a trial; None changes none."""
        if trial is None:
            self._set_trial_in_state(None)
            yield
            return
        if self._search is None:
            raise ConfigError("train(trial=...) is for hyperparameter_search, which calls it for each trial")
        directory = self.args.output_dir
        values = self._search.set_arguments(self.args, trial)
        self.args.output_dir = self._search.directory(directory, trial)
        self._set_trial_in_state(trial, values)
        try:
            yield
        finally:
            self.args.output_dir = directory
        self._search.end_trial()

    def _set_trial_in_state(self, trial: Any, values: dict[str, Any] | None = None) -> None:
        state, search = self.state, self._search
        state.is_hyper_param_search = trial is not None
        state.trial_name = None if trial is None or search is None else search.trial_name(trial)
        state.trial_params = values

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> Any:
        """Train with many choices of the arguments, and return the best.

        Each trial trains a new model of `model_init` in `output_dir/run-<number>`. `drivetrain.search`
        searches with a drivetrain Trainer, and goes on after a kill.

        Args:
            hp_space: Takes Optuna's trial, and returns options of the arguments by name; with "ray" takes
                None and returns a `param_space` of Ray Tune; with "wandb" the configuration of a sweep.
            compute_objective: Takes the metrics of an evaluation, and returns the objective, or several; the
                last one of a trial counts. By default the loss, or the sum of the metrics if there are any.
            n_trials: The number of trials.
            direction: "minimize" or "maximize", or with Optuna one for each objective.
            backend: "optuna", "ray", "wandb", or None for the first of them that is installed. With "ray",
                trials are processes of Ray, and the environment variable `RAY_SCOPE` says which of a trial's
                values counts, by default the last one. "wandb" needs its server.
            hp_name: Takes the trial, and returns its name.
            **options: Keywords for `optuna.create_study`, and `timeout`, `catch` and `gc_after_trial`; for
                `ray.tune.run`; or for a sweep: `project`, `entity`, `name`, `sweep_id` and `metric`.

        Returns:
            transformers' `BestRun`, or a list of them for several objectives; None on ranks other than 0.

        Raises:
            ConfigError: There is no `model_init`, or the backend does not take the options.
            MissingDependencyError: The backend is not installed.
            DrivetrainError: No trial has an objective.
        """
        search = chosen_search(backend)
        if self.model_init is None:
            raise ConfigError(
                "hyperparameter_search makes a new model for each trial: give Trainer(model_init=...)"
            )
        settings = self._settings()
        with_ranks = settings.select_strategy().world_size > 1
        ranks = (
            Engine(settings.strategy, devices=settings.devices, num_nodes=settings.num_nodes).ranks
            if with_ranks
            else ALONE
        )
        self._search = search(hp_space, compute_objective, hp_name)
        self.hp_search_backend = search.backend
        try:
            return self._search.run(self, ranks, n_trials, direction, options)
        finally:
            self._search = self.hp_search_backend = None

    def _go_on_with(self, optimizer: Optimizer, begins_anew: bool) -> None:
        """Let a second `train()` go on with the state of the first one's optimizer, as in transformers."""
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if begins_anew and self._trained is not None and type(self._trained) is type(optimizer):
            for parameter, state in self._trained.state.items():
                if id(parameter) in parameters:  # of the same model, which no strategy has sharded
                    optimizer.state[parameter] = state
        self._trained = optimizer

    def _prepare_model(self) -> None:
        """Set training mode and the tokenizer's special tokens, and check shared tensors."""
        kinds = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
        if isinstance(self.processing_class, kinds) and hasattr(self.model, "config"):
            own_method: Any = getattr(THEIRS, "_align_special_tokens", None)  # of 5.0
            align = getattr(trainer_utils, "align_special_tokens", None)
            if align is None:
                own_method(self)
            else:
                align(self.model, self.processing_class)
        if "memory" in self._mapped.trainer_options and has_own_recomputation(self.model):
            enable_own_recomputation(self.model, self.args)
        self.model.train()
        saves = self._mapped.trainer_options["checkpoint"]
        if saves and self.args.save_only_model and may_start_again():
            raise ConfigError(
                "the launcher may start this program again (--max-restarts), and the checkpoints of"
                " save_only_model=True have nothing to resume from. Leave one of them out"
            )
        if saves and base_of(self.model) is self.model:
            check_shared(self.model)

    def _planned_steps(self, loader: DataLoader[Any]) -> int | None:
        """Return the number of steps that `num_train_epochs` gives; None if the data has no length."""
        if not has_length(loader):
            return None
        micro_batches = math.ceil(len(loader) / self._chosen_strategy.data_size)
        per_epoch = math.ceil(micro_batches / self.args.gradient_accumulation_steps)
        total: int = math.ceil(self.args.num_train_epochs * per_epoch)
        return total

    def _log_begin(self, loader: DataLoader[Any]) -> None:
        """Write to the logger of transformers what it writes when a training begins."""
        args, dataset = self.args, getattr(loader, "dataset", ())
        steps = args.max_steps if args.max_steps > 0 else self._planned_steps(loader)
        together = args.train_batch_size * args.gradient_accumulation_steps * self._chosen_strategy.data_size
        lines: dict[str, Any] = {
            "Num examples": len(dataset) if has_length(dataset) else "unknown",
            "Num Epochs": args.num_train_epochs if args.max_steps <= 0 else "unknown",
            "Instantaneous batch size per device": args.per_device_train_batch_size,
            "Total train batch size (w. parallel, distributed & accumulation)": together,
            "Gradient Accumulation steps": args.gradient_accumulation_steps,
            "Total optimization steps": steps,
            "Number of trainable parameters": self.get_num_trainable_parameters(),
        }
        log = transformers.trainer.logger
        log.info("***** Running training *****")
        for name, value in lines.items():
            log.info(f"  {name} = {value:,}" if isinstance(value, int) else f"  {name} = {value}")

    def _resumed(self, given: str | os.PathLike[str] | bool | None) -> str | None:
        """Return the path to resume from; None, with earlier checkpoints moved away, for a fresh start."""
        output_dir = self.args.output_dir
        goes_on = may_start_again() and is_started_again()  # by a launcher: a fit then resumes by itself
        saves = self._mapped.trainer_options["checkpoint"] and not goes_on
        if given is None or given is False:
            if saves and self.is_world_process_zero():
                set_aside(output_dir)
            return None
        path = self._path_to_resume(given)
        try:
            found = newest(path)[1] if given is True else self._checkpoint_at(path)
        except DamagedCheckpointError:
            raise
        except CheckpointError as error:
            if is_of_transformers(path):
                raise CheckpointError(
                    f"{path!r} has checkpoints of transformers' own Trainer, which cannot be resumed here, or"
                    f" folders that have lost their {CHECKPOINTS!r}. Load the weights of a folder"
                    " with from_pretrained, and train in another output_dir"
                ) from error
            raise MissingCheckpointError(not_there(given, output_dir)) from error
        check_resumable(given, found)
        return taken_into(output_dir, found, self.is_world_process_zero()) if saves else found

    @staticmethod
    def _checkpoint_at(path: str) -> str:
        return checkpoint_in(path) or checkpoint_in(os.path.realpath(path)) or resolve(path)

    def _path_to_resume(self, given: Any) -> str:
        if given is True:
            return str(self.args.output_dir)
        if not isinstance(given, (str, os.PathLike)):
            raise ConfigError(
                f"resume_from_checkpoint={given!r}: give True for the newest checkpoint in output_dir, or the"
                " path of one, such as 'output_dir/checkpoint-500'"
            )
        return os.fspath(given)

    def _get_output_dir(self, trial: Any = None) -> str:
        """Return the folder of the checkpoints: `output_dir`, which a trial of a search sets to its own."""
        return str(self.args.output_dir)

    def _save_without_policy(self, run: Run) -> None:
        """Save a checkpoint in a fit with save_strategy="no", because a callback asks for it."""
        folder, limit = os.path.join(self.args.output_dir, CHECKPOINTS), self.args.save_total_limit
        policy = CheckpointConfig(every=None, keep_last=limit or None, by=None)
        progress, assets, what = run.progress, dict[str, bytes](), "the model"
        of_model = what, checked_assets(info_of(self._task).assets, what)
        run.engine.ranks.first(lambda: assets.update(make_assets(of_model)))

        def snapshot() -> Snapshot:
            made = snapshot_to_save(run, not self.args.save_only_model)
            made.assets = assets
            return made

        with as_saved(run):
            manager = CheckpointManager(folder, policy, ranks=run.engine.ranks)
            saved = manager.save(progress.steps, progress.epoch, run.metrics, snapshot)
        run.checkpoint_saved(saved.path)

    def _checkpoint_saved(self, run: Run) -> None:
        """Write the folder `checkpoint-N` for a checkpoint; all ranks call this."""
        checkpoint, folders, ranks = run.last_checkpoint, self._folders, run.engine.ranks
        assert checkpoint is not None
        self._adapter.note_checkpoint(run)
        unfinished = ranks.first(lambda: folders.unfinished(checkpoint))
        self.save_model(unfinished, _internal_call=True)
        whole = run.engine.strategy.name in ("single", "ddp")  # each process has the whole optimizer
        if whole and not self.args.save_only_model:
            made = self.model, self.optimizer, self.lr_scheduler, run.progress.steps
            ranks.first(lambda: write_optimizer(unfinished, *made))
        state = self._adapter.state_json(indent=2) + "\n"
        ranks.first(lambda: folders.commit(unfinished, checkpoint, state))
        self._save_checkpoint(self.model, None)
        if self._search is not None:
            self._search.saved(folders.path(checkpoint))
        self._adapter.clear(*ONCE)
        self._adapter.heed(run)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run one micro-batch with its backward, and return its loss, detached.

        An override may call this, or `self.accelerator.backward(loss)`; on one device and under DDP also
        `loss.backward()`. After `loss.backward()` it may read and change the gradients, which are those of
        this micro-batch. With sharded parameters or gradients (FSDP, ZeRO), or float16, the backward runs
        once the step has returned.

        Args:
            model: The model.
            inputs: The columns of the micro-batch, on the device.
            num_items_in_batch: The items of this micro-batch that its loss is a mean over.
        """
        items = items_for(self.compute_loss, num_items_in_batch)
        return self._task.run_backward(self.compute_loss(model, inputs, **items))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a micro-batch as a mean over its items, with the outputs if asked for.

        Args:
            model: The model.
            inputs: The columns of the micro-batch, on the device.
            return_outputs: Whether to return (loss, outputs).
            num_items_in_batch: The items of this micro-batch that the loss is a mean over.
        """
        outputs = self._task.outputs_of(model, inputs)
        loss = self._task.loss(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs, which are on the device."""
        return inputs

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        """Run the block; the strategy has set the precision's context around each step."""
        yield

    def _find_beside(self) -> nn.Module | None:
        """Return the module that the script's optimizer trains beside the model, so that the task has it.

        If an attribute may hold it, `create_optimizer` is called to find out. The fit makes it
        again, once the strategy has placed the parameters.
        """
        ours = ("_own_model", "_task")
        attributes = {name: each for name, each in vars(self).items() if name not in ours}
        optimizer, overrides = self._given_optimizers[0], is_overridden(self, *_OPTIMIZER_METHODS)
        if optimizer is None and overrides and has_beside(attributes, self.model):
            self.is_in_train = True  # so that what the script sets counts as its answer, not as an argument
            try:
                self._own_optimizer, self._own_scheduler = None, None
                optimizer = self.create_optimizer()
            finally:
                self.is_in_train = False
        return modules_beside(attributes, self.model, optimizer)

    def _make_optimizers(self, parameters: list[nn.Parameter]) -> tuple[Optimizer, Any]:
        """Return the optimizer and scheduler of the script's methods or arguments, for a fit that begins."""
        self._own_optimizer, self._own_scheduler = self._given_optimizers
        if self._created_lr_scheduler:  # by create_scheduler, for an earlier fit or before this one
            self._own_scheduler, self._created_lr_scheduler = None, False
        total = self._task.run_length.steps
        if total is None:
            raise ConfigError("a scheduler needs the number of steps: give max_steps")
        self.create_optimizer_and_scheduler(num_training_steps=total)
        made = self.optimizer
        if not isinstance(made, Optimizer):
            raise ConfigError(
                f"{type(self).__name__}.create_optimizer must set self.optimizer, as in transformers; it is"
                f" {made!r}"
            )
        ours = {id(each) for each in parameters}
        if any(id(each) not in ours for group in made.param_groups for each in group["params"]):
            raise ConfigError(
                "the strategy has placed self.model's parameters, and the optimizer has others."
                " Make it in create_optimizer, or give optimizer_cls_and_kwargs=(class, arguments)"
            )
        return made, self._scheduled()

    def _scheduled(self) -> Any:
        """Return the scheduler; a ReduceLROnPlateau monitors `metric_for_best_model`, or the loss.

        An AdafactorSchedule shows the rates of the optimizer, which it needs gradients for. So it is called
        as soon as the optimizer has stepped, and not by the engine.
        """
        scheduler = self.lr_scheduler
        if isinstance(scheduler, AdafactorSchedule):
            self._handles.append(scheduler.optimizer.register_step_post_hook(lambda *_: scheduler.step()))
            return None
        greedy = getattr(transformers.optimization, "GreedyLR", ReduceLROnPlateau)  # of 5.3
        if not isinstance(scheduler, (ReduceLROnPlateau, greedy)):
            return scheduler
        sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
        metric = from_metric_for_best_model(self.args.metric_for_best_model or "loss", sets)
        return TorchSchedule(scheduler, metric=metric, mode=scheduler.mode)

    def _log_point(self, logs: dict[str, float]) -> None:
        self._at_log_point = True
        if logs is self._adapter.train_metrics:
            self._stop_measuring(logs)
        try:
            self.log(logs)
        finally:
            self._at_log_point = False
        if self._runs.run is not None:
            self._adapter.heed(self._runs.run)
            if self._runs_own_code():
                self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Say which arguments a callback has changed since training began, without an effect on it."""
        for given, begun in self._begun:
            for name, value in begun.items():
                if (now := getattr(given, name)) != value:
                    _LOG.warning(
                        f"{name} was {value!r} when train() began, and is {now!r} now. That changes nothing"
                        " in this training: set it before"
                    )
                    begun[name] = now

    def _stop_measuring(self, metrics: dict[str, float] | None = None) -> None:
        """Stop the measurement of a fit's memory, whose thread would never end, and add its metrics."""
        tracker = self._memory_tracker
        if not tracker.skip_memory_metrics and tracker.cur_stage == "train":
            tracker.stop("train")
            if metrics is not None:
                tracker.update_metrics("train", metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add values to `state.log_history` and give them to the callbacks; loggers get them too.

        Args:
            logs: The values by name.
            start_time: Without effect; transformers measures the speed in tokens from it.
        """
        run = self._runs.run
        if run is not None and not run.is_over and self._runs.current is None:
            known = all_to_transformers(run.logged) if self._at_log_point else {}
            for name, value in logs.items():
                if name not in known and isinstance(value, (Real, Tensor)):
                    run.log(name, value)
                    self._adapter.told |= {name, to_transformers(name)} - {"loss"}
        self._adapter.log(logs)

    # Evaluation.

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = EVALUATION,
    ) -> dict[str, float]:
        """Evaluate, and return the metrics: each sample counts once, on any number of processes.

        Args:
            eval_dataset: The data, several sets as a mapping; None for `eval_dataset` of the constructor.
            ignore_keys: The outputs that `compute_metrics` does not get.
            metric_key_prefix: What the names of the metrics begin with.
        """
        self._follow_arguments()
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, Mapping):
            metrics: dict[str, float] = {}
            for name, dataset in given.items():
                metrics |= self.evaluate(
                    name if eval_dataset is None else dataset, ignore_keys, f"{metric_key_prefix}_{name}"
                )
            return metrics
        self._memory_tracker.start()
        loader, start = self.get_eval_dataloader(given), time.time()
        self._keeps_outputs = is_overridden(self, "evaluation_loop")  # which may read the predictions
        try:
            output = self.evaluation_loop(
                loader,
                description="Evaluation",
                prediction_loss_only=True if self.compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self._keeps_outputs = True
        metrics = dict(output.metrics)
        metrics |= self._speed(metric_key_prefix, start, output.num_samples)
        with _in_evaluation_mode(self.model):  # which the `log` of a subclass may ask for
            self.log(metrics)
            self._adapter.clear("should_evaluate")
            self._adapter.event("on_evaluate", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = TEST
    ) -> PredictionOutput:
        """Return the predictions for a set as arrays, with the labels and metrics if it has labels.

        Rows of different lengths are padded with -100. All processes get the whole arrays.

        Args:
            test_dataset: The data.
            ignore_keys: The outputs to leave out.
            metric_key_prefix: What the names of the metrics begin with.
        """
        self._follow_arguments()
        self._memory_tracker.start()
        loader, start = self.get_test_dataloader(test_dataset), time.time()
        output = self.evaluation_loop(
            loader, description="Prediction", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
        )
        metrics = dict(output.metrics) | self._speed(metric_key_prefix, start, output.num_samples)
        self._adapter.event("on_predict", metrics=metrics)
        self._memory_tracker.stop_and_update_metrics(metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = EVALUATION,
    ) -> EvalLoopOutput:
        """Make one pass over a loader; `evaluate` and `predict` call it.

        Args:
            dataloader: The loader.
            description: What the pass is for.
            prediction_loss_only: Whether to return the loss alone; None for what the arguments say.
            ignore_keys: The outputs to leave out.
            metric_key_prefix: What the names of the metrics begin with.
        """
        loss_only = self._mapped.loss_only if prediction_loss_only is None else prediction_loss_only
        current = Pass(
            self.compute_metrics,
            keeps=self._keeps_outputs and not loss_only,
            loss_only=loss_only,
            ignored=ignore_keys,
            generation=None if loss_only else self._generation(),
        )
        self._adapter.eval_dataloader = dataloader
        with self._runs.passing(self._task, current):
            values = self._runs.values(self._settings(), self._task, dataloader)
        prefix = f"{metric_key_prefix}_"
        metrics = {
            name if name.startswith(prefix) else f"{prefix}{name}": current.counts.get(name, value)
            for name, value in values.items()
        }
        return EvalLoopOutput(current.predictions, current.label_ids, metrics, current.samples)

    def _generation(self) -> Any:
        return None

    def _speed(self, prefix: str, start: float, samples: int | None) -> dict[str, float]:
        samples = samples or 0
        batch = self._mapped.data_options["evaluation_batch_size"] * self._chosen_strategy.data_size
        return dict(speed_metrics(prefix, start, num_samples=samples, num_steps=math.ceil(samples / batch)))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, outputs and labels of a batch, each None if there is none.

        Args:
            model: The model.
            inputs: The columns of the batch, on the device.
            prediction_loss_only: Whether to return the loss alone.
            ignore_keys: The outputs to leave out; None leaves out what the model's configuration names.
        """
        task, labels = self._task, self._labels(inputs)
        with torch.no_grad():
            if labels is None and (self.label_names or not self.can_return_loss):
                loss, outputs = None, task.outputs_of(model, inputs)
            else:
                items = items_for(self.compute_loss, as_tensor(task.loss_weight(inputs), inputs))
                loss, outputs = self.compute_loss(model, dict(inputs), return_outputs=True, **items)
        if prediction_loss_only:
            return loss, None, None
        ignored = task.ignored_outputs if ignore_keys is None else ignore_keys
        return loss, predictions_of(outputs, {*ignored, "loss"}), labels

    def _labels(self, inputs: Mapping[str, Any]) -> Any:
        columns = self._task.columns
        if not columns.has_labels(inputs):
            return None
        labels = tuple(inputs[name] for name in columns.labels if name in inputs)
        return labels[0] if len(labels) == 1 else labels

    # Results and models on the disk.

    def save_model(
        self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False
    ) -> None:
        """Write the model and its processor to a folder, for `from_pretrained`; all processes call it.

        As in transformers, files of the same names are replaced, whoever has written them, and the folder has
        the arguments too, in training_args.bin.

        Args:
            output_dir: The folder; None takes the arguments' `output_dir`.
            _internal_call: Whether a checkpoint calls this, for its folder `checkpoint-N`.
        """
        run, folder = self._runs.run, self.args.output_dir if output_dir is None else output_dir
        if is_overridden(self, "_save"):
            if self.is_world_process_zero():
                self._save(os.fspath(folder))
            return
        with nullcontext() if run is None else run.engine.checkpoint_layout():
            replace_pretrained(self._task, folder)
        if self.is_world_process_zero():
            write_arguments(os.fspath(folder), self.args)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model; an override writes it in a package's own form, for models that are not sharded."""
        if state_dict is not None:
            raise ConfigError("_save(state_dict=...): the weights are those of the model. Leave it out")
        replace_pretrained(self._task, self.args.output_dir if output_dir is None else output_dir)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Do nothing: the checkpoint and its folder are on the disk. An override is called after each one."""

    def push_to_hub(
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> str | None:
        """Upload the newest checkpoint, or the best one if it was loaded, to the Hub; rank 0 does.

        Args:
            commit_message: The message of the commit; None names the checkpoint.
            blocking: Without effect: the upload is always finished when this returns. `Publish` uploads in
                the background.
            token: The token; None takes `hub_token`, or the one of the machine.
            revision: The branch; None takes `hub_revision`.
            private: Whether a new repository is private; None takes `hub_private_repo`.
            card: Parts of the model card, as transformers' `create_model_card` takes them: texts or lists.

        Returns:
            The address of the commit, on rank 0.

        Raises:
            ConfigError: A name in `card` is none of a card's.
        """
        hub = importlib.import_module("drivetrain.integrations.hub")  # only if it is asked for
        data = hub.CardData(**card_options(card))
        self._adapter.call("on_push_begin")
        if not self.is_world_process_zero():
            return None
        args, best = self.args, self.state.best_model_checkpoint
        source = best if args.load_best_model_at_end and best else args.output_dir
        address: str = hub.push(
            source,
            args.hub_model_id or os.path.basename(os.path.abspath(args.output_dir)),
            revision=revision or args.hub_revision,
            private=args.hub_private_repo if private is None else private,
            token=token or args.hub_token,
            card=data,
            message=commit_message,
        )
        return address

    def __getattr__(self, name: str) -> NoReturn:
        told = f"'{type(self).__name__}' object has no attribute {name!r}"
        if name in COUNTERPARTS or is_theirs(name):
            told += f": {counterpart(name)}"
        raise AttributeError(told)
