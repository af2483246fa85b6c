"""The strategy's contract: where a step runs, and how its pieces are realised there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.precision import Precision
from drivetrain.registry import is_installed
from drivetrain.strategies.scaling import LossScale
from drivetrain.strategies.stepping import step
from drivetrain.task import StepModule

MakeOptimizers = Callable[[nn.Module], dict[str, Optimizer]]
"""Given the module as the strategy has wrapped or sharded it, returns the optimizers by name."""


def check_values(task: nn.Module, name: str, meta: bool = False) -> None:
    """See that a task has all of its values before strategy `name` prepares it.

    Args:
        task: The task.
        name: The strategy's name.
        meta: Whether the strategy gives values to a task on the meta device.

    Raises:
        StrategyError: It has shards of an earlier run; is on the meta device; or has lazy modules that have
            seen no batch, with which "single" alone can begin. Names the first such parameter.
    """
    tensors = (*task.named_parameters(), *task.named_buffers())
    lazy = next((each for each, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None and name != "single":
        raise StrategyError(
            f"{lazy!r} of {type(task).__name__} has no shape yet, because its module is lazy; strategy"
            f" {name!r} needs all shapes before it begins. Give the module its sizes, or call the task with"
            " one batch's inputs before the run"
        )
    if not meta:
        empty = next((each for each, tensor in task.named_parameters() if tensor.is_meta), None)
        if empty is not None:
            raise StrategyError(
                f"{type(task).__name__} was made on the meta device and has no values ({empty!r}). Strategy"
                f" 'fsdp', or 'zero3', gives them, {name!r} does not: make it without torch.device('meta')"
            )
    shard = next((each for each, tensor in task.named_parameters() if _is_share(tensor)), None)
    if shard is not None:
        raise StrategyError(
            f"this {type(task).__name__} has only a shard of {shard!r}, left by an earlier run that failed or"
            f" had gather_at_end=False. Make it anew: {type(task).__name__}.from_checkpoint(path)"
        )


def check_dimensions(task: nn.Module, whole: Collection[str] = (), otherwise: str = "") -> None:
    """See that every parameter that a strategy divides has a dimension for it.

    Args:
        task: The task.
        whole: The names of those that it leaves whole.
        otherwise: What else a user may do about the parameter `{name}`, as the end of a sentence.

    Raises:
        StrategyError: One is a scalar; names it.
    """
    for name, parameter in task.named_parameters():
        if parameter.ndim == 0 and name not in whole:
            raise StrategyError(
                f"the parameter {name!r} is a scalar, which cannot be sharded; give it the shape (1,)"
                f"{otherwise.format(name=name)}"
            )


def _is_share(parameter: Tensor) -> bool:
    """Whether it is one process's part of a parameter: FSDP's, or that of a DeepSpeed engine."""
    return hasattr(parameter, "full_tensor") or hasattr(parameter, "_z3_optimizer")


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


def installed(package: str, extra: str) -> Support:
    """Whether a package is there, without loading it.

    Args:
        package: Its name.
        extra: The extra of this package that brings it.
    """
    if is_installed(package):
        return Support(True)
    return Support(False, f"the package {package!r} is not installed: pip install 'drivetrain[{extra}]'")


class Settings(NamedTuple):
    """What a Trainer asks for that a strategy's own configuration may say too.

    Attributes:
        batch_size: Samples of a micro-batch in each process; None where that is not known.
        gradient_accumulation_steps: Micro-batches of an update in each process.
        max_grad_norm: What the gradient's norm is clipped to; None for no clipping.
        world_size: How many processes there are.
    """

    batch_size: int | None
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    world_size: int


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
        always_told: Whether one process alone is told of each micro-batch, too.
        no_generators: Why it cannot run steps of several optimizers; empty where it can.
        no_compile: Why its models cannot be compiled; empty where they can.
        no_recomputation: Why `MemoryConfig` cannot have blocks computed again, or activations offloaded;
            empty where it can.
        no_release: Why a gradient is not final once backward has added it; empty where it is.
        no_micro_batch: Why an update cannot be run in parts and begun again; empty where it can.
        no_skipping: Why an update cannot be left out once its gradients are there; empty where it can.
        place: What is done with each tensor of a batch once it is on the device; None for nothing.
    """

    name: str
    device: torch.device
    rank: int = 0
    world_size: int = 1
    ranks: Ranks = ALONE
    sharded: bool = False
    always_told: bool = False
    no_generators: str = ""
    no_compile: str = ""
    no_recomputation: str = "it manages activations itself, by options of its own if at all"
    no_release: str = "gradients are exchanged between processes, or kept, after backward"
    no_micro_batch: str = "it does not say that an update may be run in parts and begun again"
    no_skipping: str = "it does not say that an update may be left out once its gradients are there"
    place: Callable[[Tensor], Tensor] | None = None

    @property
    def title(self) -> str:
        """What a plan calls it: its name, and what is chosen by options and is known by a name of its own."""
        return self.name

    # Of a strategy whose backward scales losses itself; `unscale` and the methods after it go by it.
    _scale: LossScale | None = None

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

    def check_settings(self, asked: Settings, precision: Precision) -> None:
        """Told what the Trainer asks for, before `prepare`, and when the Trainer is made.

        Raises:
            ConfigError: The strategy's own configuration says otherwise.
        """

    def configured_optimizer(self, task: nn.Module, total_updates: int | None) -> Any:
        """The optimizer that the strategy's own configuration chooses, as `configure_optimizers` would return
        it; None to ask the task.
        """
        return None

    @abstractmethod
    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Place, wrap or shard the module and have its optimizers made, in the order this strategy needs."""

    @contextmanager
    def exchanged(
        self, optimizers: Mapping[str, Optimizer], write: bool = False
    ) -> Iterator[Mapping[str, Optimizer]]:
        """Within it the prepared task's parameters, and the optimizers that it gives, are as checkpoints hold
        them: whole tensors, or `DTensor`s. To be entered by all processes together.

        Args:
            optimizers: What `prepare` gave.
            write: Take over at the end what was put there.
        """
        yield optimizers

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which each process may have a part, and any other tensor itself. To be called by
        all processes together.

        Args:
            tensor: A parameter of the prepared task, its gradient, or what was computed from them.
        """
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole

    def restore(self) -> None:
        """Make what was prepared an ordinary module with all of its values again. Called by all processes,
        after a run that ended well.
        """

    def settle(self, model: nn.Module) -> None:
        """Give the model the parameters that `prepare` left it with, where a forward puts others in their
        place for a while. Called between updates, by all processes.
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

    def scale_gradients(self, parameters: Sequence[Tensor], factor: float | Tensor) -> None:
        """Multiply the gradients that a loop of one's own has added up, before the update."""
        torch._foreach_mul_([each.grad for each in parameters if each.grad is not None], factor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients of a scaled loss back to their size; called once before they are looked at."""
        if self._scale is not None:
            self._scale.unscale(optimizer)

    @abstractmethod
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded, unscaled gradient and return that norm (0-d)."""

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the update; False when it was skipped because a scaled gradient overflowed, on all processes
        alike. A loss scale is updated here too; under one, knowing of an overflow takes a host sync.
        """
        if self._scale is not None and self._scale.overflowed(optimizer):
            return False
        step(optimizer)
        return True

    def discard(self, optimizer: Optimizer) -> None:
        """Told in place of `optimizer_step` that the update is not made; a loss scale stays what it is."""
        if self._scale is not None:
            self._scale.discard(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What the strategy itself must remember: the loss scale and its growth counter."""
        return {} if self._scale is None else {"scaler": self._scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; a loss scale saved under another precision is left alone."""
        if self._scale is not None and "scaler" in state:
            self._scale.load_state_dict(state["scaler"])


@contextmanager
def gradients_of(inputs: Sequence[Tensor] | None, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Run a backward to shards, which are no leaves of the graph, so that torch cannot be told of `inputs`.

    The gradients of all other parameters are put back to what they were.

    Args:
        inputs: What gets gradients; None for all parameters.
        parameters: All of them.
    """
    mine = {id(each) for each in inputs or ()}
    others = [] if inputs is None else [each for each in parameters if id(each) not in mine]
    before = [each.grad for each in others]
    for each in others:
        each.grad = None
    yield
    for each, gradient in zip(others, before, strict=True):
        each.grad = gradient
