"""`drivetrain env`: installed packages and available devices, the first lines of a bug report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain.cli.printing import print_json, table
from drivetrain.core.version import __version__

_NEEDED = ("torch", "safetensors", "torchmetrics", "tensorboard", "tqdm", "numpy", "xxhash", "jsonargparse")
_EXTRAS = {
    "deepspeed": ("deepspeed",),
    "accelerate": ("accelerate",),
    "torchao": ("torchao",),
    "xla": ("torch_xla",),
    "transformers": ("transformers", "peft"),
    "lightning": ("lightning", "pytorch-lightning"),
    "hub": ("huggingface_hub",),
    "remote": ("fsspec",),
    "s3": ("s3fs",),
    "search": ("optuna",),
    "examples": ("scikit-learn",),
}


def environment() -> dict[str, Any]:
    """Return versions, devices and extras as JSON values; None marks a package that is not installed."""
    import torch  # late: other commands do not need it

    devices = [
        {
            "type": "cpu",
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    ]
    for kind, backend in {"cuda": torch.cuda, "xpu": torch.xpu}.items():
        for index in range(backend.device_count() if backend.is_available() else 0):
            found = backend.get_device_properties(index)
            devices.append({"type": f"{kind}:{index}", "name": found.name, "memory": found.total_memory})
    if torch.backends.mps.is_available():
        devices.append({"type": "mps", "name": platform.processor()})
    return {
        "drivetrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "packages": {name: _version(name) for name in _NEEDED},
        "devices": devices,
        "extras": {extra: {name: _version(name) for name in names} for extra, names in _EXTRAS.items()},
    }


def print_environment(as_json: bool) -> None:
    """Print the environment as a table or as JSON."""
    found = environment()
    if as_json:
        print_json(found)
        return
    rows = [(name, str(found[name])) for name in ("drivetrain", "python", "platform", "cores", "cuda")]
    rows += [(name, each or "not installed") for name, each in found["packages"].items()]
    for device in found["devices"]:
        details = [f"{name} {value}" for name, value in device.items() if name not in ("type", "name")]
        rows.append(("device", ", ".join([device["type"], device["name"], *details])))
    for extra, packages in found["extras"].items():
        each = ", ".join(f"{name} {found or 'not installed'}" for name, found in packages.items())
        rows.append((f"extra {extra}", each))
    table((), rows)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
