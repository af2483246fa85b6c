"""What a package of another brings: a strategy, and a class that is none."""

from dataclasses import dataclass

from drivetrain.strategies import Support
from drivetrain.strategies.ddp import DDP


@dataclass(frozen=True)
class RingConfig:
    hops: int = 2


class Ring(DDP):
    name = "ring"
    config_type = RingConfig
    needs = "processes in a ring"

    def __init__(self, config=None, *, device="cpu", world_size=1):
        super().__init__(device=device, world_size=world_size)
        self.hops = (config or RingConfig()).hops

    @classmethod
    def available(cls, hardware):
        return Support(hardware.cuda < 2, "rings of GPUs burn")


class Half:
    name = "half"
