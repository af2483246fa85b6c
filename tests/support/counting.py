"""What torch computes, counted."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):  # counts what torch computes
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
