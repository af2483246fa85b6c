"""Weights from elsewhere into a module: renamed, compared with what it has, loaded all or none, reported."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.checkpoint.dtypes import check_range
from drivetrain.checkpoint.sharding import is_sharded
from drivetrain.checkpoint.weights import find_weights
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.module_state import clean_name, full_state, hint, is_extra, put_state
from drivetrain.renaming import Rename, prefix_hint, renamed

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
"""Where weights come from: what `checkpoint.load_weights` reads, or tensors by name."""

_SHOWN = 10
"""How many names of a kind a report or a message lists."""


class Difference(NamedTuple):
    """A tensor that is of another shape or dtype there than here."""

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype

    def __str__(self) -> str:
        """Both sides in words."""
        return (
            f"{_short(self.stored_dtype)} {list(self.stored_shape)} there, {_short(self.dtype)} "
            f"{list(self.shape)} here"
        )


@dataclass(frozen=True)
class LoadReport:
    """The report on weights that were loaded; its text is a table.

    Attributes:
        loaded: The module's tensors that have a new value, in model order; tied ones under each name.
        missing: Those that were not given, and keep their value.
        unexpected: Names that were given, and that the module does not have.
        mismatched: Tensors of another shape, or of a dtype that cannot be converted; they keep their value.
        converted: Tensors that were loaded, and rounded or widened to the module's dtype.
        dropped: Names that `rename` dropped, as they are in the source.
        note: What was taken of another program's file, and what was not.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Difference, ...] = ()
    converted: tuple[Difference, ...] = ()
    dropped: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """A line on how many were loaded, and one for everything that was not, or not as it is."""
        rows: list[tuple[str, str, str]] = []
        for kind, names, note in (
            ("missing", self.missing, "keeps its value"),
            ("unexpected", self.unexpected, "not in the module"),
            ("dropped", self.dropped, "by rename"),
        ):
            rows += [(kind, name, note) for name in names[:_SHOWN]]
            rows += _rest(kind, names)
        for kind, differences in (("mismatched", self.mismatched), ("converted", self.converted)):
            rows += [(kind, each.name, str(each)) for each in differences[:_SHOWN]]
            rows += _rest(kind, differences)
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = [f"{kind:<10}  {name:<{width}}  {note}".rstrip() for kind, name, note in rows]
        note = f": {self.note}" if self.note else ""
        return "\n".join([f"loaded {len(self.loaded)} of {total} tensors{note}", *lines])


def load_weights_into(
    module: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    adopt_dtypes: bool = False,
) -> LoadReport:
    """Copy weights from elsewhere into a module, all or none.

    Floating-point numbers are converted to the module's dtype. One name of a tied parameter is enough. Names
    are compared without the parts that wrappers such as torch.compile add.

    Args:
        module: Where to; its parameters stay the objects that they are.
        source: What `checkpoint.load_weights` reads (a file, a folder, a checkpoint, a run; Lightning's and
            Composer's files too), or tensors by name.
        strict: Whether everything must fit. If not, what fits is loaded, and the report says the rest.
        rename: From names there to names here: a mapping of regular expressions to replacements, as for
            `re.sub`, each applied to what those before it made; or a function. None in place of a name drops
            the tensor.
        adopt_dtypes: Give the module the dtypes that floating-point tensors have there, in place of
            converting.

    Returns:
        What was loaded and converted; and what is missing, unexpected or different, if that is allowed.

    Raises:
        CheckpointError: Nothing readable at the source; what does not fit, listed with the nearest names;
            nothing at all that fits; or two names that become one. The module is as it was.
        ConfigError: A source, or a `rename`, that is no such thing.
    """
    where, given, note = _read(source)
    named, dropped = renamed(given, rename, where)
    own = full_state(module)
    comparison = _compare(module, own, named, where, adopt_dtypes)
    if comparison.differs and (strict or not comparison.fitting):
        suggestion = prefix_hint(named, own)
        problems = "; ".join(comparison.problems(() if suggestion else comparison.missing or own))
        if strict:
            raise CheckpointError(
                f"the weights of {where} do not fit {type(module).__name__}: {problems}. {suggestion}With "
                "strict=False what fits is loaded"
            )
        raise CheckpointError(
            f"nothing of {where} fits {type(module).__name__}, so nothing was loaded: {problems}. "
            f"{suggestion}Give `rename` to turn the names there into the names here"
        )
    put_state(module, comparison.fitting, adopt_dtypes=adopt_dtypes)
    return LoadReport(
        loaded=tuple(comparison.loaded),
        missing=tuple(comparison.missing),
        unexpected=tuple(comparison.unexpected),
        mismatched=tuple(comparison.mismatched),
        converted=tuple(comparison.converted),
        dropped=tuple(dropped),
        note=note,
    )


def _read(source: Source) -> tuple[str, Mapping[str, Tensor], str]:
    """What to call the source, its tensors, and a note on them."""
    if isinstance(source, (str, os.PathLike)):
        return repr(os.fspath(source)), *find_weights(source)
    if not isinstance(source, Mapping):
        more = "; give its state_dict()" if isinstance(source, nn.Module) else ""
        raise ConfigError(
            f"weights come from a path or from tensors by name, not from a {type(source).__name__}{more}"
        )
    for name, value in source.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            continue
        inner = (
            isinstance(value, Mapping) and value and all(isinstance(each, Tensor) for each in value.values())
        )
        more = f". Did you mean what is in it: source[{name!r}]?" if inner else ""
        raise ConfigError(f"weights are tensors by name; {name!r} is a {type(value).__name__}{more}")
    return "the given mapping", source, ""


@dataclass
class _Comparison:
    """The comparison of a module with the weights that it is given; the lists are those of the report."""

    fitting: dict[str, Tensor] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Difference] = field(default_factory=list)
    converted: list[Difference] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether there is anything that does not fit."""
        return bool(self.missing or self.unexpected or self.mismatched)

    def problems(self, meant: Collection[str]) -> list[str]:
        """Return a text for each kind of thing that does not fit.

        Args:
            meant: The names that an unexpected one may be a misspelling of.
        """
        unexpected = [f"{name!r}{hint(name, meant)}" for name in self.unexpected[:_SHOWN]]
        mismatched = [f"{each.name!r}: {each}" for each in self.mismatched[:_SHOWN]]
        return [
            f"{count} {kind}: {', '.join(texts)}{', ...' if count > _SHOWN else ''}"
            for kind, count, texts in (
                ("missing", len(self.missing), [repr(name) for name in self.missing[:_SHOWN]]),
                ("unexpected", len(self.unexpected), unexpected),
                ("of another shape or dtype", len(self.mismatched), mismatched),
            )
            if count
        ]


def _compare(
    module: nn.Module, own: Mapping[str, Any], named: Mapping[str, Tensor], where: str, adopt_dtypes: bool
) -> _Comparison:
    found = _Comparison(unexpected=[name for name in named if name not in own])
    for name in [name for name in own if name in named]:  # in the order in which the module is read
        value = named[name]
        if is_extra(name):  # a module's own business, of any size and kind
            found.fitting[name] = value
            continue
        mine = own[name]
        _check_usable(name, mine, value, where)
        shape = tuple(value.shape)
        both = Difference(name, shape, shape if is_lazy(mine) else tuple(mine.shape), value.dtype, mine.dtype)
        if both.shape != shape or not _converts(value.dtype, mine.dtype, adopt_dtypes):
            found.mismatched.append(both)
            continue
        if value.dtype != mine.dtype and not adopt_dtypes:
            if value.is_floating_point():
                check_range(value, mine.dtype, f"{name!r} of {where}")
            found.converted.append(both)
        found.fitting[name] = value
    twins = _tied(module)
    _check_twins(twins, found.fitting, where)
    wrong = {each.name for each in found.mismatched}
    for name in own:
        if name in wrong:
            continue
        if name in found.fitting or not found.fitting.keys().isdisjoint(twins.get(name, ())):
            found.loaded.append(name)
        elif not is_extra(name):
            found.missing.append(name)
    return found


def _check_usable(name: str, mine: Tensor, value: Tensor, where: str) -> None:
    if value.is_meta or value.layout != torch.strided:
        raise CheckpointError(
            f"{name!r} of {where} is {'on the meta device' if value.is_meta else value.layout}; give tensors "
            "that have all their numbers"
        )
    if is_sharded(mine) != is_sharded(value):
        raise CheckpointError(
            f"{name!r} is {'sharded' if is_sharded(mine) else 'whole'} here, and not so in {where}. Load "
            "weights before the module is sharded, which `fit` does"
        )


def _converts(stored: torch.dtype, own: torch.dtype, adopt_dtypes: bool) -> bool:
    """Whether numbers of one dtype are meant by those of another."""
    if stored == own:
        return True
    if stored.is_floating_point and own.is_floating_point:
        # Numbers in 8 bits mean something only together with their scale.
        return adopt_dtypes or (stored.itemsize > 1 and own.itemsize > 1)
    if stored.is_complex or own.is_complex:
        return stored.is_complex and own.is_complex
    if torch.bool in (stored, own) or stored.is_floating_point or own.is_floating_point:
        return False
    narrow, wide = torch.iinfo(stored), torch.iinfo(own)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """For each name of a parameter or buffer all names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            groups.setdefault(id(tensor), []).append(clean_name(name))
    return {name: group for group in groups.values() for name in group}


def _check_twins(twins: Mapping[str, list[str]], fitting: Mapping[str, Tensor], where: str) -> None:
    """Refuse two different values for one tensor."""
    for name, value in fitting.items():
        first = next((each for each in twins.get(name, ()) if each in fitting), name)
        other = fitting[first]
        if other is not value and not _same(other, value.to(device=other.device, dtype=other.dtype)):
            raise CheckpointError(
                f"{first!r} and {name!r} are one tensor in the module, and differ in {where}. Say with "
                f"`rename` which counts: rename={{{'^' + re.escape(name) + '$'!r}: None}} drops the latter"
            )


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values; NaN is the same as NaN."""
    return first.shape == second.shape and bool(
        ((first == second) | ((first != first) & (second != second))).all()
    )


def _rest(kind: str, names: Collection[object]) -> list[tuple[str, str, str]]:
    more = len(names) - _SHOWN
    return [(kind, f"... and {more} more", "")] if more > 0 else []


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
