from drivetrain.integrations.transformers.arguments import ArgumentsReport as ArgumentsReport
from drivetrain.integrations.transformers.arguments import MappedArguments as MappedArguments
from drivetrain.integrations.transformers.arguments import ReportLine as ReportLine
from drivetrain.integrations.transformers.arguments import from_training_arguments as from_training_arguments
from drivetrain.integrations.transformers.callbacks import CallbackAdapter as CallbackAdapter
from drivetrain.integrations.transformers.export import export_pretrained as export_pretrained
from drivetrain.integrations.transformers.export import merged_weights as merged_weights
from drivetrain.integrations.transformers.optimizers import TransformersOptimizer as TransformersOptimizer
from drivetrain.integrations.transformers.script.last_checkpoint import (
    get_last_checkpoint as get_last_checkpoint,
)
from drivetrain.integrations.transformers.script.replacing import replace_trainer as replace_trainer
from drivetrain.integrations.transformers.script.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer
from drivetrain.integrations.transformers.script.trainer import Trainer as Trainer
from drivetrain.integrations.transformers.task import TransformersTask as TransformersTask
