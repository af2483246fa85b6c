"""The parts of a model that a step has run, and the parameters that it has not used, on all ranks or some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.call_order import CallOrder


def note_forwards(order: CallOrder, parts: Mapping[str, nn.Module]) -> list[Any]:
    """Note each forward of some modules, before a strategy gathers their weights.

    Args:
        parts: The modules by name.

    Returns:
        The handles of the hooks.
    """

    def noting(call: str) -> Callable[..., None]:
        return lambda *_: order.note(call)

    return [
        each.register_forward_pre_hook(noting(f"runs {name!r}"), prepend=True) for name, each in parts.items()
    ]


class ShardOrder:
    """Notes which parts of FSDP2's modules a rank runs, and which of their parameters get no gradient.

    Args:
        order: The calls of the ranks.
        adds: Whether each backward of a window adds to gradients that are reduced already.
    """

    def __init__(self, order: CallOrder, adds: bool = False) -> None:
        self._order, self._adds, self._models = order, adds, 0
        self._texts: dict[Tensor, str] = {}
        self._used: set[Tensor] = set()
        self._handles: list[Any] = []

    def add(self, module: nn.Module) -> None:
        """Note the calls of a module that was sharded just now; all ranks add the same ones."""
        from torch.distributed.fsdp import FSDPModule

        self._models += 1
        more = "" if self._models == 1 else f" of model {self._models}"
        modules: list[tuple[str, Any]] = [*module.named_modules()]
        named = [(f"{_in_task(name)}{more}", each) for name, each in modules if isinstance(each, FSDPModule)]
        parts: dict[str, Any] = dict(named)
        self._handles += note_forwards(self._order, parts)
        for name, each in module.named_parameters():
            if hasattr(each, "to_local"):
                self._texts[each] = f"has no gradient of '{_in_task(name)}{more}'"
                if (
                    self._adds and each.requires_grad
                ):  # FSDP2 calls these hooks; with offloading it then waits for each copy
                    hooked: Any = each
                    self._handles.append(hooked.register_post_accumulate_grad_hook(self._used.add))

    def begin_backward(self) -> None:
        """Note that a backward begins."""
        self._order.note("begins a backward")
        self._used.clear()

    def end_backward(self, inputs: Sequence[Tensor] | None) -> None:
        """Note which parameters have got no gradient in a backward that reduces gradients.

        Args:
            inputs: The parameters that it was for; None for all.
        """
        for each in self._texts if inputs is None else inputs:
            used = each in self._used if self._adds else each.grad is not None
            if not used and each.requires_grad and each in self._texts:
                self._order.note(self._texts[each])
        self._order.note("ends a backward")

    def close(self) -> None:
        """Remove the hooks."""
        for each in self._handles:
            each.remove()


def _in_task(name: str) -> str:
    return name.removeprefix("task.") or "task"


Gradients: TypeAlias = "list[tuple[Tensor | None, int]]"
"""The gradient of each parameter before a backward, and torch's count of its changes."""


def gradients_now(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of parameters, to compare after a backward."""
    return [(each.grad, 0 if each.grad is None else each.grad._version) for each in parameters]


def check_used(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    allow: str,
    before: Gradients | None = None,
    needs_any: bool = True,
) -> None:
    """Check that a synchronised backward has given every parameter a gradient.

    A bucket that lacks a gradient is never averaged. torch reports that only at the next forward, if there is
    one.

    Args:
        before: The gradients of the window's earlier micro-batches; None if there were none.
        needs_any: Whether the backward must have used some of them.
    """
    if before is None:
        without = [index for index, each in enumerate(parameters) if each.grad is None]
    else:
        now = gradients_now(parameters)
        pairs = enumerate(zip(before, now, strict=True))
        without = [at for at, (old, new) in pairs if old[0] is new[0] and old[1] == new[1]]
    if not without or (len(without) == len(names) and not needs_any):
        return
    frozen = [names[index] for index in without if not parameters[index].requires_grad]
    if frozen:
        raise ConfigError(
            f"parameters were frozen after the run had started: {', '.join(frozen[:8])}. Freeze them by the"
            f" callback Freeze(...), or before the run, or give {allow}"
        )
    what = "the step" if before is None else "the last micro-batch of the window"
    unused = [names[index] for index in without]
    raise _unused(what, unused, len(names), f"Freeze them, use them, or give {allow}")


def _unused(what: str, names: Sequence[str], of: int, advice: str) -> ConfigError:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ConfigError(
        f"{what} used {of - len(names)} of {of} trainable parameters; these got no gradient:"
        f" {', '.join(names[:8])}{more}. {advice}"
    )


_AT_ZERO = (
    "DeepSpeed would update them with a gradient of zero, so that momentum, weight decay or running averages"
    " would change them or their state"
)
_STAGE_3 = "DeepSpeed's stage 3 would update them with the gradients of an earlier step"


class UsedParameters:
    """A record of the parameters that have got gradients in a step of DeepSpeed's.

    Make it before DeepSpeed's engine, whose hooks begin the exchange of a gradient.

    Args:
        order: The calls of the ranks.
        stage: ZeRO's stage; an error says what the stage would do to the others.
        in_order: Whether it exchanges each gradient as it comes; otherwise all at the step.

    Attributes:
        whole: Parameters of modules that DeepSpeed reduces as a whole, whatever a step uses of them.
    """

    def __init__(self, task: nn.Module, order: CallOrder, stage: int, in_order: bool) -> None:
        self._order, self._stage, self._in_order = order, stage, in_order
        self._names: dict[Tensor, str] = {}
        self._used: set[Tensor] = set()
        self.whole: set[Tensor] = set()
        self._handles: list[Any] = []
        self.watch(task)

    def watch(self, task: nn.Module) -> None:
        """Record the parameters of a task that are trained now."""
        self.stop()
        self._names = {each: name for name, each in task.named_parameters() if each.requires_grad}
        self._used.clear()
        self._handles = [
            each.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
            for each in self._names
        ]

    def _add(self, parameter: Tensor) -> None:
        self._used.add(parameter)
        if self._in_order and parameter not in self.whole:
            self._order.note(f"has the gradient of {self._names[parameter]!r}")

    def stop(self) -> None:
        for each in self._handles:
            each.remove()

    def check(self) -> None:
        """Check that all parameters have got a gradient, and begin with the next step."""
        unused = [name for each, name in self._names.items() if each not in self._used | self.whole]
        if unused:
            advice = (
                f"{_STAGE_3 if self._stage == 3 else _AT_ZERO}. Freeze them or use them; or use strategy"
                " 'fsdp', or 'ddp' with DDPConfig(find_unused_parameters=True)"
            )
            raise _unused("this step", unused, len(self._names), advice)
        # DeepSpeed completes the gradients of its leaf modules, whose experts a later step may leave out.
        self._used &= self.whole
