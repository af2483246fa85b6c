"""The names of transformers' Trainer that copies of its methods use in a subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import TrainerMemoryTracker

from drivetrain.integrations.transformers.arguments import MappedArguments
from drivetrain.integrations.transformers.batch.collating import Collation
from drivetrain.integrations.transformers.batch.columns import Columns
from drivetrain.integrations.transformers.script.script_task import ScriptTask
from drivetrain.integrations.transformers.stored_model import base_of
from drivetrain.strategies.base import Strategy


class Fact:
    """A property that a script may replace by a value of its own, as it may in transformers.

    Args:
        get: Returns the value for an object.
    """

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get
        self.__doc__ = get.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the value; an attribute of the object comes before it."""
        return self if instance is None else self._get(instance)


class TheirNames:
    """Attributes and small methods that scripts copy with the methods of transformers' Trainer.

    They are facts of this Trainer. Overriding one of the methods is an error.
    """

    _mapped: MappedArguments
    _task: ScriptTask
    args: TrainingArguments
    get_learning_rates: Any

    current_gradient_accumulation_steps = 1
    """The number that a step divides its loss by: 1, because the engine weights the micro-batches."""

    @Fact
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's forward takes `num_items_in_batch`."""
        takes = self._task.columns.takes("num_items_in_batch")
        return bool(getattr(base_of(self._task.model), "accepts_loss_kwargs", takes))

    @cached_property
    def _chosen_strategy(self) -> Strategy:
        return self._mapped.trainer.select_strategy()

    @Fact
    def is_deepspeed_enabled(self) -> bool:
        """Whether the strategy is DeepSpeed's."""
        return self._chosen_strategy.name == "deepspeed"

    @Fact
    def is_fsdp_enabled(self) -> bool:
        """Whether the strategy shards parameters by FSDP."""
        return self._chosen_strategy.name in ("fsdp", "xla_fsdp")

    @Fact
    def is_fsdp_xla_v2_enabled(self) -> bool:
        """False: loaders need not be made torch_xla's, under any strategy."""
        return False

    @Fact
    def is_model_parallel(self) -> bool:
        """False: no strategy puts the layers of a model on different devices."""
        return False

    @Fact
    def place_model_on_device(self) -> bool:
        """True: the strategy always places the model."""
        return True

    @cached_property
    def _memory_tracker(self) -> TrainerMemoryTracker:
        """Measures the memory of the constructor, fits and evaluations with `skip_memory_metrics=False`."""
        return TrainerMemoryTracker(self.args.skip_memory_metrics)

    @Fact
    def hub_model_id(self) -> str | None:
        """The repository of the Hub; None without `push_to_hub`."""
        return self.args.hub_model_id if self.args.push_to_hub else None

    @Fact
    def can_return_loss(self) -> bool:
        """Whether the model's forward takes `return_loss`."""
        return self._task.columns.takes("return_loss")

    @Fact
    def label_smoother(self) -> LabelSmoother | None:
        """The loss with smoothed labels, for a `compute_loss` that calls it; None without smoothing."""
        factor = self._task.label_smoothing
        return LabelSmoother(epsilon=factor) if factor else None

    def get_tp_size(self) -> int:
        """Return the number of processes that split the model's matrices."""
        strategy = self._chosen_strategy
        return strategy.world_size // strategy.data_size

    def get_cp_size(self) -> int:
        """Return 1: sequences are not split over processes."""
        return 1

    get_sp_size = get_cp_size

    @Fact
    def _train_batch_size(self) -> int:
        """The samples of a micro-batch of this process."""
        return int(self._mapped.data_options["batch_size"])

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Move another model, such as a teacher, to where the strategy places the trained one."""
        if model is not self._task.model:
            model.to(self.args.device)

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the first group of parameters."""
        return float(self.get_learning_rates()[0])

    def _get_num_items_in_batch(self, batch_samples: Sequence[dict[str, Any]], device: Any) -> Any:
        """Return the number of items that the losses of these batches are means over."""
        return sum(self._task.loss_weight(each) for each in batch_samples)

    def _prepare_context_parallel_inputs(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Return a context that does nothing, and the inputs: sequences are not split over processes."""
        return nullcontext, inputs

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Return a `datasets.Dataset` without the columns that the model does not take."""
        names = dataset.column_names
        return dataset.remove_columns(sorted(set(names) - self._columns().of_samples(names)))

    def _get_collator_with_removed_columns(
        self, data_collator: Callable[[list[Any]], Any], description: str | None = None
    ) -> Collation:
        """Return a collator that leaves out the columns that the model does not take."""
        return Collation(self._columns(), data_collator)

    _signature_columns: list[str] | None = None

    def _set_signature_columns_if_needed(self) -> None:
        """Do nothing; an override sets `_signature_columns`, the columns of samples that are collated."""

    def _columns(self) -> Columns:
        self._set_signature_columns_if_needed()
        columns = self._task.columns
        if self._signature_columns is not None:
            columns.of_script = frozenset(self._signature_columns)
        return columns
