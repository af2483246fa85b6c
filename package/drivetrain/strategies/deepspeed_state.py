"""What DeepSpeed's ZeRO has divided, as checkpoints hold it, and back: parameter by parameter.

ZeRO keeps float32 weights and optimizer states in flat pieces, in which parameters lie end to end, cut
wherever a process's share ends. A checkpoint names and shapes every tensor, so that every strategy can read
it. Here each parameter and each slot of the optimizer is made a `DTensor` of which every process holds some
rows, so that no process ever holds more than one whole tensor beside its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.strategies import deepspeed_adam

_BITS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}
"""By the size of an element: whole numbers, of which a sum with zeros changes no bit. Those of 16 bits are
added byte by byte, because neither gloo nor NCCL adds whole numbers of that size."""

Members = list[list[nn.Parameter]]
"""The parameters of an optimizer's groups."""


class _Place(NamedTuple):
    """Where the share of a parameter that is kept here lies.

    Attributes:
        flat: The flat piece that holds it, in float32; the key of the optimizer's state.
        offset: Its first element there.
        start: Its first element in the parameter.
        size: How many elements; 0 where this process has none.
    """

    flat: Tensor
    offset: int
    start: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """This share of a flat piece, or of a slot of the optimizer's like it."""
        return flat.narrow(0, self.offset, self.size)


class ZeroState:
    """The weights and the optimizer's state of a task that DeepSpeed has divided.

    Args:
        task: The task.
        zero: DeepSpeed's optimizer.
        optimizer: The one that DeepSpeed has taken over; None where nothing is trained.
        members: The parameters of the optimizer's groups, which DeepSpeed has replaced by flat pieces.
        stored: The dtype in which each parameter is stored: what it had before DeepSpeed cast it.
    """

    def __init__(
        self,
        task: nn.Module,
        zero: Any,
        optimizer: Optimizer | None,
        members: Members,
        stored: Mapping[nn.Parameter, torch.dtype],
    ) -> None:
        self.optimizer = optimizer
        self._task = task
        self._zero = zero
        self._members = members
        self._group = {each: index for index, group in enumerate(members) for each in group}
        self._stored = stored
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._mesh: Any = None

    @contextmanager
    def exchanged(self, write: bool) -> Iterator[Optimizer | None]:
        """Within it the task's parameters, and the optimizer that it gives, are as checkpoints hold them.

        Args:
            write: Take over at the end what was put there.
        """
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = self._mesh or init_device_mesh("cpu", (self._size,))
        modules = [(module, module._parameters) for module in self._task.modules()]
        own = list(self._task.parameters())
        forms = {each: self._form(each) for each in own}
        given = None if self.optimizer is None else self._optimizer(self.optimizer, forms)
        for module, parameters in modules:
            module.__dict__["_parameters"] = {
                name: each if each is None else forms[each] for name, each in dict.items(parameters)
            }
        try:
            yield given
        finally:
            for module, parameters in modules:
                module.__dict__["_parameters"] = parameters
        if write:
            if self.optimizer is not None and given is not None:
                deepspeed_adam.check_settings(self.optimizer, given)
            with torch.no_grad():
                for each in own:
                    self._put(each, whole(forms[each].detach()))
                if self.optimizer is not None and given is not None:
                    self._put_optimizer(self.optimizer, given, forms)

    def gathered(self, parameter: Any) -> Tensor:
        """A whole parameter on the host, as it is stored; to be called by all processes."""
        return self._joined(self._weights(parameter), parameter, self._stored[parameter])

    def holds_back(self, tensor: Any) -> bool:
        """Whether it is a parameter that has less than `gathered` gives: it is divided, or rounded."""
        stored = self._stored.get(tensor)
        return stored is not None and (hasattr(tensor, "ds_id") or tensor.dtype != stored)

    def put(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the float32 weights of trained parameters: from whole ones, or from the shares of stage 3."""
        with torch.no_grad():
            for parameter, value in values.items():
                if parameter not in self._group:
                    continue
                place = self._place(parameter)
                start = place.start if value.shape == self._shape(parameter) else 0
                place.of(place.flat.data).copy_(value.reshape(-1)[start:][: place.size])

    # Where things are.

    def _shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape) if hasattr(parameter, "ds_id") else parameter.shape

    def _place(self, parameter: Any) -> _Place:
        """Of a trained parameter."""
        if hasattr(parameter, "ds_id"):
            index, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = size * self._rank
            kept = max(0, min(size, parameter.ds_numel - start))  # what is behind it fills the last share up
            return _Place(self._zero.fp32_partitioned_groups_flat[index], offset, start, kept)
        flat = self._zero.optimizer.param_groups[self._group[parameter]]["params"][0]
        mapping = parameter._hp_mapping
        if mapping is None:
            return _Place(flat, 0, 0, 0)
        there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        return _Place(flat, here.start, there.start, here.numel)

    def _weights(self, parameter: Any) -> tuple[int, Tensor]:
        """The share of a parameter that is kept here, and its first element."""
        if parameter in self._group:
            place = self._place(parameter)
            return place.start, place.of(place.flat.detach())
        if hasattr(parameter, "ds_id"):
            share = parameter.ds_tensor.detach()
            start = share.numel() * self._rank
            return start, share[: max(0, parameter.ds_numel - start)]
        values = parameter.detach().reshape(-1)  # every process has all of it
        return 0, values if self._rank == 0 else values[:0]

    # In the form of a checkpoint.

    def _form(self, parameter: nn.Parameter) -> nn.Parameter:
        values = self._rows(parameter, self._stored[parameter], self._weights(parameter))
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    def _rows(self, parameter: nn.Parameter, dtype: torch.dtype, share: tuple[int, Tensor]) -> Tensor:
        """A tensor like a parameter, of which this process holds its rows."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = self._shape(parameter)
        full = self._joined(share, parameter, dtype)
        if not shape:
            return DTensor.from_local(full, self._mesh, [Replicate()], run_check=False)
        rows = -(-shape[0] // self._size)
        mine = full[rows * self._rank :][:rows].clone()
        stride = full.stride()
        return DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _joined(self, share: tuple[int, Tensor], parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The whole tensor of which each process has a share, bit for bit, on the host."""
        start, values = share
        shape = self._shape(parameter)
        joined = torch.zeros(shape.numel(), dtype=dtype, device=values.device)
        joined[start : start + values.numel()] = values.to(dtype)
        if self._size > 1 and shape.numel():
            torch.distributed.all_reduce(joined.view(_BITS[joined.element_size()]))
        return joined.view(shape).cpu()

    def _optimizer(self, optimizer: Optimizer, forms: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
        """An optimizer of the same kind over the parameters in the form of a checkpoint."""
        given = deepspeed_adam.shell(optimizer)
        given.param_groups = [
            {**deepspeed_adam.told_settings(optimizer, group), "params": [forms[each] for each in members]}
            for group, members in zip(optimizer.param_groups, self._members, strict=True)
        ]
        for parameter in self._group:
            place = self._place(parameter)
            for slot, value in optimizer.state.get(place.flat, {}).items():
                if isinstance(value, Tensor) and value.shape == place.flat.shape:
                    value = self._rows(parameter, value.dtype, (place.start, place.of(value.detach())))
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise CheckpointError(
                        f"the state {slot!r} of {type(optimizer).__name__} has the shape {list(value.shape)},"
                        " which is not that of the parameters that DeepSpeed gave it, and cannot be divided"
                    )
                given.state[forms[parameter]][slot] = deepspeed_adam.told_slot(optimizer, slot, value)
        return given

    # And back.

    def _put(self, parameter: Any, value: Tensor) -> None:
        """Take over a parameter's whole value: in float32, and in what forward reads."""
        if parameter in self._group:
            place = self._place(parameter)
            place.of(place.flat.data).copy_(value.reshape(-1)[place.start :][: place.size])
        if not hasattr(parameter, "ds_id"):
            parameter.data.copy_(value)
            return
        share = parameter.ds_tensor.data
        mine = value.reshape(-1)[share.numel() * self._rank :][: share.numel()]
        share[: mine.numel()].copy_(mine)
        if parameter.data.shape == value.shape:  # small ones stay whole beside their shares
            parameter.data.copy_(value)

    def _put_optimizer(
        self, optimizer: Optimizer, given: Optimizer, forms: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        for group, theirs in zip(optimizer.param_groups, given.param_groups, strict=True):
            group.update(deepspeed_adam.taken_settings(optimizer, group, theirs))
        optimizer.state.clear()
        told: dict[Tensor, dict[str, Any]] = {}
        for parameter in self._group:
            place = self._place(parameter)
            slots = given.state.get(forms[parameter], {})
            alike = {name: each for name, each in slots.items() if not _is_divided(each, forms[parameter])}
            _check_alike(told.setdefault(place.flat, alike), alike)
            for name, value in slots.items():
                kept = optimizer.state[place.flat]
                if name in alike:
                    kept[name] = deepspeed_adam.taken_slot(optimizer, name, value)
                    continue
                if name not in kept:
                    kept[name] = torch.zeros_like(place.flat, dtype=value.dtype, requires_grad=False)
                place.of(kept[name]).copy_(whole(value).reshape(-1)[place.start :][: place.size])


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which each process has some rows; to be called by all."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _is_divided(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and hasattr(value, "full_tensor")


def _check_alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """DeepSpeed updates all parameters of a piece at once: they have one count of updates."""
    same = first.keys() == other.keys() and all(
        bool(torch.equal(value, other[name])) if isinstance(value, Tensor) else value == other[name]
        for name, value in first.items()
    )
    if not same:
        raise CheckpointError(
            "the checkpoint's parameters have not had the same number of updates, as when some got no"
            " gradient in some steps: DeepSpeed updates them together. Resume with another strategy, or load"
            " the weights only"
        )
