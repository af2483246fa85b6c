"""Texts, images or sound that the model makes from fixed prompts during a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.at_points import AtPoints
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name
from drivetrain.loggers.media import Media, Table

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy
    from drivetrain.task.task import TaskModule


@by_name
class Samples(AtPoints):
    """Logs what the model makes of fixed prompts, at each validation or at an interval.

    `generate` is called on rank 0, inside `run.gathered()`: the task has its whole weights there under every
    strategy, is in evaluation mode and computes without gradients, and what is drawn at random does not
    change the training.

    Args:
        prompts: The prompts, of any type.
        every: The interval, such as "500 steps" or "1 epoch"; None is each validation.
        generate: Takes the task and the prompts, and returns a sequence with a sample for each prompt. Texts
            are logged as a table, as "samples"; values of `drivetrain.loggers`, such as an `Image`, as
            "samples/0", "samples/1" and so on.
        name: The name of what is logged.

    Raises:
        ConfigError: There are no prompts, `generate` is no function, two `Samples` have one name, or, at the
            first point, a sample has another type.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        every: Interval | None = None,
        generate: Callable[[TaskModule, Sequence[Any]], Sequence[Any]],
        name: str = "samples",
    ) -> None:
        super().__init__(every)
        if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not len(prompts):
            raise ConfigError(f"Samples(prompts) takes a list, such as ['Once upon'], not {prompts!r}")
        if not callable(generate):
            raise ConfigError(
                "Samples(generate=) takes a function of the task and the prompts that returns a sample for"
                f" each prompt, not {generate!r}"
            )
        self.prompts, self.generate, self.name = prompts, generate, name

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that no other `Samples` has this name.

        Raises:
            ConfigError: One has.
        """
        others = [each for each in trainer.callbacks if isinstance(each, Samples) and each is not self]
        if any(each.name == self.name for each in others):
            raise ConfigError(f"two Samples have the name {self.name!r}. Give one another: Samples(name=...)")

    def evaluate(self, run: Run) -> None:
        """Make the samples and log them; see `AtPoints`."""
        run.engine.ranks.first(lambda: self._log(run))  # whose error is every rank's

    def _log(self, run: Run) -> None:
        samples = list(self.generate(run.task, self.prompts) or ())
        if len(samples) != len(self.prompts):
            raise ConfigError(
                f"Samples(generate=) returned {len(samples)} samples for {len(self.prompts)} prompts; it"
                " returns one for each"
            )
        if all(isinstance(each, str) for each in samples):
            step = run.progress.steps
            rows = [(step, *each) for each in zip(map(str, self.prompts), samples, strict=True)]
            run.log(self.name, Table(["step", "prompt", "sample"], rows))
            return
        if not all(isinstance(each, Media) for each in samples):
            raise ConfigError(
                f"Samples(generate=) returned {sorted({type(each).__name__ for each in samples})}; allowed"
                " are texts, or values of drivetrain.loggers, such as Image(pixels)"
            )
        for index, each in enumerate(samples):
            run.log(f"{self.name}/{index}", each)
