"""Which strategy a run uses: a pure function of what was asked for and what hardware there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from drivetrain.errors import StrategyError
from drivetrain.precision import Precision
from drivetrain.registry import Registry
from drivetrain.strategies.base import Strategy
from drivetrain.strategies.single import SingleDevice


@dataclass(frozen=True)
class Hardware:
    """What this machine has.

    Attributes:
        cuda: The number of CUDA GPUs.
        mps: Whether Apple's Metal can be used.
    """

    cuda: int = 0
    mps: bool = False

    @classmethod
    def here(cls) -> Hardware:
        """This machine's."""
        return cls(
            torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.backends.mps.is_available()
        )

    @property
    def best_device(self) -> str:
        """The fastest kind of device."""
        return "cuda" if self.cuda else "mps" if self.mps else "cpu"

    def has(self, device: str) -> bool:
        """Whether there is such a kind of device."""
        return {"cuda": self.cuda > 0, "mps": self.mps}.get(device, device == "cpu")

    def __str__(self) -> str:
        gpus = f"{self.cuda or 'no'} CUDA GPU{'' if self.cuda == 1 else 's'}"
        return f"{gpus} and {'Metal' if self.mps else 'no Metal'}"


def choose_device(name: str, hardware: Hardware) -> str:
    """The kind of device that a one-process strategy runs on: the fastest, or the one that it is named after.

    Raises:
        StrategyError: The machine has no such device.
    """
    if name in ("auto", "single"):
        return hardware.best_device
    if not hardware.has(name):
        raise StrategyError(
            f"strategy {name!r} cannot run here: this machine has {hardware}. Use strategy='auto', which"
            " takes the fastest device there is, or 'cpu'"
        )
    return name


def _single(name: str) -> Callable[[Hardware], Strategy]:
    return lambda hardware: SingleDevice(choose_device(name, hardware))


STRATEGIES: Registry[Callable[[Hardware], Strategy]] = Registry(
    "strategy", {name: _single(name) for name in ("auto", "single", "cpu", "cuda", "mps")}
)


def select_strategy(
    spec: str | Strategy,
    precision: Precision,
    devices: int | str = "auto",
    num_nodes: int = 1,
    hardware: Hardware | None = None,
) -> Strategy:
    """The strategy for a run.

    Args:
        spec: A name or an instance.
        precision: What it must support.
        devices: How many processes; "auto" is what the strategy uses by itself.
        num_nodes: How many machines.
        hardware: What there is; default is this machine's.

    Raises:
        ConfigError: An unknown name; lists the nearest.
        StrategyError: The strategy cannot run here, on that many devices, or in that precision.
    """
    strategy = spec if isinstance(spec, Strategy) else STRATEGIES[spec](hardware or Hardware.here())
    wanted = 1 if devices == "auto" else devices
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise StrategyError(f"devices must be a positive number of processes or 'auto', not {devices!r}")
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1:
        raise StrategyError(f"num_nodes must be a positive number, not {num_nodes!r}")
    if wanted * num_nodes != strategy.world_size:
        raise StrategyError(
            f"strategy {strategy.name!r} runs {strategy.world_size} process, but devices={devices!r} on"
            f" {num_nodes} node(s) asks for {wanted * num_nodes}. Use devices=1; a strategy for several"
            " processes is not part of this version"
        )
    support = strategy.supports(precision)
    if not support:
        raise StrategyError(f"precision {precision.name!r} cannot run on {strategy.device}: {support.reason}")
    return strategy
