"""Initialising, part by part, a model that was created on the meta device and has only shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, distributed, nn

from drivetrain.core.errors import StrategyError

_RESETS = ("reset_parameters", "_reset_parameters")
"""The methods that torch's modules call at the end of their constructors to initialise themselves."""


def on_meta(module: nn.Module) -> bool:
    """Return whether any tensor of the module is on the meta device."""
    return any(each.is_meta for each in (*module.parameters(), *module.buffers()))


class Materialization:
    """Initialisation of a model on the meta device, with the values that its constructor gives on the CPU.

    The modules' `reset_parameters` are called on the CPU in the order of the constructors: children in the
    order of their registration, then the module that holds them. So they draw from torch's random stream as
    the constructors would. A part is cast, moved, broadcast from rank 0 and handed on as soon as no module
    around it can still change it. So a process holds one whole part at a time.

    Construct it before the model is converted to another dtype: values are drawn in the task's dtype.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._dtypes = {
            (id(module), name): tensor.dtype for module in model.modules() for name, tensor in _own(module)
        }
        self._pending = {id(module) for module in model.modules() if on_meta(module)}
        # Maps the id of a meta tensor to the tensor and its initialised one, until that is handed on. Kept
        # longer, it would hold a whole parameter in addition to its shards. The meta tensor is held so that
        # its id is not reused.
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._origins: dict[int, Tensor] = {}
        self._placed_buffers: dict[int, Tensor] = {}

    def run(
        self,
        parts: Sequence[nn.Module],
        device: torch.device,
        world_size: int,
        hand_on: Callable[[nn.Module], None],
    ) -> None:
        """Initialise the model.

        Args:
            parts: The modules that are handed on one at a time, inner modules before those that contain them.
            hand_on: A function called with each initialised part; it may replace the part's parameters.
        """
        waiting = {id(each): each for each in parts}

        def settle(module: nn.Module) -> None:
            inside = {id(each) for each in module.modules()}
            for key in [each for each in waiting if each in inside]:
                part = waiting.pop(key)
                self._place(part, device, world_size)
                hand_on(part)

        def visit(module: nn.Module, held: bool) -> None:
            pending = id(module) in self._pending
            self._pending.discard(id(module))
            reset = _reset_of(module) if pending else None
            for child in module.children():
                visit(child, held or reset is not None)
            if pending:
                self._fill(module, reset)
            if not held:
                settle(module)

        # A module that resets its children needs all of them whole, on the CPU.
        visit(self._model, False)
        self._place(self._model, device, world_size)

    def _fill(self, module: nn.Module, reset: Callable[[], None] | None) -> None:
        """Allocate the module's direct meta tensors, and call its reset to initialise them."""
        empty = [(name, tensor) for name, tensor in _own(module) if tensor.is_meta]
        if reset is None:
            if empty:
                raise self._cannot(module, [name for name, _ in empty])
            return
        tied = [(name, self._made[id(tensor)][1]) for name, tensor in empty if id(tensor) in self._made]
        for name, tensor in empty:
            setattr(module, name, self._allocate(module, name, tensor))
        with torch.no_grad():
            reset()
        # A tied module draws values in its constructor that are then replaced by those of the first module.
        for name, first in tied:
            setattr(module, name, first)

    def _allocate(self, module: nn.Module, name: str, tensor: Tensor) -> Tensor:
        made: Tensor = torch.empty(tensor.shape, dtype=self._dtypes.get((id(module), name), tensor.dtype))
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        made.__dict__.update(tensor.__dict__)
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, made)
            self._origins[id(made)] = tensor
        return made

    def _place(self, part: nn.Module, device: torch.device, world_size: int) -> None:
        """Cast, move and broadcast the tensors that were not handed on yet."""
        for tensor in (*part.parameters(), *part.buffers()):
            if id(tensor) in self._placed_buffers or _is_divided(tensor):
                continue
            origin = self._origins.pop(id(tensor), tensor)
            self._made.pop(id(origin), None)
            tensor.data = tensor.data.to(device, origin.dtype).contiguous()
            if world_size > 1:
                distributed.broadcast(tensor.detach(), 0)
            if not isinstance(tensor, nn.Parameter):
                self._placed_buffers[id(tensor)] = tensor

    def _cannot(self, module: nn.Module, names: Sequence[str]) -> StrategyError:
        where = self._names[id(module)].removeprefix("task.")
        called = f"{where!r} ({type(module).__name__})" if where else type(module).__name__
        return StrategyError(
            f"the task was made on the meta device, and {called} cannot initialise {', '.join(names)}. Give"
            " that class a method reset_parameters() that does, and call it at the end of the constructor; or"
            " make the task without torch.device('meta')"
        )


def _is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of FSDP's or DeepSpeed's, and so was handed on."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the module itself, without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    for name in _RESETS:
        found = getattr(module, name, None)
        if callable(found):
            reset: Callable[[], None] = found
            return reset
    return None
