"""Reads of tensors' values by the host."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class HostSyncs(TorchDispatchMode):
    """Notes each time that a value is read from a tensor, which on an accelerator waits for the device."""

    READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.READS:
            self.reads.append(name)
        return function(*arguments, **(keywords or {}))
