from drivetrain.core.types import Batch as Batch
from drivetrain.core.types import Stateful as Stateful
from drivetrain.core.types import StepOutput as StepOutput
from drivetrain.task.model_info import ModelInfo as ModelInfo
from drivetrain.task.output import Optimized as Optimized
from drivetrain.task.task import TaskModule as TaskModule
