"""Tensor parallelism: splitting the modules of a task's plan over neighbouring processes.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
implemented with torch's parallel styles
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from drivetrain.core.errors import ConfigError, StrategyError, nearest
from drivetrain.core.types import StepOutput
from drivetrain.data.batch import map_tensors
from drivetrain.distributed.processes import has_fake_ranks
from drivetrain.distributed.tensors import local_part
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.wrapping import Use, tie, uses_of_parameters
from drivetrain.task.model_info import info_of
from drivetrain.task.task import overrides


class ParallelModule(NamedTuple):
    """A module of a plan, its name, its parallel style, and the dimension of the mesh that splits it."""

    name: str
    module: nn.Module
    style: Any
    dimension: str


def split_modules(task: nn.Module, config: FSDPConfig) -> list[ParallelModule]:
    """Return the modules of a task's `parallel_plan` that these options split, in the order of the plan.

    Raises:
        ConfigError: The plan is wrong, or has no experts for `expert_parallel`.
    """
    used = {"shard": config.expert_parallel, "tensor": config.tensor_parallel > 1}
    plan = parallel_modules(task) if any(used.values()) else []
    if config.expert_parallel and all(each.dimension == "tensor" for each in plan):
        raise ConfigError(
            f"expert_parallel: the parallel_plan of {type(task).__name__} has no ExpertParallel() of"
            " drivetrain.strategies for a module of experts; add it, or leave expert_parallel off"
        )
    return [each for each in plan if used[each.dimension]]


def parallel_modules(task: nn.Module) -> list[ParallelModule]:
    """Return the modules of a task's `parallel_plan`, in the order of the plan.

    Raises:
        ConfigError: There is no plan, it is not a mapping to styles, or a name matches no module.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    kind = type(task).__name__
    plan = info_of(task).parallel_plan
    if callable(plan):
        plan = plan()
    if not isinstance(plan, Mapping):
        raise ConfigError(
            f"{kind}: ModelInfo(parallel_plan=...) must be a mapping of module names to styles, not a"
            f" {type(plan).__name__}"
        )
    if not plan:
        raise ConfigError(
            f"tensor_parallel and expert_parallel need a plan: define {kind}.model_info(), which returns"
            " ModelInfo(parallel_plan={...}) with styles of torch.distributed.tensor.parallel, or"
            " drivetrain.strategies.ExpertParallel(), by the names of modules; or leave the option out"
        )
    modules = dict(task.named_modules())
    chosen = []
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"{kind}: the parallel_plan has a {type(style).__name__} for {pattern!r}; it must be a style"
                " of torch.distributed.tensor.parallel, such as ColwiseParallel()"
            )
        names = modules_named(task, pattern, "the parallel_plan")
        dimension = getattr(style, "dimension", "tensor")
        chosen += [ParallelModule(name, modules[name], style, dimension) for name in names]
    return chosen


def modules_named(task: nn.Module, pattern: str, where: str) -> list[str]:
    """Return the names of the modules that a pattern of a task's `model_info` matches.

    Args:
        where: What has the pattern, for the message.

    Raises:
        ConfigError: It matches none.
    """
    modules = dict(task.named_modules())
    names = [name for name in modules if _matches(name, pattern)]
    if not names:
        raise ConfigError(
            f"{type(task).__name__}: {where} names {pattern!r}, which is not a module of the task."
            f" {nearest(pattern, filter(None, modules))}"
        )
    return names


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches, by torch's rule: part by part, so that `*` does not cross dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


class TensorParallel:
    """The planned modules, split all at once or as they are initialised.

    Args:
        plan: The modules.
        mesh: The mesh of all processes.
    """

    def __init__(self, plan: list[ParallelModule], mesh: Any) -> None:
        self._waiting = plan
        self._mesh = mesh

    def split(self, part: nn.Module) -> None:
        """Split the planned modules in a part of the model that are not split yet.

        Every process must have the same values. Tied parameters stay tied.

        Raises:
            StrategyError: A style cannot split its module, the number of processes does not divide a
                dimension, or tied parameters would be split differently.
        """
        inside = {id(module) for module in part.modules()}
        now = [each for each in self._waiting if id(each.module) in inside]
        self._waiting = [each for each in self._waiting if id(each.module) not in inside]
        uses = uses_of_parameters(part) if now else []
        for each in now:
            self._split(each)
        for modules in uses:
            _check_and_tie(modules)

    def _split(self, each: ParallelModule) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        mesh = self._mesh[each.dimension]
        try:
            # Every process has the values already, so none are sent.
            parallelize_module(each.module, mesh, each.style, src_data_rank=None)
        except NotImplementedError as error:
            raise StrategyError(f"{each.name!r} ({type(each.module).__name__}): {error}") from error
        except KeyError as error:  # of torch, which sets a name with a dot
            raise StrategyError(
                f"{each.name!r} ({type(each.module).__name__}) has parameters in submodules, such as"
                f" adapters, which {type(each.style).__name__} does not split"
            ) from error
        size = mesh.size()
        for name, parameter in each.module.named_parameters(each.name):
            for placement in getattr(parameter, "placements", ()):
                if not placement.is_replicate() and parameter.shape[placement.dim] % size:
                    raise StrategyError(
                        f"tensor_parallel={size} does not divide dimension {placement.dim} of {name!r}, which"
                        f" has the shape {list(parameter.shape)}"
                    )


class SameOutputs:
    """A hook of a step module, which checks that processes that split modules return the same from a step.

    It compares the first values of each tensor in the first training, validation, test and predict step, and
    of what a task's own `metric_inputs` makes of the outputs.

    Args:
        group: The processes, which get the same data.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._seen = group, set[str]()

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        kind = getattr(module.step, "__name__", "")
        if kind not in self._seen:
            self._seen.add(kind)
            map_tensors(self._compare, output)
            task, outputs = module.task, output.outputs if isinstance(output, StepOutput) else None
            if outputs is not None and overrides(task, "metric_inputs"):
                with torch.no_grad():
                    map_tensors(self._compare, task.metric_inputs(outputs, *inputs))

    def _compare(self, tensor: Tensor) -> None:
        if type(tensor) is not Tensor or not tensor.numel():  # a plan's have no values
            return
        first = tensor.detach().flatten()[:1000].float()
        both = torch.stack([first, -first])
        distributed.all_reduce(both, distributed.ReduceOp.MAX, group=self._group)
        if (both.sum(0) > 1e-3 * both.amax()).any():
            raise StrategyError(
                "the processes that tensor_parallel gives the same batch have returned different values of"
                f" shape {list(tensor.shape)} from a step or from metric_inputs, such as parts of the logits."
                " Give the style of the split head output_layouts=Replicate(), or RowwiseParallel() to the"
                " module after a split one"
            )


def check_gradients(task: nn.Module, group: Any) -> None:
    """Check that processes that split modules have the same gradients of the parameters that are not split.

    Args:
        task: The task, after its first backward.
        group: The processes, which get the same data.

    Raises:
        StrategyError: They differ, as those of a norm that gets a part of the heads or of the sequence.
    """
    whole = {
        name: each for name, each in task.named_parameters() if each.requires_grad and not _is_split(each)
    }
    if not whole or has_fake_ranks():
        return
    parts = [local_part(each if each.grad is None else each.grad, 1)[0] for each in whole.values()]
    norms = torch.stack([each.abs().float().norm().to(parts[0].device) for each in parts])
    both = torch.stack([norms, -norms])
    distributed.all_reduce(both, distributed.ReduceOp.MAX, group=group)
    apart = (both.sum(0) > 1e-3 * both[0]) & (both.sum(0) > 1e-6 * both.amax())
    wrong = [name for name, is_apart in zip(whole, apart.tolist(), strict=True) if is_apart]
    if wrong:  # those before the cause are wrong too
        raise StrategyError(
            "the processes that tensor_parallel gives the same batch have different gradients of"
            f" {wrong[-1]!r}, which the parallel_plan does not split: it, or what follows it, works on a part"
            " of the sequence, the heads or the features. Give a norm of such a part the style"
            " SequenceParallel(sequence_dim=..., use_local_output=True), with the dimension that is split"
        )


def _is_split(parameter: Any) -> bool:
    placements = getattr(parameter, "placements", ())
    names = parameter.device_mesh.mesh_dim_names if placements else ()
    return ("tensor", False) in zip(names, (each.is_replicate() for each in placements), strict=True)


def _check_and_tie(uses: Sequence[Use]) -> None:
    parameters = [getattr(module, name) for module, name in uses]
    first = parameters[0]
    if any(getattr(each, "placements", ()) != getattr(first, "placements", ()) for each in parameters):
        kinds = " and ".join(f"{type(module).__name__}.{name}" for module, name in uses)
        raise StrategyError(
            f"{kinds} are one parameter, of shape {list(first.shape)}, which the parallel_plan splits in"
            " different ways; name all of these modules in it, with styles that split the same dimension"
        )
    tie(uses)
