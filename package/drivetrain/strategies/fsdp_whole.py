"""Making a sharded module an ordinary one again: whole values, its own classes, none of torch's hooks."""

from __future__ import annotations

from torch import Tensor, nn

from drivetrain.strategies.module_hooks import OwnHooks
from drivetrain.strategies.recomputation import forget

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied")
"""Attributes by which torch knows modules that it has sharded or split."""


class Before:
    """What the modules were before torch sharded them.

    Args:
        module: The whole, as it is now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(each, type(each), OwnHooks(each)) for each in module.modules()]

    def restore(self) -> None:
        """Gather every parameter into the host's memory, one after the other, and take back what torch has
        added. To be called by all processes together; what else was added to the modules stays.
        """
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp import FSDPModule

        for module, _, _ in self._modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        whole: dict[int, nn.Parameter] = {}
        for module, kind, hooks in self._modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _gathered(parameter, whole)
            hooks.remove_others("torch.distributed")
            forget(module)
            _module_state_mapping.pop(module, None)
            for key in (STATE_KEY, REGISTRY_KEY, *_MARKS):
                vars(module).pop(key, None)
            if type(module) is not kind and isinstance(module, FSDPModule):
                module.__class__ = kind  # type: ignore[assignment]
        root, _, _ = self._modules[0]
        root.to("cpu")


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
