"""A forward that is computed again in backward, from all that the first one found."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.streams import HostDraws, shielded

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What makes the contexts of a forward and of computing it again, as `torch.utils.checkpoint` takes it."""


class CallsAgain:
    """Calls a module's forward so that it is computed again in backward.

    torch puts its own random streams back; here the same is done with Python's and numpy's global ones, and
    with buffers that the forward writes to. Within what is compiled the compiler sees to it. What it cannot
    compile with that, it runs as it stands, and whole: what it would compile of it anew could not be told
    apart from what is compiled together with this.

    Args:
        module: Whose.
        contexts: More contexts, such as those that keep some operations' results; or None.
    """

    def __init__(self, module: nn.Module, contexts: Contexts | None = None) -> None:
        self.module = module
        self.options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        self._more: Contexts = _none if contexts is None else contexts
        self._buffers: list[_Buffers] | None = None
        self.run: Callable[..., Any] = _run_here
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and it takes long to import
            _tell_compiler()
            if contexts is not None:
                logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_needed)
            self.run = torch.compiler.disable(_run_here)  # type: ignore[no-untyped-call]

    def __call__(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the forward gives."""
        if torch.is_grad_enabled():
            return _run(self, own, args, kwargs)
        return own(*args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Those of a forward that begins now, and of computing it again."""
        if self._buffers is None:
            self._buffers = [_Buffers(each) for each in self.module.modules()]
        found = _Found(self._buffers)
        forward, again = self._more()
        return found.first(forward), _Repeated(partial(found.again, again))


def _run(again: CallsAgain, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return again.run(again, own, args, kwargs)


def _run_here(again: CallsAgain, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return checkpoint(own, *args, use_reentrant=False, context_fn=again.contexts, **kwargs)


def _traced(again: CallsAgain, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the compiler traces in the place of `_run`, whose contexts it could not."""
    return checkpoint(own, *args, use_reentrant=False, **again.options, **kwargs)


@functools.cache  # it refuses to be told twice
def _tell_compiler() -> None:
    torch.compiler.substitute_in_graph(_run)(_traced)


def _is_needed(record: logging.LogRecord) -> bool:
    """Whether a message of the compiler is not the one that wants writing in place to be left out.

    What is compiled is rid of that before the compiler chooses what to keep; and uncompiled, torch itself
    refuses to use a result that was kept and then written to.
    """
    return "Detected that context_fn is passed to torch.utils.checkpoint" not in str(record.msg)


class Recomputed:
    """A module's forward that is computed again in backward, in the place of its own.

    The forward, and not the call, so that hooks on the module run once, and names stay as they are.

    Args:
        module: Whose.
        contexts: See `CallsAgain`.
    """

    def __init__(self, module: nn.Module, contexts: Contexts | None = None) -> None:
        self._module = module
        self._own: Callable[..., Any] | None = vars(module).get("forward")
        self._forward = module.forward
        self._again = CallsAgain(module, contexts)
        vars(module)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self._again(self._forward, args, kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own is not None:
                vars(self._module)["forward"] = self._own

    def __reduce__(self) -> Any:
        # A copy of the module is an ordinary one, and above all does not compute with this one's parameters.
        return getattr, (self._module, "forward")


def _none() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


class _Found:
    """What one forward finds: where the host's generators stand, and the values of its buffers.

    What it leaves as it was is let go when it ends.
    """

    def __init__(self, buffers: list[_Buffers]) -> None:
        self._draws: HostDraws | None = HostDraws()
        copied: dict[int, Tensor] = {}
        self._values = [(each, each.values(copied)) for each in buffers if each.now]

    @contextmanager
    def first(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of the forward."""
        with inner:
            yield
        if self._draws is not None and self._draws.if_moved() is None:
            self._draws = None
        self._values = [(each, values) for each, values in self._values if each.are_written(values)]

    @contextmanager
    def again(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of computing it again."""
        with ExitStack() as stack:
            if self._draws is not None:
                stack.enter_context(shielded())
                self._draws.restore()
            copied: dict[int, Tensor] = {}
            for each, values in self._values:
                stack.enter_context(each.replaced(values, copied))
            stack.enter_context(inner)
            yield


class _Repeated:
    """A context that can be entered again, as where a graph is gone through twice.

    Args:
        make: What makes it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@dataclass(frozen=True, slots=True)
class _Value:
    """A buffer before a forward: itself, the number of writes to it by then, and what it held."""

    buffer: Tensor | None
    writes: int
    copy: Tensor | None


class _Buffers:
    """The buffers of one module.

    Args:
        module: Whose.

    Attributes:
        now: By name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.now = module._buffers
        self._compared = False
        self._always = False

    def values(self, copied: dict[int, Tensor]) -> dict[str, _Value]:
        """What they are now; a copy is made of each tensor once."""
        return {
            name: _Value(each, _writes(each), None if each is None else _copy(each, copied))
            for name, each in self.now.items()
        }

    def are_written(self, values: Mapping[str, _Value]) -> bool:
        """Whether a forward that began with these values has written to them.

        Not every kernel, nor what goes through `.data`, is counted by torch as writing; therefore values are
        compared after the first forward, and what was written to then is taken as written to in each. Later
        on nothing is compared: on a GPU the host would have to wait for it.
        """
        if not self._compared:
            self._compared = True
            self._always = any(_differs(self.now.get(name), each.copy) for name, each in values.items())
        return (
            self._always
            or self.now.keys() != values.keys()
            or any(
                self.now[name] is not each.buffer or _writes(each.buffer) != each.writes
                for name, each in values.items()
            )
        )

    @contextmanager
    def replaced(self, values: Mapping[str, _Value], copied: dict[int, Tensor]) -> Iterator[None]:
        """Have other tensors in their place: writing to these changes none that a graph or a user holds."""
        own = dict(self.now)
        self.now.clear()
        for name, each in values.items():
            self.now[name] = None if each.copy is None else _copy(each.copy, copied)
        try:
            yield
        finally:
            self.now.clear()
            self.now.update(own)


def _copy(tensor: Tensor, copied: dict[int, Tensor]) -> Tensor:
    """A copy, the same for the same tensor."""
    if id(tensor) not in copied:
        copied[id(tensor)] = tensor.detach().clone()
    return copied[id(tensor)]


def _writes(tensor: Tensor | None) -> int:
    """How often torch has counted a write; tensors of inference mode cannot be written to outside of it."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _differs(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None or now.is_meta:
        return now is not before
    return now.shape != before.shape or not torch.equal(now, before)
