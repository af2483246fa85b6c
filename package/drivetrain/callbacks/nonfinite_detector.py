"""Finds the first module whose output is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.weights.module_state import clean_name, parameter_names
from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name
from drivetrain.engine.skip import all_finite
from drivetrain.strategies.transforms.compile import as_compile

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_KEPT = 1000
"""The number of steps kept between two log points; after more, the host reads whether one was bad."""

_PARAMETER = "the gradient of the parameter"


class _GradientOrigin(NamedTuple):
    """The origin of a gradient: a module's output, and the modules that took it as input."""

    name: str
    users: list[str]


_ORIGIN = "_nonfinite_detector_origin"
"""The attribute that marks a tensor whose gradient has a hook."""


@by_name
class NonFiniteDetector(Callback):
    """Names the first module whose output, or whose output's gradient, is NaN or infinite.

    Hooks on all modules check every output of a forward and every gradient of an output, in the order of
    computation. The batch is checked before the forward, and the parameters' gradients after the backward.
    The checks run on the device; a log point or a skipped step reads one number. The result appears in the
    error of `on_nonfinite="raise"`, in the reason of "stop" and in the log line of "skip". With several
    ranks, the rank that found it reports it. Modules are named as in the state dict.

    It costs about two kernels for each output and each gradient. Use it in a run that has failed before,
    resumed from its last good checkpoint.

    Args:
        ignore: Globs on names of modules whose outputs are infinite on purpose, such as masks.

    Raises:
        ConfigError: `ignore` is not a sequence of strings; at the start of a fit, a pattern matches nothing;
            or, when a Trainer is made, the task will be compiled.
    """

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        self._ignored = () if isinstance(ignore, str) else tuple(ignore)
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in self._ignored):
            raise ConfigError(f"NonFiniteDetector(ignore={ignore!r}): give a sequence of modules' names")
        self._forget()

    def _forget(self) -> None:
        self._handles: list[Any] = []
        self._names: list[str] = []
        self._flags: list[Tensor] = []
        self._seen: list[tuple[int, list[str], Tensor]] = []  # steps, their checks, and which are bad

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that modules are not compiled.

        Raises:
            ConfigError: They are compiled.
        """
        if as_compile(trainer.compile):
            raise ConfigError(
                "NonFiniteDetector checks each module's outputs, and a compiled block hides them:"
                " use compile=False to find the module"
            )

    # The hooks.

    def on_fit_start(self, run: Run) -> None:
        """Install the hooks.

        Raises:
            ConfigError: `ignore` has a pattern that no module matches.
        """
        self._forget()
        self._step = run.progress.steps
        modules = {clean_name(name): each for name, each in run.task.named_modules()}
        lost = [each for each in self._ignored if not any(fnmatchcase(name, each) for name in modules)]
        if lost:
            raise ConfigError(f"NonFiniteDetector(ignore=...): no module's name matches {lost[0]!r}")
        for name, module in modules.items():
            if any(fnmatchcase(name, each) for each in self._ignored):
                continue
            title = f"{name!r} ({type(module).__name__})" if name else f"the task ({type(module).__name__})"
            self._handles.append(module.register_forward_hook(partial(self._check_outputs, title)))
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_pre_hook(partial(self._check_inputs, title)))
        self._parameters: dict[Any, str] = parameter_names(run.task)
        self._device = run.engine.device
        run.nonfinite.find = self.find

    def on_step_start(self, run: Run) -> None:
        """Check the batches of a step."""
        self._step = run.progress.steps
        self._clear()
        for number, each in enumerate(run.window.micro_batches):
            for tensor in _tensors(each.batch):
                self._note(f"batch {number} of the step's data", tensor)

    def on_before_optimizer_step(self, run: Run) -> None:
        """Check the gradients before the optimizer's step."""
        for each, name in self._parameters.items():
            if each.grad is not None:
                self._note(f"{_PARAMETER} {name!r}", each.grad)

    def on_step_end(self, run: Run) -> None:
        """End a step; discard the findings of a skipped one, such as an overflow of the loss scale."""
        if run.result is not None and not run.result.applied:
            self._clear()
        self._fold()

    def on_log(self, run: Run) -> None:
        """Discard all findings except those of the last step, whose loss does not show a bad gradient.

        A log point that has only values of a validation discards nothing: it has not read the losses of the
        steps before it.
        """
        if any(run.names.stage_of(name) == "train" for name in run.logged):
            del self._seen[:-1]

    def _remove(self, run: Run) -> None:
        for handle in self._handles:
            handle.remove()
        self._forget()

    on_fit_end = on_exception = _remove

    # The checks.

    def _note(self, name: str, tensor: Tensor) -> None:
        with torch.no_grad():
            for finite in all_finite([tensor]):
                self._names.append(name)
                self._flags.append(~finite.all())

    def _clear(self) -> None:
        self._names, self._flags = [], []

    def _check_outputs(self, title: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for each in _tensors(output):
                self._note(f"the forward of {title}", each)
                self._watch_gradient(each, f"the gradient of the output of {title}")

    def _check_inputs(self, title: str, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            for each in _tensors(inputs):
                self._watch_gradient(each, "").users.append(title)

    def _watch_gradient(self, tensor: Tensor, name: str) -> _GradientOrigin:
        """Check the gradient of a tensor, if it gets one, and only once."""
        origin: _GradientOrigin | None = getattr(tensor, _ORIGIN, None)
        if origin is None:
            origin = _GradientOrigin(name, [])
            if tensor.requires_grad and not tensor.is_leaf:  # a parameter would keep it
                setattr(tensor, _ORIGIN, origin)
                tensor.register_hook(partial(self._check_gradient, origin))  # type: ignore[no-untyped-call]
        return origin

    def _check_gradient(self, origin: _GradientOrigin, gradient: Tensor) -> None:
        self._note(f"the backward of {' or '.join(origin.users)}" if origin.users else origin.name, gradient)

    # The findings.

    def _fold(self) -> None:
        """Store which of this step's checks are bad."""
        if not self._flags:
            return
        if len(self._seen) >= _KEPT and not bool(torch.cat([bad for *_, bad in self._seen]).any()):
            self._seen.clear()
        if len(self._seen) < _KEPT:  # the first bad checks are the ones to report
            # Flags of batches are on the host, and copying them waits for nothing.
            bad = torch.stack([each.to(self._device, non_blocking=True) for each in self._flags])
            self._seen.append((self._step, self._names, bad))
        self._clear()

    def find(self, step: int) -> tuple[int, str] | None:
        """Return the name of the first non-finite check since the last log point, up to a step, and reset.

        Waits for the device.

        Returns:
            How close the check is to the cause (0 is closest), and its name; None if this rank found none.
        """
        self._fold()
        seen, self._seen = self._seen, []
        for found, names, bad in seen:
            if found <= step and bool(bad.any()):
                name = names[int(bad.int().argmax())]
                when = "" if found == step else f", at step {found}"
                # A bad gradient of a parameter may come from another rank, by the reduction of gradients.
                return int(name.startswith(_PARAMETER)), f"first in {name}{when}"
        return None


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
