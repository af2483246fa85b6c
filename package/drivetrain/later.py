"""What not every program asks for: each name is loaded when it is first used.

Written as `later.make_plan(...)`; `from drivetrain.later import make_plan` would load its module at once.
"""

from typing import TYPE_CHECKING

from drivetrain.lazy import exports

if TYPE_CHECKING:
    from drivetrain.callbacks.compile_time import CompileTime
    from drivetrain.callbacks.progress_bar import ProgressBar
    from drivetrain.callbacks.summary import ModelSummary
    from drivetrain.checkpoint.io import DirectoryCheckpointIO
    from drivetrain.checkpoint.tree import well_formed
    from drivetrain.checkpoint.weights import load_weights
    from drivetrain.distributed.forking import fork_ranks
    from drivetrain.distributed.group import disband
    from drivetrain.engine_state import load_engine, save_engine
    from drivetrain.plan import make_plan
    from drivetrain.prediction_files import write_predictions
    from drivetrain.run_checkpoints import find_checkpoint, make_saver, named_checkpoint, tell_start
    from drivetrain.run_state import restore_run, snapshot_run
    from drivetrain.stored_task import read_extras, read_task
    from drivetrain.warm_start import load_weights_into
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.callbacks.compile_time": ("CompileTime",),
            "drivetrain.callbacks.progress_bar": ("ProgressBar",),
            "drivetrain.callbacks.summary": ("ModelSummary",),
            "drivetrain.checkpoint.io": ("DirectoryCheckpointIO",),
            "drivetrain.checkpoint.tree": ("well_formed",),
            "drivetrain.checkpoint.weights": ("load_weights",),
            "drivetrain.distributed.forking": ("fork_ranks",),
            "drivetrain.distributed.group": ("disband",),
            "drivetrain.engine_state": ("load_engine", "save_engine"),
            "drivetrain.plan": ("make_plan",),
            "drivetrain.prediction_files": ("write_predictions",),
            "drivetrain.run_checkpoints": ("find_checkpoint", "make_saver", "named_checkpoint", "tell_start"),
            "drivetrain.run_state": ("restore_run", "snapshot_run"),
            "drivetrain.stored_task": ("read_extras", "read_task"),
            "drivetrain.warm_start": ("load_weights_into",),
        },
    )

__all__ = [
    "CompileTime",
    "DirectoryCheckpointIO",
    "ModelSummary",
    "ProgressBar",
    "disband",
    "find_checkpoint",
    "fork_ranks",
    "load_engine",
    "load_weights",
    "load_weights_into",
    "make_plan",
    "make_saver",
    "named_checkpoint",
    "read_extras",
    "read_task",
    "restore_run",
    "save_engine",
    "snapshot_run",
    "tell_start",
    "well_formed",
    "write_predictions",
]
