"""A stand-in for the questions that are asked of `torch.cuda`, and what is set there, in order."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STARTING = {"init", "set_device", "current_device", "get_device_capability", "is_bf16_supported", "Stream"}
"""What starts CUDA in this process, after which its forks can use no GPU."""


class Cuda:
    """Two GPUs. `calls` has what was asked of them, in order, and `started_by` what of that starts CUDA.

    With a `capability` below (8, 0) they emulate bfloat16.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.started_by: list[str] = []
        self.current = 0
        self.capability = (9, 0)
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "is_initialized": lambda: any(not each.startswith("is_a") for each in self.started_by),
            "init": lambda: None,
            "current_device": lambda: self.current,
            "set_device": self._set,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_name": lambda device=None: "a GPU",
            "is_bf16_supported": lambda including_emulation=True: (
                including_emulation or self.capability >= (8, 0)
            ),
            "Stream": lambda device=None: SimpleNamespace(device=device),
            "default_generators": [torch.Generator() for _ in range(2)],
        }
        for name, answer in answers.items():
            recorded = self._recording(name, answer) if callable(answer) else answer
            patch.setattr(torch.cuda, name, recorded)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(name, raising=False)

    def _set(self, device: int | torch.device) -> None:
        self.current = device if isinstance(device, int) else device.index

    def _recording(self, name: str, answer: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            call = f"{name}({', '.join(map(str, arguments))})"
            self.calls.append(call)
            # Without the variable torch asks CUDA itself, and a fork that does so again gets an error.
            asks = name == "is_available" and os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1"
            if asks or name in STARTING:
                self.started_by.append(call)
            return answer(*arguments, **keywords)

        return call
