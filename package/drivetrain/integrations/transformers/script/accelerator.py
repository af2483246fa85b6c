"""The part of an `Accelerator` that scripts use in the steps of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.processes import local_rank, once_per_machine, rank, world_size

if TYPE_CHECKING:
    from accelerate.utils import DistributedType
    from transformers import TrainingArguments

_TYPES = {
    "deepspeed": "DEEPSPEED",
    "fsdp": "FSDP",
    "xla": "XLA",
    "xla_fsdp": "XLA",
}
"""accelerate's names of the strategies that it tells apart by more than the device."""

_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
"""Options of `accelerator_config`, which scripts also set; the data is read in the same way with any."""


@dataclass
class GradientState:
    """The `accelerator.gradient_state` of a script: the options of accumulation that it was given."""

    plugin_kwargs: dict[str, Any]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trainer.accelerator.gradient_state has no {name!r} here, only plugin_kwargs: the engine"
            " accumulates. trainer.state.global_step rises with each step of the optimizer"
        )


class ScriptAccelerator:
    """The `trainer.accelerator` of a script: `backward` for a training step, and facts of this process.

    Args:
        backward: Takes the loss of a training step, and `retain_graph`.
        device: Returns the device of the model.
        strategy: Returns the name of the strategy.
        args: The arguments of the Trainer.
    """

    def __init__(
        self,
        backward: Callable[..., Tensor],
        device: Callable[[], torch.device],
        strategy: Callable[[], str],
        args: TrainingArguments,
    ) -> None:
        self._backward = backward
        self._device = device
        self._strategy = strategy
        for name in _OPTIONS:
            setattr(self, name, getattr(args.accelerator_config, name))
        self._args = args

    @property
    def gradient_state(self) -> GradientState:
        """The options of accumulation; the engine accumulates, and whether it has stepped is not here."""
        return GradientState(dict(self._args.accelerator_config.gradient_accumulation_kwargs or {}))

    @property
    def state(self) -> Any:
        """accelerate's `AcceleratorState`, on one device and under DDP.

        Raises:
            ConfigError: The strategy shards parameters or gradients, which accelerate does not know.
        """
        from accelerate.state import AcceleratorState, is_initialized

        if not (is_initialized() or self._make_state()):
            raise ConfigError(
                f"trainer.accelerator.state is for one device and 'ddp': accelerate knows nothing of the"
                f" {self._strategy()!r} here"
            )
        return AcceleratorState()

    @contextmanager
    def shared_state(self) -> Iterator[None]:
        """Run the block, a fit, with the `AcceleratorState` that code of others may ask for."""
        from accelerate.state import AcceleratorState, is_initialized

        shared = AcceleratorState._shared_state
        before = None if is_initialized() else dict(shared)
        if before is not None:
            self._make_state()
        try:
            yield
        finally:
            if before is not None:
                shared.clear()
                shared.update(before)

    def _make_state(self) -> bool:
        """Make the state, but not for a strategy that shards: a reader would look for its plugin there."""
        from accelerate import Accelerator

        if self._strategy() not in ("single", "ddp"):
            return False
        args = self._args
        word = "bf16" if args.bf16 else "fp16" if args.fp16 and self.device.type == "cuda" else "no"
        Accelerator(cpu=args.use_cpu, mixed_precision=word)
        return True

    def backward(self, loss: Tensor, scale_wrt_gas: bool = True, retain_graph: bool = False) -> None:
        """Run backward on a loss, now or once the step has returned; the engine weights its gradients.

        Args:
            loss: The loss.
            scale_wrt_gas: Without effect: the engine's weights hold for any accumulation.
            retain_graph: Whether the step runs backward through a part of the graph again.
        """
        self._backward(loss, retain_graph=retain_graph)

    def prepare(self, *given: Any, **options: Any) -> Any:
        """Return a loader as it is: the Trainer has each process read its part of it.

        Raises:
            ConfigError: Something else is given.
        """
        for each in given:
            if not isinstance(each, DataLoader):
                raise ConfigError(
                    f"accelerator.prepare takes DataLoaders here, not a {type(each).__name__}: train and"
                    " evaluate place the model and its optimizer. drivetrain.Engine is for loops of your own"
                )
        return given[0] if len(given) == 1 else given

    def gather(self, tensor: Any) -> Any:
        """Return the tensor: one process has all of them.

        Raises:
            ConfigError: There are several processes.
        """
        if world_size() > 1:
            raise ConfigError(
                "accelerator.gather has nothing to do here: evaluate and predict join the outputs of"
                " prediction_step over all processes, each sample once, and log averages the losses"
            )
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the same as `gather`."""
        return self.gather(input_data)

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called it.

        Raises:
            ConfigError: The processes have not met yet, which they do in `train`, `evaluate` or `predict`.
        """
        if world_size() > 1 and not torch.distributed.is_initialized():
            raise ConfigError(
                "accelerator.wait_for_everyone needs connected processes: the first train, evaluate or"
                " predict connects them. Before that, use drivetrain.one_at_a_time(path)"
            )
        once_per_machine(lambda: None)

    def unwrap_model(self, model: Any, **options: Any) -> Any:
        """Return the model, which no strategy replaces; of a wrapper that a script has made, its module."""
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        return model.module if isinstance(model, wrappers) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the model's weights by name, on one device and under DDP.

        Raises:
            ConfigError: The strategy shards them, so that no process has them all.
        """
        if self._strategy() not in ("single", "ddp"):
            raise ConfigError(
                f"accelerator.get_state_dict is for one device and 'ddp': {self._strategy()!r} shards the"
                " weights. trainer.save_model(folder) writes them whole"
            )
        return dict(self.unwrap_model(model).state_dict())

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False, **options: Any) -> nn.Module:
        """Return another model, such as a frozen reference, on the device where the other one is trained.

        Raises:
            ConfigError: `evaluation_mode` is not set.
        """
        if not evaluation_mode:
            raise ConfigError("accelerator.prepare_model is for a model with evaluation_mode=True")
        return model.to(self._args.device)  # before a fit, the strategy has not placed the trained one

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: the strategy has set that of the precision."""
        return nullcontext()

    split_batches = use_seedable_sampler = False
    even_batches = True
    dispatch_batches: bool | None = None
    parallelism_config = None
    """None: no script splits sequences or tensors over processes."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._device()

    @property
    def distributed_type(self) -> DistributedType:
        """accelerate's word for the strategy and the device."""
        from accelerate.utils import DistributedType

        alone = "NO" if world_size() == 1 else None
        name = _TYPES.get(self._strategy(), alone)
        if name is None:
            kind = self.device.type
            name = f"MULTI_{'GPU' if kind == 'cuda' else kind.upper()}"
        return DistributedType(name)

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return world_size()

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return rank()

    @property
    def local_process_index(self) -> int:
        """This process's number on its machine."""
        return local_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return local_rank() == 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"trainer.accelerator has no {name!r} here: {SERVED}")


SERVED = (
    f"it has {', '.join(sorted(name for name in vars(ScriptAccelerator) if not name.startswith('_')))}."
    " drivetrain.Engine is for loops of your own"
)
"""A sentence on what a script's accelerator has."""
