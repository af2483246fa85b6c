"""Averages of the weights over steps: EMA and SWA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.callbacks.at_points import is_due
from drivetrain.callbacks.base import Callback, check_only_one
from drivetrain.core.calendar import Point, Trigger
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.intervals import no_time
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, flag, globs, number, one_of
from drivetrain.strategies.base import check_supported
from drivetrain.task.optim.groups import select_parameters
from drivetrain.task.optim.state import AVERAGE, TRAINED, take_averages
from drivetrain.task.without_trace import without_trace

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

KINDS = ("ema", "swa")

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)

_EVERY: dict[str, Interval] = {"ema": "1 step", "swa": "1 epoch"}


@by_name
class WeightAverage(Callback):
    """Averages the trained weights, and evaluates and saves with the average.

    - "ema", an exponential moving average: ``average = decay average + (1 - decay) weight`` (Polyak and
      Juditsky, 1992; the form of Tarvainen and Valpola, "Mean teachers", 2017).
    - "swa", the mean of all weights (Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018).

    The first average is the weights at the first point after `start`. Averages are kept in at least float32;
    averages of float64 and complex weights have the dtype of the weights. Each rank averages its own shards.
    Checkpoints hold the trained weights and the averages, so that a resumed run is bitwise the same.

    With batch norms, "swa" is used at the end of the fit only. One pass over the training data
    then computes new statistics for the norms, because the averaged weights were never used in training.

    Args:
        kind: "ema" or "swa".
        decay: The share of the old average in "ema", above 0 and below 1; None is 0.999. Several make as many
            averages: the first is evaluated and saved as the model, and `used` gives the others. All are in
            the checkpoints.
        parameters: Globs on the names of the parameters to average, such as "generator.*"; None averages all.
            The others have their trained values in evaluations and saves too.
        every: The interval of averaging, such as "10 steps", "1 epoch" or "1M tokens"; None is "1 step" for
            "ema", else "1 epoch".
        start: Average from the first step after this point, such as "2 epochs", "10M tokens" or "0.75" of the
            run; None from the first step.
        evaluate: Whether the validations of a fit use the average.
        save: Whether checkpoints and the finished weights hold the average as the model. Such a checkpoint
            also holds the trained weights, from which a resume continues; a resume needs the same callback.

    Raises:
        ConfigError: An argument that is not allowed; or, when a Trainer is made, a second WeightAverage.
        StrategyError: A strategy or an optimizer that keeps its own copy of the weights: DeepSpeed, or a
            strategy that shards on XLA.
    """

    def __init__(
        self,
        kind: str = "ema",
        *,
        decay: float | Sequence[float] | None = None,
        parameters: str | Sequence[str] | None = None,
        every: Interval | None = None,
        start: Interval | None = None,
        evaluate: bool = True,
        save: bool = True,
    ) -> None:
        self.kind = one_of("kind of WeightAverage", kind, KINDS)
        if decay is not None and kind != "ema":
            raise ConfigError(f"WeightAverage({kind!r}, decay={decay}): decay is for 'ema' alone")
        several = decay if isinstance(decay, Sequence) else (0.999 if decay is None else decay,)
        self.decays = tuple(number("WeightAverage(decay=)", each, above=0) for each in several)
        if not self.decays or max(self.decays) >= 1 or len({*self.decays}) < len(self.decays):
            raise ConfigError(
                f"WeightAverage(decay={decay}) takes different numbers, which must be below 1: with 1 the"
                " average would never change"
            )
        self.parameters = globs("WeightAverage(parameters=)", parameters)
        self.every = no_time("WeightAverage(every=)", _EVERY[kind] if every is None else every)
        self.start = None if start is None else no_time("WeightAverage(start=)", start)
        self.evaluate = flag("WeightAverage(evaluate=)", evaluate)
        self.save = flag("WeightAverage(save=)", save)
        self.averaged = 0
        self._weights: list[nn.Parameter] = []
        self._averages: list[list[Tensor]] = []  # by decay
        self._used = 0
        self._trained: list[Tensor] | None = None
        self._only_at_end = self._is_resumed = False
        self._trigger, self._begun = Trigger(None), True
        self._begins: Point | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the weights are parameters that each rank holds whole or as shards.

        Raises:
            ConfigError: There is a second one.
            StrategyError: The strategy keeps weights of its own.
        """
        check_only_one(WeightAverage, trainer, "replace each other's weights. Give one")
        instead = "Use 'ddp' or 'fsdp', or leave the callback out"
        check_supported(strategy, "averages", "WeightAverage", instead)

    # The hooks.

    @contextmanager
    def wrap_run(self, run: Run) -> Iterator[None]:
        """Release the averages when the fit has ended; the task keeps the weights that it ended with."""
        try:
            yield
        finally:
            if run.train_feed is not None:
                self._weights, self._averages, self._trained = [], [], None
                self._is_resumed = False

    def on_fit_start(self, run: Run) -> None:
        """Look up the weights that the optimizers train.

        Raises:
            ConfigError: A batch norm's statistics cannot be renewed.
            StrategyError: The optimizers train copies of the weights.
        """
        if modes := run.engine.modes.optimizers:
            raise ConfigError(
                f"WeightAverage with {type(modes[0]).__name__}: this optimizer evaluates and saves an average"
                " of its own. Leave WeightAverage out"
            )
        if not self._is_resumed:
            self._averages, self.averaged = [], 0
        self._is_resumed, self._trained = False, None
        self._trigger = Trigger(self.every, run.length.calendar)
        self._trigger.start(run.progress)
        self._begins = None if self.start is None else Point(self.start, run.length.calendar)
        self._weights = self._of_optimizers(run)
        if not set(run.task.parameters()).issuperset(self._weights):
            raise StrategyError(
                "WeightAverage averages the task's own weights, and the optimizers train copies of them. Use"
                " another precision or optimizer, or leave the callback out"
            )
        self._only_at_end = self.kind != "ema" and any(_norms(run.task))
        if self._only_at_end and self.save:
            self._check_renewal(run)

    def _check_renewal(self, run: Run) -> None:
        feed, reason = run.train_feed, ""
        if run.engine.interleaved:
            reason = f"the training step of {type(run.task).__name__} is a generator"
        elif feed is None or feed.batches_per_epoch is None:
            reason = "the training data has no known length: it may have no end, or be used up by then"
        if reason:
            raise ConfigError(
                f"WeightAverage({self.kind!r}) renews the statistics of batch norms by a pass over the"
                f" training data at the end, and {reason}. Use kind='ema', or save=False"
            )

    def on_step_start(self, run: Run) -> None:
        """Note whether averaging has begun before the step."""
        self._begun = self._begins is None or self._begins.reached(run.progress)

    def on_step_end(self, run: Run) -> None:
        """Average, if it is due."""
        if run.result is not None and run.result.applied and self._is_due(run):
            self._add()

    def on_evaluation_start(self, run: Run) -> None:
        """Use the average for a validation of the fit."""
        if self.evaluate and self._averages and not self._only_at_end and run.train_feed is not None:
            self._use()

    def on_evaluation_end(self, run: Run) -> None:
        """Go back to the trained weights after a validation of the fit."""
        if run.train_feed is not None:
            self._leave()

    @contextmanager
    def saving(self, run: Run) -> Iterator[None]:
        """Run the block, which writes a checkpoint, with the averages in the optimizers' states."""
        if not self._averages:
            yield
            return
        was_used = self._trained is not None
        states = {
            each: optimizer.state[each] for optimizer in _optimizers(run) for each in _trained_by(optimizer)
        }
        if self.save and not self._only_at_end:
            self._use()
        try:
            for index, each in enumerate(self._weights):
                for number, averages in enumerate(self._averages):
                    states[each][f"{AVERAGE}{number}"] = averages[index]
                if self._trained is not None:
                    states[each][TRAINED] = self._trained[index]
            yield
        finally:
            self._take_slots(run)
            if not was_used:
                self._leave()

    def on_checkpoint_loaded(self, run: Run) -> None:
        """Take over the averages and the trained weights."""
        found = self._take_slots(run)
        self._weights = self._of_optimizers(run)
        self._is_resumed, self._trained = True, None
        trained = found.pop(TRAINED, {})
        for each in found.values():
            if len(found) != len(self.decays) or each.keys() != {*self._weights}:
                raise ConfigError(
                    "the checkpoint has WeightAverage's averages of other parameters, or by another number of"
                    " decays. Resume with the same parameters= and as many decays"
                )
        slots = sorted(found, key=lambda slot: int(slot.removeprefix(AVERAGE)))
        self._averages = [[found[slot][weight] for weight in self._weights] for slot in slots]
        with torch.no_grad():
            for weight, value in trained.items():
                weight.copy_(value)

    def on_fit_end(self, run: Run) -> None:
        """Make the average the task's weights, unless `save` is False; warn if there is none."""
        if not self._averages and run.is_main and run.stop_reason not in run.stopping.signals:
            start = "" if self.start is None else f" after start='{self.start}'"
            _LOG.warning(
                f"WeightAverage: no point of every='{self.every}'{start} came in the {run.progress.steps}"
                " steps of this fit, so nothing was averaged. Give a shorter every= or an earlier start="
            )
        if not (self.save and self._averages):
            return
        self._use()
        if self._only_at_end:
            self._renew_norms(run)

    on_fit_end.__comes_first__ = True  # type: ignore[attr-defined]  # all others see the fit's result

    def on_exception(self, run: Run) -> None:
        """Go back to the trained weights."""
        self._leave()

    # The average.

    @contextmanager
    def used(self, decay: float) -> Iterator[None]:
        """Run the block with the average of this decay as the task's weights; in any hook of a fit.

        Raises:
            ConfigError: There is no average of this decay, or none yet.
        """
        if decay not in self.decays or not self._averages:
            raise ConfigError(
                f"WeightAverage has no average of decay={decay} now. From the first averaged step to the end"
                f" of the fit there is one of each of: {', '.join(map(str, self.decays))}"
            )
        before = None if self._trained is None else self._used
        self._use(self.decays.index(decay))
        try:
            yield
        finally:
            if before is None:
                self._leave()
            else:
                self._use(before)

    def _of_optimizers(self, run: Run) -> list[nn.Parameter]:
        trained = [each for optimizer in _optimizers(run) for each in _trained_by(optimizer)]
        if self.parameters is None:
            return trained
        selected = select_parameters(run.task, None, self.parameters, "WeightAverage(parameters=)")
        chosen = {each.parameter for each in selected}
        return [each for each in trained if each in chosen]

    def _is_due(self, run: Run) -> bool:
        return is_due(self._trigger, run) and self._begun

    @torch.no_grad()
    def _add(self) -> None:
        """Add the present weights to the average."""
        if not self._averages:
            self._averages = [[_wide(each.detach()).clone() for each in self._weights] for _ in self.decays]
        else:
            weights = _local([_wide(each) for each in self._weights])
            for decay, averages in zip(self.decays, self._averages, strict=True):
                share = 1 - decay if self.kind == "ema" else 1 / (self.averaged + 1)
                torch._foreach_lerp_(_local(averages), weights, share)
        self.averaged += 1

    @torch.no_grad()
    def _use(self, index: int = 0) -> None:
        """Put an average in the place of the trained weights, which are kept."""
        if self._trained is None:
            self._trained = [each.detach().clone() for each in self._weights]
        elif self._used == index:
            return
        self._used = index
        torch._foreach_copy_(_local(self._weights), _local(self._averages[index]))

    @torch.no_grad()
    def _leave(self) -> None:
        if self._trained is not None:
            torch._foreach_copy_(_local(self._weights), _local(self._trained))
            self._trained = None

    def _take_slots(self, run: Run) -> dict[str, dict[nn.Parameter, Tensor]]:
        """Remove our slots from the optimizers' states, and return them."""
        found: dict[str, dict[nn.Parameter, Tensor]] = {}
        for optimizer in _optimizers(run):
            for slot, values in take_averages(optimizer).items():
                found.setdefault(slot, {}).update(values)
        return found

    @torch.no_grad()
    def _renew_norms(self, run: Run) -> None:
        """Make the batch norms' statistics those of the training data under the average."""
        engine, feed = run.engine, run.train_feed
        assert feed is not None
        training = run.task.training
        norms = [each for each in _norms(run.task) if each.training or not training]
        fixed = [each for each in _norms(run.task) if each not in norms]  # those of frozen parts
        with without_trace(run.task, feed.source.dataset, device=engine.device):
            run.task.train()
            for each in fixed:
                each.eval()
            for each in norms:
                each.reset_running_stats()
                each.momentum = None  # a cumulative mean
            for micro_batch in feed.micro_batches(run.progress.epoch):
                engine.run_step(micro_batch.batch)
                run.report_progress()
            found = [(each, each.clone()) for norm in norms for each in norm.buffers()]
        for statistic, value in found:
            if value.is_floating_point():
                engine.data_ranks.add(value).div_(engine.data_ranks.size)
            statistic.copy_(value)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the number of weights averaged; the averages are stored with the optimizers' states."""
        return {"kind": self.kind, "averaged": self.averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ConfigError: The checkpoint has another kind of average.
        """
        if state["kind"] != self.kind:
            raise ConfigError(
                f"the checkpoint has the averages of WeightAverage({state['kind']!r}), and this run has"
                f" WeightAverage({self.kind!r}). Resume with the same"
            )
        self.averaged = int(state["averaged"])


def _optimizers(run: Run) -> list[Optimizer]:
    return [each.optimizer for each in run.engine.updaters.values()]


def _trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _norms(task: nn.Module) -> Iterator[Any]:
    for each in task.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.track_running_stats:
            yield each


def _wide(weight: Tensor) -> Tensor:
    """Return a weight in the dtype of its average; for use without gradients."""
    if weight.dtype in _WIDE:  # asking torch takes a microsecond for each weight
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _local(tensors: Sequence[Any]) -> list[Tensor]:
    """Return this rank's parts of tensors; for use without gradients."""
    return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
