"""The hooks that a run calls, and the picture of where it calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from drivetrain.hooks import HOOKS
from drivetrain.run import Run

__all__ = ["HOOKS", "Callback", "unused"]

Hook = TypeVar("Hook", bound=Callable[..., None])


def unused(hook: Hook) -> Hook:
    """Mark a hook that does nothing, so that a run leaves it out of its tables and never calls it.

    A run asks ``getattr(hook, "__unused_hook__", False)`` once, when it starts. An override is a new function
    without the mark, so whoever overrides a hook is called, and whoever does not costs nothing.
    """
    hook.__unused_hook__ = True  # type: ignore[attr-defined]
    return hook


def without_gradients(hook: Hook) -> Hook:
    """Mark an `on_before_optimizer_step` that looks at no gradient, so that these may be gone by then."""
    hook.__no_gradients__ = True  # type: ignore[attr-defined]
    return hook


class Callback:
    """Something that watches a run, or steers it. Override any of the hooks; each is given the run.

    ::

        on_checkpoint_loaded                      only when the run resumes, or is taken back
        on_fit_start
        for each epoch:
            on_epoch_start
            for each window of micro-batches:
                on_step_start
                    forward and backward of each micro-batch
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
                on_epoch_end                      after the epoch's last update
                on_save                           savers
                on_checkpoint_saved               after each checkpoint that a saver wrote
        on_fit_end
        on_exception                              when anything above raises

    What is not logged yet when training ends has a last `on_log` before `on_fit_end`. A fit with validation
    data that has never validated does so after its last update, before `on_save`.
    `validate`, `test` and `predict` outside a fit call the evaluation's hooks alone. Callbacks are called in
    the order in which the Trainer was given them. Every rank calls them, with the same `run.metrics`, so that
    all decide alike; what writes to a screen or a file first asks `run.is_main`.

    A callback whose state belongs in a checkpoint also has `state_dict` and `load_state_dict` (see
    `drivetrain.types.Stateful`).

    One that does not fit every Trainer also has `check_trainer(trainer, strategy)`, which raises when the
    Trainer is made.

    A hook must neither draw from torch's global random stream nor change `run.progress`.

    Attributes:
        timed_names: Patterns of the names that it logs and that are measurements of time, such as
            "throughput/*": no run has the same twice, and `drivetrain check-resume` compares none of them.
    """

    timed_names: ClassVar[Sequence[str]] = ()

    @unused
    def on_fit_start(self, run: Run) -> None:
        """The task is on its device, a checkpoint is loaded if there is one, nothing is trained yet."""

    @unused
    def on_epoch_start(self, run: Run) -> None:
        """An epoch begins, or goes on after a resume in its middle."""

    @unused
    def on_step_start(self, run: Run) -> None:
        """The window's micro-batches are there; the first forward comes next."""

    @unused
    def on_before_optimizer_step(self, run: Run) -> None:
        """Gradients are complete: unscaled, averaged over the window and the ranks, and not yet clipped."""

    @unused
    def on_step_end(self, run: Run) -> None:
        """The update is made (or skipped: `run.step.applied` tells) and `run.progress` counts it."""

    @unused
    def on_epoch_end(self, run: Run) -> None:
        """The epoch's last update is over, its validation included."""

    @unused
    def on_evaluation_start(self, run: Run) -> None:
        """Validation, testing or prediction begins; `run.stage` tells which."""

    @unused
    def on_evaluation_step_end(self, run: Run) -> None:
        """One batch is evaluated; `run.evaluation` has its number and loader."""

    @unused
    def on_evaluation_end(self, run: Run) -> None:
        """The evaluation's values stand in `run.metrics`."""

    @unused
    def on_log(self, run: Run) -> None:
        """This log point's values stand in `run.logged`; `run.log` adds to them, then loggers get them."""

    @unused
    def on_save(self, run: Run) -> None:
        """Everything of this update is over. Savers belong here: what other hooks changed is then saved.

        Called once more when it was here that the run was asked to stop, so that its end is saved.
        """

    @unused
    def on_checkpoint_saved(self, run: Run) -> None:
        """A checkpoint is committed; `run.last_checkpoint` is its address."""

    @unused
    def on_checkpoint_loaded(self, run: Run) -> None:
        """The run took over the state of a checkpoint; `run.last_checkpoint` is its address."""

    @unused
    def on_exception(self, run: Run) -> None:
        """Something raised `run.exception`, an interrupt included; it is raised again after this hook."""

    @unused
    def on_fit_end(self, run: Run) -> None:
        """Training is over without an exception; `run.stop_reason` tells why if it stopped early."""
