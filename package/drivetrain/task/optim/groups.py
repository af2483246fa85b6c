"""An optimizer's parameters and their settings: selection by name, weight decay, groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os.path import commonprefix
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.validation import number

_NORM = re.compile(r"Norm(\dd)?$")


@dataclass(frozen=True, init=False)
class ParameterGroup:
    """Settings for the parameters whose names match a pattern; of several groups, the first match wins.

    ``ParameterGroup("backbone.*", lr_scale=0.1)`` trains the backbone at a tenth of the rate.

    Args:
        pattern: A glob on the parameters' names, as in `fnmatch`: ``*`` crosses dots.
        lr: Their base learning rate, instead of the optimizer's.
        lr_scale: A factor of the optimizer's base rate; excludes `lr`.
        weight_decay: Their weight decay, which then applies to biases and norms too.
        **options: Further options of the optimizer for these parameters (``momentum=0.8``).

    Raises:
        ConfigError: A number that is out of bounds, or both `lr` and `lr_scale`.
    """

    pattern: str
    lr: float | None
    lr_scale: float | None
    weight_decay: float | None
    options: dict[str, Any]

    def __init__(
        self,
        pattern: str,
        lr: float | None = None,
        lr_scale: float | None = None,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        if not pattern or not isinstance(pattern, str):
            raise ConfigError(f"the pattern of a ParameterGroup is a glob such as 'head.*', not {pattern!r}")
        of = f"of the parameter group {pattern!r}"
        if lr is not None and lr_scale is not None:
            raise ConfigError(f"lr and lr_scale {of} exclude one another: give one of them")
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "pattern", pattern)
        set_field(self, "lr", None if lr is None else number(f"lr {of}", lr, at_least=0))
        set_field(self, "lr_scale", None if lr_scale is None else number(f"lr_scale {of}", lr_scale, above=0))
        decay = None if weight_decay is None else number(f"weight_decay {of}", weight_decay, at_least=0)
        set_field(self, "weight_decay", decay)
        set_field(self, "options", dict(options))

    def has_own(self, setting: str) -> bool:
        """Return whether these parameters may have another value of a setting than the rest."""
        fields = {"lr": (self.lr, self.lr_scale), "weight_decay": (self.weight_decay,)}
        return setting in self.options or any(each is not None for each in fields.get(setting, ()))

    def rate(self, base: float | None) -> float | None:
        """Return the base learning rate of these parameters, given the optimizer's."""
        if self.lr is not None:
            return self.lr
        return base if self.lr_scale is None or base is None else base * self.lr_scale


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with all its names.

    Attributes:
        names: The name that `named_parameters` gives it, then the names tied to it, in model order.
        parameter: The parameter.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter

    def matches(self, patterns: Iterable[str]) -> bool:
        """Return whether a pattern matches one of the names."""
        return any(fnmatchcase(name, pattern) for pattern in patterns for name in self.names)


def named_parameters(module: nn.Module) -> list[NamedParameter]:
    """Return the parameters of a module in model order, each once, with all its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(clean_name(name))
    return [NamedParameter(tuple(known), parameter) for parameter, known in names.items()]


def matches_part(name: str, pattern: str) -> bool:
    """Return whether a glob matches the clean name of a parameter or buffer, or of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(len(parts), 0, -1))


def names_matching(module: nn.Module, pattern: str, what: str) -> set[str]:
    """Return the clean names of the parameters that match a glob, or belong to a module that does."""
    names = [name for each in named_parameters(module) for name in each.names]
    found = {name for name in names if matches_part(name, pattern)}
    if not found:
        paths = [name.split(".") for name in names]
        modules = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}
        raise ConfigError(
            f"{what} matches no parameter, and no module with parameters."
            f" {nearest(pattern, {*names, *modules})}"
        )
    return found


def select_parameters(
    module: nn.Module,
    names: Collection[str] | None,
    patterns: Sequence[str] | None,
    argument: str = "parameters",
) -> list[NamedParameter]:
    """Return the parameters that have one of `names` and match one of `patterns`; None does not restrict."""
    selected = named_parameters(module)
    every = [name for each in selected for name in each.names]
    if names is not None:
        wanted = frozenset(names)
        for name in sorted(wanted - set(every)):
            raise ConfigError(f"the module has no parameter {name!r}. {nearest(name, every)}")
        selected = [each for each in selected if not wanted.isdisjoint(each.names)]
    for pattern in patterns or ():
        _require_match(argument, pattern, selected)
    return selected if patterns is None else [each for each in selected if each.matches(patterns)]


def _require_match(argument: str, pattern: str, candidates: Sequence[NamedParameter]) -> None:
    if not any(each.matches((pattern,)) for each in candidates):
        known = [name for each in candidates for name in each.names]
        raise ConfigError(f"{pattern!r} in {argument} matches no parameter. {nearest(pattern, known)}")


def norm_parameters(module: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters of normalisation layers: classes named *Norm, *Norm1d, *Norm2d or *Norm3d.

    Names decide, because there is no common base class, and a project's RMSNorm must count too.
    """
    return frozenset(
        parameter
        for each in module.modules()
        if _NORM.search(type(each).__name__)
        for parameter in each.parameters(recurse=False)
    )


def make_groups(
    module: nn.Module,
    selected: Sequence[NamedParameter],
    rules: Sequence[ParameterGroup],
    *,
    lr: float | None,
    weight_decay: float,
    decay_all: bool,
    decayed: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of `selected` as torch groups, each with "lr" and "weight_decay".

    Weight decay leaves out biases, norms and everything else of fewer than two dimensions, because shrinking
    a scale or an offset regularises nothing. The order depends on the rules alone: parameters without a rule
    come first, then each rule's in turn. Within each, decayed parameters come before the others. Within a
    group, the order is the model's.

    Args:
        decayed: The names of those that do, instead of the rule above.
    """
    decays = _decay_rule(module, decay_all, decayed)
    groups: dict[tuple[int, int], dict[str, Any]] = {}
    used: set[int] = set()
    for each in selected:
        index = next((i for i, rule in enumerate(rules) if each.matches((rule.pattern,))), -1)
        used.add(index)
        parameter = each.parameter
        if not parameter.requires_grad:
            continue
        rule = rules[index] if index >= 0 else None
        decay = weight_decay if decays(each) else 0.0
        if rule is not None and rule.weight_decay is not None:
            decay = rule.weight_decay
        settings: dict[str, Any] = {"lr": lr if rule is None else rule.rate(lr), "weight_decay": decay}
        key = (index, int(decay == 0.0))
        group = groups.setdefault(key, {"params": [], **settings, **(rule.options if rule else {})})
        group["params"].append(parameter)
    for index, rule in enumerate(rules):
        if index not in used:
            _require_match("groups", rule.pattern, selected)
            raise ConfigError(
                f"the parameter group {rule.pattern!r} is left with nothing: groups before it match the same "
                "parameters, and the first match wins. Put it before them"
            )
    if not groups:
        raise ConfigError(_nothing_to_train(selected))
    return [groups[key] for key in sorted(groups)]


def group_titles(
    module: nn.Module,
    optimizer: Optimizer,
    rules: Sequence[ParameterGroup] | None = None,
    setting: str = "lr",
) -> list[str]:
    """Return a title for each group of an optimizer, for the names under which its rate is logged.

    Groups that always have the same rate share a title. "" is that of an only one, and of all parameters
    without a rate of their own. The same holds for another setting.

    Args:
        rules: The user's groups, in the order in which they were matched; None for an optimizer that a user
            made. Its groups are titled by their entry "name", by the module that has all of their parameters,
            or by their number.
    """
    names = {each.parameter: each for each in named_parameters(module)}
    groups = [[names[each] for each in group["params"] if each in names] for group in optimizer.param_groups]
    if rules is not None:
        return _titles_of_rules(groups, rules, setting)
    if len(groups) == 1:
        return [""]
    given = [group.get("name") for group in optimizer.param_groups]
    if all(isinstance(each, str) for each in given):
        titles = [_title(str(each)) for each in given]
    else:
        titles = [
            ".".join(commonprefix([each.names[0].split(".")[:-1] for each in members]))  # noqa: RUF071 - no paths
            for members in groups
        ]
    return titles if all(titles) and len({*titles}) == len(titles) else [f"{i}" for i in range(len(groups))]


def _titles_of_rules(
    groups: Sequence[Sequence[Any]], rules: Sequence[ParameterGroup], setting: str
) -> list[str]:
    """Return the title of the rule that each group follows, if the rule has its own setting; else ""."""
    known = [_title(rule.pattern) for rule in rules]
    found = []
    for members in groups:
        index = next((i for i, rule in enumerate(rules) if members[0].matches((rule.pattern,))), None)
        if index is None or not rules[index].has_own(setting):
            found.append("")
        else:
            is_clear = known[index] and known.count(known[index]) == 1
            found.append(known[index] if is_clear else f"{known[index]}_{index}".strip("_"))
    return found


def _title(pattern: str) -> str:
    """Return a glob without what is not allowed in the names of some loggers, such as MLflow's."""
    return re.sub(r"[^\w.\-]+", "_", pattern.strip("*.?"))


def _decay_rule(
    module: nn.Module, decay_all: bool, decayed: Collection[str] | None
) -> Callable[[NamedParameter], bool]:
    if decayed is None:
        norms = norm_parameters(module)
        return lambda each: decay_all or (each.parameter.ndim >= 2 and each.parameter not in norms)
    chosen = frozenset(decayed)
    known = [name for each in named_parameters(module) for name in each.names]
    for name in sorted(chosen.difference(known)):
        raise ConfigError(f"decayed has {name!r}, which is no parameter. {nearest(name, known)}")
    return lambda each: each.names[0] in chosen


def _nothing_to_train(selected: Sequence[NamedParameter]) -> str:
    if not selected:
        return "the optimizer has nothing to train: the module has no parameters"
    return (
        f"the optimizer has nothing to train: none of its {len(selected)} parameters requires gradients. "
        "Unfreeze some with requires_grad_(True), or leave some out of Freeze(...)"
    )


def embedding_parameters(module: nn.Module, sparse: bool = False) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings; with `sparse`, those with sparse gradients alone."""
    for each in module.modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and (each.sparse or not sparse):
            yield from each.parameters(recurse=False)
