"""Conversion of ZeRO's sharded state to the form of checkpoints and back, one parameter at a time.

ZeRO concatenates float32 weights and optimizer states to flat pieces, and cuts these at shard boundaries. A
checkpoint has every tensor under its name and in its shape, so that every strategy can read it. Here each
parameter and each slot of the optimizer becomes a `DTensor` sharded by rows. No process ever holds more than
one whole tensor in addition to its shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import CheckpointError

_BITS = {1: torch.uint8, 2: torch.uint8, 4: torch.int32, 8: torch.int64}
"""Integer types by the size of an element: adding integer zeros changes no bit. Elements of 16 bits are added
byte by byte, because neither gloo nor NCCL reduces integers of that size."""

Members = list[list[nn.Parameter]]
"""The parameters of an optimizer's groups."""


class _FlatSpan(NamedTuple):
    """The position of this process's shard of a parameter.

    Attributes:
        flat: The float32 flat piece that holds the shard; it is the key of the optimizer's state.
        offset: The index of the shard's first element in the flat piece.
        start: The index of the shard's first element in the parameter.
        size: The number of elements; 0 if this process has none.
    """

    flat: Tensor
    offset: int
    start: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """Return the shard's view of a flat piece, or of an optimizer's slot of the same shape."""
        return flat.narrow(0, self.offset, self.size)


class ZeroState:
    """The weights and the optimizer's state of a task that DeepSpeed has sharded.

    Args:
        task: The task.
        zero: DeepSpeed's optimizer.
        optimizer: The optimizer that DeepSpeed has wrapped; None if nothing is trained.
        members: The parameters of the optimizer's groups, which DeepSpeed has replaced by flat pieces.
        stored: The dtype of each parameter in checkpoints, which it had before DeepSpeed cast it.
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
    def checkpoint_layout(self, write: bool) -> Iterator[Optimizer | None]:
        """Run the block with the task's parameters and the yielded optimizer in the form of checkpoints.

        Args:
            write: Load the values that the block has written.
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
            with torch.no_grad():
                for each in own:
                    self._put(each, whole(forms[each].detach()))
                if self.optimizer is not None and given is not None:
                    self._put_optimizer(self.optimizer, given, forms)

    def gathered(self, parameter: Any) -> Tensor:
        """Return a whole parameter on the host, in its stored dtype; all processes must call it."""
        return self._joined(self._weights(parameter), parameter, self._stored[parameter])

    def knows(self, tensor: Any) -> bool:
        """Return whether a tensor is a parameter of the task."""
        return tensor in self._stored

    def part(self, parameter: Any) -> Tensor:
        """Return this process's part of a parameter, flat; the parts of all processes are disjoint."""
        return self._weights(parameter)[1]

    def is_incomplete(self, tensor: Any) -> bool:
        """Return whether a tensor is a parameter that is sharded or rounded, so that `gathered` has more."""
        stored = self._stored.get(tensor)
        return stored is not None and (hasattr(tensor, "ds_id") or tensor.dtype != stored)

    def put(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the float32 weights of trained parameters from whole values, or from stage 3's shards."""
        with torch.no_grad():
            for parameter, value in values.items():
                if parameter not in self._group:
                    continue
                span = self._span(parameter)
                start = span.start if value.shape == self._shape(parameter) else 0
                span.of(span.flat.data).copy_(value.reshape(-1)[start:][: span.size])

    # Positions.

    def _shape(self, parameter: Any) -> torch.Size:
        return torch.Size(parameter.ds_shape) if hasattr(parameter, "ds_id") else parameter.shape

    def _span(self, parameter: Any) -> _FlatSpan:
        """Return the position of a trained parameter's shard."""
        if hasattr(parameter, "ds_id"):
            index, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            start = size * self._rank
            kept = max(0, min(size, parameter.ds_numel - start))  # the rest of the last shard is padding
            return _FlatSpan(self._zero.fp32_partitioned_groups_flat[index], offset, start, kept)
        flat = self._zero.optimizer.param_groups[self._group[parameter]]["params"][0]
        mapping = parameter._hp_mapping
        if mapping is None:
            return _FlatSpan(flat, 0, 0, 0)
        there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
        return _FlatSpan(flat, here.start, there.start, here.numel)

    def _weights(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the index of the local shard's first element, and the shard."""
        if parameter in self._group:
            span = self._span(parameter)
            return span.start, span.of(span.flat.detach())
        if hasattr(parameter, "ds_id"):
            shard = parameter.ds_tensor.detach()
            start = shard.numel() * self._rank
            return start, shard[: max(0, parameter.ds_numel - start)]
        values = parameter.detach().reshape(-1)  # every process has the whole parameter
        return 0, values if self._rank == 0 else values[:0]

    # To the form of a checkpoint.

    def _form(self, parameter: nn.Parameter) -> nn.Parameter:
        values = self._rows(parameter, self._stored[parameter], self._weights(parameter))
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    def _rows(self, parameter: nn.Parameter, dtype: torch.dtype, shard: tuple[int, Tensor]) -> Tensor:
        """Return a parameter, or a slot of its shape, as a tensor sharded by rows."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = self._shape(parameter)
        full = self._joined(shard, parameter, dtype)
        if not shape:
            return DTensor.from_local(full, self._mesh, [Replicate()], run_check=False)
        rows = -(-shape[0] // self._size)
        mine = full[rows * self._rank :][:rows].clone()
        stride = full.stride()
        return DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _joined(self, shard: tuple[int, Tensor], parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Gather a sharded tensor on the host, bit for bit."""
        start, values = shard
        shape = self._shape(parameter)
        joined = torch.zeros(shape.numel(), dtype=dtype, device=values.device)
        joined[start : start + values.numel()] = values.to(dtype)
        if self._size > 1 and shape.numel():
            torch.distributed.all_reduce(joined.view(_BITS[joined.element_size()]))
        return joined.view(shape).cpu()

    def _optimizer(self, optimizer: Optimizer, forms: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
        """Return an optimizer of the same type, with parameters and state in the form of a checkpoint."""
        given: Optimizer = object.__new__(type(optimizer))
        given.__dict__.update(optimizer.__dict__)
        given.state = defaultdict(dict)
        given.param_groups = [
            {**group, "params": [forms[each] for each in members]}
            for group, members in zip(optimizer.param_groups, self._members, strict=True)
        ]
        for parameter in self._group:
            span = self._span(parameter)
            for slot, value in optimizer.state.get(span.flat, {}).items():
                if isinstance(value, Tensor) and value.shape == span.flat.shape:
                    value = self._rows(parameter, value.dtype, (span.start, span.of(value.detach())))
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise CheckpointError(
                        f"the state {slot!r} of {type(optimizer).__name__} has the shape {list(value.shape)},"
                        " not that of the parameters that DeepSpeed gave it, so it cannot be saved"
                    )
                given.state[forms[parameter]][slot] = value
        return given

    # From the form of a checkpoint.

    def _put(self, parameter: Any, value: Tensor) -> None:
        """Load a parameter's whole value into the float32 weights and into those that forward reads."""
        if parameter in self._group:
            span = self._span(parameter)
            span.of(span.flat.data).copy_(value.reshape(-1)[span.start :][: span.size])
        if not hasattr(parameter, "ds_id"):
            parameter.data.copy_(value)
            return
        shard = parameter.ds_tensor.data
        mine = value.reshape(-1)[shard.numel() * self._rank :][: shard.numel()]
        shard[: mine.numel()].copy_(mine)
        if parameter.data.shape == value.shape:  # stage 3 also keeps small parameters whole
            parameter.data.copy_(value)

    def _put_optimizer(
        self, optimizer: Optimizer, given: Optimizer, forms: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        for group, theirs in zip(optimizer.param_groups, given.param_groups, strict=True):
            group.update({name: each for name, each in theirs.items() if name != "params"})
        optimizer.state.clear()
        told: dict[Tensor, dict[str, Any]] = {}
        for parameter in self._group:
            span = self._span(parameter)
            slots = given.state.get(forms[parameter], {})
            alike = {name: each for name, each in slots.items() if not _is_divided(each, forms[parameter])}
            _check_same(told.setdefault(span.flat, alike), alike)
            for name, value in slots.items():
                kept = optimizer.state[span.flat]
                if name in alike:
                    kept[name] = value
                    continue
                if name not in kept:
                    kept[name] = torch.zeros_like(span.flat, dtype=value.dtype, requires_grad=False)
                span.of(kept[name]).copy_(whole(value).reshape(-1)[span.start :][: span.size])


def whole(tensor: Any) -> Tensor:
    """Gather a sharded tensor; return any other unchanged. All processes must call it."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def _is_divided(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and hasattr(value, "full_tensor")


def _check_same(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that parameters of one flat piece have the same count of steps: DeepSpeed keeps only one."""
    same = first.keys() == other.keys() and all(
        bool(torch.equal(value, other[name])) if isinstance(value, Tensor) else value == other[name]
        for name, value in first.items()
    )
    if not same:
        raise CheckpointError(
            "the checkpoint's parameters have had different numbers of steps, as when some got no gradient"
            " in some steps, but DeepSpeed updates them together. Resume with another strategy, or load only"
            " the weights"
        )


_SCALER_FIELDS = ("cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields that only DeepSpeed's scaler has: its position, and how many overflows it still tolerates."""


def scaler_state(scaler: Any) -> dict[str, Any]:
    """Return the state of a dynamic loss scaler, in the form of torch's gradient scaler."""
    return {
        "scale": float(scaler.cur_scale),
        "growth_factor": float(scaler.scale_factor),
        "backoff_factor": 1.0 / float(scaler.scale_factor),
        "growth_interval": int(scaler.scale_window),
        "_growth_tracker": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
        "deepspeed": {name: int(getattr(scaler, name)) for name in _SCALER_FIELDS},
    }


def load_scaler_state(scaler: Any, state: Mapping[str, Any]) -> None:
    """Load a state of DeepSpeed's scaler, or of torch's."""
    scaler.cur_scale = float(state["scale"])
    own = state.get("deepspeed")
    if own is None:
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(state["_growth_tracker"])
        return
    for name in _SCALER_FIELDS:
        setattr(scaler, name, int(own[name]))
