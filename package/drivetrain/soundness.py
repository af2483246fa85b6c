"""Whether what a run has trained is worth keeping, and what becomes of the run when it is not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.parameter import is_lazy

from drivetrain.errors import ConfigError, NonFiniteError, StrategyError, nearest
from drivetrain.metrics import Row, refuse_nonfinite
from drivetrain.module_state import parameter_names
from drivetrain.strategies import Strategy
from drivetrain.update_gate import SkipNonFinite, UpdateGate, all_finite

if TYPE_CHECKING:
    from drivetrain.checkpoint.format import Snapshot
    from drivetrain.run import Run

_LOG = logging.getLogger(__name__)

CHOICES = ("raise", "skip", "stop")


def check_on_nonfinite(choice: object, strategy: Strategy) -> None:
    """See that a run can do what it is to do about numbers that are not finite.

    Raises:
        ConfigError: It is none of the choices.
        StrategyError: The strategy leaves no update out; says why.
    """
    if choice not in CHOICES or not isinstance(choice, str):
        raise ConfigError(f"on_nonfinite={choice!r}. {nearest(str(choice), CHOICES)}")
    if choice == "skip":
        check_skipping("on_nonfinite='skip'", strategy)


def check_skipping(asked: str, strategy: Strategy) -> None:
    """See that updates can be left out.

    Args:
        asked: What needs it, as the user wrote it.
        strategy: The run's.

    Raises:
        StrategyError: They cannot; says why.
    """
    if strategy.no_skipping:
        raise StrategyError(
            f"{asked} with strategy {strategy.name!r}: {strategy.no_skipping}. Use on_nonfinite='stop', or"
            " strategy 'ddp' or 'fsdp'"
        )


class Soundness:
    """What a run does about numbers that are not finite, and about weights that are not worth keeping.

    Args:
        run: The run.

    Attributes:
        on_nonfinite: "raise", "skip" or "stop".
        spoiled: What ended the run in order; nothing of it may be saved any more.
        reason: Why it ended the run, or None.
        finders: Given an update, each says where its numbers were first not finite on this rank, with how
            close to the cause that is, from 0; or None.
        judges: Asked before each log point and each save; each says whether it has taken the run back to an
            earlier state. All ranks ask them together.
        rescues: Asked before an error that all ranks have alike is raised, likewise.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.on_nonfinite = "raise"
        self.spoiled: NonFiniteError | None = None
        self.reason: str | None = None
        self.finders: list[Callable[[int], tuple[int, str] | None]] = []
        self.judges: list[Callable[[], bool]] = []
        self.rescues: list[Callable[[NonFiniteError], bool]] = []
        self.skip: SkipNonFinite | None = None
        self._known: frozenset[str] = frozenset()
        self._checked = -1  # after so many updates
        self._reported: set[str] = set()

    def use(self, choice: str) -> None:
        """Do what the Trainer was asked to."""
        self.on_nonfinite = choice
        engine = self._run.engine
        if choice == "skip":
            self.skip = SkipNonFinite(engine, self.seen_here)
            self.gate.add(self.skip)
        elif choice == "stop":
            engine.refuse_nonfinite = self._stop_after_overflow

    @property
    def gate(self) -> UpdateGate:
        """What is asked before each optimizer's step; from now on it is."""
        engine = self._run.engine
        if engine.gate is None:
            engine.gate = UpdateGate(engine.task)
        return engine.gate

    def judge(self) -> bool:
        """Whether the run was taken back to an earlier state, which is then that of now."""
        return True in [each() for each in self.judges]  # all of them, as each asks all ranks

    # What was found.

    def end(self, error: NonFiniteError) -> None:
        """Raise an error that all ranks have alike, or end the run in order, as was asked for; unless the run
        is taken back to an earlier state.

        Raises:
            NonFiniteError: It was not asked to be ended in order. Names the module, where it is looked for.
        """
        run = self._run
        if self.finders and error.update is not None:
            found = run.engine.ranks.all_gather(self._find(error.update))
            told = min((each for each in found if each is not None), default=(0, ""))[1]
            error = NonFiniteError("; ".join(filter(None, (error.what, told))), error.help, error.update)
        if any(each(error) for each in self.rescues):
            return
        run.stopping.in_vain = True
        if self.on_nonfinite != "stop":
            raise error
        if self.spoiled is None:
            self.spoiled = error
            self._stop(error.what)

    def _stop(self, what: str) -> None:
        run = self._run
        last = run.last_checkpoint
        reason = f"{what}; " + (f"the last good checkpoint is {last}" if last else "no checkpoint was saved")
        self.reason = reason
        if run.stop_reason is None or run.stop_reason in run.stopping.signals:
            run.stop(reason)
        else:  # a limit that was reached says less
            run.stop_reason = reason

    def _stop_after_overflow(self, rows: Iterable[Row], update: int, rank: int = 0) -> None:
        # The loss scale has skipped the update, so that the weights are good, and may be saved. This rank
        # alone may have seen it.
        try:
            refuse_nonfinite(rows, update, rank)
        except NonFiniteError as error:
            more = self.seen_here(update)
            self._run.stop(f"{error.what}; {more}" if more else error.what)

    def _find(self, update: int) -> tuple[int, str] | None:
        return min((each for find in self.finders if (each := find(update)) is not None), default=None)

    def judge_values(self, values: Mapping[str, float]) -> None:
        """Do what was asked for about values, by full name, that are not finite though the weights may be.

        The weights are saved before the run ends, unless they are not finite either. With "skip" there is no
        update to leave out: the run goes on, and a warning names each value once.
        """
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        run = self._run
        listed = ", ".join(f"{name!r} is {value}" for name, value in bad.items())
        what = f"{listed} after update {run.progress.updates}"
        if self.on_nonfinite == "skip":
            if run.is_main and not self._reported.issuperset(bad):
                _LOG.warning("%s; with on_nonfinite='skip' the run goes on", what)
            self._reported.update(bad)
        elif self.on_nonfinite == "stop":
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

    def seen_here(self, update: int) -> str:
        """Where an update's numbers were first not finite, as far as this rank knows; else nothing."""
        found = self._find(update)
        return "" if found is None else found[1]

    # What is saved.

    def note(self, snapshot: Snapshot | None = None) -> None:
        """Take what is not finite in the weights of a run that begins as meant."""
        self._known = frozenset(self._not_finite(snapshot))

    def check_end(self) -> None:
        """See that the weights that training ends with are finite, unless a save has seen it.

        Raises:
            NonFiniteError: Some are not, and the run is not to be ended in order.
        """
        if self.spoiled is not None or self._checked == self._run.progress.updates:
            return
        try:
            self.check()
        except NonFiniteError as error:
            self.end(error)

    def check(self, snapshot: Snapshot | None = None) -> None:
        """See that the weights are finite. A loss tells of them only in the next update.

        Args:
            snapshot: What has them; None for the task itself.

        Raises:
            NonFiniteError: Some are not, on any rank; all ranks raise it.
        """
        run = self._run
        self._checked = run.progress.updates
        bad = [each for each in self._not_finite(snapshot) if each not in self._known]
        gathered = run.engine.ranks.all_gather(bad)
        rank = next((rank for rank, each in enumerate(gathered) if each), None)
        if rank is None:
            return
        names = list(dict.fromkeys(name for each in gathered for name in each))
        more = f" and {len(names) - 4} more" if names[4:] else ""
        raise NonFiniteError(
            f"NaN or infinite after update {run.progress.updates - 1} on rank {rank}: the weights"
            f" {', '.join(map(repr, names[:4]))}{more}",
            "They are not saved; resume from a checkpoint before it. The loss of that update was finite, and"
            " its gradient was not: look for a square root or a norm of zero, and at the learning rate",
            run.progress.updates - 1,
        )

    def _not_finite(self, snapshot: Snapshot | None) -> list[str]:
        """The names of parameters that are not finite; of sharded ones, what is here is looked at."""
        trained = {name: each for each, name in parameter_names(self._run.task).items() if each.requires_grad}
        if snapshot is None:
            # DeepSpeed keeps this rank's shard beside an empty parameter; a lazy one is not made yet.
            here = {name: each for name, each in trained.items() if not is_lazy(each)}
            return _names_of_not_finite(
                {name: getattr(each, "ds_tensor", each) for name, each in here.items()}
            )
        weights = snapshot.tensors.get("model", {})
        return _names_of_not_finite({name: weights[name] for name in trained if name in weights})


def _names_of_not_finite(parameters: Mapping[str, Tensor]) -> list[str]:
    if all(bool(finite.all()) for finite in all_finite(list(parameters.values()))):
        return []
    return [
        name for name, each in parameters.items() if not all(bool(flag.all()) for flag in all_finite([each]))
    ]
