"""An optimizer's step without torch's wrapper, which is only needed by profilers and step hooks."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

# torch's wrapper is recognised by its code object, which all wrapped steps share.
_WRAPPER = getattr(Optimizer.profile_hook_step(lambda optimizer: None), "__code__", None)


def step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, bypassing torch's wrapper if no profiler is on and no step hook is registered.

    torch wraps every optimizer's step in a `record_function` range and a search for hooks. That takes 9 us in
    each step, a tenth of a small step, whether or not anybody profiles. The wrapper is kept if a profiler
    or a hook needs it, or if the step was replaced on the instance, as learning-rate schedulers do.
    """
    wrapped = type(optimizer).step
    if (
        getattr(wrapped, "__code__", None) is not _WRAPPER
        or "step" in optimizer.__dict__
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
    ):
        optimizer.step()
    else:
        wrapped.__wrapped__(optimizer)  # type: ignore[attr-defined]
