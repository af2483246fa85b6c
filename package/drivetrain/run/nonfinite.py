"""The policy for numbers that are NaN or infinite: raise, skip or stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.checkpoint.weights.module_state import parameter_names
from drivetrain.core.errors import NonFiniteError
from drivetrain.core.messages import logger
from drivetrain.engine.metrics.means import Row, bad_losses, refuse_nonfinite
from drivetrain.engine.skip import StepGate, all_finite, names_of_nonfinite
from drivetrain.engine.updater import Updater
from drivetrain.run.state import RunState

if TYPE_CHECKING:
    from drivetrain.checkpoint.format.manifest import Snapshot

_LOG = logger(__name__)

IN_A_ROW = 100
"""The number of steps skipped in a row for a NaN or an infinity that ends the run with an error."""


class NonFinitePolicy:
    """Decides about a run with a NaN or infinite loss, weight or validation value.

    Attributes:
        choice: "raise", "skip" or "stop".
        diverged: The error that has stopped the run in order; nothing of the run may be saved any more.
        reason: Why the policy has stopped the run, or None.
        find: Returns where a step's numbers were first not finite on this rank, as a pair: how close the
            check is to the cause, from 0, and its name. None without a detector.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.choice = "raise"
        self.diverged: NonFiniteError | None = None
        self.reason: str | None = None
        self.find: Callable[[int], tuple[int, str] | None] | None = None
        self._in_a_row: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._checked = -1  # after so many steps
        self._reported: set[str] = set()

    def begin(self, choice: str) -> None:
        """Apply the Trainer's `on_nonfinite` from now on."""
        self.choice = choice
        self._run.engine.refuse_nonfinite = self._after_overflow
        if choice == "skip":
            self.gate.refusals.append(self._refuses)

    @property
    def gate(self) -> StepGate:
        """The gate before each optimizer's step; the first access installs it."""
        engine = self._run.engine
        if engine.gate is None:
            engine.gate = StepGate(engine.task)
        return engine.gate

    # Losses.

    def end(self, error: NonFiniteError) -> None:
        """Stop the run in order, or raise an error that all ranks share.

        Raises:
            NonFiniteError: The run does not stop in order. Names the module if a detector found one.
        """
        run = self._run
        if self.find is not None and error.step is not None:
            found = run.engine.ranks.all_gather(self.find(error.step))
            error = _at(error, min((each for each in found if each is not None), default=None))
        run.stopping.restart_is_pointless = True
        if self.choice != "stop":
            raise error
        if self.diverged is not None:
            return
        self.diverged = error
        last = run.last_checkpoint
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
        self.reason = f"{error.what}; {kept}"
        if run.stop_reason is None or run.stop_reason in run.stopping.signals:
            run.stop_now(self.reason)
        else:  # a limit that was reached is less informative
            run.stop_reason = self.reason

    def _after_overflow(self, rows: Iterable[Row], step: int, rank: int = 0) -> None:
        """Raise or stop for a loss in a step that the loss scale has skipped.

        The weights are good and may be saved. Possibly only this rank has seen the loss.
        """
        try:
            refuse_nonfinite(rows, step, rank)
        except NonFiniteError as error:
            error = _at(error, self.find(step) if self.find is not None else None)
            if self.choice != "stop":
                raise error from None
            self._run.stop_now(error.what)

    def _refuses(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """Skip the step of a loss or a gradient that is NaN or infinite on any rank.

        All checks run on the device, and their results are added up over the ranks there. Then the host reads
        one number, because the schedule, the random streams, the counts and the averages depend on it. A loss
        scale checks the gradients and skips by itself. Then only losses are checked here, so that a bad batch
        does not lower the scale.
        """
        engine = self._run.engine
        flags = [flag for _, flag in bad_losses(rows)]
        if not engine.precision.loss_scaling:
            gradients = [each.grad for each in updater.parameters if each.grad is not None]
            flags += [~finite.all() for finite in all_finite(gradients)]
        found = torch.zeros((), device=engine.device)
        for each in flags:
            found += each.to(engine.device)
        if not bool(engine.ranks.add(found)):
            self._in_a_row.pop(updater.name, None)
            return False
        count = self._in_a_row[updater.name] = self._in_a_row.get(updater.name, 0) + 1
        what = self._warn_of_skipped(updater, rows)
        if count >= IN_A_ROW:
            raise NonFiniteError(
                f"step {engine.progress.steps} was tried {count} times, and a loss or gradient was NaN or"
                f" infinite each time; the last: {what or 'on another rank'}",
                "The weights are those before that step. Look at the data from there on, and at the loss",
            )
        return True

    def _warn_of_skipped(self, updater: Updater, rows: Sequence[Row]) -> str:
        """Report what this rank has found; a closer check costs nothing more, because the step is lost."""
        engine, what = self._run.engine, ""
        step, rank = engine.progress.steps, engine.strategy.rank
        if losses := dict.fromkeys(name for name, flag in bad_losses(rows) if bool(flag)):
            what = f"NaN or infinite on rank {rank}: {', '.join(map(repr, losses))}"
        elif rank == 0:
            names: Mapping[Any, str] = parameter_names(engine.task)
            gradients = [(names.get(each, "?"), each.grad) for each in updater.parameters]
            bad = names_of_nonfinite({name: grad for name, grad in gradients if grad is not None})
            what = f"NaN or infinite: the gradient of {_listed(bad)}" if bad else ""
        found = self.find(step) if self.find is not None else None
        if what or found:
            text = "; ".join(filter(None, (what, found and found[1])))
            _LOG.warning("step %d was not made: %s", step, text)
        return what

    def judge_values(self, values: Mapping[str, float]) -> None:
        """Act on values, by full name, that are not finite although the weights may be.

        The weights are saved before the run ends, unless they are not finite either. With "skip" there is no
        step to skip: the run continues, and a warning names each value once.
        """
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        run = self._run
        listed = ", ".join(f"{name!r} is {value}" for name, value in bad.items())
        what = f"{listed} after step {run.progress.steps}"
        if self.choice == "skip":
            if run.is_main and not self._reported.issuperset(bad):
                _LOG.warning("%s; with on_nonfinite='skip' the run goes on", what)
            self._reported.update(bad)
        elif self.choice == "stop":
            run.stopping.restart_is_pointless = True
            self.reason = self.reason or what
            run.stop_now(what)
        else:
            run.fail(
                NonFiniteError(
                    what,
                    "Look for a sample that divides by zero, for an overflow of 16-bit numbers, or for data"
                    " whose loss_weight is 0. on_nonfinite='skip' goes on, 'stop' ends the run without an"
                    " error",
                )
            )

    # Weights.

    def note_weights(self, snapshot: Snapshot | None = None) -> None:
        """Record the weights that are not finite when a run begins; they are exempt."""
        self._known = frozenset(self._bad_weights(snapshot))

    def check_end(self) -> None:
        """Check that the weights at the end of training are finite, unless a save has done so."""
        if self._in_a_row and not self._run.progress.steps:
            raise NonFiniteError(
                f"all {self._run.progress.skipped} steps were skipped, as a loss or gradient was NaN or"
                " infinite in each; nothing was trained",
                "Look at the loss and at the data",
            )
        if self.diverged is not None or self._checked == self._run.progress.steps:
            return
        try:
            self.check_weights()
        except NonFiniteError as error:
            self.end(error)

    def check_weights(self, snapshot: Snapshot | None = None) -> None:
        """Check that the weights are finite. A loss would show it only in the next step.

        Args:
            snapshot: A snapshot with the weights; None uses the task's.
        """
        run = self._run
        self._checked = run.progress.steps
        bad = [each for each in self._bad_weights(snapshot) if each not in self._known]
        gathered = run.engine.ranks.all_gather(bad)
        rank = next((rank for rank, each in enumerate(gathered) if each), None)
        if rank is None:
            return
        names = list(dict.fromkeys(name for each in gathered for name in each))
        raise NonFiniteError(
            f"NaN or infinite after step {run.progress.steps - 1} on rank {rank}: the weights"
            f" {_listed(names)}",
            "They are not saved; resume from a checkpoint before it. The loss of that step was finite, and"
            " its gradient was not: look for a square root or a norm of zero, and check the learning rate",
            run.progress.steps - 1,
        )

    def _bad_weights(self, snapshot: Snapshot | None) -> list[str]:
        trained = {name: each for each, name in parameter_names(self._run.task).items() if each.requires_grad}
        if snapshot is not None:
            weights = snapshot.tensors.get("model", {})
            return names_of_nonfinite({name: weights[name] for name in trained if name in weights})
        # DeepSpeed keeps this rank's shard next to an empty parameter.
        return names_of_nonfinite({name: getattr(each, "ds_tensor", each) for name, each in trained.items()})


def _at(error: NonFiniteError, found: tuple[int, str] | None) -> NonFiniteError:
    """Return the error with the name of the first value that was not finite."""
    if found is None:
        return error
    return NonFiniteError(f"{error.what}; {found[1]}", error.help, error.step)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if names[4:] else "")
