"""`drivetrain env`: installed packages and available devices, the first lines of a bug report."""

from __future__ import annotations

import os
import platform
from typing import Any

from drivetrain.cli.printing import print_json, table


def environment() -> dict[str, Any]:
    """Return versions and devices as JSON values; a package that is not installed is left out."""
    import torch  # late: other commands do not need it

    from drivetrain.run.record import versions

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
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "devices": devices,
    }


def print_environment(as_json: bool) -> None:
    """Print the environment as a table or as JSON."""
    found = environment()
    if as_json:
        print_json(found)
        return
    rows = [(name, str(each)) for name, each in found["versions"].items()]
    rows += [(name, str(found[name])) for name in ("platform", "cores")]
    for device in found["devices"]:
        details = [f"{name} {value}" for name, value in device.items() if name not in ("type", "name")]
        rows.append(("device", ", ".join([device["type"], device["name"], *details])))
    table((), rows)
