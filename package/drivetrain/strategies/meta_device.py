"""Values for a model that was created on the meta device and has only shapes.

They are those of its constructor, made part by part, or are read from files once the model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.checkpoint.weights.stored_rows import StoredWeights, forget_weights, stored_weights
from drivetrain.core.errors import StrategyError
from drivetrain.distributed.ranks import Ranks
from drivetrain.strategies.wrapping import apply_tied
from drivetrain.task.model_info import ModelInfo, info_of

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

    Args:
        model: The whole model.
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
        self._info = info_of(getattr(model, "task", model))
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
            given = _given_reset(self._info, module) if pending else None
            reset = given or (_reset_of(module) if pending else None)
            for child in module.children():
                visit(child, held or (reset is not None and given is None))
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
                raise _cannot(self._names[id(module)], module, [name for name, _ in empty])
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


def _cannot(name: str, module: nn.Module, lacking: Sequence[str]) -> StrategyError:
    where = name.removeprefix("task.")
    called = f"{where!r} ({type(module).__name__})" if where else type(module).__name__
    return StrategyError(
        f"the task was made on the meta device, and {called} cannot initialise {', '.join(lacking)}. Give"
        " that class a method reset_parameters() that does, and call it at the end of the constructor; or"
        " make the task without torch.device('meta')"
    )


def check_alike(module: nn.Module, task: nn.Module, ranks: Ranks) -> None:
    """Check that all ranks have made a model on the meta device, or none. All ranks must call it together.

    Raises:
        StrategyError: Some have, and others have not.
    """
    empty = ranks.all_gather(on_meta(module))
    if len(set(empty)) > 1:
        raise StrategyError(
            f"rank {empty.index(True)} has made {type(task).__name__} on the meta device, and rank"
            f" {empty.index(False)} has not. Make it in the same way on all ranks; on the meta device each"
            " reads its part of the files that load_weights(path) names"
        )


def deferred_weights(task: nn.Module) -> StoredWeights | None:
    """Return the stored weights of a task on the meta device, if no parameter needs any other value.

    Its buffers that are not stored are computed now, on the CPU, by the `reset_parameters` of their modules.
    So it can be sharded without values, and then be given to `read_stored`.

    Raises:
        StrategyError: A module cannot compute its buffer; the message names it.
    """
    stored = stored_weights(task)
    if stored is None or not on_meta(task):
        return None
    parameters, buffers = stored.lacking(task)
    if parameters:
        return None
    _compute(task, buffers)
    return stored


def _compute(task: nn.Module, names: Collection[str]) -> None:
    """Compute buffers on the CPU by the resets of their modules, whose parameters stay as they are."""
    info = info_of(task)
    for prefix, module in reversed(list(task.named_modules())):  # children first
        buffers = module.named_buffers(prefix, recurse=False, remove_duplicate=False)
        wanted = [name.rpartition(".")[2] for name, _ in buffers if clean_name(name) in names]
        if not wanted:
            continue
        reset = _given_reset(info, module) or _reset_of(module)
        if reset is None:
            raise _cannot(prefix, module, wanted)
        before = {**module._parameters}, {**module._buffers}
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and tensor.is_meta:
                    made: Any = torch.empty_like(tensor, device="cpu")
                    kind[name] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
        with torch.no_grad():
            reset()
        computed = {name: module._buffers[name] for name in wanted}
        module._parameters.update(before[0])
        module._buffers.update({**before[1], **computed})


def place(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that have values to a device."""
    module._apply(lambda each: each if each.is_meta else each.to(device))  # type: ignore[no-untyped-call]


def read_each(task: nn.Module, device: torch.device) -> Iterator[nn.Parameter]:
    """Yield each parameter of a task on the meta device once it has its stored values, one at a time.

    Whoever takes it may shard it before the next is read.
    """
    stored = stored_weights(task)
    assert stored is not None
    uses: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, each in task.named_parameters(remove_duplicate=False):
        uses.setdefault(id(each), []).append((name, each))
    for named in uses.values():
        old = named[0][1]
        made = old
        if old.is_meta:
            made = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            made.__dict__.update(old.__dict__)
            for name, _ in named:
                owner, _, own = name.rpartition(".")
                setattr(task.get_submodule(owner), own, made)
        stored.fill([(name, made) for name, _ in named])
        yield made


def allocate(model: nn.Module, device: torch.device, of_shards: torch.device) -> None:
    """Give what is on the meta device memory without values. Tied parameters stay tied.

    Args:
        model: The model, whose parameters may be sharded.
        device: The device of buffers, and of parameters that are not sharded.
        of_shards: The device of shards.
    """

    def with_memory(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=of_shards if is_sharded(tensor) else device)

    apply_tied(model, with_memory)  # `to_empty` would drop the values of tensors that have some


def read_stored(model: nn.Module, task: nn.Module, device: torch.device, of_shards: torch.device) -> None:
    """Read the stored weights of a task, if there are any, once its model is sharded; see `allocate`."""
    stored = stored_weights(task)
    if stored is not None:
        allocate(model, device, of_shards)
        stored.fill(
            (*task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False))
        )
        forget_weights(task)


def _is_divided(tensor: Tensor) -> bool:
    """Return whether a tensor is a shard of FSDP's or DeepSpeed's, and so was handed on."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the module itself, without those of its children."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _given_reset(info: ModelInfo, module: nn.Module) -> Callable[[], None] | None:
    """Return what the task's `ModelInfo` gives to initialise a module's own tensors, or None."""
    return None if info.reset_of is None else info.reset_of(module)


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    for name in _RESETS:
        found = getattr(module, name, None)
        if callable(found):
            reset: Callable[[], None] = found
            return reset
    return None
