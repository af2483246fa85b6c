"""The policy for numbers that are NaN or infinite: raise, skip, stop or roll back."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from drivetrain.errors import ConfigError, NonFiniteError, StrategyError, nearest
from drivetrain.metrics import Row, bad_losses, refuse_nonfinite
from drivetrain.module_state import parameter_names
from drivetrain.strategies import Strategy
from drivetrain.update_gate import UpdateGate, all_finite, names_of_nonfinite
from drivetrain.updates import Updater

if TYPE_CHECKING:
    from drivetrain.checkpoint.format import Snapshot
    from drivetrain.run import Run

_LOG = logging.getLogger(__name__)

CHOICES = ("raise", "skip", "stop")

IN_A_ROW = 100
"""Updates in a row that are skipped for a NaN or an infinity, after which the run ends with an error."""


def check_on_nonfinite(choice: object, strategy: Strategy) -> None:
    """Check that a strategy can do what `on_nonfinite` asks for.

    Raises:
        ConfigError: The choice is unknown.
        StrategyError: The strategy cannot skip an update; says why.
    """
    if choice not in CHOICES or not isinstance(choice, str):
        raise ConfigError(f"on_nonfinite={choice!r}. {nearest(str(choice), CHOICES)}")
    if choice == "skip":
        check_skipping("on_nonfinite='skip'", strategy)


def check_skipping(asked: str, strategy: Strategy) -> None:
    """Check that a strategy can skip updates.

    Args:
        asked: The argument that needs it, as the user wrote it.
        strategy: The run's strategy.

    Raises:
        StrategyError: The strategy cannot; says why.
    """
    if strategy.no_skipping:
        raise StrategyError(
            f"{asked} with strategy {strategy.name!r}: {strategy.no_skipping}. Use on_nonfinite='stop', or"
            " strategy 'ddp' or 'fsdp'"
        )


class NonFinitePolicy:
    """Decides what becomes of a run with a loss, a weight or a validation that is NaN or infinite.

    `choice` selects one of raise, skip and stop. A run with `LossSpike("rollback")` is rolled back in place
    of raising or stopping, as long as it can be.

    Args:
        run: The run.

    Attributes:
        choice: "raise", "skip" or "stop".
        spoiled: The error that has stopped the run in order; nothing of the run may be saved any more.
        reason: Why the policy has stopped the run, or None.
        find: Returns for an update where its numbers were first not finite on this rank, as a pair: how close
            the place is to the cause, from 0, and the place. None where nobody looks.
        rollbacks: Called with an error before it is raised, and with None before each log point and each
            save. Each returns whether it has rolled the run back. All ranks call them together.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.choice = "raise"
        self.spoiled: NonFiniteError | None = None
        self.reason: str | None = None
        self.find: Callable[[int], tuple[int, str] | None] | None = None
        self.rollbacks: list[Callable[[NonFiniteError | None], bool]] = []
        self._in_a_row: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._checked = -1  # after so many updates
        self._reported: set[str] = set()

    def begin(self, choice: str) -> None:
        """Do from now on what the Trainer's `on_nonfinite` asks for."""
        self.choice = choice
        self._run.engine.refuse_nonfinite = self._after_overflow
        if choice == "skip":
            self.gate.refusals.append(self._refuses)

    @property
    def gate(self) -> UpdateGate:
        """The gate before each optimizer's step; the first access installs it."""
        engine = self._run.engine
        if engine.gate is None:
            engine.gate = UpdateGate(engine.task)
        return engine.gate

    # Losses.

    def rolls_back(self, error: NonFiniteError | None = None) -> bool:
        """Return whether the run was rolled back to an earlier state, which is its state from now on."""
        return any(each(error) for each in self.rollbacks)

    def end(self, error: NonFiniteError) -> None:
        """Roll the run back, stop it in order or raise an error that all ranks have together.

        Raises:
            NonFiniteError: The run is not to be stopped in order. Names the module if one was looked for.
        """
        run = self._run
        if self.find is not None and error.update is not None:
            found = run.engine.ranks.all_gather(self.find(error.update))
            error = _at(error, min((each for each in found if each is not None), default=None))
        if self.rolls_back(error):
            return
        run.stopping.in_vain = True
        if self.choice != "stop":
            raise error
        if self.spoiled is not None:
            return
        self.spoiled = error
        last = run.last_checkpoint
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was saved"
        self.reason = f"{error.what}; {kept}"
        if run.stop_reason is None or run.stop_reason in run.stopping.signals:
            run.stop(self.reason)
        else:  # a limit that was reached says less
            run.stop_reason = self.reason

    def _after_overflow(self, rows: Iterable[Row], update: int, rank: int = 0) -> None:
        """Raise or stop for a loss of an update that the loss scale has skipped, so that the weights are good
        and may be saved. Perhaps this rank alone has seen the loss.
        """
        try:
            refuse_nonfinite(rows, update, rank)
        except NonFiniteError as error:
            error = _at(error, self.find(update) if self.find is not None else None)
            if self.choice != "stop":
                raise error from None
            self._run.stop(error.what)

    def _refuses(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """Skip the update of a loss or a gradient that is NaN or infinite on any rank.

        All is found on the device, and added up over the ranks there. Then the host reads one number: the
        schedule, the random streams, the counts and the averages depend on whether the update was made. A
        loss scale looks at the gradients and skips by itself; then only losses are looked at here, so that a
        bad batch does not lower the scale.

        Raises:
            NonFiniteError: Too many updates in a row were skipped.
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
                f"{count} updates in a row were not made, number {engine.progress.updates} each time, as a"
                f" loss or gradient was NaN or infinite; the last: {what or 'on another rank'}",
                "The weights are those of before. Look at the data from there on, and at the loss",
            )
        return True

    def _warn_of_skipped(self, updater: Updater, rows: Sequence[Row]) -> str:
        """Report what this rank has found; the update is lost, so that looking closer costs nothing more."""
        engine, what = self._run.engine, ""
        update, rank = engine.progress.updates, engine.strategy.rank
        if losses := dict.fromkeys(name for name, flag in bad_losses(rows) if bool(flag)):
            what = f"NaN or infinite on rank {rank}: {', '.join(map(repr, losses))}"
        elif rank == 0:
            names: Mapping[Any, str] = parameter_names(engine.task)
            gradients = [(names.get(each, "?"), each.grad) for each in updater.parameters]
            bad = names_of_nonfinite({name: grad for name, grad in gradients if grad is not None})
            what = f"NaN or infinite: the gradient of {_listed(bad)}" if bad else ""
        found = self.find(update) if self.find is not None else None
        if what or found:
            text = "; ".join(filter(None, (what, found and found[1])))
            _LOG.warning("update %d was not made: %s", update, text)
        return what

    def judge_values(self, values: Mapping[str, float]) -> None:
        """Act on values, by full name, that are not finite though the weights may be.

        The weights are saved before the run ends, unless they are not finite either. With "skip" there is no
        update to skip: the run goes on, and a warning names each value once.
        """
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        run = self._run
        listed = ", ".join(f"{name!r} is {value}" for name, value in bad.items())
        what = f"{listed} after update {run.progress.updates}"
        if self.choice == "skip":
            if run.is_main and not self._reported.issuperset(bad):
                _LOG.warning("%s; with on_nonfinite='skip' the run goes on", what)
            self._reported.update(bad)
        elif self.choice == "stop":
            run.stopping.in_vain = True
            self.reason = self.reason or what
            run.stop(what)
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
        """Remember the weights that are not finite when a run begins: they are meant to be."""
        self._known = frozenset(self._bad_weights(snapshot))

    def check_end(self) -> None:
        """Check that the weights at the end of training are finite, unless a save has done so.

        Raises:
            NonFiniteError: Some are not, and the run is not to be stopped in order.
        """
        if self.spoiled is not None or self._checked == self._run.progress.updates:
            return
        try:
            self.check_weights()
        except NonFiniteError as error:
            self.end(error)

    def check_weights(self, snapshot: Snapshot | None = None) -> None:
        """Check that the weights are finite. A loss would tell only in the next update.

        Args:
            snapshot: Has the weights; None for those of the task itself.

        Raises:
            NonFiniteError: Some are not, on any rank; all ranks raise it.
        """
        run = self._run
        self._checked = run.progress.updates
        bad = [each for each in self._bad_weights(snapshot) if each not in self._known]
        gathered = run.engine.ranks.all_gather(bad)
        rank = next((rank for rank, each in enumerate(gathered) if each), None)
        if rank is None:
            return
        names = list(dict.fromkeys(name for each in gathered for name in each))
        raise NonFiniteError(
            f"NaN or infinite after update {run.progress.updates - 1} on rank {rank}: the weights"
            f" {_listed(names)}",
            "They are not saved; resume from a checkpoint before it. The loss of that update was finite, and"
            " its gradient was not: look for a square root or a norm of zero, and at the learning rate",
            run.progress.updates - 1,
        )

    def _bad_weights(self, snapshot: Snapshot | None) -> list[str]:
        trained = {name: each for each, name in parameter_names(self._run.task).items() if each.requires_grad}
        if snapshot is not None:
            weights = snapshot.tensors.get("model", {})
            return names_of_nonfinite({name: weights[name] for name in trained if name in weights})
        # DeepSpeed keeps this rank's shard beside an empty parameter; a lazy one is not made yet.
        here = {name: each for name, each in trained.items() if not is_lazy(each)}
        return names_of_nonfinite({name: getattr(each, "ds_tensor", each) for name, each in here.items()})


def _at(error: NonFiniteError, found: tuple[int, str] | None) -> NonFiniteError:
    """Return an error that also says where the first number that was not finite was found."""
    if found is None:
        return error
    return NonFiniteError(f"{error.what}; {found[1]}", error.help, error.update)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if names[4:] else "")
