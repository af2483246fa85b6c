"""Hugging Face: models of transformers as tasks, and transformers' arguments."""

from typing import TYPE_CHECKING

from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.lazy import exports
from drivetrain.core.registry import is_installed

if not is_installed("transformers"):
    raise MissingDependencyError("transformers", "transformers", "drivetrain.integrations.transformers")

if TYPE_CHECKING:
    from drivetrain.integrations.transformers.arguments import MappedArguments, from_training_arguments
    from drivetrain.integrations.transformers.callbacks import CallbackAdapter
    from drivetrain.integrations.transformers.export import export_pretrained
    from drivetrain.integrations.transformers.optimizers import TransformersOptimizer
    from drivetrain.integrations.transformers.script.last_checkpoint import get_last_checkpoint
    from drivetrain.integrations.transformers.script.seq2seq import Seq2SeqTrainer
    from drivetrain.integrations.transformers.script.trainer import Trainer
    from drivetrain.integrations.transformers.task import TransformersTask
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.integrations.transformers.callbacks": ("CallbackAdapter",),
            "drivetrain.integrations.transformers.export": ("export_pretrained",),
            "drivetrain.integrations.transformers.arguments": ("MappedArguments", "from_training_arguments"),
            "drivetrain.integrations.transformers.optimizers": ("TransformersOptimizer",),
            "drivetrain.integrations.transformers.script.last_checkpoint": ("get_last_checkpoint",),
            "drivetrain.integrations.transformers.script.seq2seq": ("Seq2SeqTrainer",),
            "drivetrain.integrations.transformers.task": ("TransformersTask",),
            "drivetrain.integrations.transformers.script.trainer": ("Trainer",),
        },
    )

__all__ = [
    "CallbackAdapter",
    "MappedArguments",
    "Seq2SeqTrainer",
    "Trainer",
    "TransformersOptimizer",
    "TransformersTask",
    "export_pretrained",
    "from_training_arguments",
    "get_last_checkpoint",
]
