"""The shapes and floating-point operations of each layer of a module, for one batch, without running it.

The forward and backward run on torch's fake tensors, which have shapes, dtypes and devices but no values: no
memory is taken, no random number drawn, and the module stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.core.errors import ConfigError
from drivetrain.data.batch import map_tensors
from drivetrain.task.forward import call_forward
from drivetrain.task.output import read_output
from drivetrain.task.task import StepModule, TaskModule
from drivetrain.task.without_trace import without_trace

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of some tensors, in order."""


@dataclass
class Layer:
    """A module's shapes and floating-point operations for one batch.

    Attributes:
        inputs: The shapes of the tensors that its forward first got.
        outputs: The shapes of the tensors that it first returned.
        forward_flops: The floating-point operations of all its forwards, those of its children included.
        backward_flops: The same of backward.
    """

    inputs: Shapes = ()
    outputs: Shapes = ()
    forward_flops: int = 0
    backward_flops: int = 0


def layers_of(module: nn.Module, batch: Any) -> dict[str, Layer]:
    """Return the layers of a module by name; those that one batch does not reach are left out.

    Counted are matrix products, convolutions and attention, as torch's FlopCounterMode does: 2 operations for
    each multiplication with its addition. Attention counts its two products in full, also if it is causal.

    Args:
        module: A task, whose forward and loss run; or another module, whose outputs are summed for backward.
        batch: For a task a batch of its data; else the only argument of forward, or a tuple or a mapping of
            its arguments.

    Returns:
        The layers; the module itself, with the loss, has the name "".
    """
    if any(is_lazy(each) for each in (*module.parameters(), *module.buffers())):
        raise ConfigError("a lazy module has no shapes yet: run it once on a batch before the summary")
    if type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"the layers of a {type(module).__name__} cannot be followed: it has no forward. Define one, for"
            " its own step to call, or leave the batch out of the summary"
        )
    root = StepModule(module)
    root.use(_step(module))
    found: dict[str, Layer] = {}
    names: dict[int, str] = {}
    every = list(module.named_modules(remove_duplicate=False))
    for name, each in every:
        names.setdefault(id(each), name)
    with ExitStack() as stack:
        stack.enter_context(without_trace(module))  # nor tensors without values, which the forward keeps
        for each in module.modules():
            hook = each.register_forward_hook(_noting(found, names[id(each)]), with_kwargs=True)
            stack.callback(hook.remove)
        before, after = _counted(root, batch)
    total = found.setdefault("", Layer())
    for counts, field in ((before, "forward_flops"), (after, "backward_flops")):
        for name, each in every:
            layer = found.get(names[id(each)])
            if layer is not None and name:
                more = counts.get(f"StepModule.task.{name}", 0)
                setattr(layer, field, getattr(layer, field) + more)
        setattr(total, field, counts.get("Global", 0))
    return found


def _step(module: nn.Module) -> Callable[[Any], Tensor]:
    """Return a function of the batch that returns a scalar to run backward from."""

    def of_task(batch: Any) -> Tensor:
        outputs = call_forward(module, module.inputs(batch))  # type: ignore[operator]
        loss = read_output(module.loss(outputs, batch))[0]  # type: ignore[operator]
        return torch.zeros(()) if loss is None else loss

    def of_module(batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            outputs = module(**batch)
        else:
            outputs = module(*batch) if isinstance(batch, tuple) else module(batch)
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
        sums = [each.sum() for each in tensors if each.is_floating_point()]
        return torch.stack(sums).sum() if sums else torch.zeros(())

    return of_task if isinstance(module, TaskModule) else of_module


def _counted(root: nn.Module, batch: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the operations of forward and of backward, by the names of torch's counter."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    named = dict(root.named_parameters(remove_duplicate=False)) | dict(
        root.named_buffers(remove_duplicate=False)
    )
    device = next((each.device for each in named.values()), torch.device("cpu"))
    # Its products in place of the kernels of a device: not all of these are known to the counter.
    with sdpa_kernel(SDPBackend.MATH), fake, torch.enable_grad(), FlopCounterMode(display=False) as counter:
        tensors: dict[str, Tensor] = {name: fake.from_tensor(each) for name, each in named.items()}
        given = map_tensors(lambda each: fake.from_tensor(each).to(device), batch)
        try:
            loss = functional_call(root, tensors, (given,))
            forward = _sums(counter)
            if loss.requires_grad:
                loss.backward()
        except Exception as error:
            raise ConfigError(
                f"the layers of a {type(root.task).__name__} cannot be followed for this batch:"
                f" {type(error).__name__}: {error}. The forward runs on tensors without values, so it must"
                " not branch on one. Leave the batch out of the summary"
            ) from error
    return forward, {name: total - forward.get(name, 0) for name, total in _sums(counter).items()}


def _sums(counter: FlopCounterMode) -> dict[str, int]:
    return {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}


def _noting(found: dict[str, Layer], name: str) -> Callable[..., None]:
    def note(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        if name not in found:
            found[name] = Layer(_shapes((args, kwargs)), _shapes(outputs))

    return note


def _shapes(value: Any) -> Shapes:
    return tuple(tuple(each.shape) for each in tree_leaves(value) if isinstance(each, Tensor))
