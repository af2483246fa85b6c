"""The contract of a strategy: where a step runs, and how."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import StrategyError
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import check_names
from drivetrain.distributed.failure.named_locations import named_location
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.distributed.tensors import local_part
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.optimizer_step import step
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.sparse import clip_grad_norm
from drivetrain.task.task import StepModule

_LOCATIONS = {
    "backward": "in the backward",
    "clip_grad_norm": "as it clips the gradient",
    "optimizer_step": "in the optimizer's step",
}
"""How a report describes a rank that is in one of these methods."""

MakeOptimizers = Callable[[nn.Module], dict[str, Optimizer]] | None
"""Takes the wrapped or sharded module; returns the optimizers by name."""


REFUSED: Mapping[str, str] = {
    "exactness": "",
    "generators": "",
    "outputs": "",
    "compile": "",
    "local_parts": "",
    "averages": "",
    "recomputation": "it manages activations itself, if at all, by its own options",
    "micro_batch": "it does not declare that a step can be split into parts and restarted",
    "skipping": "it does not declare that a step can be skipped once its gradients exist",
    "value_clipping": "it does not declare that the parameters' gradients are those of the step",
    "unfreezing": "it does not declare that the trained parameters may change between steps",
}
"""The features that a strategy may refuse, each with the reason for a strategy that does not declare it.

- exactness: The numbers are those of one process on the whole batch. The conformance suite prints the reason
  of a strategy that refuses this, and leaves out these comparisons.
- generators: Steps with several optimizers.
- outputs: The outputs of a step are those of whole samples, for metrics and predictions.
- compile: Compiled models.
- local_parts: `Strategy.local_part` tells which part of a tensor this process has.
- averages: An average may take the place of the weights between steps.
- recomputation: `MemoryConfig` may recompute blocks.
- micro_batch: A step can be split into parts and restarted.
- skipping: A step can be skipped once its gradients exist.
- value_clipping: Gradients can be clipped by value, and read between backward and the step.
- unfreezing: The trained parameters may change between steps.
"""


def refusal(strategy: Strategy | type[Strategy], feature: str) -> str:
    """Return why a strategy, or a class of strategies, does not support a feature; empty if it does."""
    kind = strategy if isinstance(strategy, type) else type(strategy)
    tables = (vars(each).get("refusals", {}) for each in (strategy, *kind.__mro__))
    return next((each[feature] for each in tables if feature in each), REFUSED[feature])


def check_supported(strategy: Strategy, feature: str, what: str, instead: str) -> None:
    """Check that a strategy supports a feature of `REFUSED`.

    Args:
        what: What needs the feature, such as the name of an argument.
        instead: What to do, for the message.

    Raises:
        StrategyError: It does not; the message has the strategy's reason.
    """
    if reason := strategy.refuses(feature):
        raise StrategyError(f"{what} with strategy {strategy.name!r}: {reason}. {instead}")


class StrategyConfig(Protocol):
    """The options of a strategy: a data class such as `DDPConfig`, named by the strategy's `config_type`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Support(NamedTuple):
    """Whether something is supported: true, or false with a reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


def installed(package: str, extra: str) -> Support:
    """Return whether a package is installed, without importing it."""
    if is_installed(package):
        return Support(True)
    return Support(False, f"the package {package!r} is not installed: pip install 'drivetrain[{extra}]'")


def has_collectives() -> Support:
    """Return whether this build of torch can run several processes."""
    if torch.distributed.is_available():
        return Support(True)
    return Support(False, "this build of torch has no torch.distributed")


def has_bfloat16(device: torch.device, precision: Precision) -> Support:
    """Return whether a device has bfloat16, if a precision needs it."""
    is_needed = device.type == "cuda" and torch.bfloat16 in (precision.param_dtype, precision.compute_dtype)
    # Emulated, as on a T4 or V100, it would train at a tenth of the speed.
    if is_needed and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Support(False, "this GPU has no bfloat16; use '16-mixed' or '32'")
    return Support(True)


class SharedSettings(NamedTuple):
    """Settings of a Trainer that a strategy's own configuration may contain too.

    Attributes:
        batch_size: Samples in a micro-batch on each rank, or a schedule of them; None if it is not known.
        gradient_accumulation_steps: Micro-batches in a step on each rank, or a schedule of them.
        max_grad_norm: The norm that gradients are clipped to; None disables clipping.
        world_size: The number of processes.
    """

    batch_size: int | Mapping[Any, int] | None
    gradient_accumulation_steps: int | Mapping[Any, int]
    max_grad_norm: float | None
    world_size: int


class Memory(NamedTuple):
    """The memory of one rank in a step: the part of the task that it keeps, from which a plan computes bytes.

    Attributes:
        share: The share of the divided parts that a process keeps.
        divided: What is divided over the processes: any of "parameters", "gradients" and "optimizer" (its
            state).
        gathered: Bytes of weights and gradients that are whole for a while, such as those of a block in use;
            None if unknown.
        offloaded: Which of these three are kept in the host's memory.
        forward_dtype: The dtype of the weights in a forward; None means the dtype in which they are stored.
        copies: Whether the weights are stored in `forward_dtype`, and the optimizer has float32 copies.
    """

    share: float = 1.0
    divided: frozenset[str] = frozenset({"parameters", "gradients", "optimizer"})
    gathered: int | None = None
    offloaded: frozenset[str] = frozenset()
    forward_dtype: torch.dtype | None = None
    copies: bool = False


@dataclass(frozen=True)
class Prepared:
    """The result of `Strategy.prepare`.

    Attributes:
        model: The step module, wrapped as the strategy needs it; it is called with a micro-batch.
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
        name: The name that a user writes.
        device: The device of this process's model.
        rank: This process's number, from 0; valid after `setup`.
        world_size: The number of processes that train together.
        ranks: All processes, for exchange on the host.
        sharded: Whether all processes must run each forward together, including those of an evaluation.
        refusals: The features that the strategy does not support, each with the reason; and features of
            `REFUSED` that it supports, each with an empty text. All other features are as in its base class.
        place: A function applied to each tensor of a batch on the device; None applies nothing.
    """

    name: str
    device: torch.device
    rank: int = 0
    world_size: int = 1
    ranks: Ranks = ALONE
    sharded: bool = False
    refusals: Mapping[str, str] = {}
    place: Callable[[Tensor], Tensor] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_names(f"{cls.__name__}.refusals", cls.refusals, REFUSED)
        for name, words in _LOCATIONS.items():
            if name in vars(cls):
                named_location(words)(inspect.unwrap(vars(cls)[name]))

    def __str__(self) -> str:
        """Return the name in a plan, which may include a choice among the options, such as ZeRO's stage."""
        return self.name

    def refuses(self, feature: str) -> str:
        """Return why a feature of `REFUSED` is not supported; empty if it is."""
        return refusal(self, feature)

    # Set by a strategy whose backward scales losses; the default methods from `unscale` on use it.
    _scale: LossScale | None = None

    # Set by a strategy whose parameters may get sparse gradients.
    _sparse: Sequence[Tensor] = ()

    def _join(self, timeout: float | None) -> None:
        """Join the job's process group, for `setup`.

        Args:
            timeout: Seconds that a collective may take; None uses torch's limit.
        """
        from drivetrain.distributed.group import join

        limit = None if timeout is None else timedelta(seconds=timeout)
        member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def _leave(self) -> None:
        """Close the groups of this run, for `teardown`; the job's group stays."""
        self.ranks.close()
        self.ranks = ALONE

    @property
    def data_rank(self) -> int:
        """The data shard of this process; processes that split a model's tensors get the same shard."""
        return self.rank

    @property
    def data_size(self) -> int:
        """The number of data shards."""
        return self.world_size

    @property
    def data_ranks(self) -> Ranks:
        """The processes that the data is divided among: one for each data shard."""
        return self.ranks

    @property
    def part(self) -> tuple[int, int]:
        """The number of the part of each sample that this process has, from 0, and the number of parts."""
        return 0, 1

    @abstractmethod
    def supports(self, precision: Precision) -> Support:
        """Return whether this precision works here; called when a Trainer or Engine is constructed."""

    def setup(self) -> None:
        """Acquire what the run needs: process groups, devices."""

    def teardown(self) -> None:
        """Release what `setup` acquired."""

    def check_settings(self, asked: SharedSettings, precision: Precision) -> None:
        """Check a Trainer's settings when the Trainer is constructed, and again before `prepare`.

        Raises:
            ConfigError: The strategy's own configuration contradicts them.
        """

    @abstractmethod
    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Place, wrap or shard the module and build its optimizers, in the order that this strategy needs."""

    def memory(self, task: nn.Module, precision: Precision, local_size: int) -> Memory | None:
        """Return what one rank keeps of a task in a step; None if the strategy cannot tell.

        The default is the whole task, unless the strategy is `sharded`.

        Args:
            task: The task, or a copy of it without values, as `prepare` would be given it.
            precision: The run's precision.
            local_size: The processes on a machine.
        """
        return None if self.sharded else Memory()

    @contextmanager
    def checkpoint_layout(
        self, optimizers: Mapping[str, Optimizer], write: bool = False
    ) -> Iterator[Mapping[str, Optimizer]]:
        """Run the block with the task's parameters and the yielded optimizers in the form of checkpoints:
        whole tensors, or `DTensor`s. All processes must enter it together.

        An override gives the task new tensors instead of changing the old ones, because a checkpoint may be
        written after the block.

        Args:
            optimizers: The optimizers of `prepare`.
            write: Load the values that the block has written.
        """
        yield optimizers

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; return any other tensor unchanged. All processes must call it together.

        Args:
            tensor: A parameter of the prepared task, its gradient, or a tensor computed from them.
        """
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole

    def local_part(self, tensor: Tensor) -> tuple[Tensor, float]:
        """Return this process's part of a tensor without gathering it, and the part's share.

        A part that n processes hold has the share 1/n. If each process multiplies its part's result by the
        share, the sum over all processes counts every element once.

        Args:
            tensor: A parameter of the prepared task, or its gradient.
        """
        return local_part(tensor, self.world_size)

    def restore(self) -> None:
        """Turn the prepared module back into an ordinary one with all of its values. Called on all processes
        after a run that ended without an error.
        """

    def reshard(self, model: nn.Module) -> None:
        """Restore the parameters that the model had after `prepare`, if a forward has replaced them.

        Called on all processes between steps.
        """

    def retrain(self, model: nn.Module) -> nn.Module:
        """Return the prepared model, adapted to the parameters that require gradients now.

        Called on all processes between steps, after `reshard`, when the `requires_grad` of parameters that
        the optimizers train has changed.

        Args:
            model: The model of `prepare`, or of the last call.
        """
        return model

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Prepare for a micro-batch; only the window's last one needs to synchronise gradients."""

    @named_location(_LOCATIONS["backward"])
    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Add the gradients of `factor * loss` to all parameters, or only to `inputs`.

        Args:
            loss: A scalar.
            factor: The micro-batch's share of its window's weight; None means 1.
            inputs: The parameters that get gradients; None means all.
        """
        root = None
        if factor is not None or self._scale is not None:  # multiplying the loss would take 6 us
            loss, root = self._root(loss, factor)
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]

    def _root(self, loss: Tensor, factor: float | Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the scaled loss and its gradient, where backward begins. Neither waits for the device.

        `torch.full` passes a number to its kernel. `torch.tensor` would copy it from the host, and that waits
        for all work that the device still has.
        """
        if self._scale is not None:
            loss = self._scale.scale(loss)
        if factor is None:
            return loss, None
        if isinstance(factor, Tensor):
            return loss, factor.to(loss.device, loss.dtype)
        return loss, torch.full((), factor, dtype=loss.dtype, device=loss.device)

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of a backward with `inputs` over all processes."""

    def scale_gradients(self, parameters: Sequence[Tensor], factor: float | Tensor) -> None:
        """Multiply the accumulated gradients of a user's own loop before the step."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        if isinstance(factor, Tensor) and any(each.device.type == "cpu" for each in gradients):
            factor = float(factor)  # of offloaded gradients, which no factor on the device can multiply
        torch._foreach_mul_(gradients, factor)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale; called once before anything reads them."""
        if self._scale is not None:
            self._scale.unscale(optimizer)

    @named_location(_LOCATIONS["clip_grad_norm"])
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm of the unsharded, unscaled gradient, and return that norm (0-d)."""
        return clip_grad_norm(parameters, max_norm, self._sparse)

    @named_location(_LOCATIONS["optimizer_step"])
    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Make the step. Return False if all processes skipped it because a scaled gradient overflowed.

        The loss scale is updated too. With a loss scale, finding an overflow takes a host sync.
        """
        if self._scale is not None and self._scale.overflowed(optimizer):
            return False
        step(optimizer)
        return True

    def discard(self, optimizer: Optimizer) -> None:
        """Skip the step; called instead of `optimizer_step`. The loss scale does not change."""
        if self._scale is not None:
            self._scale.discard(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's own state: the loss scale and its growth counter."""
        return {} if self._scale is None else {"scaler": self._scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; without a loss scale here, a saved one is ignored."""
        if self._scale is not None and "scaler" in state:
            self._scale.load_state_dict(state["scaler"])


@contextmanager
def gradients_of(inputs: Sequence[Tensor] | None, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Run a backward in the block, and keep only the gradients of `inputs`.

    Shards are not leaves of the graph, so torch's `backward` does not accept them as its `inputs`. The
    gradients of all other parameters are restored afterwards.
    """
    mine = {id(each) for each in inputs or ()}
    others = [] if inputs is None else [each for each in parameters if id(each) not in mine]
    before = [each.grad for each in others]
    for each in others:
        each.grad = None
    yield
    for each, gradient in zip(others, before, strict=True):
        each.grad = gradient
