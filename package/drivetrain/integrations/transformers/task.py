"""A model of transformers as a task."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.checkpoint.weights.rename import Rename
from drivetrain.checkpoint.weights.warm_start import LoadReport, WeightSource, load_weights_into
from drivetrain.core.devices import has_values
from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.types import Batch, EvaluationReader, Json, StepOutput
from drivetrain.core.validation import count, number, one_of
from drivetrain.distributed.processes import rank
from drivetrain.integrations.transformers.batch.collating import Collation, default_collate
from drivetrain.integrations.transformers.batch.columns import Columns
from drivetrain.integrations.transformers.batch.packing import check_packed
from drivetrain.integrations.transformers.evaluation import (
    MetricsReader,
    check_compute_metrics,
    check_unused,
    predictions_of,
)
from drivetrain.integrations.transformers.generation import (
    check_embeddings,
    generation_config,
    noisy_embeddings,
)
from drivetrain.integrations.transformers.generation import generate as run_generate
from drivetrain.integrations.transformers.loss_items import (
    as_tensor,
    check_smoothed,
    counted_targets,
    items_of,
    smoothed_cross_entropy,
    tokens,
)
from drivetrain.integrations.transformers.optimizers import TransformersOptimizer
from drivetrain.integrations.transformers.pretrained import (
    IN_TASK,
    PRETRAINED,
    adapter_weights,
    is_adapter,
    model_assets,
    of_model,
    write_pretrained,
)
from drivetrain.integrations.transformers.sharded.meta_model import (
    folder_of,
    is_folder,
    is_unloaded,
    renamed_to,
    reset_of,
)
from drivetrain.integrations.transformers.sharded.tensor_plan import tensor_plan
from drivetrain.integrations.transformers.stored_model import (
    base_of,
    base_of_checkpoint,
    build_model,
    describe_config,
    describe_model,
    has_prompts,
    is_pretrained,
    origin_of,
    quantised_by,
)
from drivetrain.task.attributes import never_search
from drivetrain.task.forward import call_forward
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.stored import pack_hparams
from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

never_search("peft", "transformers")

_REBUILDS: ContextVar[bool] = ContextVar("rebuilds", default=False)
"""Whether tasks are made by `from_checkpoint`, which lacks the functions that other arguments belong to."""


@contextmanager
def _rebuilding() -> Iterator[None]:
    token = _REBUILDS.set(True)
    try:
        yield
    finally:
        _REBUILDS.reset(token)


class TransformersTask(TaskModule):
    """A `PreTrainedModel` of transformers, or a `PeftModel`, as a task.

    The loss is the model's own. Its weight is exact: a loss over tokens counts the labels other than -100,
    shifted where the model shifts them. Any split of a batch then gives the gradient of the large batch.

    Args:
        model: The model, which is set to training mode, as transformers' Trainer does: call `eval()` on parts
            of it afterwards. Or its description in a checkpoint, for `from_checkpoint`.
        processing_class: The tokenizer, processor or image processor. Datasets are padded with it.
        optimizer: An `OptimizerConfig`, a `TransformersOptimizer`, or anything else that
            `configure_optimizers` may return. None: AdamW with lr=5e-5.
        compute_metrics: A function from an `EvalPrediction`, the outputs and labels of the whole set, to
            values by name. It runs on rank 0.
        compute_loss_func: A function of (outputs, labels, num_items_in_batch=...) that replaces the model's
            loss. It returns the sum over the items of the micro-batch, divided by their number.
        label_smoothing: The share of each target that is spread over all classes.
        generate: True, a `GenerationConfig` or a mapping of its options: evaluation and prediction then
            generate.
        neftune_alpha: Add noise to the input embeddings in training; usually 5 to 15.
        preprocess_logits_for_metrics: A function of (logits, labels) that returns what to keep for
            `compute_metrics`, such as the argmax.
        batch_eval_metrics: Call `compute_metrics(prediction, compute_result=...)` with each batch instead.
        include_for_metrics: What else an `EvalPrediction` has: "inputs", "loss".
        label_names: The columns that are labels; None finds them as transformers does.
        remove_unused_columns: Leave out the columns that the model's forward does not take; they are logged.
        count_tokens: The tokens of the model's input that `run.progress.tokens` counts: "no", "all", or
            "non_padding" for those that the attention mask keeps.
        pad_to_multiple_of: Pad sequences to a multiple of this length, such as 8; None pads to the longest of
            a batch. For datasets that are padded by `processing_class`.

    Raises:
        ConfigError: An argument that cannot work with this model.
    """

    takes_any_module = False
    """Whether the model may be any module whose forward returns its loss."""

    def __init__(
        self,
        model: Any,
        *,
        processing_class: Any = None,
        optimizer: OptimizerConfig | TransformersOptimizer | Any = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        label_smoothing: float = 0.0,
        generate: bool | Mapping[str, Any] | GenerationConfig | None = None,
        neftune_alpha: float | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        batch_eval_metrics: bool = False,
        include_for_metrics: Sequence[str] = (),
        label_names: Sequence[str] | None = None,
        remove_unused_columns: bool = True,
        count_tokens: str = "no",
        pad_to_multiple_of: int | None = None,
    ) -> None:
        super().__init__()
        self.model: Any = (
            build_model(model) if isinstance(model, Mapping) else _checked(model, self.takes_any_module)
        )
        if not self.takes_any_module:  # whose Trainer sets the mode when it trains
            self.model.train()
        base = base_of(self.model)
        quantised = quantised_by(self.model)
        if quantised not in ("", "torchao"):
            raise ConfigError(
                f"the model is quantised by {quantised}, whose layers do not load all that their state"
                " dicts hold, so that no checkpoint could be resumed. Quantise it with TorchAoConfig"
            )
        if isinstance(processing_class, str):
            raise ConfigError(
                "processing_class must be a tokenizer or another processor, not a text: give"
                f" AutoTokenizer.from_pretrained({processing_class!r})"
            )
        for name, function in (
            ("compute_loss_func", compute_loss_func),
            ("preprocess_logits_for_metrics", preprocess_logits_for_metrics),
        ):
            if function is not None and not callable(function):
                raise ConfigError(f"{name} must be a function, not {function!r}")
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.compute_metrics = compute_metrics
        self.compute_loss_func = compute_loss_func
        self.label_smoothing = number("label_smoothing", label_smoothing, at_least=0, below=1)
        self.neftune_alpha = (
            None if neftune_alpha is None else number("neftune_alpha", neftune_alpha, above=0)
        )
        if neftune_alpha is not None:
            check_embeddings(base)
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.batch_eval_metrics = batch_eval_metrics
        self.include_for_metrics = tuple(include_for_metrics)
        self.count_tokens = one_of("count_tokens", count_tokens, ("no", "all", "non_padding"))
        self.pad_to_multiple_of = (
            None
            if pad_to_multiple_of is None
            else count("pad_to_multiple_of", pad_to_multiple_of, at_least=1)
        )
        if not _REBUILDS.get():
            default_collate(processing_class, self.pad_to_multiple_of)  # checks that it can pad
        check_compute_metrics(compute_metrics, batch_eval_metrics, include_for_metrics)
        has_own_reader = type(self).evaluation_reader is not TransformersTask.evaluation_reader
        is_rebuilt = _REBUILDS.get()
        if compute_metrics is None and not has_own_reader and not is_rebuilt:
            check_unused(
                {
                    "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
                    "batch_eval_metrics": batch_eval_metrics,
                    "include_for_metrics": tuple(include_for_metrics),
                }
            )
        self.generation = generation_config(generate, base)
        finds_strings = self.generation is not None and self.generation.stop_strings
        if finds_strings and processing_class is None and not is_rebuilt:
            raise ConfigError("stop_strings are found by the tokenizer: give it as processing_class")
        self.columns = Columns(base, label_names, not remove_unused_columns)
        if compute_loss_func is not None and label_smoothing:
            raise ConfigError(
                "compute_loss_func replaces the loss, so that label_smoothing has no effect: give one of them"
            )
        if compute_loss_func is None and self._has_model_loss() and not is_rebuilt:
            self.columns.check_labels()
        adapter = getattr(self.model, "active_peft_config", None)  # prompts may be keys and values of a cache
        added = {} if getattr(adapter, "is_prompt_learning", False) else {"use_cache": False}
        self._added_columns = [
            (name, value)
            for name, value in {**added, "return_loss": True}.items()
            if self.columns.takes(name)
        ]
        self.items = items_of(base)
        if self.items.shifts and has_prompts(self.model):
            self.items = replace(self.items, count=tokens)  # a prompt comes before the first label
        config = getattr(base, "config", None)
        self._ignored = tuple(getattr(config, "keys_to_ignore_at_inference", None) or ())
        self._checked = self._knows_packing = False
        self._load_left_out()
        self._record(generate)

    def _has_model_loss(self) -> bool:
        """Return whether this class leaves the loss to the model."""
        kind = type(self)
        return kind.loss is TransformersTask.loss and kind.training_step is TransformersTask.training_step

    def _record(self, generate: Any) -> None:
        """Replace arguments in `hparams` by what a file can hold."""
        recorded = self.hparams
        described = describe_model(self.model)
        if described is not None:
            recorded["model"] = described
        if isinstance(generate, GenerationConfig):
            recorded["generate"] = generate.to_diff_dict()
        packed: Any = pack_hparams(self)
        for name in packed["unstored"]:
            if name != "model":
                recorded[name] = None

    def forward(self, **columns: Any) -> Any:
        """Run the model."""
        return self.model(**columns)

    # Reading a batch.

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return the columns that the model takes, with options to compute its loss and to keep no cache."""
        columns = self.columns.of_forward(batch)
        for name, value in self._added_columns:
            if name not in columns:
                columns[name] = value
        if not self._knows_packing:
            if "position_ids" in columns:
                check_packed(self.model, columns)
            self._knows_packing = True
        return columns

    def loss_weight(self, batch: Batch) -> float | Tensor:
        """Return the number of items that the loss is a mean over."""
        return self.items.count(batch)

    def tokens(self, batch: Batch) -> int:
        """Return the number of tokens of the model's main input, if `count_tokens` asks for it."""
        if self.count_tokens == "no":
            return 0
        columns = self.columns.of_batch(batch)
        main = getattr(base_of(self.model), "main_input_name", None)
        if main not in columns:
            raise ConfigError(
                f"count_tokens={self.count_tokens!r}: the batch has no {main!r}, the main input of the model."
                f" It has {', '.join(sorted(columns))}"
            )
        if self.count_tokens == "all":
            return int(columns[main].numel())
        if "attention_mask" not in columns:
            raise ConfigError('count_tokens="non_padding" needs a batch with attention_mask. Give "all"')
        return int(columns["attention_mask"].sum())

    def collate_function(self) -> Callable[[list[Any]], Batch]:
        """Return a collation that leaves out unused columns and pads."""
        # A task that is rebuilt from a checkpoint may lack its tokenizer; the first step checks lengths.
        multiple = None if self.processing_class is None else self.pad_to_multiple_of
        return Collation(self.columns, default_collate(self.processing_class, multiple))

    # The steps.

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Any]:
        """Return the model's own loss, or the one that an argument asks for."""
        if self.compute_loss_func is not None:
            columns = self.columns.of_batch(batch)
            labels = tuple(columns[name] for name in self.columns.labels if name in columns)
            items = as_tensor(self.loss_weight(batch), batch)
            return self.compute_loss_func(
                outputs, labels[0] if len(labels) == 1 else labels, num_items_in_batch=items
            )
        if self.label_smoothing:
            columns = self.columns.of_batch(batch)
            if "labels" not in columns:
                raise ConfigError("label_smoothing needs a batch with labels")
            logits = predictions_of(outputs, {*self._ignored, "loss"})
            logits = logits[0] if isinstance(logits, tuple) else logits
            check_smoothed(logits, columns["labels"])
            return smoothed_cross_entropy(logits, columns["labels"], self.label_smoothing, self.items.shifts)
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if not isinstance(outputs, tuple) and found is None:
            name, wanted = type(base_of(self.model)).__name__, " and ".join(self.columns.labels)
            if not wanted:
                raise ConfigError(
                    f"{name} returned no loss, and its forward takes no labels. Take a class with a head,"
                    " such as BertForSequenceClassification, or give compute_loss_func"
                )
            raise ConfigError(
                f"{name} returned no loss: the batch has the columns"
                f" {', '.join(sorted(self.columns.of_batch(batch)))}; a loss needs {wanted}"
            )
        return super().loss(outputs, batch)

    def training_step(self, batch: Batch) -> Any:
        """Run one micro-batch, with noise on the embeddings if `neftune_alpha` asks for it."""
        step = super().training_step if self._checked else self._first_step
        if self.neftune_alpha is None:
            return step(batch)
        with noisy_embeddings(self.model, self.neftune_alpha):
            return step(batch)

    def validation_step(self, batch: Batch) -> Any:
        """Run one batch: outputs, or generated sequences, with the loss if there are labels."""
        columns = self.inputs(batch)
        generated = None if self.generation is None else self._generated(columns)
        if self.columns.has_labels(self.columns.of_batch(batch)) or "return_loss" in columns:
            outputs = call_forward(self, columns)
            return StepOutput(self.loss(outputs, batch), outputs if generated is None else generated)
        return StepOutput(None, call_forward(self, columns) if generated is None else generated)  # type: ignore[arg-type]

    def predict_step(self, batch: Batch) -> Any:
        """Return the model's outputs without caches, or the generated sequences."""
        columns = self.inputs(batch)
        if self.generation is not None:
            return self._generated(columns)
        outputs = call_forward(self, columns)
        if isinstance(outputs, Mapping):
            kept = {name: each for name, each in outputs.items() if name not in self._ignored}
            return type(outputs)(**kept)
        return outputs

    def _generated(self, columns: Mapping[str, Any]) -> Any:
        assert self.generation is not None
        left_out = {*self.columns.labels, "use_cache", "return_loss"}
        labels, decoder = columns.get("labels"), columns.get("decoder_input_ids")
        if labels is not None and decoder is not None and decoder.shape == labels.shape:
            left_out |= {"decoder_input_ids", "decoder_attention_mask"}  # made from the labels
        inputs = {name: each for name, each in columns.items() if name not in left_out}
        found = run_generate(self.model, inputs, self.generation, self.processing_class)
        return found if isinstance(found, Tensor) else found.sequences

    def _first_step(self, batch: Batch) -> Any:
        """Make the first step, and record the configuration: the step may set its `problem_type`."""
        output = self._checked_step(batch)
        recorded = self.hparams.get("model")
        if isinstance(recorded, dict):
            recorded["config"] = describe_config(base_of(self.model).config)
        return output

    def _checked_step(self, batch: Batch) -> Any:
        """Make a step, and warn if the loss is not the mean that its weight stands for."""
        self._checked = True
        self._check_multiple(batch)
        name = type(base_of(self.model)).__name__
        if self.items.problem and self.compute_loss_func is None:
            _LOG.warning(
                f"{name}: {self.items.problem}. Its losses are weighted by samples, so that gradients over"
                " several micro-batches or ranks, and logged means, may differ from those of one large batch"
            )
            return super().training_step(batch)
        if any(each._compiled_call_impl is not None for each in self.modules()):
            return super().training_step(batch)
        if not all(has_values(each) for each in batch.values() if isinstance(each, Tensor)):
            return super().training_step(batch)  # a plan's
        with counted_targets() as counts:
            output = super().training_step(batch)
        weight = float(self.loss_weight(batch))
        if len(counts) == 1 and counts[0] != weight:
            _LOG.warning(
                f"{name}: its loss is a mean over {counts[0]} labels of the first micro-batch, but its weight"
                f" is {weight:g}. Gradients over several micro-batches or ranks, and logged means, may differ"
                " from those of one large batch"
            )
        return output

    def _check_multiple(self, batch: Batch) -> None:
        main_input = getattr(base_of(self.model), "main_input_name", None)
        multiple, main = self.pad_to_multiple_of, batch.get(main_input)
        if multiple is not None and isinstance(main, Tensor) and main.ndim > 1 and main.shape[1] % multiple:
            raise ConfigError(
                f"pad_to_multiple_of={multiple}, but the first micro-batch has length {main.shape[1]}: it was"
                " collated by a DataLoader or Trainer(collate=...), and not by the task. Give that collation"
                " the multiple"
            )

    # Evaluation.

    def configure_callbacks(self, stage: str) -> Sequence[Callback]:
        """Return a callback that has `compute_metrics` read evaluations."""
        return [_Reading(self)]

    def evaluation_reader(self) -> EvaluationReader | None:
        """Return the reader for `compute_metrics`; None without it. See `Callback.evaluation_reader`."""
        if self.compute_metrics is None:
            return None
        return MetricsReader(
            self.compute_metrics,
            self.columns,
            ignored=self._ignored,
            preprocess=self.preprocess_logits_for_metrics,
            by_batch=self.batch_eval_metrics,
            include=self.include_for_metrics,
        )

    # Training.

    def configure_optimizers(self) -> Any:
        """Return the optimizer that was given; AdamW with lr=5e-5 by default."""
        if isinstance(self.optimizer, TransformersOptimizer):
            return self.optimizer.config(self)
        return OptimizerConfig("adamw", lr=5e-5) if self.optimizer is None else self.optimizer

    def model_info(self) -> ModelInfo:
        """Return the block classes that stay on one device, and the model's files and formats."""
        names: Iterable[str] | None = getattr(base_of(self.model), "_no_split_modules", None)
        return ModelInfo(
            block_classes=tuple(names or ()),
            collate=self.collate_function(),
            assets=model_assets(self.model, self.processing_class),
            left_out=self._adapted(),
            origin=origin_of(self.model),
            export_format="transformers",
            save_finished=self._save_finished,
            parallel_plan=partial(tensor_plan, self.model, IN_TASK),
            reset_of=partial(reset_of, self.model),
        )

    def load_weights(
        self, source: WeightSource, *, strict: bool = True, rename: Rename | None = None
    ) -> LoadReport:
        """Copy weights into the model; the names may be those of a folder of `from_pretrained` too.

        A folder of PEFT with an adapter is loaded into a `PeftModel` with such an adapter. If drivetrain has
        exported it, its base must be that of the export.

        See `TaskModule.load_weights` for arguments, the report and errors.
        """
        if rename is None and base_of(self.model) is not self.model and is_adapter(source):
            return load_weights_into(self, adapter_weights(self, self.model, source), strict=strict)
        if rename is None and is_folder(source):
            rename = renamed_to(self.model, IN_TASK)
        return super().load_weights(source, strict=strict, rename=rename)

    def _load_left_out(self) -> None:
        """Give a model that `from_pretrained` has made on the meta device the weights of its folder."""
        if (getattr(base_of(self.model), "tp_size", None) or 1) > 1:
            raise ConfigError(
                "the model was split by from_pretrained(tp_plan=...). Load it without, and give"
                " FSDPConfig(tensor_parallel=...), or tp_size in the arguments: the strategy splits it"
            )
        if not is_unloaded(self.model):
            return
        if base_of(self.model) is not self.model:
            raise ConfigError(
                "the base of a PeftModel was loaded with device_map='meta', and has no weights: load it whole"
            )
        folder = folder_of(self.model)
        report = self.load_weights(folder, strict=False)
        if rank() == 0:  # each process makes the task
            _LOG.info("the weights of %r: %s", folder, report)
        if report.missing or report.mismatched:
            kind = type(base_of(self.model)).__name__
            _LOG.warning(f"{kind} begins with new values where {folder!r} has no fitting ones: {report}")

    def _adapted(self) -> Collection[str]:
        """Return the frozen base of a `PeftModel`: by default its checkpoints hold the adapter alone."""
        if base_of(self.model) is self.model:
            return ()
        named = self.named_parameters(remove_duplicate=False)
        # PEFT keeps the new values that a head began with, which no pretrained model has.
        return [clean_name(n) for n, each in named if not (each.requires_grad or ".original_module." in n)]

    def _save_finished(
        self,
        root: str,
        weights: Mapping[str, Tensor],
        assets: Mapping[str, bytes],
        write: bool,
        frozen: Json,
    ) -> str:
        """Write the folder `pretrained`, which `from_pretrained` loads."""
        folder = file_system(root).join(root, PRETRAINED)
        tensors = LazyTensors(of_model(weights, type(self).__name__), None, f"the weights for {folder!r}")
        write_pretrained(self.model, tensors, folder, files=assets, write=write, frozen=frozen)
        return folder

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Rebuild a task: its model from the stored class and configuration, then its weights.

        Functions and the processor are not stored; give again those that the task needs. Frozen weights that
        the checkpoint leaves out, such as the base of an adapter, are loaded by their recorded name and
        revision, and compared. See `TaskModule.from_checkpoint` for arguments and errors.
        """
        with torch.random.fork_rng(devices=()), _rebuilding():
            if path is not None and "model" not in overrides:
                base = base_of_checkpoint(path)
                overrides |= {} if base is None else {"model": base}
            return super().from_checkpoint(path, **overrides)


class _Reading(Callback):
    """Has a task's reader read evaluations."""

    def __init__(self, task: TransformersTask) -> None:
        self._task = task

    def evaluation_reader(self) -> EvaluationReader | None:
        """Return the task's reader."""
        return self._task.evaluation_reader()


def _checked(model: Any, takes_any: bool) -> nn.Module:
    base = base_of(model) if isinstance(model, nn.Module) else model
    if not (isinstance(base, nn.Module) and (takes_any or is_pretrained(base))):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(
            f"TransformersTask takes a PreTrainedModel or a PeftModel, not {given}. from_pretrained of an"
            " AutoModel class loads one. Another module is a part of your own TaskModule"
        )
    return model  # type: ignore[no-any-return]
