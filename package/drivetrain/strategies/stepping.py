"""Calling an optimizer's step without paying for what nobody listens to."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

# How torch's wrapper is told from any other: by its code, which all wrapped steps share.
_WRAPPER = getattr(Optimizer.profile_hook_step(lambda optimizer: None), "__code__", None)


def step(optimizer: Optimizer) -> None:
    """`optimizer.step()`, past torch's wrapper when no profiler is on and no step hook is registered.

    torch wraps every optimizer's step in a `record_function` range and a search for hooks, 9 us in each
    update whether or not anybody profiles: a tenth of a small step. The wrapped function is the optimizer's
    own; anything that needs the wrapper (a profiler, hooks, a step replaced on the instance as learning-rate
    schedulers do) gets it.
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
