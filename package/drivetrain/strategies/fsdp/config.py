"""The options of fully sharded training."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name, count, one_of
from drivetrain.strategies.checks import check_options
from drivetrain.strategies.transforms.recompute import RecomputeOption, as_recompute_option
from drivetrain.strategies.wrapping import Wrap, are_names, check_wrap

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid")


@by_name
@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Options of strategy "fsdp".

    Attributes:
        sharding: "full_shard" gathers parameters for each use and frees them after it (ZeRO 3).
            "shard_grad_op" keeps them whole from forward to backward (ZeRO 2). "no_shard" keeps everything
            on every process. "hybrid" shards over `shard_size` processes, and replicates over the groups.
        wrap: The modules whose parameters are gathered together: "auto" for each of the model's repeated
            blocks, and for an embedding and a head without a bias whose weights have one shape and are not
            tied; the names of classes; a minimum number of parameters; a function of a module; or () for the
            whole model at once. A module that is gathered apart must be called.
        shard_size: With "hybrid", the number of processes that a parameter is sharded over; None means the
            processes of a machine.
        tensor_parallel: The number of neighbouring processes that split the modules of the task's
            `parallel_plan`; they get the same data. 1 ignores the plan.
        context_parallel: The number of neighbouring processes that each run a part of a sample's sequence, as
            the task's `ModelInfo(sequence_columns=..., attention_modules=...)` says. 1 ignores both.
        expert_parallel: Divide the experts of modules with the style `ExpertParallel` in the plan among the
            processes that shard the model, and send each token to the process of its experts.
        ignored: Names of parameters or modules, or globs on them (`*` crosses dots), that every process keeps
            whole; their gradients are averaged.
        broadcast_buffers: Copy rank 0's buffers, such as running means, to all ranks before each forward.
        sync_batchnorm: Compute batch statistics over all ranks; GPUs only.
        cpu_offload: Keep shards and optimizer states in the host's memory.
        activation_checkpointing: What backward recomputes. False recomputes nothing; True or "full" each
            block's activations; "selective" all but the results of matrix products, convolutions and
            attention. Otherwise the classes, their names, or globs on the names of modules to recompute, or a
            function of (context, operation, *arguments, **keywords) that returns a
            `torch.utils.checkpoint.CheckpointPolicy`.
        forward_prefetch: How many further blocks forward gathers in advance.
        backward_prefetch: How many blocks backward gathers in advance; it always gathers at least one, so 0
            and 1 are the same.
        timeout: Seconds that a collective may take; None uses torch's limit.
        reduce_each_micro_batch: Reduce the gradients in each micro-batch of an accumulation, not only in the
            last one. It communicates in each micro-batch, and each process keeps only the gradients of its
            shards until the step, instead of those of the whole model.
        gather_at_end: Gather the task's whole values in the host's memory of every process when a run has
            ended without an error. False leaves the shards, for tasks that do not fit there.
    """

    sharding: str = "full_shard"
    wrap: Wrap = "auto"
    shard_size: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: bool = False
    ignored: tuple[str, ...] = ()
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    cpu_offload: bool = False
    activation_checkpointing: RecomputeOption = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    timeout: float | None = None
    reduce_each_micro_batch: bool = False
    gather_at_end: bool = True

    def __post_init__(self) -> None:
        """Check each option.

        Raises:
            ConfigError: An option is invalid; the message says what is allowed.
        """
        one_of("sharding", self.sharding, SHARDINGS)
        check_wrap("FSDPConfig", self.wrap)
        again = as_recompute_option("FSDPConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)
        if not are_names(self.ignored):
            raise ConfigError(
                f"FSDPConfig(ignored=...) takes a tuple of names: ('head.*',), not {self.ignored!r}"
            )
        if self.expert_parallel and self.sharding == "no_shard":
            raise ConfigError("expert_parallel divides experts among processes; sharding='no_shard' does not")
        if self.expert_parallel and (again == "selective" or callable(again)):
            raise ConfigError(
                "expert_parallel with activation_checkpointing='selective' or a policy: torch cannot gather"
                " experts inside a block that it recomputes in part; use 'full'"
            )
        if self.shard_size is not None and self.sharding != "hybrid":
            raise ConfigError(f"shard_size is for sharding='hybrid', not {self.sharding!r}")
        if self.shard_size is not None:
            count("FSDPConfig(shard_size=...)", self.shard_size, at_least=1)
        check_options(
            self,
            ("timeout",),
            (
                "broadcast_buffers",
                "sync_batchnorm",
                "cpu_offload",
                "reduce_each_micro_batch",
                "gather_at_end",
                "expert_parallel",
            ),
        )
        for name in ("forward_prefetch", "backward_prefetch"):
            count(f"FSDPConfig({name}=...)", getattr(self, name))
        for name in ("tensor_parallel", "context_parallel"):
            count(f"FSDPConfig({name}=...)", getattr(self, name), at_least=1)
