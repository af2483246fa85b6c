"""The hooks that a run calls, with a drawing of where it calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, TypeVar

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import EvaluationReader
from drivetrain.run.hooks import HOOKS, Hooked

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy
    from drivetrain.task.task import TaskModule

__all__ = ["HOOKS", "Callback", "unused"]

Hook = TypeVar("Hook", bound=Callable[..., None])


def unused(hook: Hook) -> Hook:
    """Mark a hook that does nothing, so that a run never calls it.

    A run asks ``getattr(hook, "__unused_hook__", False)`` once, when it starts. An override is a new function
    without the mark, so it is called; a hook without an override costs nothing.
    """
    hook.__unused_hook__ = True  # type: ignore[attr-defined]
    return hook


def check_only_one(kind: type[Callback], trainer: RunSettings, why: str) -> None:
    """Check that a Trainer has only one callback of a kind.

    Args:
        why: What two would do, and what to give instead: the end of the message.
    """
    found = sum(isinstance(each, kind) for each in trainer.callbacks)
    if found > 1:
        raise ConfigError(f"callbacks has {found} {kind.__name__}, which would {why}")


class Callback(Hooked):
    """An object that watches or steers a run. Override any of the hooks; each is called with the run.

    ::

        on_checkpoint_loaded                      only when the run resumes
        on_fit_start
        for each epoch:
            on_epoch_start
            for each window of micro-batches:
                on_step_start
                for each micro-batch:
                    forward and backward
                    on_micro_batch_end            its gradient is added to those before it
                on_before_optimizer_step          gradients complete, unscaled and averaged; before clipping
                    clip, optimizer step, zero grad, schedule
                on_step_end
                on_log                            every `log_every`
                when validation is due:
                    on_evaluation_start
                    for each batch of each loader:
                        on_evaluation_step_end
                    on_evaluation_end
                    on_log
                on_epoch_end                      after the epoch's last step
                on_save                           savers
                on_checkpoint_saved               after each checkpoint that a saver wrote
        on_fit_end
        on_exception                              when anything above raises

    Values that are not logged yet when training ends get a last `on_log`: before `on_save` if a limit such as
    `max_steps` is reached, otherwise before `on_fit_end`. A fit with validation data that has never validated
    is validated after its last step, before `on_save`.

    `validate`, `test` and `predict` outside a fit call only the evaluation's hooks. Every rank calls hooks,
    with the same `run.metrics`, so that all ranks make the same decisions. A callback that writes to a screen
    or a file first asks `run.is_main`.

    Callbacks are called in the order of the Trainer's argument. These hooks are called in the reverse order:
    `on_step_end`, `on_epoch_end`, `on_evaluation_end`, `on_fit_end` and `on_exception`. In the last two,
    callbacks with `on_save` or `after_saver` come after all others.

    A callback whose state belongs in a checkpoint also has `state_dict` and `load_state_dict` (see
    `drivetrain.core.types.Stateful`).

    A hook must neither draw from torch's global random stream nor change `run.progress`.

    Attributes:
        after_saver: Whether the callback is called after the saver, so that it finds the step's checkpoint
            and the finished weights on the disk.
        resume_name: The name that makes `fit(..., resume=<name>)` resume from `fetch_checkpoint`; None if the
            callback keeps no checkpoints.
        timed_names: Patterns of the names under which the callback logs measurements of time, such as
            "throughput/*". These values differ in each run, so `drivetrain check-resume` does not compare
            them.
        changes_data: Whether the callback's hooks may change the training dataset, so that the workers of
            each epoch need a new copy. None means True, unless all of its hooks are defined in drivetrain.
    """

    after_saver: ClassVar[bool] = False
    resume_name: ClassVar[str | None] = None
    timed_names: ClassVar[Sequence[str]] = ()
    changes_data: bool | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the callback fits a Trainer, when the Trainer is made. Default: it fits every Trainer.

        For a task's callback it is called when a fit begins.

        Raises:
            ConfigError: It does not fit; says why.
        """

    def modify_task(self, task: TaskModule) -> AbstractContextManager[object]:
        """Return a context manager that changes the task before a fit places it and builds its optimizers.

        The fit runs inside the context, and so does `Trainer.plan`. The parameters that the fit trains may be
        other objects than before.
        """
        return nullcontext()

    def wrap_run(self, run: Run) -> AbstractContextManager[object]:
        """Return a context manager that encloses the whole run.

        It is entered before a checkpoint is loaded, and left after the last hook, which may be
        `on_exception`.
        """
        return nullcontext()

    def saving(self, run: Run) -> AbstractContextManager[object]:
        """Return a context manager that encloses the collection of a checkpoint's content, to change it."""
        return nullcontext()

    def fetch_checkpoint(self, directory: str) -> str | None:
        """Copy the newest checkpoint that the callback has stored into the directory of a fit's checkpoints.

        Rank 0 calls it for `fit(..., resume=<resume_name>)`, which resumes from the newest checkpoint there.

        Returns:
            Its path, or None if there is none.
        """
        return None

    def evaluation_reader(self) -> EvaluationReader | None:
        """Return an object that reads all outputs of one pass over evaluation data, in sample order.

        Use it for values that no metric can compute batch by batch. It is called once for each pass and
        loader. Default: None.
        """
        return None

    @unused
    def on_fit_start(self, run: Run) -> None:
        """The task is on its device, a checkpoint is loaded if there is one, and nothing is trained yet."""

    @unused
    def on_epoch_start(self, run: Run) -> None:
        """An epoch begins, or continues after a resume in its middle."""

    @unused
    def on_step_start(self, run: Run) -> None:
        """The window's micro-batches are ready; the first forward comes next."""

    @unused
    def on_micro_batch_end(self, run: Run) -> None:
        """A micro-batch's forward and backward are over; its gradient is not averaged over the ranks yet.

        `run.batch` is the micro-batch on the device, and `run.outputs` what the step returned as outputs.

        With `Trainer(micro_batch=...)` it is called for each part of a micro-batch, and with several
        optimizers for each loss of a step. It is not called for a micro-batch of weight zero.
        """

    @unused
    def on_before_optimizer_step(self, run: Run) -> None:
        """Gradients are complete: unscaled, averaged over the window and the ranks, and not yet clipped."""

    @unused
    def on_step_end(self, run: Run) -> None:
        """The step is made, or skipped (see `run.result.applied`), and `run.progress` has counted it."""

    @unused
    def on_epoch_end(self, run: Run) -> None:
        """The epoch's last step is over, its validation included."""

    @unused
    def on_evaluation_start(self, run: Run) -> None:
        """Validation, testing or prediction begins; `run.stage` says which."""

    @unused
    def on_evaluation_step_end(self, run: Run) -> None:
        """`run.batch` is evaluated to `run.outputs`; `run.evaluation` has its number and loader."""

    @unused
    def on_evaluation_end(self, run: Run) -> None:
        """The evaluation's values are in `run.metrics`.

        Values logged here by `run.log` belong to the evaluation. They are in `run.metrics` after this hook of
        all callbacks.
        """

    @unused
    def on_log(self, run: Run) -> None:
        """This log point's values are in `run.logged`; `run.log` adds to them, then loggers get them."""

    @unused
    def on_save(self, run: Run) -> None:
        """The step is complete. Savers belong here, so that they save the changes of other hooks.

        Called once more if the run was asked to stop in this hook, so that the end of the run is saved.
        """

    @unused
    def on_checkpoint_saved(self, run: Run) -> None:
        """A checkpoint is committed; `run.last_checkpoint` is its address."""

    @unused
    def on_checkpoint_loaded(self, run: Run) -> None:
        """The run has restored a checkpoint; `run.last_checkpoint` is its address."""

    @unused
    def on_exception(self, run: Run) -> None:
        """An error or an interrupt, `run.exception`, ends the run; it is raised again after this hook."""

    @unused
    def on_fit_end(self, run: Run) -> None:
        """Training is over without an exception; `run.stop_reason` says why if it stopped early."""
