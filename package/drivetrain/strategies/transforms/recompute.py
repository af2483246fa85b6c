"""Activation checkpointing: backward recomputes activations, so that forward need not keep them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. "selective" keeps the results of some
operations (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
Implemented with torch's `checkpoint` and `create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.core.devices import has_values
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.random_streams import HostDraws, shielded
from drivetrain.strategies.transforms.compile import Replacement, compiled_forward
from drivetrain.strategies.wrapping import named_blocks
from drivetrain.task.blocks import is_called, repeated_blocks

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""A factory of the contexts of a forward and of its recomputation, as `torch.utils.checkpoint` takes it."""

RecomputeOption = bool | str | tuple[str, ...] | Callable[..., Any]
"""A user's choice of what to recompute; see `FSDPConfig.activation_checkpointing`."""

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""The operations whose results "selective" keeps: they take nearly all of the time."""


def as_recompute_option(owner: str, again: object) -> RecomputeOption:
    """Return a user's `activation_checkpointing` in one form: classes as a tuple of their names."""
    if again is False or (callable(again) and not isinstance(again, type)):
        return again
    if again is True or again in ("full", "selective"):
        return "full" if again is True else str(again)
    given = tuple(again) if isinstance(again, (tuple, list)) else (again,)
    modules = [isinstance(each, type) and issubclass(each, nn.Module) for each in given]
    if not all(module or isinstance(each, str) for module, each in zip(modules, given, strict=True)):
        raise ConfigError(
            f"{owner}(activation_checkpointing=...) must be True, False, 'full', 'selective', classes of"
            f" modules or their names, such as ('Block',), or a policy, not {again!r}"
        )
    return tuple(each if isinstance(each, str) else each.__name__ for each in given)


def recompute(model: nn.Module, again: RecomputeOption) -> None:
    """Recompute a model's blocks in backward, until `forget`; before it is sharded, and once it is compiled.

    Args:
        again: "selective" and a policy keep the results of some operations; anything else keeps none. False
            recomputes nothing.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    if not again:
        return

    contexts: Contexts | None = None
    policy: Any = [getattr(torch.ops.aten, name).default for name in _KEPT] if again == "selective" else again
    if again == "selective" or callable(again):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in chosen_blocks(model, again):
        compiled = compiled_forward(block)
        if compiled is None:
            Recomputed(block, contexts)
        else:
            compiled.recompute(RecomputingCall(block, contexts))


def chosen_blocks(model: nn.Module, again: RecomputeOption) -> list[nn.Module]:
    """Return the modules to recompute: chosen by class or by globs on their names, or the repeated blocks.

    A model without repeated blocks, such as one with a single layer, has those that the task's
    `ModelInfo` names.
    Unlike for sharding, blocks may share parameters with the rest of the model: nothing is gathered.
    """
    if not isinstance(again, (tuple, list)):
        all_blocks = repeated_blocks(model, tied=True) or named_blocks(model)
        blocks = list({id(each): each for each in all_blocks}.values())
        if not blocks:
            raise ConfigError(
                f"{type(model).__name__} has no repeated blocks in a list of modules to recompute. Name"
                " classes or modules: activation_checkpointing=('encoder.*',)"
            )
        return blocks
    return _blocks_named(model, again)


def _blocks_named(model: nn.Module, again: Sequence[str]) -> list[nn.Module]:
    """Return the modules of these classes, or whose names match these globs; none inside another one."""
    named = [(name, each) for name, each in model.named_modules() if name and is_called(each)]
    kinds = {type(each).__name__ for _, each in named}
    for wanted in again:
        if wanted not in kinds and not any(fnmatchcase(name, wanted) for name, _ in named):
            known = ["full", "selective", *sorted(kinds), *(name for name, _ in named)]
            raise ConfigError(f"no module has the class or the name {wanted!r}. {nearest(wanted, known)}")
    found: list[nn.Module] = []
    inside: set[int] = set()
    for name, module in named:  # outer ones first
        mine = any(type(module).__name__ == each or fnmatchcase(name, each) for each in again)
        if mine and id(module) not in inside:
            found.append(module)
            inside.update(id(each) for each in module.modules())
    return found


def forget(model: nn.Module) -> None:
    """Revert the modules of a model that are recomputed."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Recomputed):
            forward.remove()


class RecomputingCall:
    """A caller of a module's forward that recomputes it in backward.

    torch restores its own random streams for the recomputation. This class also restores Python's and numpy's
    global ones, and buffers that the forward writes to. Inside compiled code the compiler handles that. A
    forward that the compiler cannot handle runs uncompiled as a whole: its compiled pieces could not be told
    apart from the code compiled around it.
    """

    def __init__(self, module: nn.Module, contexts: Contexts | None = None) -> None:
        self.module = module
        self.options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        self._more: Contexts = contexts or (lambda: (nullcontext(), nullcontext()))
        self._tables: list[dict[str, Tensor | None]] | None = None
        self._always_written: dict[int, bool] = {}
        self.run: Callable[..., Any] = _run_checkpointed
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and its import is slow
            _register_with_compiler()
            self.run = torch.compiler.disable(_run_checkpointed)  # type: ignore[no-untyped-call]

    def __call__(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return _run(self, own, args, kwargs)
        return own(*args, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward that starts now, and of its recomputation."""
        if self._tables is None:
            self._tables = [each._buffers for each in self.module.modules()]
        before = _StateBefore(self._tables, self._always_written)
        forward, again = self._more()
        return before.kept_if_changed(forward), _ReusableContext(partial(before.restored, again))


def _run(again: RecomputingCall, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return again.run(again, own, args, kwargs)


def _run_checkpointed(again: RecomputingCall, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return checkpoint(own, *args, use_reentrant=False, context_fn=again.contexts, **kwargs)


def _traced(again: RecomputingCall, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run as `_run`, without the contexts that the compiler cannot trace; the compiler's substitute."""
    return checkpoint(own, *args, use_reentrant=False, **again.options, **kwargs)


@functools.cache  # the compiler refuses a second registration
def _register_with_compiler() -> None:
    torch.compiler.substitute_in_graph(_run)(_traced)


class Recomputed(Replacement):
    """A forward that is recomputed in backward and replaces a module's original one."""

    def __init__(self, module: nn.Module, contexts: Contexts | None = None) -> None:
        super().__init__(module)
        self._again = RecomputingCall(module, contexts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._again(self._forward, args, kwargs)


class _StateBefore:
    """The state at the start of a block's forward: the host's random generators, and its modules' buffers.

    State that the forward did not change is freed when the forward ends.

    Args:
        tables: The buffers of each module.
        always_written: By the id of a table, whether each forward counts as one that writes to it.
    """

    def __init__(self, tables: Iterable[dict[str, Tensor | None]], always_written: dict[int, bool]) -> None:
        self._always_written = always_written
        self._draws: HostDraws | None = HostDraws()
        self._tables = [
            (table, dict(table), {name: _writes(each) for name, each in table.items()})
            for table in tables
            if table
        ]
        # Each tensor is copied once; the tables keep the tensors, so that no id is used again.
        tensors = (each for _, buffers, _ in self._tables for each in buffers.values() if each is not None)
        self._copies = {id(each): each.detach().clone() for each in tensors}

    @contextmanager
    def kept_if_changed(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Run the forward in the block, then drop the state that it did not change."""
        with inner:
            yield
        if self._draws is not None and self._draws.if_moved() is None:
            self._draws = None
        self._tables = [each for each in self._tables if self._is_written(*each)]
        kept = {id(each) for _, buffers, _ in self._tables for each in buffers.values()}
        self._copies = {key: copy for key, copy in self._copies.items() if key in kept}

    def _is_written(
        self, now: dict[str, Tensor | None], before: dict[str, Tensor | None], writes: Mapping[str, int]
    ) -> bool:
        """Return whether the forward has written to a table or to a buffer in it.

        torch does not count the writes of every kernel, nor those through `.data`. So the first forward's
        values are compared, and a buffer that differs counts as written by every forward. Later forwards are
        not compared: on a GPU that is a host sync.
        """
        if id(now) not in self._always_written:
            pairs = ((now.get(name), self._copies.get(id(each))) for name, each in before.items())
            self._always_written[id(now)] = any(_differs(*each) for each in pairs)
        return (
            self._always_written[id(now)]
            or now.keys() != before.keys()
            or any(now[name] is not each or _writes(each) != writes[name] for name, each in before.items())
        )

    @contextmanager
    def restored(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Run the recomputation in the block, with the state from before the forward.

        The buffers are copies, so that writes reach no graph and no user.
        """
        with ExitStack() as stack:
            if self._draws is not None:
                stack.enter_context(shielded())
                self._draws.restore()
            copies = {key: copy.clone() for key, copy in self._copies.items()}
            for table, buffers, _ in self._tables:
                stack.callback(_refill, table, dict(table))
                _refill(table, {name: copies.get(id(each)) for name, each in buffers.items()})
            stack.enter_context(inner)
            yield


def _refill(table: dict[str, Tensor | None], buffers: Mapping[str, Tensor | None]) -> None:
    table.clear()
    table.update(buffers)


class _ReusableContext:
    """A reusable context, for a graph whose backward runs twice."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _writes(tensor: Tensor | None) -> int:
    """Return torch's count of writes; -1 for inference tensors, which cannot be written outside that mode."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _differs(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None:
        return now is not before
    if not has_values(now):
        return False
    return now.shape != before.shape or not torch.equal(now, before)
