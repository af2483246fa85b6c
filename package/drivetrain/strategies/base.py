"""The strategy's contract: where a step runs, and how its pieces are realised there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.precision import Precision
from drivetrain.task import StepModule

MakeOptimizers = Callable[[nn.Module], dict[str, Optimizer]]
"""Given the module as the strategy has wrapped or sharded it, returns the optimizers by name."""


def check_values(task: nn.Module, name: str) -> None:
    """See that a task has all of its values before strategy `name` prepares it.

    Raises:
        StrategyError: It has shards of an earlier run, or is on the meta device, which "fsdp" alone can take;
            names the first such parameter.
    """
    if name != "fsdp":
        empty = next((each for each, tensor in task.named_parameters() if tensor.is_meta), None)
        if empty is not None:
            raise StrategyError(
                f"{type(task).__name__} was made on the meta device and has no values ({empty!r}). Strategy"
                f" 'fsdp' gives them, strategy {name!r} does not: make it without torch.device('meta')"
            )
    shard = next((name for name, each in task.named_parameters() if hasattr(each, "full_tensor")), None)
    if shard is not None:
        raise StrategyError(
            f"this {type(task).__name__} has only a shard of {shard!r}, left by an earlier run that failed or"
            f" had FSDPConfig(gather_at_end=False). Make it anew: {type(task).__name__}.from_checkpoint(path)"
        )


def check_options(config: Any, positive: Sequence[str], flags: Sequence[str]) -> None:
    """See that options of a configuration are positive numbers, or None, and true or false.

    Raises:
        ConfigError: One is not; names it.
    """
    kind = type(config).__name__
    for name in positive:
        value = getattr(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 1e9):
            raise ConfigError(f"{kind}({name}=...) must be a positive number, not {value!r}")
    for name in flags:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{kind}({name}=...) must be True or False, not {value!r}")


class StrategyConfig(Protocol):
    """The options of a strategy: a data class, such as `DDPConfig`, that its strategy's `config_type` is."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Support(NamedTuple):
    """Whether something can be done; true or false, with the reason when false."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Prepared:
    """What `Strategy.prepare` gives back.

    Attributes:
        model: What to call with a micro-batch: the step module, wrapped as the strategy needs it.
        optimizers: The optimizers by name; a single one is named "default".
    """

    model: nn.Module
    optimizers: dict[str, Optimizer]

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer."""
        (optimizer,) = self.optimizers.values()
        return optimizer


class Strategy(ABC):
    """Where and how a step runs. Strategies are final: none inherits from another concrete one.

    Attributes:
        name: What a user writes.
        device: Where this process's model lives.
        rank: This process's number, from 0; right once `setup` was called.
        world_size: How many processes train together.
        ranks: All of them, for what they exchange on the host.
        sharded: Whether every forward is done by all processes together, also in an evaluation.
    """

    name: str
    device: torch.device
    rank: int = 0
    world_size: int = 1
    ranks: Ranks = ALONE
    sharded: bool = False

    @property
    def data_rank(self) -> int:
        """Which of the data's shares this process gets; those that share a model's tensors get the same."""
        return self.rank

    @property
    def data_size(self) -> int:
        """How many shares the data has."""
        return self.world_size

    @property
    def data_ranks(self) -> Ranks:
        """The processes among which the data is divided: of those that get the same, one counts."""
        return self.ranks

    @abstractmethod
    def supports(self, precision: Precision) -> Support:
        """Whether this precision works here; asked when a Trainer or Engine is constructed."""

    def setup(self) -> None:
        """Take what the run needs: process groups, devices."""

    def teardown(self) -> None:
        """Release what `setup` took."""

    @abstractmethod
    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Place, wrap or shard the module and have its optimizers made, in the order this strategy needs."""

    def restore(self) -> None:
        """Make what was prepared an ordinary module with all of its values again. Called by all processes,
        after a run that ended well.
        """

    def prepare_data(self, data: Any) -> Any:
        """A user's loader for this rank; one process takes it as it is."""
        return data

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Told before each micro-batch: gradients need synchronising in the window's last only."""

    @abstractmethod
    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Add the gradients of `share` times a loss: to all parameters, or to `inputs` alone.

        Args:
            loss: A scalar.
            share: The micro-batch's share of its window's weight; None for the whole.
            inputs: The parameters to add to; None for all.
        """

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average over all processes the gradients that backward was told to add to these `inputs` alone."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients of a scaled loss back to their size; called once before they are looked at."""

    @abstractmethod
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded, unscaled gradient and return that norm (0-d)."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the update; False when it was skipped because a scaled gradient overflowed. A loss scale is
        updated here too.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself must remember, such as a loss scale."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
