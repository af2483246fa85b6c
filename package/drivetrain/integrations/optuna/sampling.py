"""Samplers and pruners by name, and a sampler whose draws depend on the seed and the trial alone."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from optuna import Study, pruners, samplers
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from drivetrain.core.errors import ConfigError, nearest

MakeSampler = Callable[[int], BaseSampler]

_SAMPLERS: dict[str, MakeSampler] = {
    "tpe": lambda seed: samplers.TPESampler(seed=seed),
    "random": lambda seed: samplers.RandomSampler(seed=seed),
    "grid": lambda seed: samplers.BruteForceSampler(seed=seed),
    "gp": lambda seed: samplers.GPSampler(seed=seed),
    "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed),
}
_PRUNERS: dict[str, Callable[[], BasePruner]] = {
    "median": pruners.MedianPruner,
    "halving": pruners.SuccessiveHalvingPruner,
    "hyperband": pruners.HyperbandPruner,
}

EXHAUSTED = "exhausted"
"""The study's attribute that says that a sampler of finite spaces has tried all."""


def make_sampler(given: object, seed: int) -> BaseSampler:
    """Return the sampler for a name, a function of a seed, or a sampler.

    Raises:
        ConfigError: It is none of them.
    """
    if isinstance(given, BaseSampler):
        return given
    if isinstance(given, str):
        if given not in _SAMPLERS:
            raise ConfigError(f"there is no sampler {given!r}. {nearest(given, _SAMPLERS)}")
        return SeededSampler(_SAMPLERS[given], seed)
    if callable(given) and not (isinstance(given, type) and issubclass(given, BaseSampler)):
        return SeededSampler(given, seed)
    raise ConfigError(
        f"sampler must be a name ({', '.join(map(repr, _SAMPLERS))}), a function of a seed that returns a"
        f" sampler of Optuna, such as lambda seed: TPESampler(seed=seed), or a sampler; not {given!r}"
    )


def make_pruner(given: object) -> BasePruner:
    """Return the pruner for a name or a pruner; None prunes nothing.

    Raises:
        ConfigError: It is none of them.
    """
    if given is None:
        return pruners.NopPruner()
    if isinstance(given, BasePruner):
        return given
    if isinstance(given, str) and given in _PRUNERS:
        return _PRUNERS[given]()
    hint = f" {nearest(given, _PRUNERS)}" if isinstance(given, str) else ""
    raise ConfigError(
        f"pruner must be a name, a pruner of Optuna such as MedianPruner(), or None; not {given!r}.{hint}"
    )


def check_grid(sampler: BaseSampler, name: str, each: BaseDistribution) -> None:
    """Check that a sampler that tries all values can do so.

    Raises:
        ConfigError: The name has no end of values.
    """
    made = sampler.example if isinstance(sampler, SeededSampler) else sampler
    if isinstance(made, samplers.BruteForceSampler) and isinstance(each, FloatDistribution) and not each.step:
        raise ConfigError(
            f"the sampler 'grid' tries all values, and the range {each.low} to {each.high} of {name!r} has"
            f" infinitely many. Give it a step, such as {(each.high - each.low) / 4:g}, or a list of choices,"
            " or use another sampler such as 'tpe'"
        )


class SeededSampler(BaseSampler):  # type: ignore[misc]  # mypy does not follow Optuna
    """A sampler that is made anew for each trial and each name, with a seed of their own.

    Its draws are a function of the seed, the trial's number and name, and the finished trials. So a search
    that was killed between any two draws goes on with the same draws as an uninterrupted one. Optuna's
    samplers keep their generator in memory, and advise to pickle it.

    Attributes:
        example: A sampler of its kind.

    Args:
        make: Returns a sampler for a seed.
        seed: The seed of the search.

    Raises:
        ConfigError: `make` returns no sampler.
    """

    def __init__(self, make: MakeSampler, seed: int) -> None:
        self._given = make
        self._seed = seed
        self._of_trial: tuple[int, BaseSampler] | None = None
        self.example = self._make(seed)
        if not isinstance(self.example, BaseSampler):
            raise ConfigError(
                f"the function given as sampler must return a sampler of Optuna, not {self.example!r}"
            )

    def _make(self, seed: int) -> BaseSampler:
        with warnings.catch_warnings():
            # Optuna warns of its newer samplers, which would be once for each trial.
            warnings.simplefilter("ignore", ExperimentalWarning)
            return self._given(seed)

    def _sampler(self, trial: FrozenTrial) -> BaseSampler:
        if self._of_trial is None or self._of_trial[0] != trial.number:
            self._of_trial = trial.number, self._make(_mixed(self._seed, trial.number))
        return self._of_trial[1]

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return the names that are drawn together."""
        space: dict[str, BaseDistribution] = self._sampler(trial).infer_relative_search_space(study, trial)
        return space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw the values of names that are drawn together."""
        found: dict[str, Any] = self._sampler(trial).sample_relative(study, trial, search_space)
        return found

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw the value of one name."""
        check_grid(self, param_name, param_distribution)
        sampler = self._make(_mixed(self._seed, trial.number, param_name))
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Begin a trial, with a sampler that nothing was drawn from."""
        self._of_trial = None
        self._sampler(trial).before_trial(study, trial)

    def after_trial(
        self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """End a trial; a sampler of finite spaces that has tried all stops the study."""
        try:
            self._sampler(trial).after_trial(study, trial, state, values)
        except RuntimeError as error:
            if "Study.stop" not in str(error):  # which only works inside Study.optimize
                raise
            study.set_user_attr(EXHAUSTED, True)

    def reseed_rng(self) -> None:
        """Change nothing: the trial's number is part of the seed."""


def _mixed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
