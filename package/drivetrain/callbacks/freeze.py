"""Freezing of parameters, for the whole fit or until a point of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from drivetrain.callbacks.base import Callback, check_only_one
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.calendar import Point
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every, no_time
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, globs
from drivetrain.strategies.base import check_supported
from drivetrain.task.optim.groups import matches_part, named_parameters, names_matching

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy
    from drivetrain.task.task import TaskModule

_LOG = logger(__name__)

Patterns = str | Sequence[str]


@by_name
class Freeze(Callback):
    """Freezes parameters by name, for the whole fit or until a point in it.

    ``Freeze("encoder")`` freezes the module `encoder` for the whole fit, ``Freeze("encoder",
    until="2 epochs")`` for its first two epochs, and ``Freeze({"encoder.layers.1.*": "500 steps", "encoder":
    "2 epochs"})`` unfreezes it gradually (Howard and Ruder, "Universal Language Model Fine-tuning for Text
    Classification", 2018).

    Frozen parameters get no gradient, so weight decay and momentum do not change them either. Gradient norms
    and clipping leave them out. Parameters that are unfrozen later are in the optimizer from the start; it
    creates their state at their first step. Parameters that are frozen for the whole fit are in no optimizer.
    Batch norms, and other modules with running statistics, are in evaluation mode while all of their
    parameters are frozen. Dropout stays as it is.

    The frozen parameters depend only on the progress, so a resumed run is bitwise the same. After the fit,
    and also after an error, `requires_grad` and the modes are the same as before.

    Args:
        patterns: Globs on the names of parameters and modules, as in `fnmatch`: ``*`` crosses dots, and a
            module stands for all parameters in it. Or a mapping of such globs to the points until which their
            parameters are frozen; None means the whole fit. If several globs match, the first one is used.
        until: The point until which all of these parameters are frozen, in steps, epochs, samples or tokens;
            None means the whole fit, and leaves them out of the optimizer.
        exclude: Globs of parameters and modules that are not frozen: ``Freeze("*", exclude="head")``.

    Raises:
        ConfigError: An argument that is not allowed. When a fit starts: a pattern that matches nothing, with
            the nearest name; or nothing is left to train.
        StrategyError: When a Trainer is made: a strategy that cannot unfreeze parameters in a fit.
    """

    def __init__(
        self,
        patterns: Patterns | Mapping[str, Interval | None],
        *,
        until: Interval | None = None,
        exclude: Patterns = (),
    ) -> None:
        self.until: dict[str, Every | None]
        if isinstance(patterns, Mapping):
            if until is not None:
                raise ConfigError("Freeze({pattern: point}) has a point for each pattern; leave out until=")
            self.until = {name: _point(each) for name, each in patterns.items()}
        else:
            self.until = dict.fromkeys(globs("Freeze(patterns=)", patterns) or (), _point(until))
        globs("Freeze(patterns=)", list(self.until), at_least=0)
        if not self.until:
            raise ConfigError("Freeze needs a pattern, such as Freeze('encoder')")
        self.exclude = globs("Freeze(exclude=)", exclude, at_least=0) or ()
        self._pattern: dict[str, str] = {}  # of each parameter that is frozen at some time
        self._pending: dict[str, Point] = {}  # of the patterns that are in force until then
        self._frozen: frozenset[str] | None = None  # None before the engine knows
        self._held: dict[nn.Module, bool] = {}  # modules in evaluation mode, and their modes before

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the strategy can unfreeze parameters, if any are.

        Raises:
            ConfigError: The Trainer has a second `Freeze`.
            StrategyError: The strategy cannot.
        """
        check_only_one(Freeze, trainer, "undo one another. Give one, with a mapping of patterns to points")
        point = next((each for each in self.until.values() if each is not None), None)
        if point is not None:
            instead = (
                "Use strategy 'ddp' or 'fsdp'; or a fit with until=None, and a second one that starts from"
                " its weights (task.load_weights) without Freeze"
            )
            check_supported(strategy, "unfreezing", f"Freeze(..., until='{point}')", instead)

    # The fit.

    @contextmanager
    def modify_task(self, task: TaskModule) -> Iterator[None]:
        """Freeze the parameters that stay frozen for the whole fit, run the block, and undo every change.

        Raises:
            ConfigError: A pattern matches nothing, or there is nothing left to train.
        """
        self._pattern, self._pending, self._held = self._chosen(task), {}, {}
        whole = self._frozen_by([name for name, point in self.until.items() if point is None])
        self._frozen = None if any(self.until.values()) else whole
        _set(task, whole, False)
        try:
            yield
        finally:
            _set(task, self._pattern, True)
            for module, mode in self._held.items():
                module.training = mode
            self._held = {}

    def on_step_start(self, run: Run) -> None:
        """Unfreeze what is due, and keep frozen modules in evaluation mode, whoever has called `train()`."""
        if self._pending and any(each.reached(run.progress) for each in self._pending.values()):
            self._follow(run)
        for module in self._held:
            if module.training:
                module.training = False

    # Patterns.

    def _chosen(self, task: nn.Module) -> dict[str, str]:
        """Return the first pattern that matches, by the names of the trainable parameters."""
        for pattern in self.until:
            names_matching(task, pattern, f"the pattern {pattern!r} of Freeze")
        for pattern in self.exclude:
            names_matching(task, pattern, f"exclude={pattern!r} of Freeze")
        trainable = [each for each in named_parameters(task) if each.parameter.requires_grad]
        chosen = [(each, self._pattern_of(each.names)) for each in trainable]
        if trainable and all(pattern is not None for _, pattern in chosen):
            raise ConfigError(
                f"Freeze freezes all {len(trainable)} trainable parameters of {type(task).__name__}: nothing"
                " is left to train. Give narrower patterns, or leave some out: Freeze('*', exclude='head')"
            )
        used = {pattern for _, pattern in chosen}
        for pattern, point in self.until.items():
            if point is not None and pattern not in used:
                raise ConfigError(
                    f"Freeze has nothing to unfreeze for the pattern {pattern!r} at {point}: what it matches"
                    " is not trainable (requires_grad=False), excluded, or matched by a pattern before it,"
                    " and the first match wins. Make it trainable, put narrower patterns first, or leave the"
                    " pattern out"
                )
        return {name: pattern for each, pattern in chosen if pattern is not None for name in each.names}

    def _pattern_of(self, names: Sequence[str]) -> str | None:
        """Return the pattern that decides about what has these names; None if it is never frozen."""
        if any(matches_part(name, pattern) for pattern in self.exclude for name in names):
            return None
        return next((each for each in self.until if any(matches_part(name, each) for name in names)), None)

    def _frozen_by(self, patterns: Collection[str]) -> frozenset[str]:
        return frozenset(name for name, pattern in self._pattern.items() if pattern in patterns)

    # The parameters that are frozen now.

    def _follow(self, run: Run) -> None:
        """Freeze what is frozen at the run's progress.

        Raises:
            ConfigError: An optimizer has nothing to train, or a point is in the middle of an epoch of unknown
                length.
        """
        calendar = run.length.calendar
        points = {name: Point(each, calendar) for name, each in self.until.items() if each is not None}
        before = self._pending
        self._pending = {name: each for name, each in points.items() if not each.reached(run.progress)}
        patterns = [name for name in self.until if name not in points or name in self._pending]
        frozen = self._frozen_by(patterns)
        if frozen != self._frozen:
            self._frozen = frozen
            run.engine.freeze(frozen)
            for name, updater in run.engine.updaters.items():
                if not updater.parameters:
                    raise ConfigError(
                        f"Freeze freezes all parameters of the optimizer {name!r} at step"
                        f" {run.progress.steps}: it has nothing to train. Leave some out by exclude="
                    )
        self._hold(run.task, patterns)
        due = [repr(name) for name in before if name not in self._pending]
        if due and run.is_main:
            _LOG.info(f"Freeze: {', '.join(due)} trains after {run.progress.steps} steps")

    on_fit_start = on_checkpoint_loaded = _follow

    def _hold(self, task: nn.Module, patterns: Collection[str]) -> None:
        """Put frozen modules with running statistics in evaluation mode, and the others back in theirs."""
        named = [(clean_name(name), each) for name, each in task.named_modules() if _has_statistics(each)]
        frozen = [each for name, each in named if self._is_frozen(name, each, patterns)]
        for module in [each for each in self._held if each not in frozen]:
            module.training = self._held.pop(module)
        for module in frozen:
            self._held.setdefault(module, module.training)
            module.training = False

    def _is_frozen(self, name: str, module: nn.Module, patterns: Collection[str]) -> bool:
        own = dict(module.named_parameters(name, recurse=False))
        if own:
            ours = any(clean_name(each) in (self._frozen or ()) for each in own)
            return ours and not any(each.requires_grad for each in own.values())
        return self._pattern_of([each for each, _ in module.named_buffers(name, recurse=False)]) in patterns


def _point(value: Interval | None) -> Every | None:
    return None if value is None else no_time("Freeze(until=)", value)


def _set(task: nn.Module, names: Collection[str], value: bool) -> None:
    for each in named_parameters(task):
        if any(name in names for name in each.names):
            each.parameter.requires_grad_(value)


def _has_statistics(module: nn.Module) -> bool:
    """Return whether forward changes buffers of a module in training mode.

    Batch norms and instance norms call them running_*. Spectral norms, which iterate towards singular
    vectors, call them _u or weight_u.
    """
    return any(
        name.startswith("running_") or name.endswith("_u")
        for name, buffer in module._buffers.items()
        if buffer is not None
    )
