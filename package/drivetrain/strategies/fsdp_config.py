"""The options of fully sharded training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.errors import ConfigError, nearest
from drivetrain.options import by_name
from drivetrain.strategies.base import check_options
from drivetrain.strategies.fsdp_wrapping import Wrap
from drivetrain.strategies.recomputation import Again, as_again

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid")


@by_name
@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of strategy "fsdp".

    Attributes:
        sharding: "full_shard": parameters are gathered for each use and freed after it (ZeRO 3);
            "shard_grad_op": they stay whole from forward to backward (ZeRO 2); "no_shard": every process
            keeps all; "hybrid": sharded over `shard_size` processes, replicated over the groups of them.
        wrap: What is gathered together: "auto" for each of the model's repeated blocks, the names of classes,
            a least number of parameters, a function of a module, or () for the whole model at once.
        shard_size: With "hybrid", over how many processes a parameter is sharded; None for those of a
            machine.
        tensor_parallel: Over how many neighbouring processes the modules of the task's `parallel_plan` are
            split; these processes get the same data. 1 for none: the plan is then not looked at.
        ignored: Names of parameters or modules, or globs on them (`*` crosses dots), that every process keeps
            whole; their gradients are averaged.
        broadcast_buffers: Give all ranks rank 0's buffers, such as running means, before each forward.
        sync_batchnorm: Take batch statistics over all ranks; on GPUs.
        cpu_offload: Keep shards and optimizer states in the host's memory.
        activation_checkpointing: False; True or "full" to compute each block's activations again in backward;
            "selective" to keep the results of matrix products, convolutions and attention and compute the
            rest again; a function of (context, operation, *arguments, **keywords) that gives a
            `torch.utils.checkpoint.CheckpointPolicy`; or the classes, or their names, whose activations
            are computed again.
        forward_prefetch: How many blocks ahead are gathered during forward, beyond what happens by itself.
        backward_prefetch: The same during backward, where one happens by itself: 0 and 1 are the same.
        timeout: Seconds that a collective may take; None for torch's limit.
        gather_at_end: Give the task its whole values again when a run has ended well, in the host's memory of
            every process. False leaves the shards, where the whole has no room.
    """

    sharding: str = "full_shard"
    wrap: Wrap = "auto"
    shard_size: int | None = None
    tensor_parallel: int = 1
    ignored: tuple[str, ...] = ()
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    cpu_offload: bool = False
    activation_checkpointing: Again = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    timeout: float | None = None
    gather_at_end: bool = True

    def __post_init__(self) -> None:
        """Check each option.

        Raises:
            ConfigError: One is of no use; says what is allowed.
        """
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"unknown sharding {self.sharding!r}. {nearest(str(self.sharding), SHARDINGS)}")
        if not (self.wrap == "auto" or _names(self.wrap) or _whole(self.wrap, 1) or callable(self.wrap)):
            raise ConfigError(
                "FSDPConfig(wrap=...) is 'auto', names of classes, a number of parameters or a function of a"
                f" module, not {self.wrap!r}"
            )
        again = as_again("FSDPConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)
        if not _names(self.ignored):
            raise ConfigError(
                f"FSDPConfig(ignored=...) is a tuple of names, such as ('head.*',), not {self.ignored!r}"
            )
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ConfigError(f"shard_size is for sharding='hybrid', not {self.sharding!r}")
        if self.shard_size is not None and not _whole(self.shard_size, 1):
            raise ConfigError(f"shard_size must be a positive number of processes, not {self.shard_size!r}")
        check_options(
            self, ("timeout",), ("broadcast_buffers", "sync_batchnorm", "cpu_offload", "gather_at_end")
        )
        for name in ("forward_prefetch", "backward_prefetch"):
            if not _whole(getattr(self, name), 0):
                raise ConfigError(f"{name} is a number of blocks, not {getattr(self, name)!r}")
        if not _whole(self.tensor_parallel, 1):
            raise ConfigError(f"tensor_parallel is a number of processes, not {self.tensor_parallel!r}")


def _names(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
