"""Reverting a sharded module: whole values, original classes, no hooks or caches of torch's sharding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from drivetrain.strategies.module_hooks import HookSnapshot

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied")
"""Attributes that torch sets on modules that it has sharded or split."""


class OriginalModules:
    """The state of modules before torch sharded them.

    Args:
        module: The model, before it is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(each, type(each), HookSnapshot(each)) for each in module.modules()]
        plain = ((name, each) for name, each in module.named_parameters() if type(each) is nn.Parameter)
        self._marks = {name: dict(vars(each)) for name, each in plain}

    def mark(self) -> None:
        """Give the parameters what a program has set on the original ones, such as `no_decay`."""
        for name, each in self._modules[0][0].named_parameters():
            vars(each).update(self._marks.get(name, {}))

    def restore(self) -> None:
        """Gather the parameters in the host's memory, one at a time, and remove what torch has added.

        All processes must call it together. Other additions to the modules stay.
        """
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule

        root, _, _ = self._modules[0]
        reshard(root)
        whole: dict[int, nn.Parameter] = {}
        for module, kind, hooks in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _gathered(parameter, whole)
            hooks.remove_others("torch.distributed")
            hooks.remove_others(__package__)
            _module_state_mapping.pop(module, None)
            for key in (STATE_KEY, REGISTRY_KEY, *_MARKS):
                vars(module).pop(key, None)
            if type(module) is not kind and isinstance(module, FSDPModule):
                module.__class__ = kind  # type: ignore[assignment]
        root.to("cpu")
        self.mark()


def _gathered(parameter: nn.Parameter, whole: dict[int, nn.Parameter]) -> nn.Parameter:
    # By identity, so that tied parameters stay tied; the sharded ones live until all are gathered.
    if id(parameter) not in whole:
        value: Tensor = parameter.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor().cpu()
            whole[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        else:
            whole[id(parameter)] = parameter
    return whole[id(parameter)]


def reshard(model: nn.Module) -> None:
    """Free the parameters that forwards have gathered."""
    from torch.distributed.fsdp import FSDPModule

    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def renew_dtypes(model: nn.Module) -> None:
    """Let torch look up again in which dtypes it reduces gradients, by gathering each part once.

    It does so before the first forward, and then leaves out a part whose parameters are all frozen. All
    processes must call it together, after a forward.
    """
    from torch.distributed.fsdp import FSDPModule

    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.unshard()
            each.reshard()


def forget_meshes() -> None:
    """Clear torch's caches of operations on shards.

    The caches are keyed only by the mesh's shape (torch 2.13), but hold the mesh itself. A process forked
    from rank 0, as in a notebook, would take rank 0's shard for its own.
    """
    from torch.distributed.tensor import DTensor, _redistribute, debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # torch 2.9
        propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        clear = propagate.cache.cache_clear
    clear()
    for each in vars(_redistribute).values():
        if hasattr(each, "cache_clear") and hasattr(each, "cache_info"):
            each.cache_clear()
