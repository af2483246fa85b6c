"""Finds the module in which a number was first NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.callbacks.base import Callback
from drivetrain.compiling import as_compile
from drivetrain.errors import ConfigError
from drivetrain.module_state import clean_name, parameter_names
from drivetrain.update_gate import all_finite

if TYPE_CHECKING:
    from drivetrain.run import Run
    from drivetrain.strategies import Strategy
    from drivetrain.trainer import Trainer

_KEPT = 1000
"""Updates that are kept between two log points; with more, the host reads whether one was bad."""

_PARAMETER = "the gradient of the parameter"


class _Came(NamedTuple):
    """From where a gradient comes back: a module's output, and the modules that were given it."""

    place: str
    users: list[str]


_CAME = "_nonfinite_detector_came"
"""The attribute of a tensor at which its gradient is looked for."""


class NonFiniteDetector(Callback):
    """Names the first module whose output, or whose output's gradient, is NaN or infinite.

    Hooks on all modules look at every output of a forward, and at every gradient that comes back to one, in
    the order in which they are computed; at the batch before, and at the gradients of the parameters after.
    All is found on the device: a run's log point, or an update that is skipped, reads one number. What was
    found is said in the error of `on_nonfinite="raise"`, in the reason of "stop", in the log line of "skip";
    of several ranks by the one in which it was. Modules are named as in the state dict.

    It costs about two kernels for each output and each gradient, and is meant for a run that has failed
    before, resumed from its last good checkpoint.

    Args:
        ignore: Globs on names of modules whose outputs are infinite on purpose, such as masks.

    Raises:
        ConfigError: `ignore` is no sequence of texts, or, when a fit starts, a pattern that matches nothing;
            or, when a Trainer is made, the task is to be compiled.
    """

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self._ignored = () if isinstance(ignore, str) else tuple(ignore)
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in self._ignored):
            raise ConfigError(f"NonFiniteDetector(ignore={ignore!r}) is to be a sequence of modules' names")
        self._forget()

    def _forget(self) -> None:
        self._handles: list[Any] = []
        self._places: list[str] = []
        self._flags: list[Tensor] = []
        self._seen: list[tuple[int, list[str], Tensor]] = []  # updates, their places, and which are bad

    def check_trainer(self, trainer: Trainer, strategy: Strategy) -> None:
        """See that modules can be looked at.

        Raises:
            ConfigError: They are compiled.
        """
        if as_compile(trainer.compile):
            raise ConfigError(
                "NonFiniteDetector looks at each module's outputs, which a compiled block no longer has one"
                " by one: use compile=False to find it"
            )

    # The run.

    def on_fit_start(self, run: Run) -> None:
        """Install the hooks.

        Raises:
            ConfigError: `ignore` has a pattern that no module matches.
        """
        self._forget()
        self._update = run.progress.updates
        modules = {clean_name(name): each for name, each in run.task.named_modules()}
        lost = [each for each in self._ignored if not any(fnmatchcase(name, each) for name in modules)]
        if lost:
            raise ConfigError(f"NonFiniteDetector(ignore=...): no module's name matches {lost[0]!r}")
        for name, module in modules.items():
            if any(fnmatchcase(name, each) for each in self._ignored):
                continue
            title = f"{name!r} ({type(module).__name__})" if name else f"the task ({type(module).__name__})"
            self._handles.append(module.register_forward_hook(partial(self._look, title)))
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_pre_hook(partial(self._look_before, title)))
        self._parameters: dict[Any, str] = parameter_names(run.task)
        run.nonfinite.find = self.find

    def on_step_start(self, run: Run) -> None:
        """Begin an update, with its batches."""
        self._update = run.progress.updates
        self._places, self._flags = [], []
        for number, each in enumerate(run.window.micro_batches):
            for tensor in _tensors(each.batch):
                self._note(f"batch {number} of the update's data", tensor)

    def on_before_optimizer_step(self, run: Run) -> None:
        """Look at the gradients that the optimizer is given."""
        for each, name in self._parameters.items():
            if each.grad is not None:
                self._note(f"{_PARAMETER} {name!r}", each.grad)

    def on_step_end(self, run: Run) -> None:
        """End an update; one that was skipped, as for an overflow of the loss scale, has come to nothing."""
        if run.step is not None and not run.step.applied:
            self._places, self._flags = [], []
        self._fold()

    def on_log(self, run: Run) -> None:
        """Forget what was found, which has come to nothing, but for the last update: its loss was finite, and
        its gradient may not have been.
        """
        if run.stage == "train":
            del self._seen[:-1]

    def on_fit_end(self, run: Run) -> None:
        """Take the hooks away."""
        self._remove()

    def on_exception(self, run: Run) -> None:
        """Take the hooks away."""
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._forget()

    # What is looked at.

    def _note(self, place: str, tensor: Tensor) -> None:
        with torch.no_grad():
            for finite in all_finite([tensor]):
                self._places.append(place)
                self._flags.append(~finite.all())

    def _look(self, title: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for each in _tensors(output):
                self._note(f"the forward of {title}", each)
                self._look_back(each, f"the gradient of the output of {title}")

    def _look_before(self, title: str, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            for each in _tensors(inputs):
                self._look_back(each, "").users.append(title)

    def _look_back(self, tensor: Tensor, place: str) -> _Came:
        """Look at the gradient that comes back to a tensor, if one does, and once."""
        came: _Came | None = getattr(tensor, _CAME, None)
        if came is None:
            came = _Came(place, [])
            if tensor.requires_grad and not tensor.is_leaf:  # a parameter would keep it
                setattr(tensor, _CAME, came)
                tensor.register_hook(partial(self._look_at_gradient, came))  # type: ignore[no-untyped-call]
        return came

    def _look_at_gradient(self, came: _Came, gradient: Tensor) -> None:
        self._note(f"the backward of {' or '.join(came.users)}" if came.users else came.place, gradient)

    # What is known.

    def _fold(self) -> None:
        """Keep which of this update's places are bad."""
        if not self._flags:
            return
        if len(self._seen) >= _KEPT and not bool(torch.cat([bad for *_, bad in self._seen]).any()):
            self._seen.clear()
        if len(self._seen) < _KEPT:  # the first bad places are those to find
            device = self._flags[0].device
            bad = torch.stack([each.to(device) for each in self._flags])
            self._seen.append((self._update, self._places, bad))
        self._places, self._flags = [], []

    def find(self, update: int) -> tuple[int, str] | None:
        """Return where a number was first not finite since the last log point, up to an update, and forget
        what was seen. Waits for the device.

        Returns:
            How close to the cause the place is, from 0, and the place; None for nowhere on this rank.
        """
        self._fold()
        seen, self._seen = self._seen, []
        for found, places, bad in seen:
            if found <= update and bool(bad.any()):
                place = places[int(bad.int().argmax())]
                when = "" if found == update else f", at update {found}"
                # A bad gradient of a parameter may come from another rank, by the exchange of gradients.
                return int(place.startswith(_PARAMETER)), f"first in {place}{when}"
        return None


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
