"""transformers' plans of tensor parallelism in the styles of torch, which FSDP's tensor parallelism takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.integrations.transformers.stored_model import base_of

_HEADS = ("q_proj", "k_proj", "v_proj")


def tensor_plan(model: nn.Module, prefix: str) -> dict[str, Any]:
    """Return the parallel styles of a model by the names of modules, from its `_tp_plan`.

    Args:
        model: A model of transformers.
        prefix: The prefix of its names in the task.

    Raises:
        ConfigError: Its class has no plan, or one with a style that has no counterpart.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    base = base_of(model)
    kind = type(base).__name__
    plan = getattr(base, "_tp_plan", None)
    if base is not model:
        raise ConfigError(
            f"tensor_parallel of a PeftModel around {kind}: transformers' plan names the modules that the"
            " adapters have replaced. Leave tensor_parallel at 1; strategy 'fsdp' shards the model"
        )
    if not plan:
        raise ConfigError(
            f"{kind} has no plan of tensor parallelism: neither the class's _tp_plan nor its configuration's"
            " base_model_tp_plan has one. Leave tensor_parallel (tp_size) at 1; strategy 'fsdp' shards the"
            " model without a plan"
        )

    class Heads(ColwiseParallel):
        """Splits a projection by whole heads of attention."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            config: Any = base.config.get_text_config()
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            width = getattr(module, "out_features", size)
            if (width // size) % device_mesh.size():
                raise StrategyError(
                    f"tensor_parallel={device_mesh.size()} does not divide the {width // size} heads of a"
                    f" projection in {kind} (num_attention_heads={config.num_attention_heads},"
                    f" num_key_value_heads={getattr(config, 'num_key_value_heads', None)})"
                )
            return super()._apply(module, device_mesh)

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        # A norm of single heads. A process has some heads, so the gradient is the sum over the processes.
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    modules = dict(base.named_modules())
    made: dict[str, Any] = {}
    for name, style in plan.items():
        if name not in modules and "*" not in name:
            continue  # a part that this model is without
        if style not in styles:
            raise ConfigError(
                f"the plan of {kind} has the style {style!r} for {name!r}, which is not supported here;"
                f" supported are {', '.join(styles)}. Leave tensor_parallel (tp_size) at 1"
            )
        by_heads = style == "colwise" and name.endswith(_HEADS)
        made[prefix + name] = Heads() if by_heads else styles[style]()
    return made
